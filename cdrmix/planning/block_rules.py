"""Rules of block types: axes of parallelism that a type says it cannot run on yet."""

from __future__ import annotations

from cdrmix.config.model import BLOCK_TYPES
from cdrmix.planning.blocks.block_type import block_type
from cdrmix.planning.layout import AXES, Combination
from cdrmix.planning.rule import THIS_VERSION, UNAVAILABLE, Rule


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


BLOCK_RULES = tuple(
    _of_axis(axis)
    for axis in AXES
    if any(axis in block_type(kind).refused_axes for kind in BLOCK_TYPES)
)
