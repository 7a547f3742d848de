"""Rules of the layers: axes that a block type cannot run on yet, stages without experts."""

from __future__ import annotations

from cdrmix.config.model import BLOCK_TYPES
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.layout import AXES, Combination
from cdrmix.planning.rule import THIS_VERSION, UNAVAILABLE, Rule
from cdrmix.planning.stages import stage_layers


def _refusals(combination: Combination, axis: str) -> list[str]:
    """Block types of a model that refuse an axis, each with its reason."""
    if combination.model.kind == "hf" or getattr(combination.degrees, axis) == 1:
        return []
    kinds = dict.fromkeys(combination.model.layer_kinds())
    reasons = {kind: block_type(kind).refused_axes.get(axis) for kind in kinds}
    return [f"{kind} ({reason})" for kind, reason in reasons.items() if reason]


def _of_axis(axis: str) -> Rule:
    def message(combination: Combination) -> str:
        return (
            f"parallel.{axis} = {getattr(combination.degrees, axis)} with blocks of the type "
            f"{', '.join(_refusals(combination, axis))} is {UNAVAILABLE}. Try parallel.{axis} = 1"
        )

    return Rule(
        f"block-types-with-{axis}-unavailable", lambda x: _refusals(x, axis), message, THIS_VERSION
    )


def _stages_without_experts(combination: Combination) -> list[int]:
    """Stages without experts, if others have some."""
    model, pipeline = combination.model, combination.degrees.pipeline
    if model.kind == "hf" or model.moe is None or pipeline > model.num_layers:
        return []
    stages = stage_layers(model, combination.training.sequence_length, pipeline)
    return [n for n, layers in enumerate(stages) if not any(map(model.has_experts, layers))]


BLOCK_RULES = (
    *(
        _of_axis(axis)
        for axis in AXES
        if any(axis in block_type(kind).refused_axes for kind in BLOCK_TYPES)
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
