"""Times of a run's saves: as given, or chosen in the user's range by what saves and steps take.

Nothing but the steps at which a run saves depends on it. What is chosen is alike on all ranks: it
follows from times of which the slowest rank's are taken in the collective of a logged step, so no
rank's own clock decides. Minutes are counted by rank 0's clock, whose wish for a save all ranks
learn of in the collective before the step, as that for one of fixed minutes.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

from cdrmix.checkpoint.saver import Saver
from cdrmix.config.schema import Config
from cdrmix.planning.cost import time_text
from cdrmix.planning.goodput import Times, best_interval

# Largest share of the time that saves take where no rate of failures is given.
_LARGEST_SHARE = 0.01
# Saves whose times count: the first one in the background also allocates the memory for its copy.
_SAVES = 4
# A chosen interval that differs less from the present one stays: times of saves vary.
_LEAST_CHANGE = 0.1


class SaveTimes(NamedTuple):
    """Times of a rank's saves since they were last asked for; 0 of what there was none."""

    stall_seconds: float  # for which training waited, at a save
    write_seconds: float  # from the begin of the newest save until it was whole; rank 0's


class Cadence:
    """Decides when a run saves to its run directory. Each rank has one."""

    def __init__(self, config: Config, *, world_size: int, step: int = 0) -> None:
        """`step` is the one that the stage begins behind."""
        checkpoint = config.checkpoint
        self._steps, self._minutes = checkpoint.every_steps, checkpoint.every_minutes
        self._range = checkpoint.auto_range
        # Until the first save is timed, as often as allowed.
        self._interval = self._range[0] if self._range is not None else 0.0
        rate = config.failures.per_device_hour
        self._failures_per_second = None if rate is None else rate * world_size / 3_600
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._write_seconds = 0.0
        self._saved_step = step
        self._stalled = 0.0  # `stall_seconds` of the saver when it was last read
        self._num_saves = 0  # since then, to any tier

    def is_due(self, step: int) -> bool:
        """True if a step is one to save behind, by its number; alike on all ranks."""
        if self._steps == "auto":
            return step - self._saved_step >= self._interval
        return self._steps is not None and step % self._steps == 0

    @property
    def minutes(self) -> float | None:
        """Minutes between saves; None where they are counted in steps."""
        return self._interval if self._minutes == "auto" else self._minutes

    @property
    def setting(self) -> dict[str, float]:
        """Interval that was chosen, by its key."""
        key = "every_steps" if self._steps == "auto" else "every_minutes"
        return {f"checkpoint.{key}": self._interval}

    def saved(self, step: int) -> None:
        """Counts a save to the run directory; on all ranks."""
        self._saved_step = step
        self._num_saves += 1

    def saved_on_hosts(self) -> None:
        """Counts a save to tiers of hosts alone, whose stall is as long."""
        self._num_saves += 1

    def take(self, saver: Saver) -> SaveTimes:
        """Times of this rank's saves since the last call."""
        stalled, count = saver.stall_seconds - self._stalled, self._num_saves
        self._stalled, self._num_saves = saver.stall_seconds, 0
        written = 0.0 if saver.last is None else saver.last.seconds
        return SaveTimes(stalled / count if count else 0.0, written)

    def adapt(self, longest: SaveTimes, *, step_seconds: float) -> str | None:
        """Chooses the interval anew; the times are those of the slowest rank, alike on all.

        Returns what was changed and why, in words; None if nothing was.
        """
        if self._range is None:
            return None
        if longest.stall_seconds > 0:
            self._stalls.append(longest.stall_seconds)
        self._write_seconds = max(longest.write_seconds, longest.stall_seconds)
        if not self._stalls:
            return None
        stall = sum(self._stalls) / len(self._stalls)
        unit = step_seconds if self._steps == "auto" else 60.0
        seconds, why = self._wanted(stall, least=self._range[0] * unit, most=self._range[1] * unit)
        wanted = seconds / unit
        if self._steps == "auto":
            wanted = math.ceil(wanted)
        chosen = min(max(wanted, self._range[0]), self._range[1])
        if chosen == self._interval or (
            abs(chosen / self._interval - 1) < _LEAST_CHANGE and chosen not in self._range
        ):
            return None
        before, self._interval = self._interval, chosen
        bound = "" if chosen == wanted else ", as far as checkpoint.auto_range allows"
        return f"a save every {self._words(chosen)} instead of {self._words(before)}: {why}{bound}"

    def _wanted(self, stall: float, *, least: float, most: float) -> tuple[float, str]:
        """Seconds between saves that the times ask for, with the reason; not yet within bounds."""
        one = f"training waits {time_text(stall)} at one"
        if self._failures_per_second is None:
            # A save that is due while the one before is written waits for it.
            seconds = max(stall / _LARGEST_SHARE, self._write_seconds)
            return seconds, f"{one}, and is to wait for {_LARGEST_SHARE:.0%} of the time at most"
        times = Times(
            failures_per_second=self._failures_per_second,
            stall_seconds=stall,
            write_seconds=max(stall, self._write_seconds),
            restart_seconds=0.0,  # no interval changes what restarts cost
        )
        # Wider than the bounds, so that it is known which of them was met.
        seconds = best_interval(times, least=least / 10, most=10 * most)
        mean = time_text(1 / self._failures_per_second)
        return seconds, f"{one}, and with a failure every {mean} this costs least"

    def _words(self, interval: float) -> str:
        if self._steps == "auto":
            return f"{interval:,.0f} step{'s' * (interval != 1)}"
        return f"{interval:.2g} minutes"

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint; none where nothing is chosen."""
        if self._range is None:
            return {}
        times = {"stall_seconds": [*self._stalls], "write_seconds": self._write_seconds}
        return {"cadence": {**times, **self.setting}}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Goes on from a checkpoint of `step`, within the range of today."""
        self._saved_step = step
        entries = state.get("cadence")
        if entries is None or self._range is None:
            return
        self._stalls.clear()
        self._stalls.extend(entries["stall_seconds"])
        self._write_seconds = entries["write_seconds"]
        (key,) = self.setting
        if key in entries:  # else of the other key
            self._interval = min(max(entries[key], self._range[0]), self._range[1])
