"""Peak memory of this process: by phase of a step, of each step, and between two logged lines.

It is that of the CUDA allocator once CUDA is in use, else that of resident main memory. Taking it
begins a new peak at every border of a phase: 10 us a phase on a CPU, of which 3 are the reading.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from statistics import median

from cdrmix.log import get_logger

logger = get_logger(__name__)

_RECENT_STEPS = 50
_LEAST_STEPS = 10  # before one can stand out
# A step stands out by this share of the median, and by as many bytes; one like it is told again
# only where it is higher by a tenth.
_SPIKE = 1.25
_LEAST_SPIKE_BYTES = 16 * 2**20
_HIGHER = 1.1
BETWEEN = "between two phases"


class PeakMemory:
    """Account of one rank."""

    def __init__(self) -> None:
        self._phase = BETWEEN
        self._by_phase: dict[str, int] = {}  # of the present step
        self._since_line = 0
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)  # peaks of steps
        self._told: dict[str, int] = {}  # highest peak that was told of, by phase

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Counts what is used in the context for a phase."""
        self._note()
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._note()
            self._phase = before

    def step_done(self, step: int) -> None:
        """Ends a step, and warns of one above the recent ones, on the rank where it was."""
        peaks = self.by_phase()
        self._by_phase = {}
        phase = max(peaks, key=peaks.__getitem__)
        peak = peaks[phase]
        usual = median(self._recent) if len(self._recent) >= _LEAST_STEPS else None
        self._recent.append(peak)
        if usual is None or peak < max(_SPIKE * usual, usual + _LEAST_SPIKE_BYTES):
            return
        if peak < _HIGHER * self._told.get(phase, 0):
            return
        self._told[phase] = peak
        logger.warning(
            "warning: memory of step %d: %.2f GiB %s, %.2f times the median of the steps before it",
            *(step, peak / 2**30, phase if phase == BETWEEN else f"in the phase {phase}"),
            peak / usual,
        )

    def by_phase(self) -> dict[str, int]:
        """Returns the peaks of the present step (bytes), in the order of their phases' ends."""
        self._note()
        return dict(self._by_phase)

    def take(self) -> int:
        """Returns the peak since the last call (bytes)."""
        self._note()
        peak, self._since_line = self._since_line, 0
        return peak

    def _note(self) -> None:
        peak = take_peak_bytes()
        self._since_line = max(self._since_line, peak)
        self._by_phase[self._phase] = max(self._by_phase.get(self._phase, 0), peak)


def take_peak_bytes() -> int:
    """Returns the peak memory of this process since the last call (bytes), and begins a new peak.

    A kernel that cannot begin a new peak (not Linux, or /proc mounted read-only) gives the one
    since the start of the process.
    """
    # Where torch is not imported, as for a report, nothing has used CUDA.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peak: int = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes; Linux counts KiB
    # VmHWM rather than ru_maxrss, which remembers what the process was before exec.
    status, clear = _files(os.getpid())
    text = os.pread(status, 65536, 0)
    start = text.index(b"VmHWM:") + 6
    if clear is not None:
        with contextlib.suppress(OSError):
            os.write(clear, b"5")  # VmHWM begins anew
    return int(text[start : text.index(b"kB", start)]) * 1024


@cache
def _files(process: int) -> tuple[int, int | None]:
    """Open files of a process in /proc: opening them takes ten times as long as reading. Those of
    a process that has forked are not the child's."""
    folder = f"/proc/{process}"
    clear = None
    with contextlib.suppress(OSError):
        clear = os.open(f"{folder}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    return os.open(f"{folder}/status", os.O_RDONLY | os.O_CLOEXEC), clear
