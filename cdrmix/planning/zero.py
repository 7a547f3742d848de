"""Bytes that ZeRO-3 and offloading keep, and those that ZeRO-3 exchanges: DeepSpeed 0.19.8.

Read off runtime/zero/stage3.py, stage_1_and_2.py and partitioned_param_coordinator.py; the states
are equal to the byte in tests/parity/test_memory.py, the exchanged bytes within 1 % in
tests/distributed/test_communication.py.

Demands of a model's size alone: ZeRO stage, expert degree, axes of parallelism.

Rules of the product, so that a layout does not hang on the second digit of an estimate:
below 1e9 parameters ZeRO-1; up to 5e10 (the 1B and 4B variants) ZeRO-2 with accumulation; beyond
(40B) tensor and pipeline with ZeRO-1, activation and sequence checkpointing; from 5e11 (200B)
sequence and expert parallelism as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import GIB
from cdrmix.planning.counts import params_by_part
from cdrmix.planning.layout import Degrees

# DeepSpeed's defaults for ZeRO-3 (elements), which no shipped profile changes.
PERSISTENT_ELEMENTS = 100_000  # parameters up to here are kept whole between steps
REUSE_DISTANCE = 1_000_000_000  # what is read again after fewer elements is not let go
PREFETCH_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class States:
    """Bytes of what a rank holds between micro-steps: on its device, and for it on the host."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0


def zero3_states(
    groups: Iterable[Sequence[int]], *, data: int, element_bytes: int, gradient_bytes: int
) -> States:
    """States under ZeRO-3, nothing offloaded.

    Each parameter is cut by itself and padded to a multiple of the ranks. Small ones are kept whole
    beside their shares.

    Args:
        groups: elements of each parameter, by optimizer group.
        data: ranks that share parameters out.
        element_bytes: of a weight.
        gradient_bytes: of an accumulated gradient.
    """
    listed = [[-(-elements // data) for elements in group] for group in groups]
    shared = sum(map(sum, listed))
    steps = sum(map(_sub_groups, listed))  # each has a step count of its own
    whole = persistent(groups) if data > 1 else 0  # one rank's share is the whole
    return States(
        weights=element_bytes * (shared + whole),
        gradients=gradient_bytes * shared,
        optimizer=12 * shared + 4 * steps,
    )


def persistent(groups: Iterable[Sequence[int]]) -> int:
    """Elements of the parameters that are kept whole."""
    return sum(n for group in groups for n in group if n <= PERSISTENT_ELEMENTS)


def _sub_groups(shares: Sequence[int]) -> int:
    """Parts in which an optimizer group is stepped: closed as soon as they are large enough."""
    count = 0
    filled = 0
    for share in shares:
        filled += share
        if filled >= SUB_GROUP_ELEMENTS:
            count = count + 1
            filled = 0
    return count + (filled > 0)


def zero3_offloaded(
    states: States,
    *,
    shared: int,
    whole: int,
    element_bytes: int,
    optimizer: bool,
    parameters: bool,
) -> States:
    """States under ZeRO-3 with the optimizer, and the weights' shares, moved to the host.

    Args:
        states: nothing offloaded.
        shared: elements of this rank's shares.
        whole: elements that the device keeps whole, if the shares leave it.
        element_bytes: of a weight.
        optimizer: whether gradients, masters and moments move.
        parameters: whether the weights' shares move.
    """
    if optimizer:
        # float32 gradients for the optimizer, beside those that accumulate
        moved = states.gradients + 4 * shared + states.optimizer
        states = replace(states, gradients=0, optimizer=0, host=states.host + moved)
    if parameters:
        host = states.host + element_bytes * shared
        states = replace(states, weights=element_bytes * whole, host=host)
    return states


def offloaded(
    states: States,
    *,
    shared: int,
    largest: int,
    accumulated: int,
    element_bytes: int,
) -> States:
    """States under ZeRO-2 with the optimizer moved to the host.

    Args:
        states: nothing offloaded; gradients are those that stay.
        shared: elements of this rank's partitions.
        largest: elements of the largest parameter.
        accumulated: elements of the gradients that are summed over micro-steps on the host.
        element_bytes: of a weight.
    """
    host = states.optimizer + 4 * shared  # with float32 gradients
    # updated weights on their way back, and one gradient on its way
    host += element_bytes * (shared + largest + accumulated)
    return replace(states, optimizer=0, host=host)


def gathered(total: int, *, largest: int) -> int:
    """Elements that are whole at a time under ZeRO-3, at most, beside persistent ones.

    The last layers of the forward pass are not let go, because the backward pass reads them soon.

    Args:
        total: elements of all parameters that are not persistent.
        largest: of one parameter.
    """
    return min(total, REUSE_DISTANCE // 2 + PREFETCH_ELEMENTS + largest)


def gathered_in_a_micro_step(blocks: int, *, embedding: int, recompute: bool) -> int:
    """Elements that a rank gathers under ZeRO-3 in one micro-step, persistent ones left out.

    A block's parameter is gathered for the forward pass, and again for the backward pass unless it
    is read again within the reuse distance: between the two readings what lies above is read twice,
    with recomputation three times. The embedding is read first and as the head, and in the backward
    pass as the head and last; the head's two readings follow each other.

    Args:
        blocks: elements of all blocks.
        embedding: of the embedding; 0 if it is persistent.
        recompute: whether blocks are recomputed in the backward pass.
    """
    passes = 3 if recompute else 2
    kept = min(blocks, max(0, REUSE_DISTANCE // passes - embedding))
    again = 2 * embedding if blocks >= REUSE_DISTANCE else 0
    return blocks + (blocks - kept) + embedding + again


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


def profile_name(stage: int, degrees: Degrees, *, offloaded: bool = False) -> str:
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
    model = config.model
    given = config.parallel.expert
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
    is_staged = total_params >= STAGED_PARAMS
    is_sequenced = total_params >= SEQUENCED_PARAMS
    wanted = {"tensor": is_staged, "pipeline": is_staged, "sequence": is_sequenced}
    if is_sequenced:
        wanted["expert"] = config.model.moe is not None
    return all(
        (getattr(degrees, axis) > 1) == is_cut
        for axis, is_cut in wanted.items()
        if axis not in config.parallel.model_fields_set
    )
