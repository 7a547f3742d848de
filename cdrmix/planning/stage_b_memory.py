"""Size of a lesson of Stage B: tokens that are learned from with a graph kept.

Whole texts are read only where nothing is learned from the reading: when the agent plays. What the
other phases learn from is some segments of each text, two windows with a question, and rows of the
corpus.

Bytes per rank in Stage B, and how many stages the backbone is shared out over.

Data ranks share out lessons, and each holds the whole backbone, if it fits; of a frozen one that
does not, a pipeline of ranks hold the blocks. Everything beside the blocks is on every stage: the
embedding, which is the head, and the parts of Stage B but for the adapters, which lie with their
layers.

Weights, gradients and optimizer are those of what Stage B trains, the backbone among them only if
it has a rate. The graph of all that a lesson reads stays until its one backward pass; blocks are
not recomputed. Activations of the blocks are those of a backbone that is trained, for the largest
lesson: a frozen one keeps less, its adapters about as much more
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
from cdrmix.planning.layout import Degrees, Layout, border_values
from cdrmix.planning.memory import CONTEXT_BYTES, FRAGMENTED_SHARE, MemoryModel
from cdrmix.planning.rules import nearest_divisors

LARGEST_SEGMENT = 64  # tokens
SEGMENTS_PER_WINDOW = 4
# Segments of a text in all phases but the policy's: enough to confuse one with another.
TRAINED_SEGMENTS = 6
# One row of plain text for so many tasks.
TASKS_PER_ROW = 8
# Further windows for each task, of evidence, question and answer, for a backbone that learns: to
# answer from a window takes many times the examples that retrieval takes.
DRILLS_PER_TASK = 4
# Plain text is read over so many windows at most.
_WINDOWS_OF_TEXT = 4
# Tokens of a question, an answer and the marks around them, about.
_QUESTION_TOKENS = 64


def segment_tokens(window_tokens: int) -> int:
    """Length of the longest segment: several fit into a window, and one says one thing (tokens)."""
    return min(LARGEST_SEGMENT, window_tokens // SEGMENTS_PER_WINDOW)


def rows_of_text(texts: int) -> int:
    """Rows of plain text in a lesson of so many texts."""
    return max(1, texts // TASKS_PER_ROW)


def row_tokens(window_tokens: int, sequence_length: int) -> int:
    """Tokens of a row of plain text: of the corpus's row, those of its first windows."""
    return min(sequence_length, _WINDOWS_OF_TEXT * window_tokens)


def lesson_tokens(training: StageBTraining, *, window_tokens: int, sequence_length: int) -> int:
    """Tokens that the backbone reads in a lesson of the joint phase, the largest, at most.

    Args:
        training: of Stage B.
        window_tokens: tokens read at a time.
        sequence_length: tokens of a row of the corpus.
    """
    segment = segment_tokens(window_tokens)
    texts = training.texts_per_lesson
    window = min(window_tokens, TRAINED_SEGMENTS * (segment + 1) + _QUESTION_TOKENS)
    tokens = texts * (TRAINED_SEGMENTS * segment + 2 * window)
    plain = rows_of_text(texts) * row_tokens(window_tokens, sequence_length)
    if training.backbone_lr_scale > 0:  # it keeps its language, and learns to read windows, alone
        return tokens + 2 * plain + texts * DRILLS_PER_TASK * window
    return tokens + plain


_STATE_BYTES = 4  # fast weights are float32


@dataclass(frozen=True)
class StageBLayout:
    """Spread of Stage B over ranks.

    Attributes:
        degrees: data ranks share out the lessons, stages of a pipeline the backbone's blocks.
        memory: bytes on the fullest rank.
        fits: whether memory stays within the usable share of the device's, and of the host's.
        is_given: whether the configuration says so.
        whole: bytes on a rank that held the whole backbone.
    """

    degrees: Degrees
    memory: Memory
    fits: bool
    is_given: bool
    whole: Memory


def stage_b_layout(config: Config, cluster: Cluster, *, zero_stage: int) -> StageBLayout | None:
    """The layout with the fewest stages that fits, or, if none does, that takes least of a device;
    None where the run has no Stage B.

    Args:
        config: of the run; the number of stages that it gives is kept.
        cluster: all of whose ranks take part.
        zero_stage: of Stage A; Stage B takes 1 where that is 1, else 2.
    Raises:
        PlanError: if the stages that it gives are no layout of these ranks.
    """
    stage_b = config.stage_b
    if stage_b is None or config.training.stage == "a":
        return None
    check_stage_b(config, cluster.world_size)
    world = cluster.world_size
    given = stage_b.pipeline
    share = config.training.memory_share
    is_frozen = stage_b.training.backbone_lr_scale == 0
    most = config.model.num_layers if is_frozen else 1
    sizes = [given] if given else [n for n in range(1, most + 1) if world % n == 0]
    model = _Model(config, cluster, zero_stage)
    found = []
    for pipeline in sizes:
        found.append((model.estimate(pipeline), pipeline))
        if found[-1][0].fits(cluster, share=share):
            break
    memory, pipeline = found[-1]
    if not memory.fits(cluster, share=share):
        memory, pipeline = min(found, key=lambda each: each[0].total)
    whole = memory if pipeline == 1 else model.estimate(1)
    degrees = Degrees(data=world // pipeline, pipeline=pipeline)
    return StageBLayout(
        degrees, memory, memory.fits(cluster, share=share), given is not None, whole
    )


def stage_b_window(config: Config) -> int:
    """Tokens that are read at a time."""
    assert config.stage_b is not None, "Stage B has its section"
    return config.stage_b.training.window_tokens or config.training.sequence_length


def check_stage_b(config: Config, world_size: int) -> None:
    """Refuse stages of Stage B that are no layout of these ranks.

    Raises:
        PlanError: if `stage_b.pipeline` is given, and cannot be.
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
    """Estimates for one configuration on one cluster."""

    def __init__(self, config: Config, cluster: Cluster, zero_stage: int) -> None:
        assert config.stage_b is not None, "asked of a run with Stage B"
        self._config = config
        self._stage_b = config.stage_b
        self._cluster = cluster
        self._zero_stage, self._window = zero_stage, stage_b_window(config)
        self._is_frozen = config.stage_b.training.backbone_lr_scale == 0
        one_window = config.training.model_copy(update={"sequence_length": self._window})
        # lessons are single texts
        apart = config.data.model_copy(update={"segment_documents": False})
        lessons = config.model_copy(update={"training": one_window, "data": apart})
        self._memory = MemoryModel(lessons, cluster.device)
        self._tokens = lesson_tokens(
            config.stage_b.training,
            window_tokens=self._window,
            sequence_length=config.training.sequence_length,
        )
        self._whole = self._memory.on_stage(_layout(1), 0)
        self._params = Counter[int | None]()  # by block; None: those around them
        for parameter in parameters(config.model):
            self._params[parameter.layer] += parameter.num_elements

    def estimate(self, pipeline: int) -> Memory:
        """Bytes on the fullest rank of so many stages."""
        stages = range(pipeline)
        return max((self._on_stage(pipeline, stage) for stage in stages), key=lambda m: m.total)

    def _on_stage(self, pipeline: int, stage: int) -> Memory:
        lesson = self._stage_b.training
        size = self._memory.numerics.element_bytes
        layers = self._memory.stages(pipeline)[stage]
        data = self._cluster.world_size // pipeline
        backbone = self._params[None] + sum(self._params[layer] for layer in layers)
        sizes = stage_b_params(self._config.model, self._stage_b, layers)
        trained = sizes.total_params + (backbone if lesson.backbone_lr_scale > 0 else 0)
        summed = 4 * trained if size == 2 else 0  # in float32 beside those of the backward pass
        zero1 = self._zero_stage <= 1
        rows = lesson.texts_per_lesson * lesson.group_size  # rollouts of the policy's phase
        activations = self._activations(pipeline, stage) * self._tokens // self._window
        plastic_state = _STATE_BYTES * rows * sizes.plastic_state
        return Memory(
            weights=size * (backbone + sizes.total_params),
            gradients=size * trained + summed if zero1 else 4 * -(-trained // data),
            optimizer=12 * -(-trained // data),
            activations=activations,
            buffers={
                "plastic_state": plastic_state,
                **self._buffers(pipeline, stage, moving=activations + plastic_state),
            },
        )

    def _activations(self, pipeline: int, stage: int) -> int:
        """Bytes of a window: of the blocks here, of what enters them, and of all around them."""
        kept = self._memory.kept
        stages = self._memory.stages(pipeline)
        around = self._whole.activations - kept.of_blocks(_layout(1), 0)
        if self._is_frozen:  # so is the head, whose gradient would be formed with the loss
            around -= 4 * self._config.model.vocab_size * self._config.model.hidden_size
        entering = border_values(self._config.model, stages, Degrees())[stage] * self._window
        entering *= self._memory.numerics.element_bytes
        return int(around + kept.of_blocks(_layout(pipeline), stage)) + entering

    def _buffers(self, pipeline: int, stage: int, *, moving: int) -> dict[str, int]:
        """Bytes that come and go beside `moving`; logits are on every stage."""
        model = self._memory
        cut = _layout(pipeline)
        buffers = {
            "workspace": model.on_stage(cut, stage).buffers["workspace"],
            "logits": self._whole.buffers["logits"],
        }
        if self._is_frozen:
            buffers["workspace"] -= model.block_gradients(cut, stage)
            buffers["logits"] -= model.head_gradient(cut.degrees)
        if model.numerics.device == "cuda":
            buffers["fragmentation"] = int(FRAGMENTED_SHARE * (moving + sum(buffers.values())))
            buffers["context"] = CONTEXT_BYTES
        return buffers


def _layout(pipeline: int) -> Layout:
    return Layout(Degrees(pipeline=pipeline), 1, 1, 1, activation_checkpointing=False)


def stage_b_reason(config: Config, cluster: Cluster, layout: StageBLayout) -> str:
    """Tells how much of a device Stage B fills, and what would take less if that is too much."""
    there = cluster.memory_bytes
    memory = layout.memory
    share = config.training.memory_share
    held = "as every rank holds the whole backbone"
    if layout.degrees.pipeline > 1:
        why = f"whole it would take {layout.whole.total / GIB:.1f} GiB"
        if layout.is_given:
            why = "stage_b.pipeline as given"
        held = f"as {layout.degrees.pipeline} stages share out the frozen backbone ({why})"
    told = (
        f"Stage B: {memory.total / GIB:.1f} GiB of {there / GIB:.1f} GiB a device: "
        f"{memory.weights / GIB:.1f} of weights, {held}, "
        f"{memory.activations / GIB:.1f} of activations of a lesson"
    )
    if layout.fits:
        return f"{told}: within the {100 * share:g} % that a plan may fill"
    told += f": NOT within the {100 * share:g} % that a plan may fill"
    assert config.stage_b is not None, "Stage B has its section"
    if config.stage_b.training.backbone_lr_scale > 0:
        told += ". A frozen backbone (backbone_lr_scale = 0) can be shared out over stages"
    least = (memory.total - memory.activations) / share
    if least < there:
        return f"{told}. Try fewer stage_b.training.texts_per_lesson or a smaller window_tokens"
    return (
        f"{told}. It takes devices of more than {least / GIB:.0f} GiB; training.stage = a leaves "
        "it out"
    )
