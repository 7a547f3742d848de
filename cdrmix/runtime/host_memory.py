"""Memory of this host: all of it, and what a new process may take now. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GIB = 2**30
# Names of a group's limit and use, by version of control groups.
_FILES = {
    "": ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.stat",
        "total_inactive_file",
    ),
}


def host_memory_gib() -> float:
    """Memory of this host (GiB)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB


def available_memory_gib(root: Path = Path("/")) -> float:
    """Memory that processes here may still take (GiB): the kernel's estimate, and what the limits
    of this process's control groups leave; files that can be dropped from memory count as free.

    Args:
        root: of the file system; another one in tests.
    """
    left = [host_memory_gib() * _GIB, *(group.left for group in _groups(root))]
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                left.append(1024.0 * int(line.split()[1]))
    return max(0.0, min(left)) / _GIB


def usable_bytes(share: float, root: Path = Path("/")) -> float:
    """Memory (bytes) that may still be taken before more than `share` is, of the host's memory or
    of the tightest control group's limit; below 0 once more is taken."""
    most = min([host_memory_gib() * _GIB, *(group.most for group in _groups(root))])
    return available_memory_gib(root) * _GIB - (1 - share) * most


class _Group(NamedTuple):
    """Limit of a control group, and what it leaves (bytes)."""

    most: float
    left: float


def _groups(root: Path) -> Iterator[_Group]:
    """Control groups of this process with a limit: one of a group holds for all below it."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, group = line.split(":", 2)
            kind = "memory" if "memory" in kinds.split(",") else kinds
            if kind not in _FILES:
                continue
            top = root / "sys/fs/cgroup" / kinds
            folder = top / group.strip("/")
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # "max" is no number
                    yield _limits_of(each, *_FILES[kind])
                if each == top:
                    break


def _limits_of(folder: Path, limit: str, used: str, statistics: str, droppable: str) -> _Group:
    most = int((folder / limit).read_text(encoding="utf-8"))
    taken = int((folder / used).read_text(encoding="utf-8"))
    files = 0
    with suppress(OSError):
        for line in (folder / statistics).read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == droppable:
                files = int(number)
    return _Group(float(most), float(most - taken + files))
