"""The combination that rules look at, and the layout that a plan comes to.

Exchange of sequence ranks for a recurrence, in one of two forms.

heads   tokens of a rank and all heads become all tokens and heads of a rank: r, lw, k, v, a, b
        there and y back, in their own types (lw is float32)
state   every rank runs its own tokens and says what they add to the state and how they map the one
        that enters: [V + K, K] a head, float32, gathered by all

Attention exchanges heads in both. Bytes are of what a rank receives, its own part included, in a
forward pass; a backward pass takes as many. The state's form also runs the recurrence over V + K
values a head instead of V.

Blocks of each pipeline stage, and values that cross the stage boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.planning.counts import forward_flops_by_layer, head_flops

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


SequenceForm = Literal["whole", "heads", "state"]  # whole: one rank has the sequence
FLOAT32_BYTES = 4


def recurrence_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of the exchange of heads for `tokens` tokens of a rank, one RWKV layer."""
    return tokens * model.hidden_size * (6 * element_bytes + FLOAT32_BYTES)


def attention_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of the exchange of heads for `tokens` tokens of a rank, one Transformer layer."""
    kv_width = model.num_kv_heads * model.head_dim
    return tokens * 2 * (model.hidden_size + kv_width) * element_bytes


def state_bytes(model: ModelConfig, samples: int, sequence: int) -> int:
    """Bytes of the states of `samples` samples, gathered from `sequence` ranks, one RWKV layer."""
    return sequence * samples * 2 * model.head_dim * model.hidden_size * FLOAT32_BYTES


def sequence_form(
    model: ModelConfig, *, sequence_length: int, sequence: int, element_bytes: int
) -> SequenceForm:
    """The form that exchanges fewer bytes where a sequence is spread over `sequence` ranks."""
    if sequence == 1:
        return "whole"
    by_heads = recurrence_bytes(model, sequence_length // sequence, element_bytes)
    return "state" if state_bytes(model, 1, sequence) < by_heads else "heads"


def stage_layers(model: ModelConfig, sequence_length: int, pipeline: int) -> list[range]:
    """Blocks of each stage, contiguous and at least one, so that FLOPs are spread evenly.

    Args:
        model: dimensions.
        sequence_length: tokens of a sample, on which the FLOPs of attention depend.
        pipeline: stages, at most as many as there are blocks.
    """
    flops = forward_flops_by_layer(model, sequence_length)
    return _even_cuts(flops, head_flops(model), pipeline)


def border_values(model: ModelConfig, stages: list[range], degrees: Degrees) -> list[int]:
    """Values of a token that cross the border before each stage, and after the last one: of its
    residual stream, and of v_first once it is made. At the ends there is no border.

    Args:
        model: dimensions.
        stages: blocks of each stage.
        degrees: whose tensor ranks share out the heads of v_first.
    """
    kinds = model.layer_kinds()
    width = model.hidden_size
    made = ["rwkv" in kinds[: stage.start] for stage in stages[1:]]
    return [0, *(width + there * width // degrees.tensor for there in made), 0]


def _even_cuts(flops: list[int], head: int, pipeline: int) -> list[range]:
    """Contiguous blocks for each stage, each stage with one at least; the last has the head too."""
    reached = list(accumulate(flops))
    share = (reached[-1] + head) / pipeline
    cuts = [0]
    for stage in range(1, pipeline):
        left = range(cuts[-1] + 1, len(flops) - (pipeline - stage) + 1)
        cuts.append(min(left, key=lambda cut: abs(reached[cut - 1] - share * stage)))  # noqa: B023
    cuts.append(len(flops))
    return [range(*pair) for pair in pairwise(cuts)]
