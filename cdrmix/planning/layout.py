"""Parallel layout of a run: degrees, and what a run is laid out with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config, Recomputation, TrainingConfig

# Axes of parallelism, as the configuration names them.
AXES = ("data", "tensor", "pipeline", "sequence", "expert")
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # by precision
# Optimizer groups, as `optimizers/adamw.py` makes them. With Muon (`optimizers/groups.py`) its
# matrices are `matrices`, and `vectors` are all that is AdamW's.
Group = Literal["matrices", "vectors", "experts"]
GROUPS: tuple[Group, ...] = ("matrices", "vectors", "experts")


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees (ranks). Sequence and expert groups are subsets of the other ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.data * self.tensor * self.pipeline

    @property
    def model_ranks(self) -> int:
        """Ranks over which the dense part of the model is split."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.tensor

    @property
    def sample_ranks(self) -> int:
        """Data ranks that read different samples; the ranks of a sequence group share one."""
        return max(1, self.data // self.sequence)

    def describe(self, axes: tuple[str, ...] = AXES) -> str:
        """Describes the axes above one in one line: 'data 4 x tensor 2'."""
        degrees = {axis: getattr(self, axis) for axis in axes}
        parts = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
        return " x ".join(parts) or "one rank"

    def split_ranks(self, group: Group) -> int:
        """Ranks over which the parameters of an optimizer group are split."""
        return self.expert if group == "experts" else self.tensor

    def optimizer_ranks(self, group: Group) -> int:
        """Ranks over which ZeRO partitions gradients and optimizer states of a group."""
        return self.stage_ranks // self.expert if group == "experts" else self.data


@dataclass(frozen=True)
class Combination:
    """Configuration, degrees and DeepSpeed settings that are checked together."""

    config: Config
    degrees: Degrees  # parallel degrees, configured or chosen
    deepspeed: dict[str, Any]  # settings of the profile
    profile: str  # name or file of the profile
    world_size: int  # number of ranks, started or planned
    device: str | None = None  # "cpu" or "cuda"; None: unknown

    @property
    def model(self) -> ModelConfig:
        """Model section."""
        return self.config.model

    @property
    def training(self) -> TrainingConfig:
        """Training section."""
        return self.config.training

    @property
    def zero(self) -> dict[str, Any]:
        """DeepSpeed's settings of ZeRO."""
        section: dict[str, Any] = self.deepspeed.get("zero_optimization", {})
        return section

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; DeepSpeed's default is 0."""
        return int(self.zero.get("stage", 0))

    def offloads(self, what: str) -> bool:
        """True if `what` (`offload_optimizer` or `offload_param`) moves states off the device."""
        return bool(self.zero.get(what, {}).get("device", "none") != "none")


@dataclass(frozen=True)
class Layout:
    """Settings of a run that determine its memory and its time."""

    degrees: Degrees
    zero_stage: int
    micro_batch_size: int  # samples per data rank and forward pass
    gradient_accumulation_steps: int  # forward passes per optimizer step
    activation_checkpointing: Recomputation  # what is recomputed in the backward pass
    # tokens of a sample that are recomputed together, of spans alone; None: all
    sequence_checkpoint_tokens: int | None = None
    offloads_optimizer: bool = False  # True if masters, moments and average are on the host
    offloads_parameters: bool = False  # True if partitions of the weights are too (ZeRO-3)
    # DeepSpeed's `reduce_bucket_size` (elements)
    bucket_elements: int = 500_000_000  # DeepSpeed's default
    # True if gradients are reduced under the backward pass: DeepSpeed's `overlap_comm`, which it
    # reads under ZeRO-2, and under ZeRO-3, where it is its default
    overlaps_reduction: bool = False
    # bytes of an element while gradients are reduced, DeepSpeed's `communication_data_type`; None:
    # those of the weights
    reduced_bytes: int | None = None

    @property
    def passes(self) -> Layout:
        """The same layout without ZeRO's part, which decides nothing of the passes.

        A search looks at the passes of one layout under several profiles.
        """
        return Layout(
            self.degrees,
            0,
            self.micro_batch_size,
            self.gradient_accumulation_steps,
            self.activation_checkpointing,
            self.sequence_checkpoint_tokens,
        )

    @property
    def recomputes(self) -> bool:
        """True if anything is recomputed in the backward pass."""
        return self.activation_checkpointing != "none"

    @property
    def recomputes_blocks(self) -> bool:
        """True if whole blocks are run again, at once or in spans, and save their inputs alone."""
        return self.activation_checkpointing in ("block", "spans")
