"""Adapts how a rank reads its data to its waits and to the memory of its host, and tells of it.

Each rank decides for itself, without a collective: of what is adapted, no number of a run depends
on. The rules are those of `data/read_pace.py`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.config.resources import ResourcesConfig
from cdrmix.data.loader import Batch, Loader
from cdrmix.data.read_ahead import ReadLimits
from cdrmix.data.read_pace import Change, ReadPace, Window
from cdrmix.data.remote import cache_size, remote_files
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.sinks import write_json_atomic
from cdrmix.planning.text_page import size_text
from cdrmix.runtime.host_memory import usable_bytes
from cdrmix.runtime.host_use import IdleCores, NetworkUse
from cdrmix.runtime.mounts import is_between_hosts, is_in_memory

logger = get_logger(__name__)

RESOURCES = "resources.json"
# A window is long enough for a mean of either.
_WINDOW_STEPS = 4
_WINDOW_SECONDS = 0.1
_MEMORY_SECONDS = 1.0  # between two readings of the host's memory: one takes 0.1 ms
# A disk with less room than this share is full before long.
_LEAST_FREE_DISK = 0.02
_MOST_KEPT = 200  # changes in the record, the newest ones


class Reading:
    """The batches of a rank's loader, read in the way that fits this host at the time.

    Args:
        memory_left: memory (bytes) that processes of this host may still take; below 0 once they
            take too much.
        network: reads how full the links of this host are; asked where its data comes by one.
    """

    def __init__(
        self,
        loader: Loader,
        resources: ResourcesConfig,
        *,
        memory_left: Callable[[], float] | None = None,
        network: NetworkUse | None = None,
    ) -> None:
        self._loader = loader
        self._pins = loader.limits.pins
        self._pace = ReadPace(resources, pins=self._pins)
        by_network = remote_files(loader.folder) is not None or is_between_hosts(loader.folder)
        self._network = (network or NetworkUse()) if by_network else None
        self._memory_left = memory_left or partial(usable_bytes, resources.share)
        self._memory = self._memory_left()
        self._memory_read = time.monotonic()
        self._idle = IdleCores()
        self._is_first = True
        self._begin_window()

    def next_batch(self, *, step: int, folder: Path) -> Batch:
        """Waits for the next batch; records a change in the run directory `folder`, on rank 0."""
        entered = time.perf_counter()
        batch = self._loader.next()
        if not self._pace.adapts:
            return batch
        if self._is_first:  # nothing was read ahead of it
            self._is_first = False
            self._begin_window()
            return batch
        self._waited += time.perf_counter() - entered
        self._steps += 1
        for change in self._changes():
            self._tell(change, step, folder)
        return batch

    def _begin_window(self) -> None:
        self._began = time.perf_counter()
        self._steps = 0
        self._waited = 0.0

    def _changes(self) -> list[str]:
        """Decides and adapts; returns what was changed and why, in words."""
        now = time.monotonic()
        told = []
        if now - self._memory_read >= _MEMORY_SECONDS:
            self._memory_read = now
            self._memory = self._memory_left()
            told = list(filter(None, [self._relieve(), self._fit_cache()]))
        seconds = time.perf_counter() - self._began
        if self._steps < _WINDOW_STEPS or seconds < _WINDOW_SECONDS:
            return told
        window = Window(
            self._steps,
            seconds,
            self._waited,
            self._loader.take_read_figures(),
            self._memory / runtime.local_world_size(),
            self._idle.read(),
            self._network.read() if self._network is not None else 0.0,
        )
        self._begin_window()
        change = self._pace.judge(window, self._loader.limits, self._loader.batch_bytes or 1)
        return [*told, self._adapt(change)] if change else told

    def _relieve(self) -> str | None:
        change = self._pace.relieve(self._memory, self._loader.limits)
        told = self._adapt(change) if change else None
        if self._memory < 0 and self._pins and not self._loader.limits.pins:
            # Each time: batches that were pinned before are freed one by one as steps take them.
            runtime.release_pinned_memory()
        return told

    def _adapt(self, change: Change) -> str:
        before = self._loader.limits
        self._loader.set_limits(change.limits)
        after = self._loader.limits
        if after == before:
            return f"reading ahead: {self._words(after)} as before: {change.why}"
        return f"reading ahead: {self._words(after)} instead of {self._words(before)}: {change.why}"

    def _words(self, limits: ReadLimits) -> str:
        batches = f"{limits.batches} batch{'es' * (limits.batches != 1)}"
        threads = f"{limits.threads} thread{'s' * (limits.threads != 1)}"
        pinned = f", {'not ' * (not limits.pins)}pinned" if self._pins else ""
        return f"{batches} by {threads}{pinned}"

    def _fit_cache(self) -> str | None:
        """Fits the cache of a remote data set to what its place has left: a disk that is nearly
        full, or memory, where the cache lies in it."""
        size, files = cache_size(self._loader.folder), remote_files(self._loader.folder)
        if size is None or files is None:
            return None
        folder = self._loader.folder
        disk = shutil.disk_usage(folder)
        in_memory = is_in_memory(folder)
        short_bytes = int(_LEAST_FREE_DISK * disk.total) - disk.free
        if in_memory:
            short_bytes = max(short_bytes, -int(self._memory))
        before = size.bytes
        if short_bytes > 0:
            used = sum(path.stat().st_size for path in folder.glob("*.bin"))
            size.bytes = max(size.least, min(before, used - short_bytes))
        elif -short_bytes > _LEAST_FREE_DISK * disk.total and (not in_memory or self._memory > 0):
            size.bytes = size.most
        if size.bytes == before:
            return None
        files.shrink()
        why = "there is room again"
        if short_bytes > 0:
            why = f"{'memory' if in_memory else 'the disk'} is short by {size_text(short_bytes)}"
        return f"cache of {folder}: {size_text(size.bytes)} instead of {size_text(before)}: {why}"

    def _tell(self, change: str, step: int, folder: Path) -> None:
        logger.info("resources: behind step %d: %s", step, change)
        if runtime.rank() > 0:
            return
        limits = self._loader.limits
        present = {"prefetch_batches": limits.batches, "reader_threads": limits.threads}
        if self._pins:
            present["pinned"] = limits.pins
        record_change(folder, {"reading": present}, step, change)


def record_change(folder: Path, present: dict[str, Any], step: int, change: str) -> None:
    """Adds a change to the record of a run's resources, with the `present` values of its part;
    rank 0, on the thread that trains. A failed write costs a line of the record, not the run."""
    with contextlib.suppress(StateError):
        kept = read_resources(folder)
        changes = [*kept.get("changes", []), {"step": step, "change": change}]
        record = kept | present | {"changes": changes[-_MOST_KEPT:]}
        write_json_atomic(folder / RESOURCES, record)


def read_resources(folder: Path) -> dict[str, Any]:
    """Reads the record of a run's resources; an empty one where there is none."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((folder / RESOURCES).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {}
