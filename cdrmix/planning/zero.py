"""ZeRO-3 and offloading in DeepSpeed 0.19.8 (memory and traffic), and layout rules by model size.

Memory and traffic are read off runtime/zero/stage3.py, stage_1_and_2.py and
partitioned_param_coordinator.py. States are equal to the byte in tests/parity/test_memory.py,
communicated bytes within 1 % in tests/distributed/test_communication.py.

The rules by size keep the choice of a layout independent of the second digit of an estimate: below
1e9 parameters ZeRO-1; up to 5e10 (the 1B and 4B variants) ZeRO-2 with accumulation; beyond (40B)
tensor and pipeline parallelism with ZeRO-1, activation and sequence checkpointing; from 5e11 (200B)
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
PERSISTENT_ELEMENTS = 100_000  # parameters up to this size stay whole between steps
REUSE_DISTANCE = 1_000_000_000  # a parameter read again within this many stays gathered
PREFETCH_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class States:
    """Bytes of a rank's states between micro-steps, on its device and on its host."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0


def zero3_states(
    groups: Iterable[Sequence[int]], *, data: int, element_bytes: int, gradient_bytes: int
) -> States:
    """States under ZeRO-3 without offloading.

    Each parameter is partitioned by itself and padded to a multiple of the ranks. Small parameters
    stay whole besides their partitions.

    Args:
        groups: elements of each parameter, by optimizer group.
        data: ranks that partition the parameters.
        element_bytes: of a weight.
        gradient_bytes: of an accumulated gradient.
    """
    partitions = [[-(-elements // data) for elements in group] for group in groups]
    shared = sum(map(sum, partitions))
    sub_groups = 0  # stepped one by one, each with a step count; closed as soon as large enough
    for group in partitions:
        filled = 0
        for elements in group:
            filled += elements
            if filled >= SUB_GROUP_ELEMENTS:
                sub_groups += 1
                filled = 0
        sub_groups += filled > 0
    whole = persistent(groups) if data > 1 else 0  # the partition of a single rank is whole already
    return States(
        weights=element_bytes * (shared + whole),
        gradients=gradient_bytes * shared,
        # float32 master, mean and square of each element
        optimizer=12 * shared + 4 * sub_groups,
    )


def persistent(groups: Iterable[Sequence[int]]) -> int:
    """Elements of the parameters that stay whole on every rank."""
    return sum(n for group in groups for n in group if n <= PERSISTENT_ELEMENTS)


def zero3_offloaded(
    states: States,
    *,
    shared: int,
    whole: int,
    element_bytes: int,
    optimizer: bool,
    parameters: bool,
) -> States:
    """States under ZeRO-3 with the optimizer, the weights' partitions, or both on the host.

    Args:
        states: without offloading.
        shared: elements of this rank's partitions.
        whole: elements that stay whole on the device if the partitions move.
        element_bytes: of a weight.
        optimizer: True if gradients, masters and moments move.
        parameters: True if the weights' partitions move.
    """
    if optimizer:
        # float32 gradients for the optimizer, besides the accumulated ones
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
    """States under ZeRO-2 with the optimizer on the host.

    Args:
        states: without offloading; the gradients are those that stay on the device.
        shared: elements of this rank's partitions.
        largest: elements of the largest parameter.
        accumulated: elements of the gradients that the host sums over micro-steps.
        element_bytes: of a weight.
    """
    host = states.optimizer + 4 * shared  # with float32 gradients
    # transfer buffers: updated weights, and one gradient
    host += element_bytes * (shared + largest + accumulated)
    return replace(states, optimizer=0, host=host)


def gathered(total: int, *, largest: int) -> int:
    """Upper bound of the elements that ZeRO-3 has gathered at a time, persistent ones left out.

    The last layers of the forward pass stay gathered, because the backward pass reads them soon.

    Args:
        total: elements of all parameters that are not persistent.
        largest: elements of the largest parameter.
    """
    return min(total, REUSE_DISTANCE // 2 + PREFETCH_ELEMENTS + largest)


def gathered_in_a_micro_step(blocks: int, *, embedding: int, recompute: bool) -> int:
    """Elements that a rank gathers under ZeRO-3 in one micro-step, persistent ones left out.

    A block's parameter is gathered for the forward pass, and again for the backward pass unless
    both uses are within the reuse distance: in between, the layers above are read twice, with
    recomputation three times. The embedding is read first and as the head, in the backward pass as
    the head and last; the two uses as the head follow each other.

    Args:
        blocks: elements of all blocks.
        embedding: elements of the embedding; 0 if it is persistent.
        recompute: True if blocks are recomputed in the backward pass.
    """
    passes = 3 if recompute else 2
    reused = min(blocks, max(0, REUSE_DISTANCE // passes - embedding))
    again = 2 * embedding if blocks >= REUSE_DISTANCE else 0
    return blocks + (blocks - reused) + embedding + again


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


def zero_stage(total_params: int, *, data: int, pipeline: int) -> tuple[int, str]:
    """Chooses ZeRO stage 1 or 2, with the reason."""
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
    """Chooses the tokens of a sample that are recomputed together (None: all), with the reason."""
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
    """Chooses the expert degree for the other degrees of a layout, with the reason."""
    model = config.model
    if config.parallel.expert is not None:
        return config.parallel.expert, "parallel.expert as given"
    if model.moe is None:
        return 1, "a dense model has no experts"
    expert_bytes = params_by_part(model)["experts"] // degrees.model_ranks * EXPERT_BYTES_PER_PARAM
    gib = expert_bytes / GIB
    amount = f"{gib:,.0f}" if gib > 10 else f"{gib:.2g}"
    size = f"all experts take {amount} GiB of weights and gradients"
    if expert_bytes <= WHOLE_EXPERT_BYTES:
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
    """True if the axes that the configuration leaves open are used as usual for the size."""
    is_staged = total_params >= STAGED_PARAMS
    is_sequenced = total_params >= SEQUENCED_PARAMS
    usual = {"tensor": is_staged, "pipeline": is_staged, "sequence": is_sequenced}
    if is_sequenced:
        usual["expert"] = config.model.moe is not None
    return all(
        (getattr(degrees, axis) > 1) == is_cut
        for axis, is_cut in usual.items()
        if axis not in config.parallel.model_fields_set
    )
