"""Bytes that ZeRO-3 and offloading keep, and those that ZeRO-3 exchanges: DeepSpeed 0.19.8.

Read off runtime/zero/stage3.py, stage_1_and_2.py and partitioned_param_coordinator.py; the states
are equal to the byte in tests/parity/test_memory.py, the exchanged bytes within 1 % in
tests/distributed/test_communication.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    count, filled = 0, 0
    for share in shares:
        filled += share
        if filled >= SUB_GROUP_ELEMENTS:
            count, filled = count + 1, 0
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
