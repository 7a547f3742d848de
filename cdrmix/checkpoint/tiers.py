"""Checkpoints of a run in tiers: host memory and local disk often, the run directory as configured,
an archive behind it.

The run directory is the truth: its saves end a run when they fail, and only they carry scores. A
host's tiers have every save of it too, and those of their own intervals; what fails in another tier
is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint.archive import Uploads
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.held_out import Score
from cdrmix.checkpoint.host_saver import HostSaver
from cdrmix.checkpoint.saver import Save, Saver, Snapshot
from cdrmix.log import get_logger

logger = get_logger(__name__)


class TieredSaver(Saver):
    """Writes the checkpoints of a run to its run directory, to the tiers of this host, and has them
    archived. Each rank creates one, as a `Saver`."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        hosts: HostSaver | None,
        uploads: Uploads | None,
        **settings: Any,
    ) -> None:
        """Collective. `hosts` are the tiers of this host, `uploads` those to an archive, on rank 0
        alone; `settings` are a Saver's."""
        super().__init__(roots, **settings)
        self._hosts = hosts
        self._uploads = uploads
        if hosts is not None:
            self._last_number = max(self._last_number, hosts.newest_number)
        self._left_out = 0  # saves to the tiers of hosts, while the one before was written

    def host_tiers_due(self, step: int) -> bool:
        """True if a tier of hosts saves this step by its own interval; alike on all ranks."""
        hosts = self._hosts
        return hosts is not None and bool(hosts.due(step)) and self.step != step

    def start_in_host_tiers(
        self,
        step: int,
        fragments: Iterable[Fragment],
        *,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """As `start`, to the tiers of hosts that are due alone; collective. Left out while the save
        before is written, for which training does not wait."""
        assert self._hosts is not None, "else none is due"
        self._last_number += 1
        if self._hosts.is_saving:
            self._left_out += 1
            return
        with self._stall():
            snapshot = self._hosts.snapshot(step, fragments, state, rank_state, self._last_number)
            self._hosts.write(snapshot, self._hosts.due(step), before)

    @property
    def is_copying(self) -> bool:
        """True while the state must not change."""
        return super().is_copying or (self._hosts is not None and self._hosts.is_copying)

    def wait_for_copy(self) -> None:
        """Waits until the state may change; on this rank alone."""
        super().wait_for_copy()
        if self._hosts is not None and self._hosts.is_copying:
            with self._stall():
                self._hosts.wait_for_copy()

    def votes(self) -> list[float]:
        """As of a Saver, those of the host's tiers behind them."""
        return [*super().votes(), *([] if self._hosts is None else self._hosts.votes())]

    def advance(self, votes: Sequence[float]) -> None:
        """As of a Saver."""
        own = 1 + len(self._roots)
        if self._hosts is not None:
            self._hosts.advance(votes[own:])
        super().advance(votes[:own])

    def wait(self) -> None:
        """Waits for the saves under way to all tiers but the archive; collective."""
        super().wait()
        if self._hosts is not None:
            with self._stall():
                self._hosts.wait()

    def close(self, *, waits: bool = True) -> None:
        """As of a Saver. Uploads to the archive are not waited for: `finish` does that."""
        super().close(waits=waits)
        if self._hosts is not None:
            self._hosts.close(waits=waits)
        if self._uploads is not None:
            self._uploads.close()

    def finish(self, *, seconds: float) -> None:
        """Archives the last checkpoint, and waits for that so long at most; on this rank alone."""
        if self._uploads is not None and self.saved_step is not None:
            self._uploads.offer(self._roots[0] / str(self.saved_step), is_last=True)
            self._uploads.finish(seconds=seconds)

    def end(self) -> None:
        """Removes what this run has in the memory of this host: the run directory has its end."""
        if self._hosts is not None:
            self._hosts.remove_memory()

    def tiers(self) -> dict[str, Any]:
        """Steps of the checkpoints in each tier, those of hosts on this one, and failed saves."""
        told: dict[str, Any] = {}
        if self._hosts is not None:
            for name, steps in self._hosts.held_steps().items():
                told[name] = {"steps": steps, "failed": self._hosts.failed[name]}
            told["left_out"] = self._left_out
        if self._uploads is not None:
            told["archive"] = {"steps": self._uploads.steps, "failed": self._uploads.failures}
        return told

    def _begin(
        self,
        snapshot: Snapshot,
        roots: Sequence[Path],
        score: Score | None,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        # The nearest first: the run directory may take minutes.
        if self._hosts is not None:
            self._hosts.write(snapshot, self._hosts.roots, before)
        super()._begin(snapshot, roots, score, before, after)

    def _pinned_steps(self) -> frozenset[int]:
        uploaded = frozenset() if self._uploads is None else self._uploads.pinned
        return super()._pinned_steps() | uploaded

    def _conclude(self, save: Save) -> None:
        super()._conclude(save)
        if self._uploads is not None and runtime.rank() == 0:
            self._uploads.offer(self._roots[0] / str(save.step))
