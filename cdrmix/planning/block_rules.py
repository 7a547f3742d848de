"""Rules of the layers: what a block type cannot run with yet, stages without experts."""

from __future__ import annotations

from cdrmix.config.plugin import is_plugin
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.layout import Combination
from cdrmix.planning.rule import THIS_VERSION, UNAVAILABLE, Rule
from cdrmix.planning.stages import stages_without_experts


def _refusals(combination: Combination, axis: str) -> list[str]:
    """Block types of a model that cannot run on an axis, each with its reason."""
    model = combination.model
    if model.kind == "hf" or getattr(combination.degrees, axis) == 1:
        return []
    refused = []
    kinds = model.layer_kinds()
    for name in dict.fromkeys(kinds):
        kind = block_type(name, model)
        reason = kind.refused_axes.get(axis)
        if reason is None and axis == "sequence" and not kind.is_exchanged(model):
            reason = "it has no exchange, so that each rank would see its own tokens alone"
        if reason is None and axis == "tensor" and is_plugin(name):
            parameters = kind.parameters(model, kinds.index(name))
            if all(each.cut is None for each in parameters):
                reason = "none of its parameters says where it is cut"
        if reason is not None:
            refused.append(f"{name} ({reason})")
    return refused


def _of_axes(*axes: str) -> Rule:
    def found(combination: Combination) -> list[str]:
        return [axis for axis in axes if _refusals(combination, axis)]

    def message(combination: Combination) -> str:
        axis = found(combination)[0]
        return (
            f"parallel.{axis} = {getattr(combination.degrees, axis)} with blocks of the type "
            f"{', '.join(_refusals(combination, axis))} is {UNAVAILABLE}. Try parallel.{axis} = 1"
        )

    name = axes[0] if len(axes) == 1 else "other-axes"
    return Rule(f"block-types-with-{name}-unavailable", found, message, THIS_VERSION)


def _without_adapters(combination: Combination) -> list[str]:
    """Block types of a model with Stage B in which no linear layer gets a plastic adapter."""
    config, model = combination.config, combination.model
    if model.kind == "hf" or config.stage_b is None or config.training.stage == "a":
        return []
    return [
        name for name in dict.fromkeys(model.layer_kinds()) if not block_type(name, model).adapted
    ]


def _stages_without_experts(combination: Combination) -> list[int]:
    """Stages without experts, if others have some."""
    model, pipeline = combination.model, combination.degrees.pipeline
    if model.kind == "hf" or pipeline > model.num_layers:
        return []
    return stages_without_experts(model, combination.training.sequence_length, pipeline)


BLOCK_RULES = (
    _of_axes("tensor"),
    _of_axes("sequence"),
    _of_axes("data", "pipeline", "expert"),  # that a user's type may refuse
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
