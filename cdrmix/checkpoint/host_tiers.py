"""Tiers of a host: checkpoints of the ranks there, in its memory and on its disk.

    <tier>/cdrmix-<run>-<key>/<step>/   files of this host's ranks, with an index and a manifest
                              run.json  run directory, by which a dead run's folder is known

With one host these are checkpoints like those of the run directory. With several, a checkpoint is
whole where all hosts have their part; `joining.py` brings the parts together. No torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cdrmix import runtime
from cdrmix.cluster.messages import TIER_PREFIX
from cdrmix.config.checkpoint import CheckpointConfig
from cdrmix.errors import StateError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostTier:
    """Folder of a run in a tier of this host."""

    name: Literal["memory", "local"]
    folder: Path
    keep: int  # newest checkpoints that stay
    every_steps: int | None  # None: with the saves of the run directory alone


def host_tiers(config: CheckpointConfig, run_dir: Path) -> tuple[HostTier, ...]:
    """Tiers of this host that a run is configured with, the fastest first."""
    if config.tiers is None:
        return ()
    whole = run_dir.resolve()
    # Runs of one name in different folders may share a tier.
    key = hashlib.sha256(str(whole).encode()).hexdigest()[:8]
    name = f"{TIER_PREFIX}{whole.name}-{key}"
    memory, local = config.tiers.memory, config.tiers.local
    tiers = []
    if memory is not None:
        place = Path(memory.folder) / name
        tiers.append(HostTier("memory", place, memory.keep, memory.every_steps))
    if local is not None:
        tiers.append(HostTier("local", Path(local.path) / name, local.keep, local.every_steps))
    return tuple(tiers)


def ranks_of_host() -> list[int]:
    """Ranks on this host, which see the same memory and disk; collective."""
    names = runtime.all_gather_object(host_name())
    return [rank for rank, name in enumerate(names) if name == names[runtime.rank()]]


def host_name() -> str:
    """Name of this host and of its start: containers on different hosts may have one name."""
    with suppress(OSError):
        return f"{socket.gethostname()} {_BOOT_ID.read_text(encoding='ascii').strip()}"
    return socket.gethostname()


def check_own(folder: Path) -> None:
    """Raises StateError for a folder of somebody else, who could put another model there: anyone
    may write into a host's memory. OSError if there is none."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StateError(f"{folder}: is not a folder of this user")
