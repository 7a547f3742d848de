"""Deduplication by text and by address, in three phases that an engine runs task by task.

1. `Sign` passes a task's documents on and writes their signatures (signatures.py).
2. `find_duplicates` reads the signatures of all tasks and lists, per task, the documents to drop
   (clusters.py).
3. `Deduplicate` drops them.

By address, `SignUrls` and `find_same_urls` take the place of the first two: one document per page,
and a limited number of pages per host. They need no text, so they may come before every other step.

The result depends on the order of the signature files alone, not on when or by whom they were
written; any phase of any task may be repeated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.steps.clusters import (
    DROPS,
    EXACT,
    HOST,
    NEAR,
    URL,
    Duplicates,
    drops_path,
    find_duplicates,
)
from cdrmix.corpus.steps.components import ExternalSort
from cdrmix.corpus.steps.minhash import Method, MinHash, SimHash
from cdrmix.corpus.steps.signatures import Sign, hash_id, place
from cdrmix.corpus.steps.url import canonical_url, host_of, url_key
from cdrmix.data.document import Document, Drop
from cdrmix.errors import DataError

__all__ = [
    "Deduplicate",
    "Duplicates",
    "Method",
    "MinHash",
    "Sign",
    "SimHash",
    "drops_path",
    "find_duplicates",
]
_REASONS = {
    EXACT: "exact duplicate",
    NEAR: "near duplicate",
    URL: "same url",
    HOST: "host has enough",
}


class Deduplicate:
    """Drops the documents on a list of `find_duplicates` or `find_same_urls`.

    Holds that list in memory, 17 bytes per document.

    Args:
        drops: the list of this task, `drops_path` of its signature file.
    """

    name = "dedup"

    def __init__(self, drops: Path) -> None:
        self.drops = Path(drops)

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Passes on all documents that are not on the list.

        Raises:
            DataError: if the list is missing, or is not one of these documents.
        """
        try:
            drops = np.load(self.drops)
        except OSError as error:
            raise DataError(f"{self.drops}: cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise DataError(
                f"{self.drops}: damaged: {error}. Delete it; it is made anew."
            ) from error
        if drops.dtype != DROPS:
            raise DataError(f"{self.drops}: not a list of duplicates. Delete it; it is made anew.")
        num_dropped = 0
        for document in documents:
            hashed_id = np.uint64(hash_id(document.id))
            index = int(np.searchsorted(drops["id"], hashed_id))
            if index < len(drops) and drops["id"][index] == hashed_id:
                num_dropped += 1
                drop(document, _REASONS[int(drops["kind"][index])])
            else:
                yield document
        # Lists of another build would silently drop the wrong documents.
        if num_dropped != len(drops):
            raise DataError(
                f"{self.drops}: lists {len(drops)} documents, of which {num_dropped} were met: "
                "the documents are not those that were signed, or share an id. Delete the "
                "signatures and start the build again."
            )


# Record of a document with an address: hash of its id, row in its task, hashes of host and page.
_NOTES = np.dtype([("id", "<u8"), ("row", "<u8"), ("host", "<u8"), ("page", "<u8")])
_BATCH_RECORDS = 2**14


class SignUrls:
    """Passes all documents on and writes the hashes of their addresses.

    Args:
        path: the task's file, which appears as a whole after the last document.
    """

    name = "sign urls"

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Gives the documents unchanged and in order."""
        unfinished = self.path.with_name(f"{self.path.name}.partial")
        records: list[tuple[int, int, int, int]] = []
        with unfinished.open("wb") as file:
            for row, document in enumerate(documents):
                url = document.metadata.get("url")
                canonical = canonical_url(url) if isinstance(url, str) else None
                if canonical is not None:
                    digest = hashlib.blake2b(host_of(canonical).encode(), digest_size=8).digest()
                    host = int.from_bytes(digest, "little")
                    records.append((hash_id(document.id), row, host, int(url_key(canonical), 16)))
                if len(records) == _BATCH_RECORDS:
                    np.array(records, dtype=_NOTES).tofile(file)
                    records = []
                yield document
            np.array(records, dtype=_NOTES).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)


def find_same_urls(
    notes: Sequence[Path], out: Path, *, max_per_host: int | None, memory_bytes: int
) -> dict[str, int]:
    """Lists the documents to drop, one file per file of notes.

    Of the documents of a page, the first of the corpus stays. Of the pages of a host those stay
    whose hashes are smallest: a random choice that does not depend on their order.

    Args:
        notes: in the order of the corpus.
        out: an existing folder for the lists, and for temporary files.
        max_per_host: most pages of a host; None: all.
        memory_bytes: most memory used for records.
    Returns:
        `documents` with an address, different `pages` and `hosts` among these, and documents
        dropped for the `same_url` or a `full_host` (counts).
    Raises:
        DataError: if notes are missing or damaged.
    """
    for path in notes:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
        if size % _NOTES.itemsize:
            raise DataError(f"{path}: truncated. Delete its folder and start the build again.")
    work = out / "urls.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a killed run
    work.mkdir()
    share = memory_bytes // 4  # two sorts, a chunk of notes and copies
    new_sort = partial(ExternalSort, folder=work, memory_bytes=share)
    by_page = new_sort(4, num_keys=3)
    dropped = new_sort(3, num_keys=1)
    rows = max(1, share // (8 * _NOTES.itemsize))
    for number, path in enumerate(notes):
        with path.open("rb") as file:
            while len(records := np.fromfile(file, _NOTES, rows)):
                places = records["row"] + place(number, 0)
                by_page.add(
                    np.column_stack([records["host"], records["page"], places, records["id"]])
                )
    judge = _Judge(max_per_host)
    for chunk in by_page.chunks():
        dropped.add(judge.dropped(chunk))
    _write_drops(notes, dropped.chunks(), out)
    shutil.rmtree(work)
    return dict(judge.counts)


class _Judge:
    """Goes through (host, page, place, id), sorted, and decides which documents are dropped."""

    def __init__(self, max_per_host: int | None) -> None:
        self.counts = Counter(documents=0, pages=0, hosts=0, same_url=0, full_host=0)
        self._max_per_host = sys.maxsize if max_per_host is None else max_per_host
        self._last: NDArray[np.uint64] | None = None  # record before the chunk, [1, 4]
        self._last_rank = 0  # number of its page among those of its host

    def dropped(self, chunk: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Rows (place, id, kind of drop) of the records of a chunk that are dropped."""
        changes = np.ones((len(chunk), 2), dtype=bool)
        changes[1:] = chunk[1:, :2] != chunk[:-1, :2]
        if self._last is not None:
            changes[0] = chunk[0, :2] != self._last[0, :2]
        new_host = changes[:, 0]
        new_page = changes.any(axis=1)
        # Number of each record's page among those of its host, which may have begun in an earlier
        # chunk.
        num_pages = np.cumsum(new_page)
        pages_before = np.where(new_host, num_pages - 1, -self._last_rank)
        ranks: NDArray[np.int64] = num_pages - np.maximum.accumulate(pages_before)
        full = ranks > self._max_per_host
        same = ~new_page & ~full
        self._last = chunk[-1:].copy()
        self._last_rank = int(ranks[-1])
        self.counts["documents"] += len(chunk)
        self.counts["pages"] += int(new_page.sum())
        self.counts["hosts"] += int(new_host.sum())
        self.counts["same_url"] += int(same.sum())
        self.counts["full_host"] += int(full.sum())
        kinds = np.where(full, np.uint64(HOST), np.uint64(URL))
        return np.column_stack([chunk[:, 2:], kinds])[full | same]


def _write_drops(notes: Sequence[Path], dropped: Iterator[NDArray[np.uint64]], out: Path) -> None:
    """Writes one list per file of notes, from (place, id, kind) in the order of the corpus."""
    rest = np.empty((0, 3), dtype=np.uint64)
    for number, path in enumerate(notes):
        end = place(number + 1, 0)
        while not len(rest) or rest[-1, 0] < end:
            following = next(dropped, None)
            if following is None:
                break
            rest = np.concatenate([rest, following])
        count = int(np.searchsorted(rest[:, 0], end))
        drops = np.zeros(count, dtype=DROPS)
        drops["id"] = rest[:count, 1]
        drops["kind"] = rest[:count, 2]
        np.save(drops_path(out, path), np.sort(drops, order="id"))
        rest = rest[count:]
