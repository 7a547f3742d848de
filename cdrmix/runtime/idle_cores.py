"""Cores of this host that nobody uses. No torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class IdleCores:
    """Measures idle cores between two readings, by the kernel's account of all cores."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = root / "proc/stat"
        self._last = self._ticks()

    def read(self) -> float:
        """Returns the mean number of idle cores since the last reading; 0 where none can be had, as
        on a kernel without that account."""
        now = self._ticks()
        if now is None or self._last is None:
            return 0.0
        idle, total = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return len(os.sched_getaffinity(0)) * idle / total if total > 0 else 0.0

    def _ticks(self) -> tuple[int, int] | None:
        """Ticks that all cores were idle, and all ticks."""
        with suppress(OSError, ValueError, IndexError):
            with self._file.open(encoding="utf-8") as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]
            return ticks[3] + ticks[4], sum(ticks)  # waiting for a disk leaves a core idle
        return None
