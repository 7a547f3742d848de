"""All runs below a folder: found anew as they come and go, and their newest figures."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cdrmix.live.run_folder import METRICS, RunFolder, runs_below
from cdrmix.live.status import EVALUATED, Status, status_of
from cdrmix.monitoring.metric_columns import GrowingMetrics, MetricColumns, newest_with

_SECONDS_BETWEEN_SEARCHES = 5.0
_NEWEST_BYTES = 2**18  # of a metrics.jsonl, for the table of all runs
_MOST_OPEN = 2  # runs whose metrics are kept whole
_MOST_COMPARED = 16  # runs of which the compared metrics are kept
COMPARED = ("loss", "eval/loss", "tokens_per_second", "grad_norm")
# What files of another version, or changed by hand, raise where they are read.
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ServedRun:
    """A run of the table, by its newest lines."""

    def __init__(self, key: str, path: Path) -> None:
        """Reads nothing yet; `key` is its path from the folder of all runs."""
        self.key = key
        self.path = path
        self.folder = RunFolder(path)
        self._metrics = GrowingMetrics(path / METRICS, newest_bytes=_NEWEST_BYTES)
        # bytes that were skipped when an evaluation was sought in them, and its values
        self._sought: tuple[int | None, dict[str, float]] = (None, {})

    def status(self) -> Status:
        """Status now. Raises one of DAMAGE where a file is not as a run writes it."""
        self._metrics.update()
        status = status_of(self.folder, self._metrics.columns, name=self.path.name)
        if "eval/loss" not in status.values and self._metrics.skipped_bytes:
            # An evaluation is rare, and may be before the newest lines.
            if self._sought[0] != self._metrics.skipped_bytes:
                line = newest_with(self._metrics.path, "eval/loss") or {}
                found = {
                    name: value
                    for name, value in line.items()
                    if name.startswith(EVALUATED) and isinstance(value, int | float)
                }
                self._sought = (self._metrics.skipped_bytes, found)
            return replace(status, values={**status.values, **self._sought[1]})
        return status


@dataclass(frozen=True)
class Listed:
    """A run of the table; without a status where its files cannot be read, for the reason."""

    run: ServedRun
    status: Status | None
    damage: str = ""


class Runs:
    """The runs below a folder, by their keys."""

    def __init__(self, root: Path) -> None:
        """Searches at the first call."""
        self.root = root
        self._found: dict[str, ServedRun] = {}
        self._searched: float | None = None
        self._open: OrderedDict[tuple[str, bool], GrowingMetrics] = OrderedDict()

    def listed(self) -> Iterator[Listed]:
        """Yields all runs with their status, by key."""
        self._search()
        for run in self._found.values():
            try:
                yield Listed(run, run.status())
            except DAMAGE as error:
                yield Listed(run, None, f"{type(error).__name__}: {error}")

    def get(self, key: str) -> ServedRun | None:
        """Run of a key; None where there is none. Nothing but a found run is ever opened."""
        if key not in self._found:
            self._search()
        return self._found.get(key)

    def metrics(self, run: ServedRun, *, compared: bool = False) -> MetricColumns:
        """Metrics of a run, read on to the newest: all, or those to compare.

        Those of few runs are kept, so that memory does not grow with the runs that are looked at.
        """
        place = (run.key, compared)
        growing = self._open.pop(place, None)
        if growing is None:
            growing = GrowingMetrics(run.path / METRICS, COMPARED if compared else None)
        self._open[place] = growing
        most = _MOST_COMPARED if compared else _MOST_OPEN
        alike = [each for each in self._open if each[1] == compared]
        for oldest in alike[:-most]:
            del self._open[oldest]
        growing.update()
        return growing.columns

    def _search(self) -> None:
        now = time.monotonic()
        if self._searched is not None and now - self._searched < _SECONDS_BETWEEN_SEARCHES:
            return
        found = {}
        for path in runs_below(self.root):
            key = key_of(path, self.root)
            found[key] = self._found.get(key) or ServedRun(key, path)
        self._found = found
        self._searched = time.monotonic()


def key_of(path: Path, root: Path) -> str:
    """Path of a run from the folder of all runs, as text that fits into an address; bytes of its
    name that are no UTF-8 are written as escapes."""
    relative = path.name if path == root else str(path.relative_to(root))
    return relative.encode(errors="surrogateescape").decode(errors="backslashreplace")
