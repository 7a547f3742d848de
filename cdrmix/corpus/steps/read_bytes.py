"""Bytes of plain and compressed files, in bounded memory."""

from __future__ import annotations

import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cdrmix.errors import DataError

_CHUNK_BYTES = 2**20
# Four bytes of zstd may stand for 128 KiB, so that a decompressed chunk stays below 128 MiB.
_COMPRESSED_CHUNK_BYTES = 2**12
_GZIP = 31  # zlib's way to ask for gzip's header and checksum


class Unreadable(Exception):
    """A row or the rest of a file cannot be read."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason  # a few words, the same for the same cause
        self.detail = detail  # particulars of this file


def from_extra(module: str, what: str) -> Any:
    """Imports a module of the [data] extra, without which `what` cannot be read."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the package '{package}'. Install it: pip install 'cdrmix[data]'"
        ) from None


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file for reading, decompressed according to its name.

    Reading raises Unreadable if the compressed data is damaged or ends too early.
    """
    if path.suffix not in (".gz", ".zst"):
        return path.open("rb", buffering=_CHUNK_BYTES)
    if path.suffix == ".gz":
        raw = _Decompressed(path, lambda: zlib.decompressobj(_GZIP), zlib.error)
    else:
        zstandard = from_extra("zstandard", str(path))
        new_frame = zstandard.ZstdDecompressor().decompressobj
        raw = _Decompressed(path, new_frame, zstandard.ZstdError)
    return io.BufferedReader(raw, _CHUNK_BYTES)


class _Decompressed(io.RawIOBase):
    """A compressed file of any number of members.

    Gives all content before a damage and raises then: gzip's reader loses its read-ahead, and
    zstandard's takes a truncated file for a whole one.
    """

    def __init__(self, path: Path, new_member: Callable[[], Any], damage: type[Exception]) -> None:
        self._file = path.open("rb")
        self._new_member = new_member  # makes a decompressor
        self._damage = damage  # class of its errors
        self._member: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._file.read(_COMPRESSED_CHUNK_BYTES)
            if not chunk and self._member is not None:
                raise Unreadable("damaged compression", "the file ends too early")
            if not chunk:
                return 0
            content = []
            while chunk:
                if self._member is None:
                    chunk = chunk.lstrip(b"\0")  # tapes pad gzip files; no member begins with NUL
                    self._member = self._new_member() if chunk else None
                    continue
                try:
                    content.append(self._member.decompress(chunk))
                except self._damage as error:
                    raise Unreadable("damaged compression", str(error)) from None
                chunk = self._member.unused_data if self._member.eof else b""
                self._member = None if self._member.eof else self._member
            self._ready = b"".join(content)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def bounded_lines(file: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """Reads lines with their ends; None for a line longer than `limit` bytes."""
    while line := file.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line
            continue
        # Skipped piece by piece, so that it never stands in memory as a whole.
        while line and not line.endswith(b"\n"):
            line = file.readline(_CHUNK_BYTES)
        yield None
