"""Linear layers and expert matrices of each family that get low-rank adapters; no torch."""

from __future__ import annotations

from typing import NamedTuple

from cdrmix.errors import ConfigError

# In place of names: every linear layer that may be adapted.
ALL_LINEAR = "all-linear"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_GATED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Matrices of experts that are two in one: each of them has an adapter's whole rank.
_FUSED = ("gate_up_proj",)


class LoraTargets(NamedTuple):
    """Adapted parts of a model, in the words of peft."""

    modules: tuple[str, ...]  # last names of linear layers
    parameters: tuple[str, ...]  # last two names of the matrices of experts, [experts, out, in]


# Never a router, whose choices would move with it; nor a Mamba block's out_proj and conv1d, which
# its fused kernel reads past any adapter; nor embedding and head, which may be one matrix.
_TARGETS = {
    **{
        family: LoraTargets(_ATTENTION + _GATED, ())
        for family in ("llama", "mistral", "qwen2", "qwen3")
    },
    "mixtral": LoraTargets(_ATTENTION, _GATED_EXPERTS),
    # Not its dense layers, if it has any: peft takes their names for older ones of experts.
    "qwen3_moe": LoraTargets(_ATTENTION, _GATED_EXPERTS),
    # up_proj and down_proj are those of dense layers and of shared experts.
    "nemotron_h": LoraTargets(
        (*_ATTENTION, "in_proj", "up_proj", "down_proj"),
        ("experts.up_proj", "experts.down_proj"),
    ),
}


def default_targets(model_type: str) -> LoraTargets:
    """Targets of a family by the `model_type` of its config.json.

    Raises:
        ConfigError: if the family is not known here.
    """
    if model_type not in _TARGETS:
        raise ConfigError(
            f"model.lora: nothing is known of the linear layers of model_type {model_type!r}. Give "
            "their names as model.lora.target_modules"
        )
    return _TARGETS[model_type]


def rank_of(parameter: str, rank: int) -> int:
    """Rank of the adapter of an expert's matrix, by its name with or without its module's.

    Args:
        rank: `model.lora.rank`.
    """
    return 2 * rank if parameter.rpartition(".")[2] in _FUSED else rank


def dropout_refused(dropout: float) -> str:
    """Message for adapters of experts with dropout, which peft cannot compute."""
    return (
        f"lora.dropout = {dropout:g}: adapters of experts act on weights, not on inputs that could "
        "be dropped. Try lora.dropout = 0, or lora.experts = false"
    )
