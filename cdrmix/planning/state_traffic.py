"""Bytes that DeepSpeed 0.19.8 reads and writes for gradients and optimizer on a rank.

Read off runtime/bf16_optimizer.py and runtime/zero/stage_1_and_2.py, operation by operation; a
tensor counts each time that it is read or written. tests/parity/test_moved_bytes.py counts the sum
of BF16_Optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdrmix.planning.layout import Group, Layout

_FLOAT32 = 4
# Of each element of a rank's partition in a step: AdamW reads master, two moments and gradient and
# writes three of them; the weight is cast from its master.
_ADAMW_BYTES = 7 * _FLOAT32


def accumulation_bytes(layout: Layout, held: Mapping[Group, int], *, element_bytes: int) -> float:
    """Bytes of a micro-step that add its gradients to those of the step.

    `held` are the elements of each optimizer group on the rank.

    ZeRO-1 in bf16 is BF16_Optimizer, to whose float32 sum each gradient is added as it is
    (parallel/gradient_sums.py): 2 + 4 + 4 bytes. In other types torch adds it in place. Under
    ZeRO-2 and ZeRO-3 it is copied into a bucket and scaled there; the rank's share of it is cast to
    float32 and added.
    """
    all_held = sum(held.values())
    size = element_bytes
    if layout.zero_stage == 1:
        return all_held * (size + 2 * _FLOAT32 if size < _FLOAT32 else 3 * size)
    cast_and_added = (size + _FLOAT32 if size < _FLOAT32 else 0) + 3 * _FLOAT32
    shared = _shared(layout, held)
    return all_held * 4 * size + shared * (2 * size + cast_and_added)


def optimizer_bytes(
    layout: Layout, held: Mapping[Group, int], *, element_bytes: int, clips: bool
) -> float:
    """Bytes of the end of a step: norm, clipping, AdamW, cast weights, zeroed gradients.

    BF16_Optimizer does all but AdamW and the cast on gradients of all elements that a rank holds,
    zeroes them twice, and reduces them in bf16, which casts them there and back. Another optimizer
    counts as AdamW.
    """
    all_held, shared = sum(held.values()), _shared(layout, held)
    stepped = shared * (_ADAMW_BYTES + _FLOAT32 + element_bytes)
    of_gradients = _FLOAT32 + (2 * _FLOAT32 if clips else 0)  # norm; scaled in place
    if layout.zero_stage == 1 and element_bytes < _FLOAT32:
        casts = 2 * (_FLOAT32 + element_bytes) if layout.degrees.stage_ranks > 1 else 0
        return stepped + all_held * (of_gradients + 2 * _FLOAT32 + casts)
    return stepped + shared * (of_gradients + _FLOAT32)


def _shared(layout: Layout, held: Mapping[Group, int]) -> float:
    """Elements of a rank's partitions."""
    degrees = layout.degrees
    return sum(elements / degrees.optimizer_ranks(group) for group, elements in held.items())
