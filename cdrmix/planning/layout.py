"""Parallel layout of a run: degrees, pipeline stages, and the exchange of sequence ranks.

Sequence ranks exchange data for a recurrence in one of two forms:

heads   all-to-all from a rank's tokens with all heads to all tokens with a rank's heads: r, lw, k,
        v, a, b there and y back, in their own types (lw is float32)
state   each rank runs its own tokens and computes their contribution to the state and the map that
        they apply to the entering one: [V + K, K] a head, float32, gathered by all ranks

Attention always exchanges heads. Byte counts are those that a rank receives in a forward pass, its
own part included; a backward pass receives as many. The state form also runs the recurrence over
V + K values a head instead of V.
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
# Optimizer groups, as `optimizers/adamw.py` makes them.
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
    activation_checkpointing: bool  # True if blocks are recomputed in the backward pass
    # tokens of a sample that are recomputed together; None: all
    sequence_checkpoint_tokens: int | None = None
    offloads_optimizer: bool = False  # True if masters, moments and average are on the host
    offloads_parameters: bool = False  # True if partitions of the weights are too (ZeRO-3)
    # DeepSpeed's `reduce_bucket_size` (elements)
    bucket_elements: int = 500_000_000  # DeepSpeed's default


SequenceForm = Literal["whole", "heads", "state"]  # whole: nothing is exchanged
FLOAT32_BYTES = 4
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # by precision


def recurrence_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of one RWKV layer's exchange of heads for `tokens` tokens of a rank."""
    return tokens * model.hidden_size * (6 * element_bytes + FLOAT32_BYTES)


def attention_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of one Transformer layer's exchange of heads for `tokens` tokens of a rank."""
    kv_width = model.num_kv_heads * model.head_dim
    return tokens * 2 * (model.hidden_size + kv_width) * element_bytes


def state_bytes(model: ModelConfig, samples: int, sequence: int) -> int:
    """Bytes of one RWKV layer's states of `samples` samples, gathered from `sequence` ranks."""
    return sequence * samples * 2 * model.head_dim * model.hidden_size * FLOAT32_BYTES


def sequence_form(
    model: ModelConfig, *, sequence_length: int, sequence: int, element_bytes: int
) -> SequenceForm:
    """Form that exchanges fewer bytes when `sequence` ranks share a sample."""
    # one sample decides, as both forms grow with the number of samples
    if sequence == 1:
        return "whole"
    by_heads = recurrence_bytes(model, sequence_length // sequence, element_bytes)
    return "state" if state_bytes(model, 1, sequence) < by_heads else "heads"


def stage_layers(model: ModelConfig, sequence_length: int, pipeline: int) -> list[range]:
    """Cuts the blocks into contiguous stages of about equal FLOPs, each with at least one block."""
    flops = forward_flops_by_layer(model, sequence_length)
    head = head_flops(model)  # computed by the last stage
    reached = list(accumulate(flops))
    share = (reached[-1] + head) / pipeline
    cuts = [0]
    for stage in range(1, pipeline):
        open_cuts = range(cuts[-1] + 1, len(flops) - (pipeline - stage) + 1)
        distances = {cut: abs(reached[cut - 1] - share * stage) for cut in open_cuts}
        cuts.append(min(distances, key=distances.__getitem__))
    return [range(*pair) for pair in pairwise([*cuts, len(flops)])]


def boundary_values(model: ModelConfig, stages: list[range], degrees: Degrees) -> list[int]:
    """Values per token that cross the boundary before each stage, and after the last one (0).

    They are the residual stream, and v_first behind the RWKV block that creates it, whose heads are
    split over tensor ranks.
    """
    kinds = model.layer_kinds()
    width = model.hidden_size
    # the first RWKV block creates v_first, and all later ones mix it in
    has_v_first = ["rwkv" in kinds[: stage.start] for stage in stages[1:]]
    return [0, *(width + created * width // degrees.tensor for created in has_v_first), 0]
