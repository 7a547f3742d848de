"""Operations on the rows of a batch of states, whatever structure holds their tensors.

A state is never written in place: a step gives a new one. So branches may share tensors with the
state they come from, and a rejected branch is simply dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_tensors(state: Any, function: Callable[..., Tensor], *others: Any) -> Any:
    """Returns the same structure with every tensor replaced and all else as it is.

    Args:
        state: tensors in dataclasses, named tuples, lists, tuples and mappings.
        function: of a tensor of `state` and those at its place in `others`.
        others: states of the same structure.
    """
    if isinstance(state, Tensor):
        return function(state, *others)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = [vars(each) for each in (state, *others)]
        return dataclasses.replace(state, **map_tensors(fields[0], function, *fields[1:]))
    if isinstance(state, Mapping):
        return {
            key: map_tensors(value, function, *(other[key] for other in others))
            for key, value in state.items()
        }
    if isinstance(state, (list, tuple)):
        rows = zip(state, *others, strict=True)
        parts = [map_tensors(part, function, *rest) for part, *rest in rows]
        # a named tuple takes its fields one by one, a plain tuple takes an iterable
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def moved(state: State, device: torch.device) -> State:
    """Moves every tensor to a device."""
    return map_tensors(state, lambda tensor: tensor.to(device))


def branch(state: State, count: int) -> State:
    """Repeats every row `count` times, its copies beside each other."""
    return map_tensors(state, lambda rows: rows.repeat_interleave(count, dim=0))


def select(state: State, rows: Tensor) -> State:
    """Copies chosen rows of every tensor, [n] int64."""
    return map_tensors(state, lambda tensor: tensor.index_select(0, rows))


def part(state: State, rows: slice) -> State:
    """Returns consecutive rows of every tensor, as views."""
    return map_tensors(state, lambda tensor: tensor[rows])


def joined(parts: Sequence[State]) -> State:
    """Puts the rows of states of one structure below each other; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return map_tensors(parts[0], lambda *tensors: torch.cat(tensors), *parts[1:])


def merge(rows: Tensor, new: State, old: State) -> State:
    """Takes rows of `new` where `rows` [n] is true, of `old` elsewhere; both of one structure."""

    def choose(ours: Tensor, theirs: Tensor) -> Tensor:
        # what a step does not change (streams of text, mostly) is large and shared: no copy
        if ours is theirs:
            return ours
        return torch.where(rows.view(-1, *[1] * (ours.dim() - 1)), ours, theirs)

    return map_tensors(new, choose, old)
