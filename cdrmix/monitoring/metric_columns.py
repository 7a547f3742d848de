"""Metrics as columns, and a reader of a metrics.jsonl that grows, of bounded memory.

A column is what was logged of one metric: steps and values. 100,000 records as dicts take hundreds
of megabytes, as columns 16 bytes a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cdrmix.errors import StateError
from cdrmix.monitoring.sinks import parse_record

# Of one column. Longer ones are reduced to half, the lowest and highest of each stretch kept.
_MOST_VALUES = 2**18
# A file that is none of ours may name a metric of its own in each line.
_MOST_NAMES = 4_096
_BLOCK_BYTES = 2**20  # read at once; a longer line is none of ours, and skipped
_LINE_BYTES = 2**16  # of the longest that is sought from the end
_SOUGHT_BYTES = 2**25
_LINES_AT_ONCE = 1_000  # parsed in one call, which takes half the time of one call each
_FINGERPRINT_BYTES = 256


class Column:
    """Steps and values of one metric, in order of the steps."""

    def __init__(self) -> None:
        """Makes an empty one."""
        self._both = np.empty((2, 64))
        self._length = 0

    @property
    def steps(self) -> np.ndarray:
        """Steps, ascending; a view, until the next values are added."""
        return self._both[0, : self._length]

    @property
    def values(self) -> np.ndarray:
        """Values by step; a view, until the next ones are added."""
        return self._both[1, : self._length]

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds values at the end, of steps that are not before the last one."""
        needed = self._length + len(steps)
        if needed > self._both.shape[1]:
            grown = np.empty((2, max(2 * self._both.shape[1], needed)))
            grown[:, : self._length] = self._both[:, : self._length]
            self._both = grown
        self._both[0, self._length : needed] = steps
        self._both[1, self._length : needed] = values
        self._length = needed
        if needed > _MOST_VALUES:
            self._reduce()

    def cut_from(self, step: float) -> None:
        """Drops the values of this step and of later ones."""
        self._length = int(np.searchsorted(self.steps, step))

    def _reduce(self) -> None:
        """Keeps the lowest and the highest of each four values, in their order."""
        stretches = self.values[: self._length // 4 * 4].reshape(-1, 4)
        first = 4 * np.arange(len(stretches))
        ends = [first + stretches.argmin(axis=1), first + stretches.argmax(axis=1)]
        rest = np.arange(4 * len(stretches), self._length)
        places = np.unique(np.concatenate([*ends, rest]))
        self._both = self._both[:, places]
        self._length = len(places)


class MetricColumns:
    """Records of a run by metric."""

    def __init__(self, series_of: Collection[str] | None = None) -> None:
        """Keeps the series of all metrics, or of some, and the newest value of the others."""
        self._series_of = None if series_of is None else frozenset(series_of)
        self._columns: dict[str, Column] = {}
        self.last_step = 0  # completed steps, as far as they are logged
        self.num_records = 0  # since the last `clear`, cut ones included

    @property
    def names(self) -> list[str]:
        """Metrics that were logged, in the order of their first records."""
        return [name for name, column in self._columns.items() if len(column.steps)]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a metric, where it was logged."""
        column = self._columns.get(name)
        return (column.steps, column.values) if column else (np.empty(0), np.empty(0))

    def latest(self, name: str) -> float | None:
        """Returns the last logged value of a metric; a whole one as an int."""
        values = self.series(name)[1]
        if not len(values):
            return None
        value = float(values[-1])
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    def clear(self) -> None:
        """Drops all records."""
        self._columns.clear()
        self.last_step = 0
        self.num_records = 0

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Adds records; one of an earlier step than the last voids those from that step on."""
        falls = [n for n, (a, b) in enumerate(pairwise(records), 1) if b["step"] < a["step"]]
        for begin, end in pairwise([0, *falls, len(records)]):
            if begin == end:
                continue
            stretch = records[begin:end]
            if stretch[0]["step"] < self.last_step:  # the run went back, and does them again
                for column in self._columns.values():
                    column.cut_from(stretch[0]["step"])
            self._add_ascending(stretch)
            self.last_step = int(stretch[-1]["step"])
        self.num_records += len(records)

    def _add_ascending(self, records: Sequence[dict[str, Any]]) -> None:
        """Adds records of ascending steps, metric by metric."""
        all_steps = np.array([line["step"] for line in records], dtype=np.float64)
        for name in dict.fromkeys(name for line in records for name in line):
            if name == "step" or (name not in self._columns and len(self._columns) >= _MOST_NAMES):
                continue
            held = [line[name] for line in records if name in line]
            steps = all_steps
            if len(held) < len(records):
                steps = all_steps[[name in line for line in records]]
            if self._series_of is not None and name not in self._series_of:
                held, steps = held[-1:], steps[-1:]
                self._columns.pop(name, None)
            steps, values = _numbers(steps, held)
            if len(steps):
                self._columns.setdefault(name, Column()).add(steps, values)


def _numbers(steps: np.ndarray, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values as floats with their steps; leaves out what is no number."""
    try:
        # reads the names of non-finite numbers too
        floats = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = [_number(value) for value in values]
        is_number = [value is not None for value in found]
        return steps[is_number], np.array([value for value in found if value is not None])
    # lists of one length, which are no numbers
    return (steps, floats) if floats.ndim == 1 else (steps[:0], floats[:0, 0])


class GrowingMetrics:
    """A metrics.jsonl as columns, read on from where the last call stopped.

    A resume or a rollback replaces the file by a shorter one: it is then read from its beginning.
    """

    def __init__(
        self,
        path: Path,
        series_of: Collection[str] | None = None,
        *,
        newest_bytes: int | None = None,
    ) -> None:
        """Reads nothing yet; `series_of` is that of `MetricColumns`, and `newest_bytes` the part at
        the end of the file that is read at first, in place of all of it."""
        self.path = path
        self._newest_bytes = newest_bytes
        self.skipped_bytes = 0  # before the part that was read
        self.columns = MetricColumns(series_of)
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._fingerprint = b""  # what stood before the offset
        self._skips_line = False  # within a line that is too long

    def update(self, *, is_last: bool = False) -> bool:
        """Reads what was added; True if there was anything, or the file has changed or gone.

        The `is_last` call takes a last line without its end too, if it is a record. Raises
        StateError if it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                return self._read_on(file, is_last)
        except FileNotFoundError:
            had_records = self._offset > 0
            self._start_over()
            return had_records
        except OSError as error:
            raise StateError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _start_over(self) -> None:
        self.columns.clear()
        self._file_id = None
        self._offset = 0
        self._fingerprint = b""
        self._skips_line = False

    def _read_on(self, file: BinaryIO, is_last: bool) -> bool:
        found = _stat_id(file)
        file.seek(max(0, self._offset - len(self._fingerprint)))
        # Of the same number may be another file, and a file may be cut and grow past the offset.
        is_same = found == self._file_id and file.read(len(self._fingerprint)) == self._fingerprint
        if not is_same:
            self._start_over()
            self._file_id = found
            if self._newest_bytes is not None:
                self._offset = max(0, file.seek(0, os.SEEK_END) - self._newest_bytes)
                self.skipped_bytes = self._offset
                self._skips_line = self._offset > 0  # a part of one, most likely
            file.seek(self._offset)
        has_changed = not is_same
        while block := file.read(_BLOCK_BYTES):
            taken = self._take(block)
            has_changed = has_changed or taken > 0
            if not taken:  # a half-written last line: read again when it is whole
                self.columns.add(_parsed([block]) if is_last else [])
                break
            self._offset += taken
            file.seek(self._offset)
        file.seek(max(0, self._offset - _FINGERPRINT_BYTES))
        self._fingerprint = file.read(self._offset - file.tell())
        return has_changed

    def _take(self, block: bytes) -> int:
        """Adds the whole lines of a block; returns their bytes."""
        end = block.rfind(b"\n") + 1
        if not end:
            self._skips_line = self._skips_line or len(block) >= _BLOCK_BYTES
            return len(block) if self._skips_line else 0
        lines = block[: end - 1].split(b"\n")
        if self._skips_line:
            del lines[0]
            self._skips_line = False
        for begin in range(0, len(lines), _LINES_AT_ONCE):
            self.columns.add(_parsed(lines[begin : begin + _LINES_AT_ONCE]))
        return end


def newest_with(path: Path, name: str) -> dict[str, Any] | None:
    """Newest record with a metric that may be logged rarely; None where the last lines have none.

    It is sought backwards from the end of the file, without parsing the lines between.
    """
    mark = f'"{name}":'.encode()
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            for begin in range(end - _BLOCK_BYTES, end - _SOUGHT_BYTES, -_BLOCK_BYTES):
                file.seek(max(0, begin))
                # a line may reach into the next block
                block = file.read(min(_BLOCK_BYTES + _LINE_BYTES, end - max(0, begin)))
                place = block.rfind(mark)
                if place >= 0:
                    first = block.rfind(b"\n", 0, place) + 1
                    return next(iter(_parsed([block[first:].split(b"\n", 1)[0]])), None)
                if begin <= 0:
                    return None
    except OSError:
        return None
    return None


def read_columns(path: Path) -> MetricColumns:
    """Reads a whole metrics.jsonl; skips what is no record, such as a half-written last line.

    Raises StateError if it cannot be read.
    """
    growing = GrowingMetrics(path)
    growing.update(is_last=True)
    return growing.columns


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _stat_id(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Records of lines; those that are none are left out."""
    text = b",".join(lines).decode(errors="replace")
    try:
        # As one list: half the time of a call for each line.
        records = json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        records = []
    if len(records) != len(lines):
        records = [parse_record(line.decode(errors="replace")) for line in lines]
    return [record for record in records if _is_record(record)]


def _is_record(record: Any) -> bool:
    step = record.get("step") if isinstance(record, dict) else None
    # a float holds no larger one exactly
    return isinstance(step, int) and abs(step) < 2**53
