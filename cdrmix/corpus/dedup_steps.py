"""The steps `dedup` and `url_dedup`, which look at the whole corpus before they drop a document.

Such a step has three phases: a pass over each task that takes notes, one decision over all notes,
and a pass over each task that carries the decision out. The first and the last are ordinary steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from cdrmix.corpus.steps.dedup import (
    Deduplicate,
    Method,
    MinHash,
    Sign,
    SignUrls,
    SimHash,
    drops_path,
    find_duplicates,
    find_same_urls,
)
from cdrmix.corpus.task_run import document_id
from cdrmix.data.document import Step


class CorpusStep(ABC):
    """A step in three phases, whose decision is a list of documents to drop.

    Notes are files, one per task, in the folder of the documents that they describe; no two have
    the same name.
    """

    name: str

    @abstractmethod
    def before(self, notes: Path) -> Step:
        """Returns the step that writes the notes of a task."""

    @abstractmethod
    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Decides from the notes of all tasks, in corpus order, and writes files into `out`.

        Returns:
            Plain values for the report.
        """

    def decision(self, notes: Path, out: Path) -> Path:
        """Returns the file in `out` with the decision on one task."""
        # A file per task, so that a pass need not read the decisions on all others.
        return drops_path(out, notes)

    def after(self, decision: Path) -> Step:
        """Returns the step that carries out the decision on a task."""
        return Deduplicate(decision)


class Dedup(CorpusStep):
    """Drops each document that equals or resembles an earlier one of the corpus.

    Args:
        method: signatures for near-duplicates.
        shingle_words: words per shingle.
        num_bands, rows_per_band: MinHash: keys per document, and minima in each.
        min_jaccard: MinHash: smallest estimated similarity of a duplicate.
        max_distance: SimHash: most differing bits of a duplicate.
        memory_bytes: most memory of the search for duplicates.
    """

    name = "dedup"

    def __init__(
        self,
        *,
        method: Literal["minhash", "simhash"] = "minhash",
        shingle_words: int | None = None,
        num_bands: int | None = None,
        rows_per_band: int | None = None,
        min_jaccard: float | None = None,
        max_distance: int | None = None,
        # The search sorts on disk beyond this: a corpus has more signatures than memory.
        memory_bytes: int = 2**28,
    ) -> None:
        # None for a parameter of the recipe: the method's class has the default.
        of_minhash: dict[str, Any] = {
            "num_bands": num_bands,
            "rows_per_band": rows_per_band,
            "min_jaccard": min_jaccard,
        }
        of_simhash: dict[str, Any] = {"max_distance": max_distance}
        is_minhash = method == "minhash"
        # Refused rather than passed over: the user has another method in mind.
        for name, value in (of_simhash if is_minhash else of_minhash).items():
            if value is not None:
                raise ValueError(f"{name} is not a parameter of {method}")
        parameters = {"shingle_words": shingle_words} | (of_minhash if is_minhash else of_simhash)
        given = {name: value for name, value in parameters.items() if value is not None}
        self._method: Method = MinHash(**given) if is_minhash else SimHash(**given)
        self._memory_bytes = memory_bytes

    def before(self, notes: Path) -> Step:
        """Returns the step that signs each document."""
        return Sign(notes, self._method)

    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Finds the duplicates; the first document of each cluster stays."""
        values = asdict(
            find_duplicates(notes, out, method=self._method, memory_bytes=self._memory_bytes)
        )
        # The search knows places only; ids are read for the few clusters that the report shows.
        for kind in ("exact", "near"):
            values[kind]["largest"] = [
                {"documents": size, "first": document_id(notes[file].parent, row)}
                for size, file, row in values[kind]["largest"]
            ]
        return values


class UrlDedup(CorpusStep):
    """Keeps one document per web address, and a limited number of pages per host.

    Documents without an address pass. `cdrmix.corpus.steps.url.url_key` decides if two addresses
    are of the same page, with or without the step `url` before.

    Args:
        max_per_host: most pages of a host, chosen by hash; None: all.
        memory_bytes: most memory of the search.
    """

    name = "url_dedup"

    def __init__(self, *, max_per_host: int | None = None, memory_bytes: int = 2**28) -> None:
        if max_per_host is not None and max_per_host < 1:
            raise ValueError(f"max_per_host = {max_per_host} keeps no page; give 1 or more")
        self.max_per_host = max_per_host
        self._memory_bytes = memory_bytes

    def before(self, notes: Path) -> Step:
        """Returns the step that notes the address of each document."""
        return SignUrls(notes)

    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Finds the documents of the same page, and the hosts with too many pages."""
        return find_same_urls(
            notes, out, max_per_host=self.max_per_host, memory_bytes=self._memory_bytes
        )
