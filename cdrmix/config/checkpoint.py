"""Checkpoints: their times and number, and their tiers beside the run directory, which are host
memory, local disk and archive."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from cdrmix.config.plugin import PluginConfig
from cdrmix.config.resources import Auto
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

    every_steps: Annotated[int, Field(ge=1)] | Auto | None = 1_000
    """Optimizer steps between saves. auto: within auto_range, as every_minutes."""
    every_minutes: Annotated[float, Field(gt=0)] | Auto | None = None
    """Minutes between saves. auto: within auto_range, as the measured times of saves and steps ask
    for: that which costs least at failures.per_device_hour, or else the shortest in which saves
    take at most 1 % of the time."""
    # Not strict: a list is what JSON has, such as a checkpoint's copy of the configuration.
    auto_range: tuple[float, ...] | None = Field(None, strict=False)
    """Shortest and longest interval between saves, of which a run chooses, with every_steps or
    every_minutes = auto: whole steps, or minutes."""
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
    def _auto_has_a_range(self) -> CheckpointConfig:
        ways = {"every_steps": self.every_steps, "every_minutes": self.every_minutes}
        chosen = [name for name, value in ways.items() if value == "auto"]
        if not chosen:
            if self.auto_range is not None:
                raise ValueError(
                    "auto_range bounds what a run chooses: give every_minutes = auto and "
                    "every_steps = null, or every_steps = auto, or leave auto_range out"
                )
            return self
        (name, *more), bounds = chosen, self.auto_range
        other = next(each for each in ways if each != name)
        if more or ways[other] is not None:
            raise ValueError(
                f"{name} = auto and {other} = {ways[other]}: saves of the one would come between "
                f"those of the other. Give {other} = null"
            )
        is_range = bounds is not None and len(bounds) == 2 and 0 < bounds[0] <= bounds[1]
        if bounds is None or not is_range:
            example = "[100, 2000]" if name == "every_steps" else "[5, 60]"
            raise ValueError(
                f"{name} = auto chooses within auto_range, the shortest and the longest interval, "
                f"such as {example}, above 0: given {'null' if bounds is None else [*bounds]}"
            )
        if name == "every_steps" and any(bound % 1 for bound in bounds):
            raise ValueError(
                f"auto_range = {[*bounds]}: every_steps = auto takes whole steps, from 1"
            )
        return self

    @model_validator(mode="after")
    def _one_rule(self) -> CheckpointConfig:
        if self.retention is not None and self.keep != type(self).model_fields["keep"].default:
            raise ValueError("keep and retention both say which checkpoints stay: give one of them")
        return self
