"""Steps that look at the whole corpus before they drop anything.

Such a step has three phases: a pass over each task that takes notes, one decision over all notes,
and a pass over each task that carries the decision out. The first and last are ordinary steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

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


class CorpusStep(Protocol):
    """A step in three phases; `notes` are files, one per task, with names that differ, each in the
    folder of the documents that it is about."""

    name: str

    def before(self, notes: Path) -> Step:
        """The pass that writes a task's notes."""
        ...

    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Decide from the notes of all tasks, in corpus order, and write the decision into the
        folder `out`.

        Returns:
            What was found, plain values for the report.
        """
        ...

    def decision(self, notes: Path, out: Path) -> Path:
        """The file with the decision on one task."""
        ...

    def after(self, decision: Path) -> Step:
        """The pass that carries a task's decision out."""
        ...


class Dedup:
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
        memory_bytes: int = 2**28,
    ) -> None:
        of_minhash = {
            "num_bands": num_bands,
            "rows_per_band": rows_per_band,
            "min_jaccard": min_jaccard,
        }
        of_simhash = {"max_distance": max_distance}
        own, others = (of_minhash, of_simhash)[:: 1 if method == "minhash" else -1]
        foreign = [name for name, value in others.items() if value is not None]
        if foreign:
            raise ValueError(f"{foreign[0]} is not a parameter of {method}")
        given: dict[str, Any] = {"shingle_words": shingle_words} | own
        given = {name: value for name, value in given.items() if value is not None}
        self._method: Method = MinHash(**given) if method == "minhash" else SimHash(**given)
        self._memory_bytes = memory_bytes

    def before(self, notes: Path) -> Step:
        """Sign each document."""
        return Sign(notes, self._method)

    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Find the duplicates; the first of each cluster stays."""
        found = find_duplicates(notes, out, method=self._method, memory_bytes=self._memory_bytes)
        values = asdict(found)
        for kind in ("exact", "near"):
            values[kind]["largest"] = [
                {"documents": size, "first": document_id(notes[file].parent, row)}
                for size, file, row in values[kind]["largest"]
            ]
        return values

    def decision(self, notes: Path, out: Path) -> Path:
        """The list of a task's duplicates."""
        return drops_path(out, notes)

    def after(self, decision: Path) -> Step:
        """Drop what is listed."""
        return Deduplicate(decision)


class UrlDedup:
    """Keeps one document per web address, and at most so many pages per host.

    Documents without an address pass. Pages are told apart as `cdrmix.corpus.steps.url.url_key`
    does, whether the step `url` came before or not.

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
        """Note each document's address."""
        return SignUrls(notes)

    def decide(self, notes: Sequence[Path], out: Path) -> dict[str, Any]:
        """Find the documents of one page, and the hosts with too many."""
        return find_same_urls(
            notes, out, max_per_host=self.max_per_host, memory_bytes=self._memory_bytes
        )

    def decision(self, notes: Path, out: Path) -> Path:
        """The list of what a task drops."""
        return drops_path(out, notes)

    def after(self, decision: Path) -> Step:
        """Drop what is listed."""
        return Deduplicate(decision)
