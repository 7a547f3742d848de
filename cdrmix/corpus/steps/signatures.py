"""First phase of deduplication: a file of fixed-width records per task.

A record is enough for the later phases and holds no text: 248 bytes with the default MinHash. A
document is identified by its place, the numbers of its task's file and of its row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.steps.minhash import MAX_CHARACTERS, Method, in_batches
from cdrmix.corpus.steps.url import canonical_url, host_of, url_key
from cdrmix.data.document import Document, Drop
from cdrmix.errors import DataError

_FORMAT = 1
_HEADER_BYTES = 256
_MAX_BATCH = 512  # documents
_ROW_BITS = 40  # places: 2^24 files of 2^40 documents
# A document with an address: hash of its id, number in its task, hashes of host and page.
URL_NOTES = np.dtype([("id", "<u8"), ("row", "<u8"), ("host", "<u8"), ("page", "<u8")])


class _Signer(ABC):
    """Passes all documents on and writes records about them into a file.

    The file appears after the last document, whole or not at all. Documents wait until their batch
    is written: at most 512, and 131,072 characters or one longer document.
    """

    header = b""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @abstractmethod
    def records(self, batch: list[Document], row: int) -> NDArray[Any]:
        """Records of consecutive documents, the first of which has this number in its task."""

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Gives the documents unchanged and in order."""
        partial = self.path.with_name(f"{self.path.name}.partial")  # a killed run's is overwritten
        row = 0
        try:
            with self._named_errors():
                file = partial.open("wb")
            with file:
                with self._named_errors():
                    file.write(self.header)
                for batch in in_batches(documents, lambda x: len(x.text), max_items=_MAX_BATCH):
                    records = self.records(batch, row)
                    row += len(batch)
                    with self._named_errors():
                        file.write(records.tobytes())
                    yield from batch
                with self._named_errors():
                    file.flush()
                    os.fsync(file.fileno())
                    partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Names the file in its own errors, and leaves those of the documents' source alone."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.path}: signatures cannot be written: {error.strerror}. Make room, and "
                "start the build again: finished tasks are kept."
            ) from error


class Sign(_Signer):
    """Passes all documents on and writes their signatures into a task's file."""

    name = "sign"

    def __init__(self, path: Path, method: Method) -> None:
        super().__init__(path)
        self.method = method
        self.header = _header(method)

    def records(self, batch: list[Document], row: int) -> NDArray[Any]:
        """A record per document, of the type `record_type`."""
        records = np.zeros(len(batch), dtype=record_type(self.method))
        records["id"] = [hash_id(document.id) for document in batch]
        for record, document in zip(records, batch, strict=True):
            # 128 bits, equal for texts that differ only in letter case and white space.
            digest = hashlib.blake2b(digest_size=16)
            for start in range(0, len(document.text), MAX_CHARACTERS):
                # Piece by piece: the copies of a long text would be several times its size.
                piece = document.text[start : start + MAX_CHARACTERS].lower()
                digest.update("".join(piece.split()).encode("utf-8", "surrogatepass"))
            record["text"] = np.frombuffer(digest.digest(), dtype="<u8")
        records["keys"], records["sketch"] = self.method.sign([d.text for d in batch])
        return records


class SignUrls(_Signer):
    """Passes all documents on and writes the hashes of their addresses into a task's file."""

    name = "sign urls"

    def records(self, batch: list[Document], row: int) -> NDArray[Any]:
        """A record per document with an address, of the type `URL_NOTES`."""
        records = []
        for number, document in enumerate(batch, start=row):
            url = document.metadata.get("url")
            canonical = canonical_url(url) if isinstance(url, str) else None
            if canonical is not None:
                page = int(url_key(canonical), 16)
                records.append((hash_id(document.id), number, hash_id(host_of(canonical)), page))
        return np.array(records, dtype=URL_NOTES)


class SignatureFiles:
    """Signature files in the order of the corpus, read as one list of records.

    Args:
        paths: one file per task: sources in the recipe's order, and within a source the tasks in
            reading order. The first document of a cluster in this order survives.
    Raises:
        DataError: if a file is missing, truncated, or of another method.
    """

    def __init__(self, paths: Sequence[Path], method: Method) -> None:
        self.paths = [Path(path) for path in paths]
        self.num_records: list[int] = []  # of each file
        self._type = record_type(method)
        header = _header(method)
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    actual = file.read(_HEADER_BYTES)
                    size = os.fstat(file.fileno()).st_size - _HEADER_BYTES
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
            if actual != header:
                texts = (part.decode("utf-8", "replace").strip() for part in (actual, header))
                present, expected = (text or "nothing" for text in texts)
                raise DataError(
                    f"{path}: has signatures of {present}, wanted are {expected}. "
                    "Delete the signatures and start the build again."
                )
            if size % self._type.itemsize:
                raise DataError(f"{path}: truncated. Delete it and start the build again.")
            self.num_records.append(size // self._type.itemsize)

    def chunks(self, memory_bytes: int) -> Iterator[tuple[NDArray[np.uint64], NDArray[Any]]]:
        """Reads all records in order: places [n] and records [n], in chunks of bounded size."""
        rows = max(1, memory_bytes // (2 * self._type.itemsize))
        for number, count in enumerate(self.num_records):
            for start in range(0, count, rows):
                stop = min(start + rows, count)
                places = np.arange(start, stop, dtype=np.uint64) + place(number, 0)
                yield places, np.array(self.records(number)[start:stop])

    def records(self, number: int) -> NDArray[Any]:
        """All records of one file, mapped from disk."""
        shape = (self.num_records[number],)
        return np.memmap(self.paths[number], self._type, "r", offset=_HEADER_BYTES, shape=shape)


def place(file: int, row: int) -> np.uint64:
    """Number of row `row` of signature file `file`; ordered like the corpus."""
    return np.uint64((file << _ROW_BITS) | row)


def split_places(places: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """File and row of each place."""
    files = (places >> np.uint64(_ROW_BITS)).astype(np.int64)
    return files, (places & np.uint64((1 << _ROW_BITS) - 1)).astype(np.int64)


def hash_id(name: str) -> int:
    """64-bit hash of a document's id or of a host, unique for practical purposes."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def record_type(method: Method) -> np.dtype[Any]:
    """Fields of a record: hash of the id, hash of the text, keys and sketch."""
    # Little-endian, so that machines of a cluster may share the files.
    keys = ("keys", "<u8", (method.num_keys,))
    sketch = ("sketch", "u1", (method.sketch_bytes,))
    return np.dtype([("id", "<u8"), ("text", "<u8", (2,)), keys, sketch])


def _header(method: Method) -> bytes:
    content = json.dumps({"signatures": _FORMAT} | method.describe(), sort_keys=True).encode()
    assert len(content) < _HEADER_BYTES, "the description of a method is short"
    return content.ljust(_HEADER_BYTES)
