"""Durable files: written, digested in the same pass and flushed to the device before they count."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch

# Large enough that a system call and a thread hand-over cost nothing beside it.
_CHUNK_BYTES = 16 * 2**20

# safetensors' names of element types.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileRecord(TypedDict):
    """What a manifest says of one file."""

    bytes: int
    sha256: str


def json_text(value: Any) -> str:
    """`value` as the text of a JSON file."""
    return json.dumps(value, indent=1) + "\n"


def write_text(path: Path, text: str) -> FileRecord:
    """Write `text`, durably. Raises OSError naming `path`."""
    with _durable(path) as sink:
        sink.write(memoryview(text.encode()))
    return sink.record()


def write_json(path: Path, value: Any) -> FileRecord:
    """Write `value` as JSON, durably. Raises OSError naming `path`."""
    return write_text(path, json_text(value))


def write_tensors(path: Path, header: bytes, data: Iterable[torch.Tensor]) -> FileRecord:
    """Write a safetensors file, one tensor in host memory at a time, durably.

    Args:
        path: file to create.
        header: `safetensors_header` of the tensors, those of the widest elements first: the format
            allows no gaps, and torch needs aligned offsets.
        data: tensors on any device, or pieces of memory, that hold the bytes of these tensors.
    Raises:
        OSError: naming `path`.
    """
    with _durable(path) as sink:
        sink.write(memoryview(header))
        for tensor in data:
            sink.write(flat_bytes(tensor).cpu().numpy().data)
    return sink.record()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8, on its device; a view where it is contiguous."""
    flat = tensor.detach().reshape(-1).contiguous()
    # A single element counts as contiguous whatever its stride; a byte view does not.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def safetensors_header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """What stands before the data of `tensors`, distinct keys in the order of the file."""
    assert len({key for key, _ in tensors}) == len(tensors), "a key is there twice"
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in tensors:
        end = position + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def replace_text(path: Path, text: str) -> None:
    """Set the content of a small file in one step: a reader finds the old text or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with _durable(temporary) as sink:
        sink.write(memoryview(text.encode()))
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """sha256 of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Sink:
    """Counts, digests and writes; the digest of a chunk runs beside its write."""

    def __init__(self, file: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._file = file
        self._hasher = hasher
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data: memoryview) -> None:
        for first in range(0, data.nbytes, _CHUNK_BYTES):
            chunk = data[first : first + _CHUNK_BYTES]
            hashed = self._hasher.submit(self._digest.update, chunk)
            try:
                self._file.write(chunk)
            finally:
                hashed.result()
        self._bytes += data.nbytes

    def record(self) -> FileRecord:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[_Sink]:
    """A sink whose bytes are on the device when the block ends; errors name `path`."""
    try:
        with ThreadPoolExecutor(1) as hasher, path.open("wb") as file:
            yield _Sink(file, hasher)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
