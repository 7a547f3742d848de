"""Use of a host: idle cores and full links, by the accounts of its kernel. No torch."""

from __future__ import annotations

import os
import time
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


class NetworkUse:
    """Measures how full the links of this host are, in the direction of reading."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._last = self._received()
        self._read = time.monotonic()

    def read(self) -> float:
        """Returns what the fullest link received since the last reading, as a share of its speed;
        0 where no link tells one, as links of containers and virtual machines often do not."""
        now, received = time.monotonic(), self._received()
        seconds, self._read = now - self._read, now
        before, self._last = self._last, received
        shares = [
            (count - before[name]) / (seconds * speed)
            for name, count in received.items()
            if name in before and seconds > 0 and (speed := self._bytes_per_second(name)) > 0
        ]
        return max(shares, default=0.0)

    def _received(self) -> dict[str, int]:
        """Bytes by link since the start of the host."""
        counts = {}
        with suppress(OSError, ValueError, IndexError):
            lines = (self._root / "proc/net/dev").read_text(encoding="utf-8").splitlines()
            for line in lines[2:]:  # behind two lines of titles
                name, _, figures = line.partition(":")
                counts[name.strip()] = int(figures.split()[0])
        return counts

    def _bytes_per_second(self, name: str) -> float:
        """Speed of a link; at most 0 where it is not told."""
        with suppress(OSError, ValueError):
            text = (self._root / "sys/class/net" / name / "speed").read_text(encoding="utf-8")
            return int(text) * 1e6 / 8  # megabits
        return 0.0
