"""Where rank 0 shows what a run measures: the metrics file and the progress."""

from __future__ import annotations

import sys
from pathlib import Path

from cdrmix import runtime
from cdrmix.monitoring.metrics import SHOWN_ONLY
from cdrmix.monitoring.sinks import MetricsFile, Progress


class Observer:
    """Metrics file and progress of rank 0, and the time window between two logged lines.

    The other ranks keep the window and write nothing.
    """

    def __init__(self) -> None:
        self._metrics: MetricsFile | None = None
        self._progress: Progress | None = None
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def open(self, folder: Path, *, step: int, num_steps: int) -> None:
        """Start at `step` of `num_steps`; metrics beyond it are cut off.

        Raises:
            StateError: if the metrics file in `folder` cannot be written.
        """
        if runtime.rank() != 0:
            return
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._metrics.truncate_after(step)
        self._progress = Progress(num_steps, initial=step, stream=sys.stderr)

    def step_done(self, step: int, seconds: float, *, waited: float) -> None:
        """Count a step, its wall time, and what of it this rank waited for data, logged or not."""
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        if self._progress is not None:
            self._progress.update(step)

    def take_window(self) -> tuple[int, float, float]:
        """Steps, their seconds, and those waited for data, since this was last asked; at least one
        step is done."""
        window = self._steps, self._seconds, self._waited
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        return window

    def go_back(self, step: int) -> None:
        """Cut the metrics off behind `step`, from which the run goes on.

        Raises:
            StateError: if the metrics file cannot be written.
        """
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        if self._metrics is not None and self._progress is not None:
            self._metrics.truncate_after(step)
            self._progress.update(step)

    def write(self, step: int, line: dict[str, float]) -> None:
        """Write and show one record.

        Raises:
            StateError: if the metrics file cannot be written.
        """
        if self._metrics is not None and self._progress is not None:
            kept = {name: value for name, value in line.items() if name not in SHOWN_ONLY}
            self._metrics.write(kept)
            self._progress.update(step, line)

    def sync(self) -> None:
        """Make the written metrics durable, before a checkpoint of their step is named."""
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        """End the progress and close the metrics file."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()
