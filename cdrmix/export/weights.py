"""Weights of a checkpoint as sharded safetensors, a part of one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import FileRecord, write_json, write_tensors
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.config.safetensors_headers import INDEX_FILE

# 4 MiB of a float32 checkpoint: large reads, and little beside what a process has anyway. Of pieces
# of 16 MiB the heap kept eight, as it takes new ones where small objects leave no room in old ones.
_READ_ELEMENTS = 2**20


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint, and its place in an exported one.

    With signs of rows (i) and columns (j), each of -1, 0 and 1, it is the matrix of the blocks
    i * j * scale * source; a source of one dimension counts as a row. Without signs it has any
    number of dimensions.

    Attributes:
        source: logical name.
        transposed: exchange rows and columns of the source first.
    """

    source: str
    rows: tuple[int, ...] = (1,)
    columns: tuple[int, ...] = (1,)
    transposed: bool = False
    scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """True if it is the source as it is."""
        return self == Part(self.source)


class Stored(Protocol):
    """A tensor of a file to write."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Stored)


@dataclass(frozen=True)
class Target:
    """A tensor to write: parts that follow one another in memory, of one type.

    Attributes:
        rounding: type that the float32 weights of the checkpoint are rounded into.
        dtype: type to write, which holds every value of `rounding`.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rounding: torch.dtype
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def plain_target(source: str, shape: tuple[int, ...], dtype: torch.dtype) -> Target:
    """Makes a target of one tensor as it is, rounded."""
    return Target(shape, (Part(source),), dtype, dtype)


def plan_shards(num_bytes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Divides tensors among files, in their order, without reading any.

    Args:
        num_bytes: size of each tensor.
        max_shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
    Returns:
        Names of the tensors of each file, by the file's name.
    """
    shards: list[list[str]] = []
    used = 0
    for name, size in num_bytes.items():
        if not shards or used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    total = len(shards)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": each for i, each in enumerate(shards, 1)}


def write_weights(
    folder: Path,
    reader: CheckpointFile,
    targets: Mapping[str, Target],
    *,
    max_shard_bytes: int,
) -> dict[str, FileRecord]:
    """Writes tensors and their index durably; gives the records of the files.

    Args:
        targets: tensors by their names in the files.
        max_shard_bytes: as for `plan_shards`.
    Raises:
        StateError: if the checkpoint cannot be read.
        OSError: naming the file that cannot be written.
    """
    reader.open_files()
    values = partial(pieces, reader)
    return write_shards(folder, targets, values, max_shard_bytes=max_shard_bytes)


def write_shards(
    folder: Path,
    targets: Mapping[str, T],
    values: Callable[[T], Iterator[Tensor]],
    *,
    max_shard_bytes: int,
) -> dict[str, FileRecord]:
    """Writes tensors from any source and their index durably; as `write_weights` otherwise.

    Args:
        values: gives the elements of a tensor piece by piece, in row-major order.
    """
    shards = plan_shards({name: each.num_bytes for name, each in targets.items()}, max_shard_bytes)
    records = {
        file: write_shard(folder / file, targets, names, values) for file, names in shards.items()
    }
    metadata = {
        "total_size": sum(each.num_bytes for each in targets.values()),
        "total_parameters": sum(math.prod(each.shape) for each in targets.values()),
    }
    file_of = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": metadata, "weight_map": file_of}
    records[INDEX_FILE] = write_json(folder / INDEX_FILE, index)
    return records


def write_shard(
    path: Path,
    targets: Mapping[str, T],
    names: Sequence[str],
    values: Callable[[T], Iterator[Tensor]],
) -> FileRecord:
    """Writes one file of `plan_shards`; arguments and errors as of `write_shards`."""
    # the widest types first, as the file format wants them
    ordered = sorted(names, key=lambda name: -targets[name].dtype.itemsize)
    layout = [  # on the meta device: for shape and type alone
        (name, torch.empty(targets[name].shape, dtype=targets[name].dtype, device="meta"))
        for name in ordered
    ]
    data = (piece for name in ordered for piece in values(targets[name]))
    return write_tensors(path, layout, data)


def pieces(reader: CheckpointFile, target: Target) -> Iterator[Tensor]:
    """Reads a tensor piece by piece, in its row-major order."""
    for part in target.parts:
        if part.is_plain:
            kind = reader.content_kind(part.source)
            # Boxes, not ranges of elements: of a range the reader walks through all rows of a
            # tensor that was cut by columns, for each of its fragments.
            for box in boxes(reader.shape(part.source, kind), _READ_ELEMENTS):
                values = reader.read(part.source, kind, Span.whole(box))
                yield values.to(target.rounding).to(target.dtype)
        else:
            yield from _rows(reader, part, target)


def _rows(reader: CheckpointFile, part: Part, target: Target) -> Iterator[Tensor]:
    """Reads rows of a part's matrix, as many at a time as may be in memory."""
    kind = reader.content_kind(part.source)
    shape = reader.shape(part.source, kind)
    height, width = reversed(shape) if part.transposed else (math.prod(shape[:-1]), shape[-1])
    step = max(1, _READ_ELEMENTS // (width * len(part.columns)))
    for row_sign in part.rows:
        signs = [row_sign * column_sign for column_sign in part.columns]
        for first in range(0, height, step):
            size = min(step, height - first)
            if not any(signs):
                yield torch.zeros(size, width * len(signs), dtype=target.dtype)
                continue
            if part.transposed:
                box = Box((0, first), (width, size))
            else:
                box = Box((first, 0), (size, width)) if len(shape) == 2 else Box.whole(shape)
            values = reader.read(part.source, kind, Span.whole(box)).to(target.rounding).float()
            block = values.view(width, size).T if part.transposed else values.view(size, width)
            zeros = torch.zeros_like(block)  # a product with 0 would have zeros below zero
            blocks = [block * (sign * part.scale) if sign else zeros for sign in signs]
            yield torch.cat(blocks, dim=1).to(target.dtype)


def boxes(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Cuts a tensor into boxes of at most so many elements that follow one another in memory."""
    if math.prod(shape) <= max_elements:
        yield Box.whole(shape)
        return
    inner = math.prod(shape[1:])
    if inner > max_elements:
        for index in range(shape[0]):
            for box in boxes(shape[1:], max_elements):
                yield Box((index, *box.offset), (1, *box.shape))
        return
    step = max_elements // inner
    for start in range(0, shape[0], step):
        size = min(step, shape[0] - start)
        yield Box((start, *[0] * (len(shape) - 1)), (size, *shape[1:]))
