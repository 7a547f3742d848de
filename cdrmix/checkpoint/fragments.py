"""Fragments: how a rank says which part of a logical tensor it holds.

Logical shape: the unsharded shape of a parameter. Block: a box of the logical tensor, the local
parameter of a rank (all of it for most; some experts, rows or columns for sharded ones). Span: a
range of a block's elements in row-major order, what ZeRO leaves to one data rank. A fragment is a
span with its values. Every earlier layout is a set of spans, so reading into another layout is the
intersection of spans.

index.json: logical name -> kind -> shape, dtype and the files in which its fragments lie.

Which part of Stage B a parameter belongs to, and what it is called in checkpoints.

In a checkpoint the backbone's parameters have the names that Stage A gave them, so that whoever
reads a backbone reads one of Stage B too; all others stand under `stage_b.`.
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
    """A box of a logical tensor: where it starts and how large it is, both [N]."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The block that is all of a tensor of `shape`."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Elements in the block."""
        return math.prod(self.shape)

    def bounds_shared_with(self, other: Box) -> tuple[list[int], list[int]] | None:
        """First and past-the-last logical index, [N] each, of the common box; None if empty."""
        low = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        high = [min(a, b) for a, b in zip(self._end(), other._end(), strict=True)]
        return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None

    def _end(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a block, in the block's row-major order."""

    block: Box
    start: int
    numel: int

    @classmethod
    def whole(cls, block: Box) -> Span:
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
    outer = len(extent)
    run = 1
    while outer > 0:
        outer -= 1
        run *= extent[outer]
        if any(shape[outer] != extent[outer] for shape in shapes):
            break
    return outer, run


def _run_starts(block: Box, low: list[int], steps: list[int]) -> np.ndarray:
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
    by_block: dict[Box, list[Span]] = defaultdict(list)
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


def index_entry(file: str, key: str, fragment: Fragment) -> dict[str, Any]:
    """What the index says of one fragment that lies in `file` under `key`."""
    span = fragment.span
    assert fragment.values.numel() == span.numel, f"{key}: values do not fill their span"
    return {
        "name": fragment.name,
        "kind": fragment.kind,
        "shape": list(fragment.shape),
        "dtype": str(fragment.values.dtype).removeprefix("torch."),
        "fragment": {
            "file": file,
            "key": key,
            "block_offset": list(span.block.offset),
            "block_shape": list(span.block.shape),
            "start": span.start,
            "numel": span.numel,
        },
    }


def span_of(fragment: Mapping[str, Any]) -> Span:
    """The span that an index entry's `fragment` describes."""
    block = Box(tuple(fragment["block_offset"]), tuple(fragment["block_shape"]))
    return Span(block, fragment["start"], fragment["numel"])


def merge_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """name -> kind -> shape, dtype and fragments, from the entries of all ranks.

    Raises:
        AssertionError: if ranks disagree, or an element is held by no rank or by several.
    """
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
    for name, kinds in index.items():
        for kind, whole in kinds.items():
            spans = [span_of(fragment) for fragment in whole["fragments"]]
            check_cover(f"{kind} of {name}", tuple(whole["shape"]), spans)
    return index


Part = Literal["memory", "adapters", "policy", "backbone"]
PARTS: tuple[Part, ...] = get_args(Part)
PREFIX = "stage_b."


def part_of(name: str) -> Part:
    """Part of a parameter of a reader, by its name there; retrieval and slots are `memory`."""
    words = name.replace("/", ".").split(".")
    return next((part for part in PARTS[::-1] if part in words), "memory")


def reader_logical_name(name: str) -> str:
    """Name in checkpoints of a reader's parameter or buffer, free of how modules are nested."""
    name = name.replace("/", ".")
    if part_of(name) == "backbone":
        return backbone.logical_name(name.rpartition("backbone.")[2])
    return PREFIX + name


def is_of_a_layer(name: str) -> bool:
    """Whether a reader's parameter belongs to a block, and lies where that lies on a pipeline; all
    others are on every stage."""
    return "blocks" in name.replace("/", ".").split(".")


def is_stage_b(name: str) -> bool:
    """Whether a name in a checkpoint is of Stage B, and not of the backbone."""
    return name.startswith(PREFIX)
