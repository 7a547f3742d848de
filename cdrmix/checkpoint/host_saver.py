"""Saves of this host's ranks to its tiers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from cdrmix import runtime
from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.host_tiers import HostTier, check_own, ranks_of_host
from cdrmix.checkpoint.saver import Save, Saver, Snapshot
from cdrmix.cluster.messages import TIER_OWNER
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.runtime.host_memory import available_memory_gib

logger = get_logger(__name__)
# Of the memory or disk that is free, as other processes take some at the same time.
_FILLED_SHARE = 0.9


class HostSaver(Saver):
    """Writes the checkpoints of this host's ranks into its tiers. What fails there is a warning."""

    def __init__(self, tiers: Sequence[HostTier], run_dir: Path, *, background: bool) -> None:
        """Collective."""
        self.tiers = tuple(tiers)
        ranks = ranks_of_host()
        self._leads = runtime.rank() == ranks[0]
        self.failed: dict[str, int] = {tier.name: 0 for tier in tiers}  # saves
        if self._leads:
            for tier in tiers:
                self._open(tier, run_dir)
        self.roots = [tier.folder for tier in tiers]
        keep = [tier.keep for tier in tiers]
        super().__init__(self.roots, keep=keep, background=background, ranks=ranks)

    def _open(self, tier: HostTier, run_dir: Path) -> None:
        """Makes the folder of the run, readable by this user alone, and says whose it is."""
        try:
            tier.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_own(tier.folder)
            write_json_atomic(tier.folder / TIER_OWNER, {"run": str(run_dir.resolve())})
        except (OSError, StateError) as error:  # told of each save that fails for it
            logger.warning("warning: checkpoint.tiers.%s: %s", tier.name, error)

    def due(self, step: int) -> list[Path]:
        """Folders of the tiers that save this step by their own intervals."""
        return [
            tier.folder
            for tier in self.tiers
            if tier.every_steps is not None and step % tier.every_steps == 0
        ]

    def write(self, snapshot: Snapshot, roots: Sequence[Path], before: Callable[[], None]) -> None:
        """Begins to write a snapshot into folders of the tiers; collective, between two saves.
        `before` is run by the first rank of each host before the checkpoint gets its name."""
        self._begin(snapshot, roots, None, before, lambda: None)

    @property
    def is_saving(self) -> bool:
        """True while a save is under way; alike on all ranks."""
        return self._save is not None

    def held_steps(self) -> dict[str, list[int]]:
        """Steps of the checkpoints in each tier, on this host."""
        held: dict[str, list[int]] = {}
        for tier in self.tiers:
            with suppress(OSError):
                held[tier.name] = [step_of(folder) for folder in step_folders(tier.folder)]
        return held

    def remove_memory(self) -> None:
        """Removes what this run has in the memory of this host, at its end."""
        for tier in self.tiers:
            if tier.name == "memory" and self._leads:
                with suppress(OSError, StateError):
                    check_own(tier.folder)
                    shutil.rmtree(tier.folder)

    def _check_room(self, root: Path, values: list[torch.Tensor]) -> None:
        check_own(root)
        needed = len(self._ranks) * sum(each.numel() * each.element_size() for each in values)
        status = os.statvfs(root)
        free = status.f_bavail * status.f_frsize
        if any(tier.name == "memory" and tier.folder == root for tier in self.tiers):
            # A file system in memory takes more than there is, and the kernel then ends processes.
            free = min(free, int(available_memory_gib() * 2**30))
        if needed > _FILLED_SHARE * free:
            why = f"no room: {needed / 1e6:,.0f} MB to write, {free / 1e6:,.0f} MB free"
            raise OSError(errno.ENOSPC, why, str(root))

    def _conclude(self, save: Save) -> None:
        if save.fault is not None:
            raise save.fault
        self.saved_step = save.step
        for tier, problem in zip(self.tiers, save.problems, strict=True):
            self.failed[tier.name] += problem is not None
            if problem and runtime.rank() == 0:
                logger.warning(
                    "warning: checkpoint.tiers.%s: has no checkpoint of step %d: %s",
                    *(tier.name, save.step, problem),
                )
