"""The combination that rules look at, and the layout that a plan comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config, TrainingConfig

# Axes of parallelism, as the configuration names them.
AXES = ("data", "tensor", "pipeline", "sequence", "expert")


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees (ranks). Sequence and expert groups lie inside the ranks of the others."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.data * self.tensor * self.pipeline

    @property
    def model_ranks(self) -> int:
        """Ranks that share out one copy of the model's dense part."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.tensor

    @property
    def sample_ranks(self) -> int:
        """Data ranks that read samples of their own; sequence ranks share one."""
        return max(1, self.data // self.sequence)


@dataclass(frozen=True)
class Combination:
    """Configuration, degrees and DeepSpeed settings for a world.

    Attributes:
        config: of the run.
        degrees: as given, or chosen where they were left out.
        deepspeed: settings of the profile.
        profile: its name or file, for messages.
        world_size: ranks that were started, or are planned.
        device: "cpu" or "cuda"; None where it is not known.
    """

    config: Config
    degrees: Degrees
    deepspeed: dict[str, Any]
    profile: str
    world_size: int
    device: str | None = None

    @property
    def model(self) -> ModelConfig:
        """Model section."""
        return self.config.model

    @property
    def training(self) -> TrainingConfig:
        """Training section."""
        return self.config.training

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; DeepSpeed's default is 0."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    def offloads(self, what: str) -> bool:
        """True if `offload_optimizer` or `offload_param` moves something off the device."""
        return offloads(self.deepspeed, what)


def offloads(deepspeed: dict[str, Any], what: str) -> bool:
    """True if DeepSpeed's settings move `offload_optimizer` or `offload_param` off the device."""
    section = deepspeed.get("zero_optimization", {}).get(what, {})
    return bool(section.get("device", "none") != "none")


@dataclass(frozen=True)
class Layout:
    """Spread of a run over ranks and steps, from which its memory and its time follow.

    Attributes:
        degrees: parallel degrees.
        zero_stage: 1, 2 or 3.
        micro_batch_size: samples per data rank and forward pass.
        gradient_accumulation_steps: forward passes per optimizer step.
        activation_checkpointing: whether blocks are recomputed in the backward pass.
        sequence_checkpoint_tokens: tokens of a sample that are recomputed together; None: all.
        offloads_optimizer: whether masters and moments live on the host.
        offloads_parameters: whether the shares of the weights do too (ZeRO-3).
        bucket_elements: DeepSpeed's `reduce_bucket_size` (elements).
    """

    degrees: Degrees
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: bool
    sequence_checkpoint_tokens: int | None = None
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    bucket_elements: int = 500_000_000  # DeepSpeed's default
