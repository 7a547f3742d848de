"""Interface of a tracker: what it gets of a run, and when.

A tracker lives in a process of its own (`writer.py`), which nothing of a run waits for. It gets the
lines of metrics.jsonl, which is the truth: a tracker's copy can be made anew from it at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel

from cdrmix.monitoring.sinks import read_metrics

METRICS = "metrics.jsonl"


class Line(NamedTuple):
    """A line of metrics.jsonl."""

    time: float  # at which it was logged (Unix seconds)
    values: Mapping[str, float]  # numbers by key, `step` among them; some may not be finite

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return int(self.values["step"])


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    name: str  # of its directory
    directory: Path
    folder: Path  # of this tracker alone; exists
    place: Path  # where that folder is in the end: another one while a copy is made anew
    step: int  # points of later steps, left by an earlier start, do not count any more
    config: Mapping[str, Any]  # without secrets
    is_copy: bool  # made by `cdrmix track`, of all lines at once

    def lines(self, *, up_to: int, after: int = -1) -> list[Line]:
        """Reads the lines of metrics.jsonl behind step `after` and up to step `up_to`."""
        path = self.directory / METRICS
        lines = timed_lines(path) if path.exists() else []
        return [line for line in lines if after < line.step <= up_to]


class Tracker:
    """Base class of trackers: one defines those of these methods that it needs.

    With a class attribute `Options`, a pydantic model, its instance is made of the configured
    options, `Name(options)`; without, options are refused, and it is made as `Name()`. What a
    method raises costs the lines that it was given, and never the run.
    """

    Options: ClassVar[type[BaseModel] | None] = None

    def open(self, run: TrackedRun) -> None:
        """Begins the copy of a run, or goes on with it. Imports of seconds belong in here."""

    def write(self, lines: Sequence[Line]) -> None:
        """Writes up to a thousand lines, whose steps grow."""

    def rewind(self, step: int) -> None:
        """Hides the points after `step`, to which the run has gone back."""

    def close(self) -> None:
        """Writes what is left, and closes the copy."""


def timed_lines(path: Path) -> list[Line]:
    """Reads metrics.jsonl. Raises StateError if it cannot be read.

    The file has no times. They are counted back from its last change by `step_seconds`, so that
    pauses between starts do not show.
    """
    lines: list[Line] = []
    records = read_metrics(path)
    time = path.stat().st_mtime
    for at, values in reversed(list(enumerate(records))):
        lines.append(Line(time, values))
        if at:
            num_steps = max(values["step"] - records[at - 1]["step"], 0)
            time -= num_steps * values.get("step_seconds", 0.0)
    return lines[::-1]
