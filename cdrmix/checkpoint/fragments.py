"""Fragments: how a rank says which part of a logical tensor it holds.

Logical shape: the unsharded shape of a parameter. Block: a box of the logical tensor, the local
parameter of a rank (all of it for most; some experts, rows or columns for sharded ones). Span: a
range of a block's elements in row-major order, what ZeRO leaves to one data rank. A fragment is a
span with its values. Every earlier layout is a set of spans, so reading into another layout is the
intersection of spans.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import torch

# N dimensions of a tensor, R runs (contiguous in source and target alike)


@dataclass(frozen=True)
class Block:
    """A box of a logical tensor: where it starts and how large it is, both [N]."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Block:
        """The block that is all of a tensor of `shape`."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Elements in the block."""
        return math.prod(self.shape)

    def bounds_shared_with(self, other: Block) -> tuple[list[int], list[int]] | None:
        """First and past-the-last logical index, [N] each, of the common box; None if empty."""
        low = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        high = [min(a, b) for a, b in zip(self._end(), other._end(), strict=True)]
        return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None

    def _end(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a block, in the block's row-major order."""

    block: Block
    start: int
    numel: int

    @classmethod
    def whole(cls, block: Block) -> Span:
        """The span that is all of `block`."""
        return cls(block, 0, block.numel)


@dataclass(frozen=True)
class Fragment:
    """Values of one span of one logical tensor.

    Args:
        name: logical parameter name.
        kind: `param` (float32 master weight), `buffer`, or an optimizer's name for its state, such
            as `exp_avg`.
        shape: logical shape, [N]; () for a number that belongs to the whole parameter.
        span: which elements.
        values: [span.numel], on any device; may be a view of live memory.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    span: Span
    values: torch.Tensor


def shared_runs(source: Span, target: Span) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the elements common to two spans of one tensor lie in each of them.

    Returns:
        Starts in `source`, starts in `target` (counted from each span's own start) and lengths,
        int64 [R] each. R is 1 when the blocks differ in their first dimension only.
    """
    bounds = source.block.bounds_shared_with(target.block)
    if bounds is None:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    low, high = bounds
    extent = [b - a for a, b in zip(low, high, strict=True)]
    outer, run = _contiguous_tail(extent, source.block.shape, target.block.shape)
    source_starts = _run_starts(source.block, low, extent[:outer])
    target_starts = _run_starts(target.block, low, extent[:outer])
    head = np.maximum(source.start - source_starts, target.start - target_starts).clip(min=0)
    tail = np.minimum(
        source.start + source.numel - source_starts, target.start + target.numel - target_starts
    ).clip(max=run)
    kept = tail > head
    return (
        (source_starts + head - source.start)[kept],
        (target_starts + head - target.start)[kept],
        (tail - head)[kept],
    )


def _contiguous_tail(extent: list[int], *shapes: tuple[int, ...]) -> tuple[int, int]:
    """Number of leading dimensions to step through, and elements per contiguous run below them."""
    outer, run = len(extent), 1
    while outer > 0:
        outer -= 1
        run *= extent[outer]
        if any(shape[outer] != extent[outer] for shape in shapes):
            break
    return outer, run


def _run_starts(block: Block, low: list[int], steps: list[int]) -> np.ndarray:
    """Flat index in `block`, int64 [R], of each run of the box at `low`; `steps` per outer dim."""
    strides = [math.prod(block.shape[d + 1 :]) for d in range(len(block.shape))]
    first = sum((a - o) * s for a, o, s in zip(low, block.offset, strides, strict=True))
    starts = np.array([first], np.int64)
    for count, stride in zip(steps, strides, strict=False):
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts


def check_cover(name: str, shape: tuple[int, ...], spans: Iterable[Span]) -> None:
    """Assert that spans hold every element of a tensor of `shape` exactly once.

    Raises:
        AssertionError: what is missing or doubled; the layout that made the spans is at fault.
    """
    by_block: dict[Block, list[Span]] = defaultdict(list)
    for span in spans:
        by_block[span.block].append(span)
    for one, other in combinations(by_block, 2):
        assert one.bounds_shared_with(other) is None, f"{name}: blocks {one} and {other} overlap"
    for block, members in by_block.items():
        ordered = sorted(members, key=lambda span: span.start)
        for before, after in pairwise(ordered):
            assert before.start + before.numel <= after.start, (
                f"{name}: elements from {after.start} of {block} are held twice"
            )
    held = sum(span.numel for members in by_block.values() for span in members)
    total = math.prod(shape)
    assert held == total, f"{name}: {held} of {total} elements are held by some rank"
