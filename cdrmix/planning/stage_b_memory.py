"""Bytes per rank in Stage B, where ranks share out lessons and each holds the whole backbone.

Weights, gradients and optimizer are those of what Stage B trains, the backbone among them only if
it has a rate. The graph of all that a lesson reads stays until its one backward pass; blocks are
not recomputed. Activations are those of a backbone that is trained, for the largest lesson: a
frozen one keeps less, its adapters about as much more (tests/parity/test_stage_b_memory.py).
"""

from __future__ import annotations

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.counts import count, stage_b_params
from cdrmix.planning.layout import Arrangement, Degrees
from cdrmix.planning.lesson_size import lesson_tokens
from cdrmix.planning.memory import USABLE_SHARE, Memory, MemoryModel

_ALONE = Degrees(data=1, tensor=1, pipeline=1, sequence=1, expert=1)
_STATE_BYTES = 4  # fast weights are float32
# Of the buffers of Stage A's estimate, those that a lesson needs as well.
_BUFFERS = ("workspace", "logits", "fragmentation", "context")


def stage_b_memory(config: Config, cluster: Cluster, *, zero_stage: int) -> Memory | None:
    """Bytes on a rank in Stage B; None where the run has none.

    Args:
        config: of the run.
        cluster: all of whose ranks share out the lessons.
        zero_stage: of Stage A; Stage B takes 1 where that is 1, else 2.
    """
    stage_b, training = config.stage_b, config.training
    if stage_b is None or training.stage == "a":
        return None
    lesson, window = stage_b.training, stage_b.training.window_tokens or training.sequence_length
    sizes = stage_b_params(config.model, stage_b)
    backbone = count(config.model, window).total_params
    trained = sizes.total_params + (backbone if lesson.backbone_lr_scale > 0 else 0)
    one_window = training.model_copy(update={"sequence_length": window})
    model = MemoryModel(config.model_copy(update={"training": one_window}), cluster.device)
    reading = model.estimate(Arrangement(_ALONE, 1, 1, 1, activation_checkpointing=False))
    tokens = lesson_tokens(lesson, window_tokens=window, sequence_length=training.sequence_length)
    size, world = model.numerics.element_bytes, cluster.world_size
    summed = 4 * trained if size == 2 else 0  # in float32 beside those of the backward pass
    gradients = size * trained + summed if zero_stage <= 1 else 4 * -(-trained // world)
    rows = lesson.texts_per_lesson * lesson.group_size  # rollouts of the policy's phase
    return Memory(
        weights=size * (backbone + sizes.total_params),
        gradients=gradients,
        optimizer=12 * -(-trained // world),
        activations=reading.activations * tokens // window,
        buffers={
            "plastic_state": _STATE_BYTES * rows * sizes.plastic_state,
            **{kind: reading.buffers[kind] for kind in _BUFFERS if kind in reading.buffers},
        },
    )


def stage_b_reason(config: Config, cluster: Cluster, memory: Memory) -> str:
    """How much of a device Stage B fills, and what would take less where that is too much."""
    there = cluster.memory_bytes
    told = (
        f"Stage B: {memory.total / GIB:.1f} GiB of {there / GIB:.1f} GiB a device: "
        f"{memory.weights / GIB:.1f} of weights, as every rank holds the whole backbone, "
        f"{memory.activations / GIB:.1f} of activations of a lesson"
    )
    if memory.fits(cluster):
        return f"{told}: within the 90 % that a plan may fill"
    told += ": NOT within the 90 % that a plan may fill"
    least = (memory.total - memory.activations) / USABLE_SHARE
    if least < there:
        return f"{told}. Try fewer stage_b.training.texts_per_lesson or a smaller window_tokens"
    return (
        f"{told}. It takes devices of more than {least / GIB:.0f} GiB; training.stage = a leaves "
        "it out"
    )
