"""Memory of Stage B: tokens of a lesson, bytes per rank, number of pipeline stages.

A lesson keeps its graph until its one backward pass, so its activations follow from the tokens that
it learns from: some segments of each text, two windows with a question, and rows of the corpus.
Whole texts are read without a graph, when the agent plays.

Data ranks take different lessons. Each holds the whole backbone if it fits; a frozen backbone that
does not fit is split over pipeline stages. The embedding, which is also the head, and the parts of
Stage B are on every stage, but for the adapters, which are with their layers.

Weights, gradients and optimizer are those of the trained parameters, the backbone's among them if
it has a learning rate. Blocks are not recomputed. Activations are those of a trained backbone for
the largest lesson: a frozen one saves less, its adapters about as much more
(tests/parity/test_stage_b_memory.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cdrmix.config.reasoning import StageBTraining
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import GIB, Cluster, Memory
from cdrmix.planning.counts import parameters, stage_b_params
from cdrmix.planning.layout import Degrees, Layout, boundary_values
from cdrmix.planning.memory import CONTEXT_BYTES, FRAGMENTED_SHARE, MemoryModel
from cdrmix.planning.rules import nearest_divisors

LARGEST_SEGMENT = 64  # tokens
SEGMENTS_PER_WINDOW = 4
# Segments of a text in all phases but the policy's: enough that retrieval can pick a wrong one.
TRAINED_SEGMENTS = 6
# Tasks of a lesson for each row of plain text.
TASKS_PER_ROW = 8
# Further windows for each task, of evidence, question and answer, where the backbone is trained:
# learning to answer from a window takes many times the examples that retrieval takes.
DRILLS_PER_TASK = 4
# Largest number of windows of a row of plain text.
_WINDOWS_OF_TEXT = 4
# Approximate tokens of a question, an answer and the marks around them.
_QUESTION_TOKENS = 64
_STATE_BYTES = 4  # fast weights are float32


def segment_tokens(window_tokens: int) -> int:
    """Length of the longest segment, of which several fit into a window (tokens)."""
    return min(LARGEST_SEGMENT, window_tokens // SEGMENTS_PER_WINDOW)


def rows_of_text(texts: int) -> int:
    """Number of rows of plain text in a lesson of `texts` texts."""
    return max(1, texts // TASKS_PER_ROW)


def row_tokens(window_tokens: int, sequence_length: int) -> int:
    """Tokens of a row of plain text: the first windows of a row of the corpus."""
    return min(sequence_length, _WINDOWS_OF_TEXT * window_tokens)


def lesson_tokens(training: StageBTraining, *, window_tokens: int, sequence_length: int) -> int:
    """Upper bound of the tokens read in a lesson of the joint phase, the largest phase.

    Args:
        training: of Stage B.
        window_tokens: tokens of a window.
        sequence_length: tokens of a row of the corpus.
    """
    segment = segment_tokens(window_tokens)
    texts = training.texts_per_lesson
    window = min(window_tokens, TRAINED_SEGMENTS * (segment + 1) + _QUESTION_TOKENS)
    tokens = texts * (TRAINED_SEGMENTS * segment + 2 * window)
    plain = rows_of_text(texts) * row_tokens(window_tokens, sequence_length)
    if training.backbone_lr_scale > 0:
        # plain text twice more, so that it keeps its language, and drills without memory
        return tokens + 2 * plain + texts * DRILLS_PER_TASK * window
    return tokens + plain


@dataclass(frozen=True)
class StageBLayout:
    """Layout of Stage B with its memory.

    Attributes:
        degrees: data ranks for lessons, pipeline stages for the blocks of the backbone.
        memory: bytes on the fullest rank.
        fits: True if `memory` is within the usable share of device and host.
        is_given: True if the configuration sets the number of stages.
        whole: bytes on a rank that would hold the whole backbone.
    """

    degrees: Degrees
    memory: Memory
    fits: bool
    is_given: bool
    whole: Memory


def stage_b_layout(config: Config, cluster: Cluster, *, zero_stage: int) -> StageBLayout | None:
    """Chooses the fewest stages that fit, or, if none do, those with the least memory.

    Args:
        config: of the run; stage_b.pipeline fixes the number of stages.
        cluster: all its ranks take part.
        zero_stage: of Stage A; Stage B uses 1 if that is 1, else 2.
    Returns:
        The layout; None if the run has no Stage B.
    Raises:
        PlanError: if stage_b.pipeline is impossible on these ranks.
    """
    stage_b = config.stage_b
    if stage_b is None or config.training.stage == "a":
        return None
    check_stage_b(config, cluster.world_size)
    world = cluster.world_size
    share = config.training.memory_share
    is_frozen = stage_b.training.backbone_lr_scale == 0
    most = config.model.num_layers if is_frozen else 1
    # data ranks need equal pipelines, so stages divide the ranks
    sizes = [n for n in range(1, most + 1) if world % n == 0]
    if stage_b.pipeline is not None:
        sizes = [stage_b.pipeline]
    model = _Model(config, cluster, zero_stage)
    candidates = []
    for pipeline in sizes:
        candidates.append((model.estimate(pipeline), pipeline))
        if candidates[-1][0].fits(cluster, share=share):
            break
    memory, pipeline = candidates[-1]
    if not memory.fits(cluster, share=share):
        memory, pipeline = min(candidates, key=lambda each: each[0].total)
    whole = memory if pipeline == 1 else model.estimate(1)
    degrees = Degrees(data=world // pipeline, pipeline=pipeline)
    return StageBLayout(
        degrees=degrees,
        memory=memory,
        fits=memory.fits(cluster, share=share),
        is_given=stage_b.pipeline is not None,
        whole=whole,
    )


def stage_b_window(config: Config) -> int:
    """Tokens of a window in Stage B."""
    assert config.stage_b is not None, "Stage B has its section"
    return config.stage_b.training.window_tokens or config.training.sequence_length


def check_stage_b(config: Config, world_size: int) -> None:
    """Checks that `stage_b.pipeline`, if set, is possible on these ranks.

    Raises:
        PlanError: if it is not.
    """
    if config.stage_b is None or config.stage_b.pipeline is None or config.training.stage == "a":
        return
    pipeline = config.stage_b.pipeline
    layers = config.model.num_layers
    if pipeline > layers:
        raise PlanError(
            f"{config.name}: stage_b.pipeline = {pipeline} is more than model.num_layers = "
            f"{layers}, and a stage needs a block. Try at most that"
        )
    if world_size % pipeline:
        raise PlanError(
            f"{config.name}: stage_b.pipeline = {pipeline} does not divide the {world_size} ranks. "
            f"Try stage_b.pipeline = {nearest_divisors(world_size, pipeline)}, or leave it out"
        )


class _Model:
    """Memory estimates of Stage B for one configuration on one cluster."""

    def __init__(self, config: Config, cluster: Cluster, zero_stage: int) -> None:
        assert config.stage_b is not None, "estimated for runs with Stage B"
        self._config = config
        self._stage_b = config.stage_b
        self._cluster = cluster
        self._zero_stage = zero_stage
        self._window = stage_b_window(config)
        self._is_frozen = config.stage_b.training.backbone_lr_scale == 0
        one_window = config.training.model_copy(update={"sequence_length": self._window})
        # a lesson reads single texts, so there are no documents to separate
        data = config.data.model_copy(update={"segment_documents": False})
        lessons = config.model_copy(update={"training": one_window, "data": data})
        self._memory = MemoryModel(lessons, cluster.device)
        self._tokens = lesson_tokens(
            config.stage_b.training,
            window_tokens=self._window,
            sequence_length=config.training.sequence_length,
        )
        self._whole = self._memory.on_stage(_layout(1), 0)
        self._params = Counter[int | None]()  # by block; None: outside the blocks
        for parameter in parameters(config.model):
            self._params[parameter.layer] += parameter.num_elements

    def estimate(self, pipeline: int) -> Memory:
        """Bytes on the fullest rank of a number of stages."""
        training = self._stage_b.training
        size = self._memory.numerics.element_bytes
        data = self._cluster.world_size // pipeline
        rollouts = training.texts_per_lesson * training.group_size  # of the policy phase
        layout = _layout(pipeline)
        # Activations of a window: the blocks of a stage, their input, and all outside the blocks
        activations = self._memory.activations
        outside = self._whole.activations - activations.of_blocks(_layout(1), 0)
        if self._is_frozen:  # the head's gradient, which the loss forms, is absent too
            outside -= 4 * self._config.model.vocab_size * self._config.model.hidden_size
        stages = self._memory.stages(pipeline)
        boundaries = boundary_values(self._config.model, stages, Degrees())
        estimates = []
        for stage, layers in enumerate(stages):
            backbone = self._params[None] + sum(self._params[layer] for layer in layers)
            sizes = stage_b_params(self._config.model, self._stage_b, layers)
            trained = sizes.total_params + (0 if self._is_frozen else backbone)
            gradients = 4 * -(-trained // data)
            if self._zero_stage <= 1:
                # DeepSpeed accumulates half-precision gradients in float32, besides those of the
                # backward pass
                gradients = size * trained + (4 * trained if size == 2 else 0)
            plastic_state = _STATE_BYTES * rollouts * sizes.plastic_state
            entering = boundaries[stage] * self._window * size
            of_window = int(outside + activations.of_blocks(layout, stage)) + entering
            saved = of_window * self._tokens // self._window
            buffers = {
                "plastic_state": plastic_state,
                "workspace": self._memory.on_stage(layout, stage).buffers["workspace"],
                "logits": self._whole.buffers["logits"],  # on every stage
            }
            if self._is_frozen:
                buffers["workspace"] -= self._memory.block_gradients(layout, stage)
                buffers["logits"] -= self._memory.head_gradient(layout.degrees)
            if self._cluster.device == "cuda":
                moving = saved + sum(buffers.values())
                buffers["fragmentation"] = int(FRAGMENTED_SHARE * moving)
                buffers["context"] = CONTEXT_BYTES
            memory = Memory(
                weights=size * (backbone + sizes.total_params),
                gradients=gradients,
                optimizer=12 * -(-trained // data),
                activations=saved,
                buffers=buffers,
            )
            estimates.append(memory)
        return max(estimates, key=lambda memory: memory.total)


def _layout(pipeline: int) -> Layout:
    return Layout(Degrees(pipeline=pipeline), 1, 1, 1, activation_checkpointing=False)


def stage_b_reason(config: Config, cluster: Cluster, layout: StageBLayout) -> str:
    """Describes the memory of Stage B on a device, with advice where it does not fit."""
    memory = layout.memory
    share = config.training.memory_share
    held = "as every rank holds the whole backbone"
    if layout.degrees.pipeline > 1:
        why = f"whole it would take {layout.whole.total / GIB:.1f} GiB"
        if layout.is_given:
            why = "stage_b.pipeline as given"
        held = f"as {layout.degrees.pipeline} stages share out the frozen backbone ({why})"
    text = (
        f"Stage B: {memory.total / GIB:.1f} GiB of {cluster.memory_bytes / GIB:.1f} GiB a device: "
        f"{memory.weights / GIB:.1f} of weights, {held}, "
        f"{memory.activations / GIB:.1f} of activations of a lesson"
    )
    if layout.fits:
        return f"{text}: within the {100 * share:g} % that a plan may fill"
    text += f": NOT within the {100 * share:g} % that a plan may fill"
    assert config.stage_b is not None, "described for runs with Stage B"
    if config.stage_b.training.backbone_lr_scale > 0:
        text += ". A frozen backbone (backbone_lr_scale = 0) can be shared out over stages"
    least = (memory.total - memory.activations) / share
    if least < cluster.memory_bytes:
        return f"{text}. Try fewer stage_b.training.texts_per_lesson or a smaller window_tokens"
    return (
        f"{text}. It takes devices of more than {least / GIB:.0f} GiB; training.stage = a leaves "
        "it out"
    )
