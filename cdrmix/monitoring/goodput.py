"""Where the wall time of a run goes: steps that count, steps done again, and what is between them.

Kept in wall_time.json of the run directory over all starts of a run. What a start that was killed
had no time to write is found by the next one from the metrics, before it cuts them back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import read_metrics

logger = get_logger(__name__)

WALL_TIME = "wall_time.json"
# productive: steps that the final weights contain; redone: the others, in which a start was lost or
# that were rolled back; down: from the last sign of one start to the command of the next.
PARTS = ("productive", "redone", "checkpoint_stall", "evaluation", "start_up", "down")


class WallTime:
    """Seconds of a run by what they went to, and its steps, over all starts.

    Each rank has one; the one of rank 0 is opened and written.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._starts = 1
        self._step = 0
        self._productive_steps = 0
        self._redone_steps = 0
        self._earlier_seconds, self._since = 0.0, time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether `open` was called: on rank 0 only."""
        return self._path is not None

    def open(
        self,
        run_dir: Path,
        *,
        step: int,
        start_up_seconds: float,
        watched: tuple[int, float] | None = None,
    ) -> None:
        """Go on from what earlier starts of the run have written, and account for their end.

        Args:
            run_dir: with its metrics as the earlier start left them.
            step: that this start goes on from.
            start_up_seconds: from the command to now.
            watched: last step of a start that was watched, and when that ended, by the clock.
        Raises:
            StateError: if the metrics cannot be read.
        """
        self._path = run_dir / WALL_TIME
        earlier = _read(self._path)
        self._step = step
        self._earlier_seconds, self._since = start_up_seconds, time.monotonic()
        if earlier is not None:
            reached, alive = _last_sign(run_dir)
            if watched is not None and watched[1] >= earlier["until"]:
                reached = max(reached, watched[0])
            commanded = time.time() - start_up_seconds
            self._take_over(earlier, step, commanded, reached=reached, alive=alive)
        self._parts["start_up"] += start_up_seconds
        self.save()

    def _take_over(
        self, earlier: dict[str, Any], step: int, commanded: float, *, reached: int, alive: float
    ) -> None:
        """Add an earlier start: what it wrote, and what it did from then on to its last sign."""
        self._parts = dict(earlier["parts"])
        self._starts = earlier["starts"] + 1
        self._productive_steps = earlier["productive_steps"]
        self._redone_steps = earlier["redone_steps"]
        self._step = earlier["step"]
        gap = max(0.0, commanded - earlier["until"])
        lived = min(gap, max(0.0, alive - earlier["until"]))
        self._earlier_seconds += earlier["seconds"] + gap
        self._parts["down"] += gap - lived
        steps = max(0, reached - self._step)
        if steps:
            kept = min(steps, max(0, step - self._step))
            self._productive_steps += kept
            self._redone_steps += steps - kept
            self._parts["productive"] += lived * kept / steps
            self._parts["redone"] += lived * (steps - kept) / steps
        if step < self._step:
            self.go_back(step)
        self._step = step

    def step_done(self, step: int, seconds: float) -> None:
        """Count a step and its wall time."""
        self._step = step
        self._productive_steps += 1
        self._parts["productive"] += seconds

    def go_back(self, step: int) -> None:
        """The steps after `step` do not count: they are lost and will be done again."""
        lost = min(self._step - step, self._productive_steps)
        if lost > 0:
            seconds = self._parts["productive"] * lost / self._productive_steps
            self._parts["productive"] -= seconds
            self._parts["redone"] += seconds
            self._productive_steps -= lost
            self._redone_steps += lost
        self._step = step

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """The time in this context is a part of its own: checkpoint_stall or evaluation."""
        assert part in PARTS, part
        began = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] += time.monotonic() - began

    def save(self) -> None:
        """Write it, on the rank that opened it: after a checkpoint, and where a start ends.

        It is no state: not forced to the disk, and a run does not end because it has no room.
        """
        if self._path is None:
            return
        written = {
            "until": time.time(),
            "step": self._step,
            "starts": self._starts,
            "productive_steps": self._productive_steps,
            "redone_steps": self._redone_steps,
            "seconds": self._seconds,
            "parts": self._parts,
        }
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(written), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("%s: cannot be written: %s", self._path, error.strerror)

    @property
    def _seconds(self) -> float:
        """From the first command to now."""
        return self._earlier_seconds + time.monotonic() - self._since

    def to_json(self) -> dict[str, float]:
        """Goodput of the run so far.

        Returns:
            share: productive seconds over all; share_of_steps: productive steps over these and
            the redone ones; productive_steps, redone_steps, starts: counts; seconds from the first
            command to now, and of each of PARTS and of other, which sum to them.
        """
        total = self._seconds
        steps = self._productive_steps + self._redone_steps
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


def _read(path: Path) -> dict[str, Any] | None:
    """What an earlier start wrote, or None where there was none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be read (%s): goodput counts from this start on", path, error)
        return None


def _last_sign(run_dir: Path) -> tuple[int, float]:
    """Last logged step of the earlier start, and when that was, by the clock."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        return 0, 0.0
    lines = read_metrics(metrics)
    return int(lines[-1]["step"]) if lines else 0, metrics.stat().st_mtime
