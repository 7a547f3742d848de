"""Goodput: the wall time of a run by its parts, over all its starts.

wall_time.json of the run directory holds it. A start that is killed has no time to write its end;
the next one estimates that from the metrics, before it cuts them back.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.runtime.phases import phase

logger = get_logger(__name__)

WALL_TIME = "wall_time.json"
# productive: steps that the final weights contain; redone: steps that were lost with a start or
# rolled back; down: from the last sign of one start to the command of the next.
PARTS = ("productive", "redone", "checkpoint_stall", "evaluation", "start_up", "down")


class WallTime:
    """Seconds of a run by part, and its steps, over all starts.

    Each rank has one; only that of rank 0 is opened and written.
    """

    def __init__(self) -> None:
        self.path: Path | None = None  # of wall_time.json, from `open` on: on rank 0 only
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._starts = 1
        self._step = 0
        self._productive_steps = 0
        self._redone_steps = 0
        self._earlier_seconds = 0.0
        self._since = time.monotonic()
        # Whole checkpoints of the run directory, their seconds from begin to name, and bytes.
        self._saves: dict[str, float] = {"count": 0, "seconds": 0.0, "bytes": 0}

    def open(
        self,
        run_dir: Path,
        *,
        step: int,
        start_up_seconds: float,
        watched: tuple[int, float] | None = None,
    ) -> None:
        """Continues the account of earlier starts, and adds the time after their last entry.

        Args:
            run_dir: with the metrics as the earlier start left them.
            step: that this start continues from.
            start_up_seconds: from the command to now.
            watched: last step of a start under a watchdog, and its end, in seconds since 1970.
        Raises:
            StateError: if the metrics cannot be read.
        """
        self.path = run_dir / WALL_TIME
        self._step = step
        self._earlier_seconds = start_up_seconds
        self._since = time.monotonic()
        earlier = None
        try:
            if self.path.exists():
                earlier = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning(
                "%s: cannot be read (%s): goodput counts from this start on", self.path, error
            )
        if earlier is not None:
            reached = 0
            alive = 0.0
            metrics = run_dir / "metrics.jsonl"
            if metrics.is_file():
                # The last line and its time: the last sign of a start that was killed.
                lines = read_metrics(metrics)
                reached = int(lines[-1]["step"]) if lines else 0
                alive = metrics.stat().st_mtime
            if watched is not None and watched[1] >= earlier["until"]:
                reached = max(reached, watched[0])
            # The clock of the host, since monotonic time does not outlive a process.
            commanded = time.time() - start_up_seconds
            self._take_over(earlier, step, commanded, reached=reached, alive=alive)
        # At once: a start that is killed before its first save counts too.
        self._parts["start_up"] += start_up_seconds
        self.save()

    def _take_over(
        self, earlier: dict[str, Any], step: int, commanded: float, *, reached: int, alive: float
    ) -> None:
        """Adds an earlier start: its file, and its steps from then on to its last sign of life."""
        self._parts = dict(earlier["parts"])
        self._starts = earlier["starts"] + 1
        self._productive_steps = earlier["productive_steps"]
        self._redone_steps = earlier["redone_steps"]
        self._step = earlier["step"]
        # Saves of this start before the account was opened count too.
        for name, amount in earlier.get("saves", {}).items():  # none in earlier versions
            self._saves[name] += amount
        gap = max(0.0, commanded - earlier["until"])
        # Clocks of two hosts may differ: no part is negative or longer than the gap.
        alive_seconds = min(gap, max(0.0, alive - earlier["until"]))
        self._earlier_seconds += earlier["seconds"] + gap
        self._parts["down"] += gap - alive_seconds
        steps = reached - self._step
        if steps > 0:
            # Steps beyond the checkpoint that this start continues from are done again.
            productive_steps = min(steps, max(0, step - self._step))
            self._productive_steps += productive_steps
            self._redone_steps += steps - productive_steps
            self._parts["productive"] += alive_seconds * productive_steps / steps
            self._parts["redone"] += alive_seconds * (steps - productive_steps) / steps
        if step < self._step:
            self.go_back(step)
        self._step = step

    def step_done(self, step: int, seconds: float) -> None:
        """Counts a step and its wall time."""
        self._step = step
        self._productive_steps += 1
        self._parts["productive"] += seconds

    def go_back(self, step: int) -> None:
        """Counts the steps after `step` as lost: they will be done again."""
        # Steps before this account began, such as those of an earlier version, are not in it.
        lost_steps = min(self._step - step, self._productive_steps)
        if lost_steps > 0:
            # The mean over all steps: seconds of single ones are not stored.
            seconds = self._parts["productive"] * lost_steps / self._productive_steps
            self._parts["productive"] -= seconds
            self._parts["redone"] += seconds
            self._productive_steps -= lost_steps
            self._redone_steps += lost_steps
        self._step = step

    @contextmanager
    def spent(self, part: Literal["checkpoint_stall", "evaluation"]) -> Iterator[None]:
        """Counts the time in this context as a part, which is a phase of the step as well."""
        began = time.monotonic()
        try:
            with phase("evaluation" if part == "evaluation" else "checkpoint"):
                yield
        finally:
            self._parts[part] += time.monotonic() - began

    def saved(self, *, num_bytes: int, seconds: float) -> None:
        """Counts a checkpoint of the run directory that is whole, `seconds` after it was begun."""
        for name, amount in (("count", 1), ("seconds", seconds), ("bytes", num_bytes)):
            self._saves[name] += amount

    def save(self) -> None:
        """Writes wall_time.json, on the rank that opened it: after a checkpoint and at the end."""
        if self.path is None:
            return
        account = {
            "until": time.time(),
            "step": self._step,
            "starts": self._starts,
            "productive_steps": self._productive_steps,
            "redone_steps": self._redone_steps,
            "seconds": self._seconds,
            "parts": self._parts,
            "saves": self._saves,
        }
        # Renamed when whole: a start may be killed at any moment, also while it writes. The file is
        # no state: it is not forced to the disk, and a full disk does not end the run.
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(account), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("%s: cannot be written: %s", self.path, error.strerror)

    @property
    def _seconds(self) -> float:
        """Seconds from the first command to now."""
        return self._earlier_seconds + time.monotonic() - self._since

    def to_json(self) -> dict[str, float]:
        """Returns the goodput of the run so far.

        `share` and `share_of_steps` are productive seconds and steps over all; `seconds` go from
        the first command to now, and are the sum of those of PARTS and of "other".
        """
        total = self._seconds
        steps = self._productive_steps + self._redone_steps
        # Imports, reports, waits at the end: whatever no part counts, so that the parts sum to all.
        parts = self._parts | {"other": total - sum(self._parts.values())}
        return {
            "share": self._parts["productive"] / total if total else 0.0,
            "share_of_steps": self._productive_steps / steps if steps else 1.0,
            "productive_steps": self._productive_steps,
            "redone_steps": self._redone_steps,
            "starts": self._starts,
            "seconds": total,
            **{f"{part}_seconds": seconds for part, seconds in parts.items()},
        }
