"""Checkpoints: their times and number, and their tiers beside the run directory, which are host
memory, local disk and archive."""

from __future__ import annotations

from pydantic import Field, model_validator

from cdrmix.config.plugin import PluginConfig
from cdrmix.config.section import Section


class MemoryTierConfig(Section):
    """Checkpoints in the memory of each host, of the ranks there. They outlive killed ranks and
    jobs, not the host, and are removed when a run ends."""

    every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between saves to this tier, which has each save of the run directory too;
    null: those alone."""
    keep: int = Field(1, ge=1, description="Newest checkpoints that stay (count).")
    folder: str = "/dev/shm"
    """File system in memory, of each host."""


class LocalTierConfig(Section):
    """Checkpoints on a disk of each host, of the ranks there. They outlive a restart of the
    host."""

    path: str
    """Folder on a disk of each host, in which each run has a folder of its own."""
    every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between saves to this tier, which has each save of the run directory too;
    null: those alone."""
    keep: int = Field(1, ge=1, description="Newest checkpoints that stay (count).")


class ArchiveTierConfig(Section):
    """Copies of checkpoints of the run directory in an object store or on another file system."""

    path: str
    """Folder, or URL of an object store, in which each run has a folder by its name."""
    every_steps: int | None = Field(None, ge=1)
    """Least number of optimizer steps between archived checkpoints, besides the last one of a run;
    null: every one, or the newest where an upload takes longer than the time between them."""
    keep: int | None = Field(None, ge=1)
    """Newest checkpoints that stay (count); null: all."""
    answer_seconds: float = Field(60.0, gt=0)
    """Longest time without an answer of the store (seconds)."""


class TiersConfig(Section):
    """Places of checkpoints besides the run directory, the nearest first."""

    memory: MemoryTierConfig | None = None
    """Host memory; null: none is kept there."""
    local: LocalTierConfig | None = None
    """Local disks of hosts; null: none is kept there."""
    archive: ArchiveTierConfig | None = None
    """Object store, or another file system; null: there is none."""


class CheckpointConfig(Section):
    """Times and number of checkpoints. The end of a run always writes one."""

    every_steps: int | None = Field(1_000, ge=1, description="Optimizer steps between saves.")
    every_minutes: float | None = Field(None, gt=0, description="Minutes between saves.")
    # A run without a checkpoint could not be started again.
    keep: int = Field(3, ge=1)
    """Newest checkpoints that stay (count), in Stage B besides Stage A's last one."""
    keep_best: bool = True
    """Keep the best checkpoint by evaluation.best_by besides the newest, which is the one with the
    lowest held-out loss unless set, of those whose step was evaluated."""
    retention: PluginConfig | None = None
    """Rule of yours for the checkpoints that stay, a Retention, in place of `keep`; the newest and,
    with `keep_best`, the best stay in any case. null: `keep`."""
    background: bool | None = None
    """true: training continues while the state is copied to host memory (12 bytes per parameter of
    a rank's share, 16 with training.ema_decay) and written; only the next optimizer step waits for
    the copy. false: training waits for the disk. null: true if hosts have room for the copy."""
    replica: str | None = None
    """Second folder, visible to all ranks, for copies of each run's checkpoints, such as a local
    disk besides shared storage. --resume auto takes the newest good one of both."""
    tiers: TiersConfig | None = None
    """Further places of checkpoints; null: the run directory and its replica alone."""

    @model_validator(mode="after")
    def _one_rule(self) -> CheckpointConfig:
        if self.retention is not None and self.keep != type(self).model_fields["keep"].default:
            raise ValueError("keep and retention both say which checkpoints stay: give one of them")
        return self
