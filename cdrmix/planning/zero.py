"""Rules by model size: ZeRO stage, axes, experts, spans of recomputation.

Axes come before an estimate of speed: up to 5e10 parameters data and expert ranks; beyond (40B)
tensor and pipeline parallelism with ZeRO-1, activation and sequence checkpointing; from 5e11 (200B)
sequence and expert parallelism as well. What is usual of the rest is where a search begins that
nothing is known for: below 1e9 parameters ZeRO-1, beyond ZeRO-2, and experts on every rank that can
hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config, Recomputation
from cdrmix.planning.cluster import GIB
from cdrmix.planning.counts import params_by_part, trained_params
from cdrmix.planning.layout import Combination, Degrees
from cdrmix.planning.text_page import size_text

# Total parameters from which ZeRO-2 is used: it costs a reduction in each micro-step, and 1e9
# parameters have 2 GB of bf16 gradients on every rank.
LARGE_PARAMS = 1_000_000_000
# Total parameters from which tensor and pipeline, and from which sequence parallelism is usual.
STAGED_PARAMS = 50_000_000_000
SEQUENCED_PARAMS = 500_000_000_000
# Most tokens of a sample that a large model recomputes together, enough for efficient matrix
# products; of a shorter part of a sample, half.
SPAN_TOKENS = 2_048
# Up to this size every rank has all experts; a parameter's weight and gradient in bf16 are 4 bytes.
WHOLE_EXPERT_BYTES = GIB
EXPERT_BYTES_PER_PARAM = 4
# Expert groups stay inside a node of 8 devices, where all-to-all is cheap.
LARGEST_EXPERT_GROUP = 8


def zero_stage(model: ModelConfig, degrees: Degrees) -> tuple[int, str]:
    """Chooses ZeRO stage 1 or 2, with the reason."""
    if degrees.pipeline > 1:
        return 1, "DeepSpeed's pipeline engine partitions no gradients"
    if degrees.data == 1:
        return 1, "one data rank: ZeRO-2 would have no other rank to spread gradients over"
    total = params_by_part(model).total()
    if model.lora is not None:
        total = trained_params(model)  # frozen ones have no gradients
    if total < LARGE_PARAMS:
        return 1, f"{total / 1e6:.3g}M parameters: gradients are small, one exchange a step"
    return 2, f"{total / 1e9:.3g}B parameters: gradients are spread over the data ranks"


def profile_name(stage: int, degrees: Degrees) -> str:
    """Name of the shipped DeepSpeed profile for a ZeRO stage, without offloading."""
    if degrees.pipeline > 1:
        return "pipeline"
    return "expert" if stage == 2 and degrees.expert > 1 else f"zero{stage}"


def most_recomputed(model: ModelConfig) -> Recomputation:
    """The usual form of recomputation that keeps least: large models recompute in spans, which
    neither routed blocks nor those of transformers can."""
    if model.kind == "hf" or model.mod is not None:
        return "block"
    return "spans" if params_by_part(model).total() >= STAGED_PARAMS else "block"


def sequence_checkpoint_tokens(
    config: Config, degrees: Degrees, recomputation: Recomputation
) -> tuple[int | None, str]:
    """Chooses the tokens of a sample that are recomputed together (None: all), with the reason."""
    training = config.training
    if recomputation != "spans":
        return None, "not needed"
    if training.sequence_checkpoint_tokens is not None:
        return training.sequence_checkpoint_tokens, "training.sequence_checkpoint_tokens as given"
    total = params_by_part(config.model).total()
    part = training.sequence_length // degrees.sequence
    span = min(SPAN_TOKENS, -(-part // 2))
    return span, (
        f"{total / 1e9:.3g}B parameters: of a block that is recomputed, the activations of "
        f"{span:,} tokens are there at a time, not those of {part:,}"
    )


def expert_degree(config: Config, degrees: Degrees) -> tuple[int, str]:
    """Chooses the expert degree for the other degrees of a layout, with the reason."""
    model = config.model
    if config.parallel.expert is not None:
        return config.parallel.expert, "parallel.expert as given"
    if not model.has_deepspeed_experts:
        if model.kind == "hf":
            return 1, "every rank has all experts of a Hugging Face model, if it has any"
        return 1, "a dense model has no experts"
    assert model.moe is not None, "such a model has experts"
    expert_bytes = params_by_part(model)["experts"] // degrees.model_ranks * EXPERT_BYTES_PER_PARAM
    size = f"all experts take {size_text(expert_bytes)} of weights and gradients"
    if expert_bytes <= WHOLE_EXPERT_BYTES:
        return 1, f"{size}, which every rank can hold: no exchange of tokens"
    common = math.gcd(model.moe.num_experts, degrees.stage_ranks)
    degree = max(n for n in range(1, LARGEST_EXPERT_GROUP + 1) if common % n == 0)
    if degree == 1:
        why = f"{degrees.stage_ranks} ranks cannot share {model.moe.num_experts} experts"
        return 1, f"{size}, and {why}"
    return degree, f"{size}, spread over groups of {degree} ranks that a node holds"


def unusual_axes(combination: Combination) -> Iterator[str]:
    """Yields axes along which a model of another size is cut, where the configuration leaves them
    open: the product's layouts of its sizes, which come before an estimate of speed."""
    config = combination.config
    degrees = combination.degrees
    total = params_by_part(config.model).total()
    from_params = {
        "tensor": STAGED_PARAMS,
        "pipeline": STAGED_PARAMS,
        "sequence": SEQUENCED_PARAMS,
    }
    if config.model.kind == "hf":  # which has data ranks alone at any size
        from_params = {}
    if config.model.has_deepspeed_experts and total >= SEQUENCED_PARAMS:
        from_params["expert"] = SEQUENCED_PARAMS
    for axis, least in from_params.items():
        degree = getattr(degrees, axis)
        is_given = axis in config.parallel.model_fields_set
        if not is_given and (degree > 1) != (total >= least):
            told = f"{axis} {degree}" if degree > 1 else f"{axis} above 1"
            has = f"{total / 1e6:.3g}M" if total < LARGE_PARAMS else f"{total / 1e9:.3g}B"
            size = f"{least / 1e9:g}B"
            yield f"{told} is usual from {size} parameters on, and this model has {has}"
