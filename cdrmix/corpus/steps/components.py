"""Sorting and graph components of more records than fit into memory.

A sort writes sorted runs to disk and merges them in blocks. Connected components need nothing but
sorts: large-star and small-star steps alternate until nothing changes (Kiveris et al., Connected
Components in MapReduce and Beyond, 2014). Each links neighbours to the smallest of them; the result
is one star per component around its smallest node. A few rounds suffice for clusters of
duplicates, which are shallow.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.corpus.steps.minhash import mix

Records = NDArray[np.uint64]  # [n, columns]
Chunks = Iterator[Records]

# A sort holds the records, an index and two copies at its peak.
_COPIES = 4
_SMALLEST_BLOCK = 256  # records read at a time from each of the runs that are merged


class ExternalSort:
    """Sort of records of uint64 columns by the first columns.

    Memory is bounded by `memory_bytes` whatever the number of records and however many are equal.

    Args:
        num_columns: columns of a record.
        num_keys: columns to sort by, from the first; the order of records that are equal in them
            is not defined. None: all.
        folder: place of temporary files; none is left after `chunks`.
        memory_bytes: most memory used for records.
    """

    def __init__(
        self, num_columns: int, *, folder: Path, memory_bytes: int, num_keys: int | None = None
    ) -> None:
        self._num_columns = num_columns
        self._num_keys = num_keys or num_columns
        self._capacity = max(4 * _SMALLEST_BLOCK, memory_bytes // (8 * num_columns * _COPIES))
        self._temporary = tempfile.TemporaryDirectory(prefix="sort-", dir=folder)
        self._runs: list[Path] = []
        self._num_files = 0
        self._pending: list[Records] = []
        self._num_pending = 0

    def add(self, records: Records) -> None:
        """Takes records [n, columns]."""
        for start in range(0, len(records), self._capacity):
            piece = records[start : start + self._capacity]
            if self._num_pending + len(piece) > self._capacity:
                self._runs.append(self._write(iter([self._take()])))
            self._pending.append(piece)
            self._num_pending += len(piece)

    def chunks(self) -> Chunks:
        """Gives all records in order, in chunks [n, columns] of bounded size; once."""
        with self._temporary:
            if not self._runs:
                if self._num_pending:
                    yield self._take()
                return
            if self._num_pending:
                self._runs.append(self._write(iter([self._take()])))
            fan_in = self._capacity // _SMALLEST_BLOCK
            while len(self._runs) > fan_in:
                merged = self._runs[:fan_in]
                self._runs = self._runs[fan_in:]
                self._runs.append(self._write(self._merge(merged)))
                for path in merged:
                    path.unlink()
            yield from self._merge(self._runs)

    def _take(self) -> Records:
        """Sorts the pending records; none is pending afterwards."""
        records = np.concatenate(self._pending)
        self._pending = []
        self._num_pending = 0
        return self._sorted(records)

    def _sorted(self, records: Records) -> Records:
        return records[np.lexsort(records.T[self._num_keys - 1 :: -1])]

    def _write(self, chunks: Chunks) -> Path:
        path = Path(self._temporary.name, f"run-{self._num_files:06d}")
        self._num_files += 1
        with path.open("wb") as file:
            for chunk in chunks:
                chunk.tofile(file)
        return path

    def _merge(self, runs: list[Path]) -> Chunks:
        """Merges sorted runs into sorted chunks.

        A chunk holds the records that are not beyond the end of any run's block: the next records
        of that run may come before the rest.
        """
        block = max(_SMALLEST_BLOCK, self._capacity // len(runs))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in runs]
            heads = [np.empty((0, self._num_columns), np.uint64) for _ in runs]
            while True:
                # All blocks are filled up each time: the runs share one range of keys, and so
                # nearly all that is read is given at once.
                for number, file in enumerate(files):
                    missing = block - len(heads[number])
                    values = np.fromfile(file, np.uint64, missing * self._num_columns)
                    rows = values.reshape(-1, self._num_columns)
                    heads[number] = np.concatenate([heads[number], rows])
                full = [head for head in heads if len(head) == block]
                if not full:
                    break
                cut = min(tuple(head[-1, : self._num_keys].tolist()) for head in full)
                counts = [_count_up_to(head, cut) for head in heads]
                parts = [head[:count] for head, count in zip(heads, counts, strict=True)]
                yield self._sorted(np.concatenate(parts))
                heads = [head[count:] for head, count in zip(heads, counts, strict=True)]
        if any(map(len, heads)):
            yield self._sorted(np.concatenate(heads))


def _count_up_to(records: Records, last: tuple[int, ...]) -> int:
    """Number of the sorted records that are not greater than `last`."""
    low = 0
    high = len(records)
    for column, value in enumerate(last):
        values = records[low:high, column]
        # As uint64: searchsorted would cast the column to float64 for a Python int, and lose bits.
        target = np.uint64(value)
        high = low + int(np.searchsorted(values, target, side="right"))
        low += int(np.searchsorted(values, target, side="left"))
    return high


class Grouped(NamedTuple):
    """A chunk of records sorted by key and value; a group has equal keys.

    Attributes:
        keys: [n, columns - 1]; values: [n].
        leaders: smallest value of each record's group, [n].
        previous: value before it in its group, or its own if it is the first, [n].
    """

    keys: Records
    values: Records
    leaders: Records
    previous: Records


def grouped(chunks: Chunks) -> Iterator[Grouped]:
    """Finds groups of sorted records, of any length: the last group of a chunk may go on."""
    key = None
    leader = np.uint64(0)
    before = np.uint64(0)
    for chunk in chunks:
        keys = chunk[:, :-1]
        values = chunk[:, -1]
        starts = np.ones(len(chunk), dtype=bool)
        starts[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        starts[0] = key is None or bool((keys[0] != key).any())
        first = np.maximum.accumulate(np.where(starts, np.arange(len(chunk)), -1))
        leaders = np.where(first >= 0, values[first], leader)
        previous = np.concatenate([[before], values[:-1]])
        previous[starts] = values[starts]
        key = keys[-1].copy()
        leader = leaders[-1]
        before = values[-1]
        yield Grouped(keys, values, leaders, previous)


def unique(chunks: Chunks) -> Chunks:
    """Gives sorted records without repetitions."""
    last: Records | None = None
    for chunk in chunks:
        new = np.ones(len(chunk), dtype=bool)
        new[1:] = (chunk[1:] != chunk[:-1]).any(axis=1)
        new[0] = last is None or bool((chunk[0] != last).any())
        last = chunk[-1].copy()
        yield chunk[new]


class RecordFile:
    """Sorted records on disk, read as often as needed.

    Attributes:
        num_records: records written.
        checksum: equal for equal records, 64 bits.
    """

    def __init__(self, path: Path, chunks: Chunks, *, num_columns: int, memory_bytes: int) -> None:
        self._path = path
        self._num_columns = num_columns
        self._block = max(1, memory_bytes // (8 * num_columns))
        self.num_records = 0
        self.checksum = 0
        with path.open("wb") as file:
            for chunk in chunks:
                chunk.tofile(file)
                self.num_records += len(chunk)
                mixed = np.zeros(len(chunk), dtype=np.uint64)
                for column in chunk.T:
                    mixed = mix(mixed ^ column) + np.uint64(1)
                # A sum, so that it does not depend on where chunks end.
                self.checksum = (self.checksum + int(mixed.sum(dtype=np.uint64))) % 2**64

    def chunks(self) -> Chunks:
        """Reads all records in order."""
        with self._path.open("rb") as file:
            size = self._block * self._num_columns
            while (values := np.fromfile(file, np.uint64, size)).size:
                yield values.reshape(-1, self._num_columns)


def components(
    edges: Chunks, *, folder: Path, new_sort: Callable[[], ExternalSort], memory_bytes: int
) -> RecordFile:
    """Finds the components of a graph, as stars.

    Args:
        edges: (larger node, smaller node), in any order, each any number of times.
        folder: place of temporary files and the result.
        new_sort: makes an empty sort of two columns.
        memory_bytes: most memory of a chunk read.
    Returns:
        (node, smallest node of its component) for every other node, sorted by node.
    """
    number = 0

    def resorted(chunks: Chunks) -> Chunks:
        sort = new_sort()
        for chunk in chunks:
            sort.add(chunk)
        return sort.chunks()

    def stored(chunks: Chunks) -> RecordFile:
        path = folder / f"edges-{number % 2}"  # two take turns: one is read, the other written
        return RecordFile(path, chunks, num_columns=2, memory_bytes=memory_bytes)

    def large_star(edges: Chunks) -> Chunks:
        """Links the larger neighbours of each node to the smallest of node and neighbours."""
        both = (np.concatenate([chunk, chunk[:, ::-1]]) for chunk in edges)
        for group in grouped(resorted(both)):
            nodes = group.keys[:, 0]
            larger = group.values > nodes
            smallest = np.minimum(nodes, group.leaders)
            yield np.column_stack([group.values[larger], smallest[larger]])

    def small_star(edges: Chunks) -> Chunks:
        """Links each node and its smaller neighbours to the smallest of them."""
        for group in grouped(edges):
            first = group.values == group.leaders
            yield np.column_stack([group.keys[first, 0], group.leaders[first]])
            yield np.column_stack([group.values[~first], group.leaders[~first]])

    stars = stored(unique(resorted(edges)))
    while True:
        number += 1
        large = unique(resorted(large_star(stars.chunks())))
        linked = stored(unique(resorted(small_star(large))))
        # Equal counts and checksums: nothing has changed in this round.
        if (linked.num_records, linked.checksum) == (stars.num_records, stars.checksum):
            return linked
        stars = linked
