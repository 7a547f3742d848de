"""Sorting more fixed-width records than fit into memory: sorted runs on disk, merged in blocks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

# A sort holds the records, an index and two copies on the way.
_COPIES = 4
_SMALLEST_BLOCK = 256  # records read at a time from each of the runs that are merged


class ExternalSort:
    """Records of uint64 columns, sorted by the first columns.

    Memory is bounded by `memory_bytes` whatever the number of records and however many are equal.

    Args:
        num_columns: columns of a record.
        num_keys: columns to sort by, from the first; the order of records that are equal in them
            is not defined. None: all.
        folder: where temporary files go; none is left after `chunks`.
        memory_bytes: most memory used for records.
    """

    def __init__(
        self, num_columns: int, *, folder: Path, memory_bytes: int, num_keys: int | None = None
    ) -> None:
        self._num_columns, self._num_keys = num_columns, num_keys or num_columns
        self._capacity = max(4 * _SMALLEST_BLOCK, memory_bytes // (8 * num_columns * _COPIES))
        self._temporary = tempfile.TemporaryDirectory(prefix="sort-", dir=folder)
        self._runs: list[Path] = []
        self._num_files = 0
        self._pending: list[NDArray[np.uint64]] = []
        self._num_pending = 0

    def add(self, records: NDArray[np.uint64]) -> None:
        """Take records [n, columns]."""
        for start in range(0, len(records), self._capacity):
            piece = records[start : start + self._capacity]
            if self._num_pending + len(piece) > self._capacity:
                self._runs.append(self._write(iter([self._take()])))
            self._pending.append(piece)
            self._num_pending += len(piece)

    def chunks(self) -> Iterator[NDArray[np.uint64]]:
        """All records in order, in chunks [n, columns] of bounded size; once."""
        with self._temporary:
            if not self._runs:
                if self._num_pending:
                    yield self._take()
                return
            if self._num_pending:
                self._runs.append(self._write(iter([self._take()])))
            fan_in = self._capacity // _SMALLEST_BLOCK
            while len(self._runs) > fan_in:
                merged, self._runs = self._runs[:fan_in], self._runs[fan_in:]
                self._runs.append(self._write(self._merge(merged)))
                for path in merged:
                    path.unlink()
            yield from self._merge(self._runs)

    def _take(self) -> NDArray[np.uint64]:
        """What is pending, sorted; nothing is pending after it."""
        records = np.concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        return self._sorted(records)

    def _sorted(self, records: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return records[np.lexsort(records.T[self._num_keys - 1 :: -1])]

    def _write(self, chunks: Iterator[NDArray[np.uint64]]) -> Path:
        path = Path(self._temporary.name, f"run-{self._num_files:06d}")
        self._num_files += 1
        with path.open("wb") as file:
            for chunk in chunks:
                chunk.tofile(file)
        return path

    def _merge(self, runs: list[Path]) -> Iterator[NDArray[np.uint64]]:
        """Sorted chunks of several sorted runs: what is not beyond the end of any run's block."""
        block = max(_SMALLEST_BLOCK, self._capacity // len(runs))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in runs]
            heads = [np.empty((0, self._num_columns), np.uint64) for _ in runs]
            while True:
                # All blocks are filled up each time: the runs share one range of keys, and so
                # nearly all that is read is given at once.
                heads = [self._fill(*pair, block) for pair in zip(heads, files, strict=True)]
                going_on = [head for head in heads if len(head) == block]
                if not going_on:
                    break
                cut = min(tuple(head[-1, : self._num_keys].tolist()) for head in going_on)
                counts = [_count_up_to(head, cut) for head in heads]
                parts = [head[:count] for head, count in zip(heads, counts, strict=True)]
                yield self._sorted(np.concatenate(parts))
                heads = [head[count:] for head, count in zip(heads, counts, strict=True)]
        if any(map(len, heads)):
            yield self._sorted(np.concatenate(heads))

    def _fill(self, head: NDArray[np.uint64], file: IO[bytes], block: int) -> NDArray[np.uint64]:
        """`head` and what follows it in the file, `block` records or all that are left."""
        missing = block - len(head)
        more = np.fromfile(file, np.uint64, missing * self._num_columns)
        return np.concatenate([head, more.reshape(-1, self._num_columns)])


def _count_up_to(records: NDArray[np.uint64], last: tuple[int, ...]) -> int:
    """How many of the sorted records are not greater than `last`."""
    low, high = 0, len(records)
    for column, value in enumerate(last):
        values, wanted = records[low:high, column], np.uint64(value)
        low, high = (
            low + int(np.searchsorted(values, wanted, side="left")),
            low + int(np.searchsorted(values, wanted, side="right")),
        )
    return high
