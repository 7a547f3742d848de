"""Plan of a run: layout, memory, time, DeepSpeed settings, reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdrmix.planning.cluster import Memory
from cdrmix.planning.cost import Cost
from cdrmix.planning.deepspeed_json import profile_path
from cdrmix.planning.layout import AXES, Degrees, Layout

if TYPE_CHECKING:  # a run without Stage B imports none of its modules
    from cdrmix.planning.stage_b_memory import StageBLayout


@dataclass(frozen=True)
class Plan:
    """The layout of a run, or of a stage of it, with its estimates, settings and reasons.

    Attributes:
        profile: DeepSpeed profile: shipped name, or path of the user's file.
        layout: degrees, batch sizes, recomputation.
        memory: estimated bytes on the fullest rank; None: not estimated.
        cost: estimated time of a step; None: not estimated.
        saves_in_background: True if training continues while a checkpoint is copied and written.
        deepspeed: complete settings for `deepspeed.initialize`.
        fits: True if memory is within the usable share of device and host.
        missing: features that this version lacks for the layout; empty if it can run.
        is_usual: True if the layout is usual for the model's size (`zero`).
        reasons: one line for each choice; empty in plans that are only compared.
        warnings: settings with a cost that the user may not expect, one line each.
        stage_b: layout of Stage B; None without Stage B, and in plans that are only compared.
    """

    profile: str
    layout: Layout
    memory: Memory | None
    cost: Cost | None
    saves_in_background: bool
    deepspeed: dict[str, Any]
    fits: bool
    missing: tuple[str, ...] = ()
    is_usual: bool = True
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stage_b: StageBLayout | None = None

    @property
    def name(self) -> str:
        """Profile: shipped name, or stem of the user's file."""
        return Path(self.profile).stem

    @property
    def path(self) -> Path:
        """JSON file of the profile."""
        return profile_path(self.profile)

    @property
    def degrees(self) -> Degrees:
        """Parallel degrees."""
        return self.layout.degrees

    @property
    def micro_batch_size(self) -> int:
        """Samples per data rank and forward pass."""
        return self.layout.micro_batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.layout.gradient_accumulation_steps

    @property
    def activation_checkpointing(self) -> bool:
        """True if blocks are recomputed in the backward pass."""
        return self.layout.activation_checkpointing

    @property
    def sequence_checkpoint_tokens(self) -> int | None:
        """Tokens of a sample that are recomputed together; None: all."""
        return self.layout.sequence_checkpoint_tokens

    @property
    def zero_stage(self) -> int:
        """ZeRO stage."""
        return self.layout.zero_stage

    @property
    def stage_b_pipeline(self) -> int:
        """Pipeline stages of the backbone in Stage B."""
        return self.stage_b.degrees.pipeline if self.stage_b else 1

    def estimates(self) -> tuple[Memory, Cost]:
        """Memory and time of a plan that comes from the search."""
        assert self.memory is not None and self.cost is not None, "the search estimates both"
        return self.memory, self.cost

    def describe(self) -> str:
        """Describes the layout in one line, with the names of the configuration."""
        degrees = {axis: getattr(self.degrees, axis) for axis in AXES}
        spread = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        recomputed = ", activation checkpointing" if self.activation_checkpointing else ""
        if self.sequence_checkpoint_tokens is not None:
            recomputed += f" by {self.sequence_checkpoint_tokens:,} tokens"
        batch = f"micro batch {self.micro_batch_size}"
        return f"{self.name}, {spread or 'one rank'}, {batch}{recomputed}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plain values of plan.json."""
        return {
            "profile": self.name,
            "profile_path": str(self.path),
            **self._layout_to_json(),
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
            **self._layout_to_json(),
            "memory_per_rank_bytes": memory.to_json(),
            "buffers_bytes": memory.buffers,
            "host_memory_per_rank_bytes": memory.on_host,
            "saves_in_background": self.saves_in_background,
            "fits": self.fits and not self.missing,
            "not_available": list(self.missing),
            **cost.to_json(),
        }

    def _layout_to_json(self) -> dict[str, Any]:
        return {
            "degrees": asdict(self.degrees),
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "activation_checkpointing": self.activation_checkpointing,
            "sequence_checkpoint_tokens": self.sequence_checkpoint_tokens,
        }
