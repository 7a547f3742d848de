"""Demands of a model's size alone: ZeRO stage, expert degree, axes of parallelism.

Rules of the product, so that a layout does not hang on the second digit of an estimate:
below 1e9 parameters ZeRO-1; up to 5e10 (the 1B and 4B variants) ZeRO-2 with accumulation; beyond
(40B) tensor and pipeline with ZeRO-1, activation and sequence checkpointing; from 5e11 (200B)
sequence and expert parallelism as well.
"""

from __future__ import annotations

import math

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import GIB
from cdrmix.planning.counts import params_by_part
from cdrmix.planning.layout import Degrees

# Total parameters from which gradients are worth spreading: 1e9 are 2 GB of them in bf16 on every
# rank, which costs a reduction in each micro-step.
LARGE_PARAMS = 1_000_000_000
# Total parameters from which a model is cut into stages and matrices, and into tokens too.
STAGED_PARAMS = 50_000_000_000
SEQUENCED_PARAMS = 500_000_000_000
# Tokens of a sample that a large model recomputes together at most: enough to keep its matrices
# busy. Of a shorter part of a sample, half.
SPAN_TOKENS = 2_048
# Experts are held whole by every rank up to here; weight and gradient in bf16 are 4 bytes.
WHOLE_EXPERT_BYTES = GIB
EXPERT_BYTES_PER_PARAM = 4
# Expert groups stay inside a node of 8 devices, where all-to-all is cheap.
LARGEST_EXPERT_GROUP = 8


def zero_stage(total_params: int, *, data: int, pipeline: int) -> tuple[int, str]:
    """ZeRO stage, 1 or 2, and why."""
    if pipeline > 1:
        return 1, "DeepSpeed's pipeline engine partitions no gradients"
    if data == 1:
        return 1, "one data rank: there is nobody to share gradients with"
    if total_params < LARGE_PARAMS:
        return 1, f"{total_params / 1e6:.3g}M parameters: gradients are small, one exchange a step"
    return 2, f"{total_params / 1e9:.3g}B parameters: gradients are spread over the data ranks"


def profile(stage: int, degrees: Degrees, *, offloaded: bool = False) -> str:
    """Name of the shipped DeepSpeed profile for a ZeRO stage."""
    if degrees.pipeline > 1:
        return "pipeline"
    if stage == 2 and degrees.expert > 1 and not offloaded:
        return "expert"
    return f"zero{stage}_offload" if offloaded else f"zero{stage}"


def sequence_checkpoint_tokens(
    config: Config, *, sequence: int, recompute: bool, total_params: int
) -> tuple[int | None, str]:
    """Tokens of a sample that a rank recomputes together, None for all of them, and why."""
    training = config.training
    if "sequence_checkpoint_tokens" in training.model_fields_set:
        return training.sequence_checkpoint_tokens, "training.sequence_checkpoint_tokens as given"
    if not recompute or total_params < STAGED_PARAMS:
        return None, "not needed"
    part = training.sequence_length // sequence
    span = min(SPAN_TOKENS, -(-part // 2))
    return span, (
        f"{total_params / 1e9:.3g}B parameters: of a block that is recomputed, the activations of "
        f"{span:,} tokens are there at a time, not those of {part:,}"
    )


def expert_degree(config: Config, degrees: Degrees) -> tuple[int, str]:
    """Expert degree for the other degrees of a layout, and why."""
    model, given = config.model, config.parallel.expert
    if given is not None:
        return given, "parallel.expert as given"
    if model.moe is None:
        return 1, "a dense model has no experts"
    held_bytes = params_by_part(model)["experts"] // degrees.model_ranks * EXPERT_BYTES_PER_PARAM
    gib = held_bytes / GIB
    amount = f"{gib:,.0f}" if gib > 10 else f"{gib:.2g}"
    size = f"all experts take {amount} GiB of weights and gradients"
    if held_bytes <= WHOLE_EXPERT_BYTES:
        return 1, f"{size}, which every rank can hold: no exchange of tokens"
    common = math.gcd(model.moe.num_experts, degrees.stage_ranks)
    degree = max(n for n in range(1, LARGEST_EXPERT_GROUP + 1) if common % n == 0)
    if degree == 1:
        return (
            1,
            f"{size}, and {degrees.stage_ranks} ranks cannot share {model.moe.num_experts} experts",
        )
    return degree, f"{size}, spread over groups of {degree} ranks that a node holds"


def has_axes_of_its_size(config: Config, degrees: Degrees, total_params: int) -> bool:
    """True if a layout is cut along the axes that its size asks for, where they are left open."""
    is_staged, is_sequenced = total_params >= STAGED_PARAMS, total_params >= SEQUENCED_PARAMS
    wanted = {"tensor": is_staged, "pipeline": is_staged, "sequence": is_sequenced}
    if is_sequenced:
        wanted["expert"] = config.model.moe is not None
    return all(
        (getattr(degrees, axis) > 1) == is_cut
        for axis, is_cut in wanted.items()
        if axis not in config.parallel.model_fields_set
    )
