"""Bytes per rank in Stage B, where ranks share out lessons and each holds the whole backbone.

Weights, gradients and optimizer are those of what Stage B trains, the backbone among them only if
it has a rate. A lesson's texts are read window by window, and the graph of all their windows stays
until its one backward pass; blocks are not recomputed. Activations are those of a backbone that is
trained: a frozen one keeps less, and its adapters about as much more (0.75 to 1.1 of this was
measured, tests/parity/test_stage_b_memory.py).
"""

from __future__ import annotations

from cdrmix.config.schema import Config
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.counts import count, stage_b_params
from cdrmix.planning.layout import Arrangement, Degrees
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
    reading = model.estimate(  # of one window of each text
        Arrangement(_ALONE, 1, lesson.texts_per_lesson, 1, activation_checkpointing=False)
    )
    size, world = model.numerics.element_bytes, cluster.world_size
    summed = 4 * trained if size == 2 else 0  # in float32 beside those of the backward pass
    gradients = size * trained + summed if zero_stage <= 1 else 4 * -(-trained // world)
    rows = lesson.texts_per_lesson * lesson.group_size  # rollouts of the policy's phase
    return Memory(
        weights=size * (backbone + sizes.total_params),
        gradients=gradients,
        optimizer=12 * -(-trained // world),
        activations=reading.activations * max(lesson.length_ratios),
        buffers={
            "plastic_state": _STATE_BYTES * rows * sizes.plastic_state,
            **{kind: reading.buffers[kind] for kind in _BUFFERS if kind in reading.buffers},
        },
    )


def stage_b_reason(config: Config, cluster: Cluster, memory: Memory) -> str:
    """How much of a device Stage B fills, and what would take less where that is too much."""
    assert config.stage_b is not None, "a reasoning variant has its section"
    lesson, there = config.stage_b.training, cluster.memory_bytes
    windows = lesson.texts_per_lesson * max(lesson.length_ratios)
    told = (
        f"Stage B: {memory.total / GIB:.1f} GiB of {there / GIB:.1f} GiB a device: "
        f"{memory.weights / GIB:.1f} of weights, as every rank holds the whole backbone, "
        f"{memory.activations / GIB:.1f} of a lesson of {windows} windows"
    )
    if memory.fits(cluster):
        return f"{told}: within the 90 % that a plan may fill"
    told += ": NOT within the 90 % that a plan may fill"
    fixed = memory.total - memory.activations
    room = USABLE_SHARE * there - fixed
    most = int(room * windows / memory.activations) if room > 0 else 0
    if most:
        return (
            f"{told}. At most {most} windows fit: try fewer stage_b.training.texts_per_lesson, "
            "shorter length_ratios, or a smaller window_tokens"
        )
    needed = (fixed + memory.activations / windows) / USABLE_SHARE / GIB
    return f"{told}. It takes devices of {needed:.0f} GiB; training.stage = a leaves it out"
