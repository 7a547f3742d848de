"""Weights of a checkpoint as sharded safetensors, a part of one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import FileRecord, write_json, write_tensors
from cdrmix.checkpoint.fragments import Box, Span

INDEX_FILE = "model.safetensors.index.json"
# 16 MiB of a float32 checkpoint: large reads, and little beside what a process has anyway.
_READ_ELEMENTS = 2**22


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
    names: Mapping[str, str],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> dict[str, FileRecord]:
    """Writes tensors of a checkpoint and their index durably; gives the records of the files.

    Args:
        names: logical name of each exported one.
        dtype: type to write, into which the float32 weights of the checkpoint are rounded.
        max_shard_bytes: as for `plan_shards`.
    Raises:
        StateError: if the checkpoint cannot be read.
        OSError: naming the file that cannot be written.
    """
    shapes = {name: reader.shape(names[name], reader.content_kind(names[name])) for name in names}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    records = {}
    for file, keys in shards.items():
        # on the meta device: for shape and type alone
        layout = [(key, torch.empty(shapes[key], dtype=dtype, device="meta")) for key in keys]
        data = (part for key in keys for part in _parts(reader, names[key], dtype))
        records[file] = write_tensors(folder / file, layout, data)
    metadata = {
        "total_size": sum(sizes.values()),
        "total_parameters": sum(math.prod(shape) for shape in shapes.values()),
    }
    file_of = {key: file for file, keys in shards.items() for key in keys}
    index = {"metadata": metadata, "weight_map": file_of}
    records[INDEX_FILE] = write_json(folder / INDEX_FILE, index)
    return records


def _parts(reader: CheckpointFile, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Reads a tensor piece by piece, in its row-major order."""
    kind = reader.content_kind(name)
    # Boxes, not ranges of elements: of a range the reader walks through all rows of a tensor that
    # was cut by columns, for each of its fragments.
    for box in boxes(reader.shape(name, kind), _READ_ELEMENTS):
        yield reader.read(name, kind, Span.whole(box)).to(dtype)


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
