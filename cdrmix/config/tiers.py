"""Tiers of checkpoints beside the run directory: host memory, local disk, archive."""

from __future__ import annotations

from pydantic import Field

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
