"""Operations on the rows of a batch of states, whatever structure holds their tensors.

A state is never written in place: a step gives a new one. So branches may share tensors with the
state they come from, and a rejected branch is simply dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_tensors(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the same structure with every tensor replaced and all else as it is.

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
    # a named tuple takes its fields one by one, a plain tuple takes an iterable
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(map_tensors(value, function) for value in state))
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, function) for value in state)
    return state


def branch(state: State, count: int) -> State:
    """Repeats every row `count` times, its copies beside each other."""
    return map_tensors(state, lambda rows: rows.repeat_interleave(count, dim=0))


def select(state: State, rows: Tensor) -> State:
    """Copies chosen rows of every tensor, [n] int64."""
    return map_tensors(state, lambda tensor: tensor.index_select(0, rows))


def merge(rows: Tensor, new: State, old: State) -> State:
    """Takes rows of `new` where `rows` [n] is true, of `old` elsewhere; both of one structure."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    # both walks visit the tensors in the same order, which pairs them up
    map_tensors(new, collect)
    replacements = iter(tensors)

    def choose(tensor: Tensor) -> Tensor:
        replacement = next(replacements)
        # what a step does not change (streams of text, mostly) is large and shared: no copy
        if replacement is tensor:
            return tensor
        return torch.where(rows.view(-1, *[1] * (tensor.dim() - 1)), replacement, tensor)

    return map_tensors(old, choose)
