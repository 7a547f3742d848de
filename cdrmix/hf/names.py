"""Names of a Hugging Face model's parameters in checkpoints, free of what is wrapped around it."""

from __future__ import annotations

import re

# `causal` is where `HuggingFaceModel` holds the model; `base_model.model` is PEFT's around it.
_PREFIX = re.compile(r"^(?:causal\.)?(?:base_model\.model\.)?")
_ADAPTER = re.compile(r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?:default\.?)?")


def is_adapter(name: str) -> bool:
    """True for a parameter of a low-rank adapter, by either name of it."""
    return ".lora_" in name


def logical_name(name: str) -> str:
    """Returns the name of a parameter in checkpoints: that of transformers' own module.

    An adapter keeps `.base_layer`, which tells the nested adapters of one module apart.
    """
    bare = _PREFIX.sub("", name, count=1)
    if is_adapter(bare):
        return _ADAPTER.sub(r".\1.", bare).removesuffix(".")
    return bare.replace(".base_layer", "")
