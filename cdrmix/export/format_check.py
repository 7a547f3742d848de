"""Formats of exports, and the models that each can hold: by configuration, without torch.

peft is for the adapters of a Hugging Face model, fla and gguf are for RWKX-V.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from cdrmix.checkpoint.candidates import candidates
from cdrmix.checkpoint.files import read_json
from cdrmix.checkpoint.trained_run import check_holds_checkpoint, checkpoint_place
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.errors import StateError, TrainingError


def check_saved(source: Path, which: str, format: str) -> None:
    """Raises StateError if there is no such checkpoint, or a format is not for its model.

    A configuration that cannot be read here is left to whoever reads the checkpoint.

    Args:
        source, which: as of `checkpoint_place`.
    """
    place = checkpoint_place(source, which)
    check_holds_checkpoint(place)
    for checkpoint in candidates(place)[:1]:
        config = None
        with contextlib.suppress(
            OSError, KeyError, TypeError, ValueError, ValidationError, TrainingError
        ):
            config = Config.model_validate(read_json(checkpoint / "state.json")["config"])
        if config is not None:
            check_format(format, config.model, checkpoint)


def check_format(format: str, model: ModelConfig, checkpoint: Path) -> None:
    """Raises StateError if a format is not for a checkpoint's model."""
    if format == "peft":
        if model.lora is None:
            raise StateError(
                f"{checkpoint}: is of a run without adapters (model.lora). Try --format hf"
            )
    elif model.kind == "hf":
        if format != "hf":
            raise StateError(
                f"{checkpoint}: is of a Hugging Face model, which --format {format} is not for. "
                "Try --format hf"
            )
    elif model.mod is not None:
        raise StateError(
            f"format {format} cannot hold a model with model.mod: programs that read it run every "
            "block on every token, and keep keys and values of all of them. Use `cdrmix generate` "
            "and `cdrmix evaluate`, which read the checkpoint"
        )
    elif format != "hf":
        _check_rwkv_alone(model, format)


def _check_rwkv_alone(model: ModelConfig, name: str) -> None:
    """Raises StateError unless the format `name` can hold the model."""
    kinds = model.layer_kinds()
    reasons = []
    if others := kinds.count("transformer"):
        share = f"{others} of {len(kinds)} (model.transformer_fraction)"
        reasons.append(f"Transformer blocks are {share}")
    if unknown := sorted(set(kinds) - {"rwkv", "transformer"}):
        reasons.append(f"there are blocks of the type {', '.join(unknown)} (model.mixers)")
    if model.ffn_activation != "squared_relu":
        reasons.append(f"model.ffn_activation is {model.ffn_activation}")
    if model.moe is not None:
        reasons.append(f"each feed-forward has {model.moe.num_experts} experts (model.moe)")
    if name == "fla" and len(kinds) == 1:
        reasons.append("there is one block, of which flash-linear-attention makes no RWKV-7")
    if reasons:
        raise StateError(
            f"--format {name} holds dense models of RWKV blocks alone, and here "
            f"{', and '.join(reasons)}. Give --format hf, which holds every model"
        )
