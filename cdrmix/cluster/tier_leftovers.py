"""Checkpoints that dead runs have left in the tiers of this host. No torch."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cdrmix.cluster.messages import TIER_OWNER, TIER_PREFIX

_LOCK = ".lock"  # of a run directory: held while a job runs there
_FINISHED = "finished.json"
TIERS = "tiers.json"  # of a run directory: folders of its tiers on the hosts, by tier


class LeftTier(NamedTuple):
    """Folder of a dead run in a tier of this host."""

    path: Path
    run: Path  # its run directory
    bytes: int

    @property
    def is_needed(self) -> bool:
        """True if the run may go on from it."""
        return self.run.is_dir() and not (self.run / _FINISHED).exists()

    def __str__(self) -> str:
        use = "--resume auto may go on from it; else remove it" if self.is_needed else "of no use"
        return f"{self.path} ({self.bytes / 1e6:,.0f} MB of {self.run}: {use})"


def left_tiers(memory: Path, runs: Path | None = None) -> Iterator[LeftTier]:
    """Folders of this user's dead runs in `memory`, and those that the runs in a folder name."""
    paths = {path for path in memory.glob(f"{TIER_PREFIX}*") if path.is_dir()}
    for file in runs.glob(f"*/{TIERS}") if runs is not None else ():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            paths |= {Path(each) for each in json.loads(file.read_text("utf-8")).values()}
    for path in sorted(paths):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if path.lstat().st_uid != os.getuid():
                continue
            run = Path(json.loads((path / TIER_OWNER).read_text("utf-8"))["run"])
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            if not _is_alive(run):
                yield LeftTier(path, run, size)


def remove_left_tiers(memory: Path) -> list[str]:
    """Removes what no run can go on from; returns a line for each."""
    removed = []
    for left in left_tiers(memory):
        if not left.is_needed:
            shutil.rmtree(left.path, ignore_errors=True)
            removed.append(str(left))
    return removed


def _is_alive(run: Path) -> bool:
    """True while a job holds the lock of a run directory, on any host."""
    try:
        with (run / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or not to be read, and may be held
        return True
    return False
