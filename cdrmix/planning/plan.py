"""Plan of a run: layout, memory, time, DeepSpeed settings, reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cdrmix.planning.cluster import Memory
from cdrmix.planning.cost import Cost
from cdrmix.planning.deepspeed_json import profile_path
from cdrmix.planning.layout import Degrees, Layout

# Plain values of a layout that stand behind its degrees, in this order.
_LAYOUT_VALUES = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "sequence_checkpoint_tokens",
)


@dataclass(frozen=True)
class StageBLayout:
    """Layout of Stage B with its memory."""

    degrees: Degrees  # data ranks for lessons, pipeline stages for the blocks of the backbone
    memory: Memory  # bytes on the fullest rank
    fits: bool  # True if `memory` is within the usable share of device and host
    step_seconds: float  # estimated time of a step of the joint phase
    policy_step_seconds: float  # what a step of the policy's phase takes at most
    whole: Memory  # bytes on a rank that would hold the whole backbone


@dataclass(frozen=True, kw_only=True)
class Plan(Layout):
    """The layout of a run, or of a stage of it, with its estimates, settings and reasons."""

    profile: str  # DeepSpeed profile: shipped name, or path of the user's file
    memory: Memory | None  # estimated bytes on the fullest rank; None: not estimated
    cost: Cost | None  # estimated time of a step; None: not estimated
    saves_in_background: bool  # True if training continues while a checkpoint is copied and written
    deepspeed: dict[str, Any]  # complete settings for `deepspeed.initialize`
    fits: bool  # True if memory is within the usable share of device and host
    # features that this version lacks for the layout; empty if it can run
    missing: tuple[str, ...] = ()
    # False if hosts have no room for the checkpoints of checkpoint.tiers.memory
    has_memory_tier: bool = True
    reasons: tuple[str, ...] = ()  # one line for each choice; empty in plans that are only compared
    # settings with a cost that the user may not expect, one line each
    warnings: tuple[str, ...] = ()
    # layout of Stage B; None without Stage B, and in plans that are only compared
    stage_b: StageBLayout | None = None

    @property
    def name(self) -> str:
        """Profile: shipped name, or stem of the user's file."""
        return Path(self.profile).stem

    def estimates(self) -> tuple[Memory, Cost]:
        """Memory and time of a plan that comes from the search."""
        assert self.memory is not None and self.cost is not None, "the search estimates both"
        return self.memory, self.cost

    def describe(self) -> str:
        """Describes the layout in one line, with the names of the configuration."""
        recomputed = ", activation checkpointing" if self.recomputes else ""
        if self.activation_checkpointing == "selective":
            recomputed += " of what is cheap"
        if self.sequence_checkpoint_tokens is not None:
            recomputed += f" by {self.sequence_checkpoint_tokens:,} tokens"
        spread = self.degrees.describe()
        return f"{self.name}, {spread}, micro batch {self.micro_batch_size}{recomputed}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plain values of plan.json."""
        return {
            "profile": self.name,
            "profile_path": str(profile_path(self.profile)),
            "degrees": asdict(self.degrees),
            **{name: getattr(self, name) for name in _LAYOUT_VALUES},
            "memory_per_rank_bytes": self.memory and self.memory.to_json(),
            "saves_in_background": self.saves_in_background,
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
        }

    def estimates_to_json(self) -> dict[str, Any]:
        """Returns layout, memory and time as plain values for `cdrmix plan --json`."""
        memory, cost = self.estimates()
        return {
            "profile": self.name,
            "degrees": asdict(self.degrees),
            **{name: getattr(self, name) for name in _LAYOUT_VALUES},
            "memory_per_rank_bytes": memory.to_json(),
            "buffers_bytes": memory.buffers,
            "host_memory_per_rank_bytes": memory.on_host,
            "saves_in_background": self.saves_in_background,
            "fits": self.fits and not self.missing,
            "not_available": list(self.missing),
            **asdict(cost),
        }
