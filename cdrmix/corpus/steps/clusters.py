"""Second phase of deduplication: from signatures of all tasks to the documents to drop.

The first document of each group of equal texts stays. Of those that stay, pairs with a key in
common are candidates, verified by their sketches and joined to clusters, of which again the first
stays. Everything streams through sorts on disk: memory is bounded whatever the number of documents
and the size of a cluster.
"""

from __future__ import annotations

import heapq
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.steps.components import (
    Chunks,
    ExternalSort,
    RecordFile,
    Records,
    components,
    grouped,
    unique,
)
from cdrmix.corpus.steps.minhash import NO_KEY, Method
from cdrmix.corpus.steps.signatures import SignatureFiles, place, split_places

# Reasons to drop a document, as stored in the lists.
EXACT = 1
NEAR = 2
URL = 3
HOST = 4
DROPS = np.dtype([("id", "<u8"), ("cluster", "<u8"), ("kind", "u1")])
_NUM_LARGEST = 10
# At one time there are two sorts, a chunk of signatures, one of links, and copies of these.
_SHARES = 8


@dataclass(frozen=True)
class ClusterSizes:
    """Clusters of one kind.

    Attributes:
        clusters: number of clusters.
        dropped: documents in them except the first of each.
        sizes: clusters by number of documents: '2', '3-4', '5-8', ...
        largest: (documents, file, row of the first) of the largest clusters.
    """

    clusters: int
    dropped: int
    sizes: dict[str, int]
    largest: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Duplicates:
    """Result of the search, for the report.

    Attributes:
        documents: documents examined.
        exact: groups of equal text.
        candidates: pairs with a key in common, among the firsts of equal texts.
        verified: number of these whose sketches agree.
        near: clusters of near-duplicates among the firsts of equal texts.
    """

    documents: int
    exact: ClusterSizes
    candidates: int
    verified: int
    near: ClusterSizes


def drops_path(folder: Path, signature_file: Path) -> Path:
    """Path of the list of documents to drop of one task."""
    return Path(folder) / f"{Path(signature_file).name}.drops.npy"


def find_duplicates(
    signature_files: Sequence[Path], out: Path, *, method: Method, memory_bytes: int = 2**28
) -> Duplicates:
    """Lists the documents to drop, one file per signature file, and writes `duplicates.json`.

    That file is written last and marks the phase as done.

    Args:
        signature_files: in the order of the corpus; see `SignatureFiles`.
        out: folder of the lists and of temporary files; made if it does not exist.
        method: method of the signatures.
        memory_bytes: most memory used for records.
    Raises:
        DataError: if a signature file is missing, truncated or of another method.
    """
    files = SignatureFiles(signature_files, method)
    folder = out / "clusters.partial"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed run
    folder.mkdir(parents=True)
    try:
        search = _Search(files, method, folder, memory_bytes // _SHARES)
        exact = search.exact_links()
        near = search.near_links(exact)
        duplicates = Duplicates(
            documents=sum(files.num_records),
            exact=search.sizes(exact),
            candidates=search.num_candidates,
            verified=search.num_verified,
            near=search.sizes(near),
        )
        cursors = {EXACT: _Cursor(exact), NEAR: _Cursor(near)}
        for number, (path, count) in enumerate(zip(files.paths, files.num_records, strict=True)):
            lists = []
            for kind, cursor in cursors.items():
                links = cursor.up_to(place(number, max(count - 1, 0)))
                drops = np.empty(len(links), dtype=DROPS)
                drops["id"] = files.ids(number, split_places(links[:, 0])[1])
                drops["cluster"] = links[:, 1]
                drops["kind"] = kind
                lists.append(drops)
            # Sorted by id, which is how the third phase looks documents up.
            np.save(drops_path(out, path), np.sort(np.concatenate(lists), order="id"))
    finally:
        shutil.rmtree(folder)
    # Renamed when it is whole: its presence marks the phase as done.
    report = out / "duplicates.json.partial"
    report.write_text(json.dumps(asdict(duplicates), indent=2) + "\n", encoding="utf-8")
    report.replace(out / "duplicates.json")
    return duplicates


class _Search:
    """One search: files, method and share of memory.

    Attributes:
        num_candidates, num_verified: pairs seen by `near_links`.
    """

    def __init__(
        self, files: SignatureFiles, method: Method, folder: Path, memory_bytes: int
    ) -> None:
        self._files = files
        self._method = method
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._sort = partial(ExternalSort, folder=folder, memory_bytes=memory_bytes)
        self.num_candidates = 0
        self.num_verified = 0

    def exact_links(self) -> RecordFile:
        """(document, first document with the same text), sorted."""
        sort = self._sort(3)
        for places, records in self._files.chunks(self._memory_bytes):
            sort.add(np.column_stack([records["text"], places]))
        links = self._sort(2)
        for group in grouped(sort.chunks()):
            links.add(_pairs(group.values, group.leaders))
        return RecordFile(
            self._folder / "exact",
            links.chunks(),
            num_columns=2,
            memory_bytes=self._memory_bytes,
        )

    def near_links(self, exact: RecordFile) -> RecordFile:
        """(document, first document of its cluster), sorted; without the members of `exact`."""
        sort = self._sort(2)  # (key, place)
        duplicates = _Cursor(exact)
        # A quarter, as a record becomes a row per key.
        for places, records in self._files.chunks(self._memory_bytes // 4):
            members = duplicates.up_to(places[-1])[:, 0]
            is_first = ~np.isin(places, members, assume_unique=True)
            keys = records["keys"][is_first]  # [n, K]
            rows = np.column_stack([keys.ravel(), np.repeat(places[is_first], keys.shape[1])])
            sort.add(rows[rows[:, 0] != NO_KEY])
        candidates = self._sort(2)
        for group in grouped(sort.chunks()):
            # Linked to the first and to the one before: where the first is no duplicate of the
            # others, these still find each other.
            candidates.add(_pairs(group.values, group.leaders))
            candidates.add(_pairs(group.values, group.previous))
        return components(
            self._verified(unique(candidates.chunks())),
            folder=self._folder,
            new_sort=lambda: self._sort(2),
            memory_bytes=self._memory_bytes,
        )

    def sizes(self, links: RecordFile) -> ClusterSizes:
        """Counts the clusters whose members link to their first document, by size."""
        sort = self._sort(2)
        for chunk in links.chunks():
            sort.add(chunk[:, ::-1])
        histogram: dict[int, int] = {}
        largest: list[tuple[int, int]] = []
        for leaders, sizes in _cluster_sizes(sort.chunks()):
            powers, counts = np.unique(np.ceil(np.log2(sizes)).astype(int), return_counts=True)
            for power, count in zip(powers.tolist(), counts.tolist(), strict=True):
                histogram[power] = histogram.get(power, 0) + count
            # The smallest place first among clusters of one size.
            clusters = zip(sizes.tolist(), (-leaders.astype(np.int64)).tolist(), strict=True)
            largest = heapq.nlargest(_NUM_LARGEST, [*largest, *clusters])
        firsts = np.array([-leader for _, leader in largest], dtype=np.uint64)
        file_numbers, rows = (part.tolist() for part in split_places(firsts))
        sizes_of_largest = (size for size, _ in largest)
        return ClusterSizes(
            clusters=sum(histogram.values()),
            dropped=links.num_records,
            sizes={
                "2" if power == 1 else f"{2 ** (power - 1) + 1}-{2**power}": histogram[power]
                for power in sorted(histogram)
            },
            largest=list(zip(sizes_of_largest, file_numbers, rows, strict=True)),
        )

    def _verified(self, candidates: Chunks) -> Chunks:
        """Pairs whose sketches agree.

        Two passes over the signatures find the sketches: the first document's are stored beside
        the pairs, which are sorted anew for the second document's.
        """
        width = -(-self._method.sketch_bytes // 8)  # columns
        sort = self._sort(2 + width, num_keys=2)
        for pairs, sketches in self._with_sketches(candidates):
            self.num_candidates += len(pairs)
            first_sketches = np.zeros((len(pairs), 8 * width), dtype=np.uint8)
            first_sketches[:, : sketches.shape[1]] = sketches
            sort.add(np.column_stack([pairs[:, ::-1], first_sketches.view(np.uint64)]))
        for records, sketches in self._with_sketches(sort.chunks()):
            first_sketches = np.ascontiguousarray(records[:, 2:]).view(np.uint8)
            is_near = self._method.agree(first_sketches[:, : sketches.shape[1]], sketches)
            self.num_verified += int(is_near.sum())
            yield records[is_near, 1::-1]

    def _with_sketches(self, chunks: Chunks) -> Iterator[tuple[Records, NDArray[np.uint8]]]:
        """Joins sketches to records that are sorted by their first column, a place."""
        blocks = self._files.chunks(self._memory_bytes)
        places = np.empty(0, np.uint64)
        sketches = np.empty((0, 0), np.uint8)
        for chunk in chunks:
            rest = chunk
            while len(rest):
                count = 0
                if len(places):
                    count = int(np.searchsorted(rest[:, 0], places[-1], side="right"))
                if count:
                    yield rest[:count], sketches[np.searchsorted(places, rest[:count, 0])]
                    rest = rest[count:]
                else:
                    places, signatures = next(blocks)
                    sketches = signatures["sketch"]


class _Cursor:
    """Reader of sorted links in step with something else in the same order."""

    def __init__(self, links: RecordFile) -> None:
        self._chunks = links.chunks()
        self._rest = np.empty((0, 2), dtype=np.uint64)

    def up_to(self, last: np.uint64) -> Records:
        """Links not given yet whose document is at most `last`."""
        parts = []
        while True:
            count = int(np.searchsorted(self._rest[:, 0], last, side="right"))
            parts.append(self._rest[:count])
            self._rest = self._rest[count:]
            if len(self._rest):
                return np.concatenate(parts)
            following = next(self._chunks, None)
            if following is None:
                return np.concatenate(parts)
            self._rest = following


def _pairs(values: Records, others: Records) -> Records:
    """Pairs (value, other) that differ."""
    differ = values != others
    return np.column_stack([values[differ], others[differ]])


def _cluster_sizes(chunks: Chunks) -> Iterator[tuple[Records, Records]]:
    """Leaders and sizes of clusters, from (leader, member) sorted; a leader is no member."""
    open_leader = None
    open_size = 0
    for chunk in chunks:
        leaders, counts = np.unique(chunk[:, 0], return_counts=True)
        sizes = counts.astype(np.uint64) + np.uint64(1)
        if open_leader == leaders[0]:
            sizes[0] += np.uint64(open_size - 1)
        elif open_leader is not None:
            yield np.array([open_leader]), np.array([open_size], dtype=np.uint64)
        yield leaders[:-1], sizes[:-1]
        open_leader = leaders[-1]
        open_size = int(sizes[-1])
    if open_leader is not None:
        yield np.array([open_leader]), np.array([open_size], dtype=np.uint64)
