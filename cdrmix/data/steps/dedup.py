"""Deduplication in three phases, which an engine may run task by task and repeat at will.

1. `Sign` passes a task's documents on and writes their signatures (steps/signatures.py).
2. `find_duplicates` reads the signatures of all tasks and lists, per task, what to drop
   (steps/clusters.py).
3. `Deduplicate` drops it.

What is dropped depends on the order of the signature files alone, not on who wrote them when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cdrmix.data.document import Document, Drop
from cdrmix.data.steps.clusters import (
    DROPS,
    EXACT,
    HOST,
    NEAR,
    URL,
    Duplicates,
    drops_path,
    find_duplicates,
)
from cdrmix.data.steps.minhash import Method, MinHash, SimHash
from cdrmix.data.steps.signatures import Sign, hash_id
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
    """Drops the documents that a list names, of `find_duplicates` or `find_same_urls`; keeps that
    list, 17 bytes each.

    Args:
        drops: the list of this task, `drops_path` of its signature file.
    """

    name = "dedup"

    def __init__(self, drops: Path) -> None:
        self.drops = Path(drops)

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Pass on all documents that are not listed.

        Raises:
            DataError: if the list is missing, or is not one of these documents.
        """
        listed = self._read()
        num_dropped = 0
        for document in documents:
            wanted = np.uint64(hash_id(document.id))
            found = int(np.searchsorted(listed["id"], wanted))
            if found < len(listed) and listed["id"][found] == wanted:
                num_dropped += 1
                drop(document, _REASONS[int(listed["kind"][found])])
            else:
                yield document
        if num_dropped != len(listed):
            raise DataError(
                f"{self.drops}: lists {len(listed)} documents, of which {num_dropped} were met: "
                "the documents are not those that were signed, or share an id. Delete the "
                "signatures and start the build again."
            )

    def _read(self) -> np.ndarray:
        try:
            listed = np.load(self.drops)
        except OSError as error:
            raise DataError(f"{self.drops}: cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise DataError(
                f"{self.drops}: damaged: {error}. Delete it; it is made anew."
            ) from error
        if listed.dtype != DROPS:
            raise DataError(f"{self.drops}: not a list of duplicates. Delete it; it is made anew.")
        return listed
