"""Sorting and graph components of more records than fit into memory.

A sort writes sorted runs to disk and merges them in blocks. Connected components need nothing but
sorts: large-star and small-star steps alternate until nothing changes (Kiveris et al., Connected
Components in MapReduce and Beyond, 2014). Each links neighbours to the smallest of them; the result
is one star per component around its smallest node. A few rounds suffice for clusters of
duplicates, which are shallow.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Disk:
    """A folder for temporary files, and the most memory that a sort or a chunk may take."""

    folder: Path
    memory_bytes: int

    def sort(self, chunks: Chunks, *, num_keys: int | None = None) -> Chunks:
        """Gives records in order, in chunks of bounded size; no temporary file is left.

        Args:
            num_keys: columns to sort by, from the first; the order of records that are equal in
                them is not defined. None: all.
        """
        with tempfile.TemporaryDirectory(prefix="sort-", dir=self.folder) as folder:
            paths = (Path(folder, f"run-{number:06d}") for number in itertools.count())
            runs: list[Path] = []
            for records in self._batches(chunks):
                num_columns = records.shape[1]
                runs.append(next(paths))
                _sorted(records, num_keys).tofile(runs[-1])
                del records  # else it would be held beside the next batch
            if not runs:
                return
            capacity = self._capacity(num_columns)
            if len(runs) == 1:
                yield from _read(runs[0], num_columns, capacity)
                return
            fan_in = capacity // _SMALLEST_BLOCK
            while len(runs) > fan_in:
                merged = _merged(runs[:fan_in], num_columns, num_keys, capacity)
                runs.append(next(paths))
                with runs[-1].open("wb") as file:
                    for chunk in merged:
                        chunk.tofile(file)
                for path in runs[:fan_in]:
                    path.unlink()
                runs = runs[fan_in:]
            yield from _merged(runs, num_columns, num_keys, capacity)

    def _capacity(self, num_columns: int) -> int:
        """Records that a sort may hold."""
        return max(4 * _SMALLEST_BLOCK, self.memory_bytes // (8 * num_columns * _COPIES))

    def _batches(self, chunks: Chunks) -> Chunks:
        """Puts chunks together, as many records as a sort may hold."""
        pending: list[Records] = []
        num_pending = 0
        for records in chunks:
            capacity = self._capacity(records.shape[1])
            for start in range(0, len(records), capacity):
                piece = records[start : start + capacity]
                if num_pending + len(piece) > capacity:
                    yield np.concatenate(pending)
                    pending = []
                    num_pending = 0
                pending.append(piece)
                num_pending += len(piece)
        if pending:
            yield np.concatenate(pending)


def _sorted(records: Records, num_keys: int | None) -> Records:
    last_key = (num_keys or records.shape[1]) - 1
    return records[np.lexsort(records.T[last_key::-1])]


def _read(path: Path, num_columns: int, rows: int) -> Chunks:
    with path.open("rb") as file:
        while (values := np.fromfile(file, np.uint64, rows * num_columns)).size:
            yield values.reshape(-1, num_columns)


def _merged(runs: list[Path], num_columns: int, num_keys: int | None, capacity: int) -> Chunks:
    """Merges sorted runs into sorted chunks."""
    block = max(_SMALLEST_BLOCK, capacity // len(runs))
    heads = [np.empty((0, num_columns), np.uint64) for _ in runs]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in runs]
        while True:
            # All blocks are filled up each time: the runs share one range of keys, and so
            # nearly all that is read is given at once.
            for number, file in enumerate(files):
                missing = block - len(heads[number])
                values = np.fromfile(file, np.uint64, missing * num_columns)
                heads[number] = np.concatenate([heads[number], values.reshape(-1, num_columns)])
            full = [head for head in heads if len(head) == block]
            if not full:
                break
            # The next records of a run may come before what is beyond the end of its block.
            cut = min(tuple(head[-1, :num_keys].tolist()) for head in full)
            counts = [_count_up_to(head, cut) for head in heads]
            parts = [head[:count] for head, count in zip(heads, counts, strict=True)]
            yield _sorted(np.concatenate(parts), num_keys)
            heads = [head[count:] for head, count in zip(heads, counts, strict=True)]
    if any(map(len, heads)):
        yield _sorted(np.concatenate(heads), num_keys)


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


def changes(records: Records, before: Records) -> NDArray[np.bool_]:
    """Tells which records differ from the one before them; `before` [0 or 1, columns] the first."""
    differ = np.ones(len(records), dtype=bool)
    differ[1:] = (records[1:] != records[:-1]).any(axis=1)
    if len(before):
        differ[0] = (records[0] != before[0]).any()
    return differ


class Grouped(NamedTuple):
    """A chunk of n records sorted by key and value; a group has equal keys."""

    keys: Records  # [n, columns - 1]
    values: Records  # [n]
    leaders: Records  # smallest value of each record's group, [n]
    previous: Records  # value before it in its group, or its own if it is the first, [n]


def grouped(chunks: Chunks) -> Iterator[Grouped]:
    """Finds groups of sorted records, of any length: the last group of a chunk may go on."""
    key = np.empty((0, 0), np.uint64)
    leader = np.uint64(0)
    before = np.uint64(0)
    for chunk in chunks:
        keys = chunk[:, :-1]
        values = chunk[:, -1]
        starts = changes(keys, key)
        first = np.maximum.accumulate(np.where(starts, np.arange(len(chunk)), -1))
        leaders = np.where(first >= 0, values[first], leader)
        previous = np.concatenate([[before], values[:-1]])
        previous[starts] = values[starts]
        key = keys[-1:].copy()
        leader = leaders[-1]
        before = values[-1]
        yield Grouped(keys, values, leaders, previous)


def unique(chunks: Chunks) -> Chunks:
    """Gives sorted records without repetitions."""
    last = np.empty((0, 0), np.uint64)
    for chunk in chunks:
        new = changes(chunk, last)
        last = chunk[-1:].copy()
        if new.any():  # a chunk may repeat the end of the one before, and none is empty
            yield chunk[new]


class Cursor:
    """Reader of records, sorted by their first column, in step with something in that order."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._rest = next(chunks, np.empty((0, 1), np.uint64))

    def up_to(self, last: np.uint64) -> Chunks:
        """Gives the records not given yet whose first column is at most `last`."""
        while True:
            count = int(np.searchsorted(self._rest[:, 0], last, side="right"))
            if count:
                yield self._rest[:count]
            self._rest = self._rest[count:]
            if len(self._rest):
                return
            following = next(self._chunks, None)
            if following is None:
                return
            self._rest = following


class RecordFile:
    """Sorted pairs on disk, read as often as needed."""

    def __init__(self, disk: Disk, name: str, pairs: Chunks) -> None:
        self._path = disk.folder / name
        self._rows = max(1, disk.memory_bytes // 16)
        self.num_records = 0
        self.checksum = 0  # equal for equal records, 64 bits
        with self._path.open("wb") as file:
            for chunk in pairs:
                chunk.tofile(file)
                self.num_records += len(chunk)
                # A sum, so that it does not depend on where chunks end.
                mixed = mix(mix(chunk[:, 0]) ^ chunk[:, 1])
                self.checksum = (self.checksum + int(mixed.sum(dtype=np.uint64))) % 2**64

    def chunks(self) -> Chunks:
        """Reads all records in order."""
        return _read(self._path, 2, self._rows)


def components(edges: Chunks, disk: Disk) -> RecordFile:
    """Finds the components of a graph: (node, smallest node of its component), sorted.

    Args:
        edges: (larger node, smaller node), in any order, each any number of times.
    """

    def large_star(edges: Chunks) -> Chunks:
        """Links the larger neighbours of each node to the smallest of node and neighbours."""
        both = (np.concatenate([chunk, chunk[:, ::-1]]) for chunk in edges)
        for group in grouped(disk.sort(both)):
            nodes = group.keys[:, 0]
            larger = group.values > nodes
            smallest = np.minimum(nodes, group.leaders)
            yield np.column_stack([group.values[larger], smallest[larger]])

    stars = RecordFile(disk, "edges-0", unique(disk.sort(edges)))
    for number in itertools.count(1):
        groups = grouped(unique(disk.sort(large_star(stars.chunks()))))
        # The small star links each node and its smaller neighbours to the smallest of these: the
        # node stands in the place of the smallest.
        small = (
            np.column_stack([np.where(values == leaders, keys[:, 0], values), leaders])
            for keys, values, leaders, _ in groups
        )
        # Two files take turns: one is read, the other written.
        linked = RecordFile(disk, f"edges-{number % 2}", unique(disk.sort(small)))
        # Equal counts and checksums: nothing has changed in this round.
        if (linked.num_records, linked.checksum) == (stars.num_records, stars.checksum):
            break
        stars = linked
    return linked
