"""Deduplication by text and by address, in three phases that an engine runs task by task.

1. `Sign` passes a task's documents on and writes their signatures (signatures.py).
2. `find_duplicates` reads the signatures of all tasks and lists, per task, the documents to drop.
   The first document of each group of equal texts stays. Of those that stay, pairs with a key in
   common are candidates, verified by their sketches and joined to clusters, of which again the
   first stays.
3. `Deduplicate` drops them.

By address, `SignUrls` and `find_same_urls` take the place of the first two: one document per page,
and a limited number of pages per host. They need no text, so they may come before every other step.

Everything streams through sorts on disk: memory is bounded whatever the number of documents and the
size of a cluster. The result depends on the order of the signature files alone, not on when or by
whom they were written; any phase of any task may be repeated.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.steps.components import (
    Chunks,
    Cursor,
    Disk,
    RecordFile,
    Records,
    changes,
    components,
    grouped,
    unique,
)
from cdrmix.corpus.steps.minhash import NO_KEY, Method, MinHash, SimHash
from cdrmix.corpus.steps.signatures import (
    URL_NOTES,
    Sign,
    SignatureFiles,
    SignUrls,
    hash_id,
    place,
    split_places,
)
from cdrmix.data.document import Document, Drop
from cdrmix.errors import DataError

__all__ = ["Method", "MinHash", "Sign", "SignUrls", "SimHash"]  # for those who run the phases

DROPS = np.dtype([("id", "<u8"), ("cluster", "<u8"), ("kind", "u1")])
# Reasons to drop a document; the lists hold their numbers.
_REASONS = ("", "exact duplicate", "near duplicate", "same url", "host has enough")
_EXACT, _NEAR, _URL, _HOST = range(1, 5)
_NUM_LARGEST = 10
# At one time there are two sorts, a chunk of signatures, one of links, and copies of these.
_SHARES = 8
_URL_SHARES = 4  # two sorts, a chunk of notes and copies


class Deduplicate:
    """Drops the documents on a task's list of `find_duplicates` or `find_same_urls`.

    Holds that list in memory, 17 bytes per document.
    """

    name = "dedup"

    def __init__(self, drops: Path) -> None:
        self.drops = Path(drops)

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Passes on the documents not on the list; a DataError if it is of other documents."""
        try:
            drops = np.load(self.drops)
        except OSError as error:
            raise DataError(f"{self.drops}: cannot be read: {error.strerror}.") from error
        except ValueError as error:
            advice = "Delete it; it is made anew."
            raise DataError(f"{self.drops}: damaged: {error}. {advice}") from error
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


def drops_path(folder: Path, signature_file: Path) -> Path:
    """Path of the list of documents to drop of one task."""
    return Path(folder) / f"{Path(signature_file).name}.drops.npy"


def _save_drops(path: Path, ids: Records, clusters: Records | int, kinds: Records | int) -> None:
    drops = np.empty(len(ids), dtype=DROPS)
    drops["id"] = ids
    drops["cluster"] = clusters
    drops["kind"] = kinds
    # Sorted by id, which is how the third phase looks documents up.
    np.save(path, np.sort(drops, order="id"))


@contextlib.contextmanager
def _new_disk(folder: Path, memory_bytes: int) -> Iterator[Disk]:
    shutil.rmtree(folder, ignore_errors=True)  # of a killed run
    folder.mkdir(parents=True)
    try:
        yield Disk(folder, memory_bytes)
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class ClusterSizes:
    """Clusters of one kind."""

    clusters: int
    dropped: int  # documents in them except the first of each
    sizes: dict[str, int]  # clusters by number of documents: '2', '3-4', '5-8', ...
    largest: list[tuple[int, int, int]]  # (documents, file and row of the first)


@dataclass(frozen=True)
class Duplicates:
    """Result of the search, for the report."""

    documents: int
    exact: ClusterSizes  # groups of equal text
    candidates: int  # pairs with a key in common, among the firsts of equal texts
    verified: int  # number of these whose sketches agree
    near: ClusterSizes  # also among the firsts of equal texts


def find_duplicates(
    signature_files: Sequence[Path], out: Path, *, method: Method, memory_bytes: int = 2**28
) -> Duplicates:
    """Lists the documents to drop, one file per signature file, and writes `duplicates.json`.

    Args:
        signature_files: in the order of the corpus; see `SignatureFiles`.
        out: folder of the lists and of temporary files; made if it does not exist.
    """
    files = SignatureFiles(signature_files, method)
    with _new_disk(out / "clusters.partial", memory_bytes // _SHARES) as disk:
        search = _Search(files, method, disk)
        exact, near = search.links()
        duplicates = Duplicates(
            documents=sum(files.num_records),
            exact=_sizes(exact, disk),
            candidates=search.num_candidates,
            verified=search.num_verified,
            near=_sizes(near, disk),
        )
        cursors = {_EXACT: Cursor(exact.chunks()), _NEAR: Cursor(near.chunks())}
        for number, path in enumerate(files.paths):
            last = place(number + 1, 0) - np.uint64(1)
            links = {kind: _joined(cursor.up_to(last)) for kind, cursor in cursors.items()}
            places, clusters = np.concatenate(list(links.values())).T
            kinds = np.repeat(list(links), [len(part) for part in links.values()])
            ids = files.records(number)["id"][split_places(places)[1]]
            _save_drops(drops_path(out, path), ids, clusters, kinds)
    # Renamed when it is whole: its presence marks the phase as done.
    report = out / "duplicates.json.partial"
    report.write_text(json.dumps(asdict(duplicates), indent=2) + "\n", encoding="utf-8")
    report.replace(out / "duplicates.json")
    return duplicates


def _joined(chunks: Chunks, num_columns: int = 2) -> Records:
    return np.concatenate([np.empty((0, num_columns), np.uint64), *chunks])


@dataclass
class _Search:
    """One search for duplicates."""

    files: SignatureFiles
    method: Method
    disk: Disk
    num_candidates: int = 0  # pairs with a key in common
    num_verified: int = 0

    def links(self) -> tuple[RecordFile, RecordFile]:
        """Sorted pairs (document, first document with the same text), then (document, first
        document of its cluster) without the members of the former.
        """
        texts = (
            np.column_stack([records["text"], places])
            for places, records in self.files.chunks(self.disk.memory_bytes)
        )
        groups = grouped(self.disk.sort(texts))
        equal = (_pairs(group.values, group.leaders) for group in groups)
        exact = RecordFile(self.disk, "exact", self.disk.sort(equal))
        # Pairs with a key in common: each linked to the first and to the one before, so that where
        # the first is no duplicate of the others, these still find each other.
        pairs = (
            _pairs(group.values, others)
            for group in grouped(self.disk.sort(self._keys(exact)))
            for others in (group.leaders, group.previous)
        )
        near = components(self._verified(unique(self.disk.sort(pairs))), self.disk)
        return exact, near

    def _keys(self, exact: RecordFile) -> Chunks:
        """(key, place) of the documents that are no members of `exact`."""
        duplicates = Cursor(exact.chunks())
        # A quarter, as a record becomes a row per key.
        for places, records in self.files.chunks(self.disk.memory_bytes // 4):
            members = _joined(duplicates.up_to(places[-1]))[:, 0]
            is_first = ~np.isin(places, members, assume_unique=True)
            keys = records["keys"][is_first]  # [n, K]
            rows = np.column_stack([keys.ravel(), np.repeat(places[is_first], keys.shape[1])])
            yield rows[rows[:, 0] != NO_KEY]

    def _verified(self, candidates: Chunks) -> Chunks:
        """Pairs whose sketches agree."""
        # Two passes over the signatures find the sketches: the first document's are stored beside
        # the pairs, which are sorted anew for the second document's.
        width = -(-self.method.sketch_bytes // 8)  # columns

        def with_first() -> Chunks:
            for pairs, sketches in self._with_sketches(candidates):
                self.num_candidates += len(pairs)
                padded = np.zeros((len(pairs), 8 * width), dtype=np.uint8)
                padded[:, : sketches.shape[1]] = sketches
                yield np.column_stack([pairs[:, ::-1], padded.view(np.uint64)])

        by_second = self.disk.sort(with_first(), num_keys=2)
        for records, sketches in self._with_sketches(by_second):
            first_sketches = np.ascontiguousarray(records[:, 2:]).view(np.uint8)
            is_near = self.method.agree(first_sketches[:, : sketches.shape[1]], sketches)
            self.num_verified += int(is_near.sum())
            yield records[is_near, 1::-1]

    def _with_sketches(self, chunks: Chunks) -> Iterator[tuple[Records, NDArray[np.uint8]]]:
        """Joins sketches to records that are sorted by their first column, a place."""
        cursor = Cursor(chunks)
        for places, signatures in self.files.chunks(self.disk.memory_bytes):
            for records in cursor.up_to(places[-1]):
                yield records, signatures["sketch"][np.searchsorted(places, records[:, 0])]


def _pairs(values: Records, others: Records) -> Records:
    """Pairs (value, other) that differ."""
    differ = values != others
    return np.column_stack([values[differ], others[differ]])


def _sizes(links: RecordFile, disk: Disk) -> ClusterSizes:
    """Counts the clusters whose members link to their first document, by size."""
    histogram = Counter[int]()
    largest: list[tuple[int, int]] = []
    for leaders, sizes in _cluster_sizes(disk.sort(chunk[:, ::-1] for chunk in links.chunks())):
        histogram.update(np.ceil(np.log2(sizes)).astype(int).tolist())
        # The smallest place first among clusters of one size.
        clusters = zip(sizes.tolist(), (-leaders.astype(np.int64)).tolist(), strict=True)
        largest = heapq.nlargest(_NUM_LARGEST, [*largest, *clusters])
    firsts = np.array([-leader for _, leader in largest], dtype=np.uint64)
    file_numbers, rows = (part.tolist() for part in split_places(firsts))
    sizes_of_largest = (size for size, _ in largest)
    return ClusterSizes(
        clusters=histogram.total(),
        dropped=links.num_records,
        sizes={
            "2" if power == 1 else f"{2 ** (power - 1) + 1}-{2**power}": histogram[power]
            for power in sorted(histogram)
        },
        largest=list(zip(sizes_of_largest, file_numbers, rows, strict=True)),
    )


def _cluster_sizes(chunks: Chunks) -> Iterator[tuple[Records, NDArray[np.int64]]]:
    """Leaders and sizes of clusters, from (leader, member) sorted; a leader is no member."""
    leaders = last = np.empty((0, 1), np.uint64)
    begins = np.empty(0, np.int64)  # number of the first record of each cluster
    num_records = 0
    for chunk in chunks:
        new = np.flatnonzero(changes(chunk[:, :1], last))
        leaders = np.append(leaders, chunk[new, 0])
        begins = np.append(begins, num_records + new)
        yield leaders[:-1], np.diff(begins) + 1
        # The last cluster may go on.
        leaders = leaders[-1:]
        begins = begins[-1:]
        last = chunk[-1:, :1]
        num_records += len(chunk)
    yield leaders, num_records - begins + 1


def find_same_urls(
    notes: Sequence[Path], out: Path, *, max_per_host: int | None, memory_bytes: int
) -> dict[str, int]:
    """Lists the documents to drop, one file per file of notes.

    Of the documents of a page, the first of the corpus stays. Of the pages of a host those stay
    whose hashes are smallest: a random choice that does not depend on their order.

    Args:
        notes: files of `SignUrls` in the order of the corpus.
        out: an existing folder for the lists, and for temporary files.
    Returns:
        `documents` with an address, different `pages` and `hosts` among these, and documents
        dropped for the `same_url` or a `full_host` (counts).
    """
    for path in notes:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
        if size % URL_NOTES.itemsize:
            raise DataError(f"{path}: truncated. Delete its folder and start the build again.")
    counts = Counter(documents=0, pages=0, hosts=0, same_url=0, full_host=0)
    with _new_disk(out / "urls.partial", memory_bytes // _URL_SHARES) as disk:
        by_page = disk.sort(_url_records(notes, disk.memory_bytes), num_keys=3)
        dropped = disk.sort(_same_urls(by_page, max_per_host, counts), num_keys=1)
        cursor = Cursor(dropped)
        for number, path in enumerate(notes):
            _, ids, kinds = _joined(cursor.up_to(place(number + 1, 0) - np.uint64(1)), 3).T
            _save_drops(drops_path(out, path), ids, 0, kinds)
    return dict(counts)


def _url_records(notes: Sequence[Path], memory_bytes: int) -> Chunks:
    """(host, page, place, id) of all documents with an address."""
    rows = max(1, memory_bytes // (8 * URL_NOTES.itemsize))
    for number, path in enumerate(notes):
        with path.open("rb") as file:
            while len(records := np.fromfile(file, URL_NOTES, rows)):
                places = records["row"] + place(number, 0)
                yield np.column_stack([records["host"], records["page"], places, records["id"]])


def _same_urls(chunks: Chunks, max_per_host: int | None, counts: Counter[str]) -> Chunks:
    """(place, id, kind of drop) of the documents to drop, from `_url_records` in order."""
    most = sys.maxsize if max_per_host is None else max_per_host
    last = np.empty((0, 4), np.uint64)
    last_rank = 0  # number of its page among those of its host
    for chunk in chunks:
        new_host = changes(chunk[:, :1], last[:, :1])
        new_page = changes(chunk[:, :2], last[:, :2])
        # Number of each record's page among those of its host, maybe begun in an earlier chunk.
        num_pages = np.cumsum(new_page)
        pages_before = np.where(new_host, num_pages - 1, -last_rank)
        ranks: NDArray[np.int64] = num_pages - np.maximum.accumulate(pages_before)
        full = ranks > most
        same = ~new_page & ~full
        last = chunk[-1:].copy()
        last_rank = int(ranks[-1])
        counts["documents"] += len(chunk)
        counts["pages"] += int(new_page.sum())
        counts["hosts"] += int(new_host.sum())
        counts["same_url"] += int(same.sum())
        counts["full_host"] += int(full.sum())
        kinds = np.where(full, np.uint64(_HOST), np.uint64(_URL))
        yield np.column_stack([chunk[:, 2:], kinds])[full | same]
