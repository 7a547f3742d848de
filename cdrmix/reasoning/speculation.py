"""Proposals that are committed or rolled back, and copies of a state for branches.

States are never written in place: a proposal is a new state beside the accepted one, so that
rolling back is forgetting it. Two laws hold bit by bit: to commit twice is to commit once, and
rolling back leaves what was accepted as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Speculation(Generic[State]):
    """A state that holds, and at most one that is proposed in its place.

    Attributes:
        accepted: what holds.
        proposed: what would hold after a commit; None where nothing is proposed.
    """

    accepted: State
    proposed: State | None = None


def propose(speculation: Speculation[State], state: State) -> Speculation[State]:
    """Put `state` forward, in place of an earlier proposal."""
    return Speculation(speculation.accepted, state)


def commit(speculation: Speculation[State]) -> Speculation[State]:
    """Accept the proposal, if there is one."""
    if speculation.proposed is None:
        return speculation
    return Speculation(speculation.proposed)


def rollback(speculation: Speculation[State]) -> Speculation[State]:
    """Drop the proposal, if there is one."""
    return Speculation(speculation.accepted)


def map_tensors(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced; whatever else it holds is kept.

    Args:
        state: tensors in dataclasses, named tuples, lists, tuples and mappings.
        function: tensor -> tensor.
    """
    if isinstance(state, Tensor):
        return function(state)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        values = {
            field.name: map_tensors(getattr(state, field.name), function)
            for field in dataclasses.fields(state)
        }
        return dataclasses.replace(state, **values)
    if isinstance(state, Mapping):
        return {key: map_tensors(value, function) for key, value in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(map_tensors(value, function) for value in state))
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, function) for value in state)
    return state


def branch(state: State, count: int) -> State:
    """Every row `count` times, copies beside each other: rows of branches read and write apart."""
    return map_tensors(state, lambda rows: rows.repeat_interleave(count, dim=0))


def select(state: State, rows: Tensor) -> State:
    """The chosen rows of every tensor, [n] int64, as copies."""
    return map_tensors(state, lambda tensor: tensor.index_select(0, rows))


def merge(rows: Tensor, new: State, old: State) -> State:
    """Rows of `new` where `rows` [n] is true, of `old` elsewhere; both of one structure."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(new, note)
    replacements = iter(tensors)

    def choose(kept: Tensor) -> Tensor:
        replacement = next(replacements)
        if replacement is kept:
            return kept
        return torch.where(rows.view(-1, *[1] * (kept.dim() - 1)), replacement, kept)

    return map_tensors(old, choose)


def detach(state: State) -> State:
    """The state without its history: gradients end here."""
    return map_tensors(state, torch.Tensor.detach)
