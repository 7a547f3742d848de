"""Marks local parameters as a box of their logical tensor, or as a copy that another rank saves.

Marks on parameters, set while the model is built and read by `checkpoint`. DeepSpeed reads a mark
of its own, `tensor_model_parallel`: with it, each tensor rank's part counts in the gradient norm;
without it, the first tensor rank's copy stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """A box of a logical tensor: where it begins, and the whole tensor's shape."""

    offset: tuple[int, ...]
    logical_shape: tuple[int, ...]


def mark_shard(parameter: nn.Parameter, *, dim: int, part: int, parts: int) -> None:
    """Marks a parameter as one of `parts` equal boxes of its logical tensor along `dim`."""
    shape = list(parameter.shape)
    offset = [0] * len(shape)
    offset[dim] = part * shape[dim]
    shape[dim] *= parts
    parameter.shard = Shard(tuple(offset), tuple(shape))  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def mark_copy(parameter: nn.Parameter) -> None:
    """Marks a parameter whose values a rank outside the data group holds and saves too."""
    parameter.is_copy = True  # type: ignore[attr-defined]


def shard_of(parameter: Tensor) -> Shard | None:
    """Box that a parameter holds; None for a whole one."""
    return getattr(parameter, "shard", None)


def is_copy(parameter: Tensor) -> bool:
    """True if another rank saves the same values."""
    return getattr(parameter, "is_copy", False)
