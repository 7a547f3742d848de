"""Rules by which a rank reads further ahead while its steps wait, and gives memory back.

What is adapted changes no number of a run: how many batches are read ahead, by how many threads,
and whether into pinned memory. A rank decides by its own waits. Reading further ahead evens out
single slow reads; more threads are what helps where each read is slow, since a wait for disk or
network takes no core.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cdrmix.config.resources import ResourcesConfig
from cdrmix.data.read_ahead import ReadFigures, ReadLimits

_GIB = 2**30
_FIRST_BATCHES = 2
# Waits take no core, so that threads may be many; of what the batches hold, the memory decides.
_MOST_THREADS = 16
_MOST_BATCHES = 64
# Share of the time that steps wait for data from which on reading is worth more.
_WAITED_SHARE = 0.02
# Part of the memory that is left which the batches may take: others begin to need it, too.
_MEMORY_PART = 0.25
# Readers have as much to do as the steps take at this rate; more evens out their reads.
_SPARE_RATE = 1.25
# Less than this makes the steps no faster.
_FASTER = 1.05
# A link that is filled that far gives more readers nothing more.
_FULL_NETWORK = 0.9
# Windows without a decision: behind a change, until its effect shows; where a change did not help;
# and after memory was short.
_SETTLING, _HOLDING, _CALMING = 1, 64, 16


class Window(NamedTuple):
    """Some steps in a row as one rank saw them."""

    steps: int
    seconds: float  # wall time
    waited_seconds: float  # of it, for data
    reading: ReadFigures
    memory_bytes: float  # that this rank may still take; below 0 too much is taken
    idle_cores: float  # of the host
    network_share: float = 0.0  # of the fullest link's speed, where the data comes over a network


class Change(NamedTuple):
    """Decision to read in another way."""

    limits: ReadLimits
    why: str


def first_limits(resources: ResourcesConfig) -> ReadLimits:
    """Bounds that reading ahead begins with."""
    threads = 1 if resources.reader_threads == "auto" else resources.reader_threads
    batches = resources.prefetch_batches
    return ReadLimits(max(_FIRST_BATCHES, threads) if batches == "auto" else batches, threads)


class ReadPace:
    """Judges windows of steps, with a memory of what helped."""

    def __init__(self, resources: ResourcesConfig, *, pins: bool = False) -> None:
        """`pins` where batches are read into pinned memory as long as there is room."""
        self._pins = pins
        self._adapts_batches = resources.prefetch_batches == "auto"
        self._adapts_threads = resources.reader_threads == "auto"
        self._share = resources.share
        self._quiet = 0  # windows to let pass
        # Limits and steps per second before the last growth, until its effect is judged.
        self._before: tuple[ReadLimits, float] | None = None

    @property
    def adapts(self) -> bool:
        """True if there is anything to adapt."""
        return self._adapts_batches or self._adapts_threads

    def relieve(self, memory_bytes: float, limits: ReadLimits) -> Change | None:
        """Gives memory back where too much of the host's is taken: half of the batches, and pinned
        memory, of which torch keeps what was freed."""
        if memory_bytes >= 0 or not self._adapts_batches:
            return None
        if limits.batches <= 1 and not limits.pins:
            return None
        self._quiet = _CALMING
        self._before = None
        batches = max(min(limits.batches, 1), limits.batches // 2)
        threads = limits.threads
        if self._adapts_threads:
            threads = max(1, min(threads, batches))
        return Change(
            limits._replace(batches=batches, threads=threads, pins=False),
            f"the host's memory is filled by {-memory_bytes / _GIB:.1f} GiB more than the "
            f"{100 * self._share:g} % of resources.memory_share",
        )

    def judge(self, window: Window, limits: ReadLimits, batch_bytes: int) -> Change | None:
        """Reads more at once where steps waited for data, as far as that helps and memory goes."""
        if self._quiet > 0:
            self._quiet -= 1
            return None
        room = _MEMORY_PART * window.memory_bytes
        if self._pins and not limits.pins and room > batch_bytes * (limits.batches + 1):
            return Change(limits._replace(pins=True), "there is room again")
        waited = window.waited_seconds / window.seconds
        rate = window.steps / window.seconds
        before, self._before = self._before, None
        if waited < _WAITED_SHARE or limits.batches == 0 or window.reading.batches == 0:
            return None
        if before is not None and rate < _FASTER * before[1]:
            self._quiet = _HOLDING
            return Change(
                before[0],
                f"more at once made steps no faster: {rate:.3g} a second, {before[1]:.3g} before",
            )
        if window.network_share > _FULL_NETWORK:
            self._quiet = _HOLDING
            return Change(
                limits,
                f"steps waited for data {100 * waited:.0f} % of the time, but its link is at "
                f"{100 * window.network_share:.0f} % of its speed, of which more readers make "
                "nothing more",
            )
        wanted = self._wanted(window, limits)
        affordable = _MEMORY_PART * max(0.0, window.memory_bytes) / max(1, batch_bytes)
        batches = min(wanted.batches, limits.batches + int(affordable))
        wanted = wanted._replace(batches=batches, threads=min(wanted.threads, max(1, batches)))
        if wanted.threads <= limits.threads and wanted.batches <= limits.batches:
            return None
        self._before = (limits, rate)
        self._quiet = _SETTLING
        spent = window.reading
        at_disk = 1 - spent.cpu_seconds / spent.seconds if spent.seconds else 0.0
        return Change(
            wanted,
            f"steps waited for data {100 * waited:.0f} % of the time, and the readers for disk or "
            f"network {100 * max(0.0, at_disk):.0f} % of theirs",
        )

    def _wanted(self, window: Window, limits: ReadLimits) -> ReadLimits:
        threads = limits.threads
        spent = window.reading
        if self._adapts_threads:
            # Seconds to read a batch over those in which a step computes.
            computing = max(1e-9, (window.seconds - window.waited_seconds) / window.steps)
            needed = math.ceil(_SPARE_RATE * spent.seconds / spent.batches / computing)
            threads = min(_MOST_THREADS, max(threads + 1, needed))
            if spent.cpu_seconds > spent.seconds / 2:  # reading is work for a core
                threads = min(threads, limits.threads + int(window.idle_cores))
        batches = limits.batches
        if self._adapts_batches:
            batches = min(_MOST_BATCHES, max(2 * batches, 2 * threads))
        return limits._replace(batches=batches, threads=threads)
