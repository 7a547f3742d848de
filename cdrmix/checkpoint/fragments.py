"""Fragments: the parts of logical tensors that ranks hold, and the names of these tensors.

Logical shape: the unsharded shape of a parameter. Block: a box of the logical tensor, the local
parameter of a rank (all of it for most; some experts, rows or columns for sharded ones). Span: a
range of a block's elements in row-major order, the share that ZeRO gives to one data rank. A
fragment is a span with its values. Every earlier layout is a set of spans, so reading into another
layout is the intersection of spans.

In index.json each logical name has kinds, each with a shape, a dtype and the files of its
fragments. Parameters of a backbone trained or used in Stage B keep the names that Stage A gave
them, so that whoever reads a backbone reads one of Stage B too; all others begin with `stage_b.`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch

from cdrmix.models import backbone


# N dimensions of a tensor, R runs (contiguous in source and target alike)
@dataclass(frozen=True)
class Box:
    """A box of a logical tensor: its first index and its size, both [N]."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """All of a tensor of `shape`."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bounds_shared_with(self, other: Box) -> tuple[list[int], list[int]] | None:
        """First and past-the-last logical index, [N] each, of the common box; None if empty."""
        boxes = list(zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        low = [max(a, b) for a, _, b, _ in boxes]
        high = [min(a + size, b + other_size) for a, size, b, other_size in boxes]
        return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a block, in the block's row-major order."""

    block: Box
    start: int
    numel: int

    @classmethod
    def whole(cls, block: Box) -> Span:
        """Span that is all of `block`."""
        return cls(block, 0, block.numel)


@dataclass(frozen=True)
class Fragment:
    """Values of one span of one logical tensor."""

    name: str  # logical name
    # `param` (float32 master weight), `buffer`, or an optimizer's name for its state: `exp_avg`
    kind: str
    shape: tuple[int, ...]  # logical shape, [N]; () for a single number of a parameter
    span: Span
    values: torch.Tensor  # [span.numel], on any device; may be a view of live memory


def shared_runs(source: Span, target: Span) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, in two spans of one tensor, of the elements that both hold. Returns starts in
    `source`, starts in `target` (counted from each span's own start) and lengths, int64 [R] each. R
    is 1 when the blocks differ in their first dimension only."""
    bounds = source.block.bounds_shared_with(target.block)
    if bounds is None:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    low, high = bounds
    extent = [b - a for a, b in zip(low, high, strict=True)]
    # A run is contiguous in both blocks: it spans dimensions from the last one on, up to the first
    # one of which a block holds more. `outer` leading dimensions are stepped through.
    outer = len(extent)
    run = 1
    while outer > 0:
        outer -= 1
        run *= extent[outer]
        if not source.block.shape[outer] == extent[outer] == target.block.shape[outer]:
            break
    source_starts = _run_starts(source.block, low, extent[:outer])
    target_starts = _run_starts(target.block, low, extent[:outer])
    # A span may begin or end inside a run: `head` and `tail` bound the part that both spans hold.
    head = np.maximum(source.start - source_starts, target.start - target_starts).clip(min=0)
    tail = np.minimum(
        source.start + source.numel - source_starts, target.start + target.numel - target_starts
    ).clip(max=run)
    is_shared = tail > head
    return (
        (source_starts + head - source.start)[is_shared],
        (target_starts + head - target.start)[is_shared],
        (tail - head)[is_shared],
    )


def _run_starts(block: Box, low: list[int], steps: list[int]) -> np.ndarray:
    """Flat indices in `block`, int64 [R], of the runs of a box at `low`; `steps` per outer dim."""
    strides = [math.prod(block.shape[d + 1 :]) for d in range(len(block.shape))]
    first = sum((a - o) * s for a, o, s in zip(low, block.offset, strides, strict=True))
    starts = np.array([first], np.int64)
    for count, stride in zip(steps, strides, strict=False):
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return starts


def check_cover(name: str, shape: tuple[int, ...], spans: Iterable[Span]) -> None:
    """Asserts that spans hold every element of a tensor of `shape` exactly once."""
    by_block: dict[Box, list[Span]] = defaultdict(list)
    for span in spans:
        by_block[span.block].append(span)
    # Few blocks exist, one per shard, but a span per rank: only blocks are compared in pairs.
    for one, other in combinations(by_block, 2):
        assert one.bounds_shared_with(other) is None, f"{name}: blocks {one} and {other} overlap"
    for block, members in by_block.items():
        ordered = sorted(members, key=lambda span: span.start)
        # Neighbours are enough: where any two of these spans overlap, two neighbours do.
        for before, after in pairwise(ordered):
            assert before.start + before.numel <= after.start, (
                f"{name}: elements from {after.start} of {block} are held twice"
            )
    # Nothing is held twice, so that the right number of elements is all of them.
    covered = sum(span.numel for members in by_block.values() for span in members)
    total = math.prod(shape)
    assert covered == total, f"{name}: {covered} of {total} elements are held by some rank"


def span_of(fragment: Mapping[str, Any]) -> Span:
    """Span that the `fragment` of an index entry describes."""
    block = Box(tuple(fragment["block_offset"]), tuple(fragment["block_shape"]))
    return Span(block, fragment["start"], fragment["numel"])


def merge_entries(
    entries: Iterable[Mapping[str, Any]], *, is_whole: bool = True
) -> dict[str, dict[str, Any]]:
    """Merges the index entries that `write_share` made on all ranks: name -> kind -> shape, dtype
    and fragments. Asserts that ranks agree, and that each element is held by one rank; those of a
    part of the ranks, unless it `is_whole`, hold some alone."""
    index: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, kind, shape, dtype = (entry[key] for key in ("name", "kind", "shape", "dtype"))
        whole = index.setdefault(name, {}).setdefault(
            kind, {"shape": shape, "dtype": dtype, "fragments": []}
        )
        assert (whole["shape"], whole["dtype"]) == (shape, dtype), (
            f"{kind} of {name} is {whole['dtype']} {whole['shape']} on one rank and "
            f"{dtype} {shape} on another"
        )
        whole["fragments"].append(entry["fragment"])
    # Before the folder has a manifest: a save with a fault of the layout never counts.
    for name, kinds in index.items() if is_whole else ():
        for kind, whole in kinds.items():
            spans = [span_of(fragment) for fragment in whole["fragments"]]
            check_cover(f"{kind} of {name}", tuple(whole["shape"]), spans)
    return index


Part = Literal["memory", "adapters", "policy", "backbone"]
PARTS: tuple[Part, ...] = get_args(Part)
PREFIX = "stage_b."


def part_of(name: str) -> Part:
    """Part of a reader's parameter, by its name there; retrieval and slots are `memory`."""
    # Names of modules stand in those of parameters with "/": torch allows no dot in a name.
    words = name.replace("/", ".").split(".")
    return next((part for part in PARTS[::-1] if part in words), "memory")


def reader_logical_name(name: str) -> str:
    """Name in checkpoints of a reader's parameter or buffer, free of the nesting of modules."""
    name = name.replace("/", ".")
    # As Stage A saves it: its tools, and another Stage B, read a backbone out of either.
    if part_of(name) == "backbone":
        return backbone.logical_name(name.rpartition("backbone.")[2])
    return PREFIX + name


def is_stage_b(name: str) -> bool:
    """True for a name in a checkpoint that is of Stage B, and not of the backbone."""
    return name.startswith(PREFIX)
