"""Rules of the layers: what a block type cannot run with yet, stages without experts."""

from __future__ import annotations

from cdrmix.config.model import BLOCK_TYPES
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.layout import AXES, Combination
from cdrmix.planning.rule import THIS_VERSION, UNAVAILABLE, Rule
from cdrmix.planning.stages import stages_without_experts


def _refusals(combination: Combination, axis: str) -> list[str]:
    """Block types of a model that cannot run on an axis, each with its reason."""
    model = combination.model
    if model.kind == "hf" or getattr(combination.degrees, axis) == 1:
        return []
    refused = []
    for name in dict.fromkeys(model.layer_kinds()):
        kind = block_type(name)
        reason = kind.refused_axes.get(axis)
        if reason is None and axis == "sequence" and not kind.is_exchanged(model):
            reason = "it has no exchange, so that each rank would see its own tokens alone"
        if reason is not None:
            refused.append(f"{name} ({reason})")
    return refused


def _of_axis(axis: str) -> Rule:
    def message(combination: Combination) -> str:
        return (
            f"parallel.{axis} = {getattr(combination.degrees, axis)} with blocks of the type "
            f"{', '.join(_refusals(combination, axis))} is {UNAVAILABLE}. Try parallel.{axis} = 1"
        )

    return Rule(
        f"block-types-with-{axis}-unavailable", lambda x: _refusals(x, axis), message, THIS_VERSION
    )


def _without_adapters(combination: Combination) -> list[str]:
    """Block types of a model with Stage B in which no linear layer gets a plastic adapter."""
    config, model = combination.config, combination.model
    if model.kind == "hf" or config.stage_b is None or config.training.stage == "a":
        return []
    return [kind for kind in dict.fromkeys(model.layer_kinds()) if not block_type(kind).adapted]


def _stages_without_experts(combination: Combination) -> list[int]:
    """Stages without experts, if others have some."""
    model, pipeline = combination.model, combination.degrees.pipeline
    if model.kind == "hf" or pipeline > model.num_layers:
        return []
    return stages_without_experts(model, combination.training.sequence_length, pipeline)


BLOCK_RULES = (
    *(
        _of_axis(axis)
        for axis in AXES
        if axis == "sequence" or any(axis in block_type(kind).refused_axes for kind in BLOCK_TYPES)
    ),
    Rule(
        "block-types-in-stage-b-unavailable",
        _without_adapters,
        "training.stage = {x.training.stage} with blocks of the type {found[0]} is {unavailable}: "
        "none of their linear layers has a plastic adapter, and memory has not been shown on their "
        "state. Try training.stage = a, or model.mixers without them",
        THIS_VERSION,
    ),
    Rule(
        "stage-without-experts",
        _stages_without_experts,
        "parallel.pipeline = {x.degrees.pipeline}: stage {found[0]} of them (from 0) would have no "
        "layer of model.moe.layers, and others have. Try fewer stages",
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py: collectives of expert groups, in which "
        "such a stage takes no part",
    ),
)
