"""Lessons of Stage B: their making, their losses, and their order over steps and ranks.

A lesson is a batch of texts that one rank learns from in one micro-step. Except for the weights all
is a pure function of (phase, number): a lesson is the same on any rank and at any time. Losses and
metrics are means over a lesson, and those of a step means over its lessons.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint.fragments import Part
from cdrmix.config.reasoning import Phase, StageBConfig
from cdrmix.config.schema import Config
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import StateError
from cdrmix.models.backbone import Backbone
from cdrmix.parallel.frozen_stages import chained
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.state_rows import moved
from cdrmix.stage_b import phases
from cdrmix.stage_b.optimizer import PhasePlace, place_of
from cdrmix.stage_b.phases import Collected, LessonMetrics

_LEARNING: dict[Phase, frozenset[Part]] = {
    "memory": frozenset({"memory"}),
    "adapters": frozenset({"adapters"}),
    "policy": frozenset({"policy"}),
    "joint": frozenset({"memory", "adapters"}),
}
# Configuration keys of the fields of a loader's state that are not under stage_b.training.
_SETTINGS = {
    "manifest_digest": "data.path",
    "seed": "training.seed",
    "phases": "stage_b.training.{memory,adapter,joint,policy}_steps",
}


class Course:
    """A reader with its lessons and their losses.

    Args:
        reader: trained by the lessons.
        lessons: tasks and texts.
        config: weights of the losses, and rate of the backbone.

    Attributes:
        model: the reader, with its backbone.
        lessons: tasks and texts.
    """

    def __init__(self, reader: MemoryReader, lessons: Lessons, config: Config) -> None:
        self.model = reader
        self.lessons = lessons
        self._config = config

    def learning(self, phase: Phase) -> frozenset[Part]:
        """Parts that a phase trains; the others have no gradient."""
        scale = phases.stage_b_section(self._config).training.backbone_lr_scale
        with_backbone = phase == "joint" and scale > 0
        return _LEARNING[phase] | (frozenset({"backbone"}) if with_backbone else frozenset())

    def lesson(self, phase: Phase, number: int) -> Lesson:
        """Lesson `number` of a phase, from 0.

        Raises:
            DataError: if a shard of the corpus is missing or truncated.
        """
        return moved(self.lessons.lesson(phase, number), self.model.backbone.device)

    def loss(self, phase: Phase, lesson: Lesson) -> tuple[Tensor, LessonMetrics]:
        """Scalar loss of a lesson in a phase without rollouts, and metrics."""
        return chained(
            self.model.backbone,
            partial(phases.phase_loss, self.model, phase, lesson, self._config),
            # Stages of a pipeline must start the backward pass together.
            learning=(p for p in self.model.parameters() if p.requires_grad),
            learns_inside="adapters" in self.learning(phase),
        )

    def collect(self, lesson: Lesson) -> Collected:
        """Plays the episodes of a lesson of the policy phase.

        Raises:
            DataError: if a reward is not finite.
        """
        return phases.collect(self.model, lesson, self._config, self.lessons.tokenizer)

    def rollout_loss(self, collected: Collected) -> tuple[Tensor, LessonMetrics]:
        """Scalar loss of the present policy on collected episodes, and metrics with `kl` (nats)."""
        return phases.rollout_loss(self.model, collected, self._config)


def make_course(config: Config, backbone: Backbone, corpus: Corpus) -> Course:
    """Builds the lessons of a configuration, for a reader with initial values around a backbone.

    Args:
        config: with a Stage B.
        backbone: on this rank's device.
        corpus: tokenizer and plain text.
    """
    stage_b = phases.stage_b_section(config)
    lessons = Lessons(
        stage_b.training,
        seed=config.training.seed,
        window_tokens=stage_b.training.window_tokens or config.training.sequence_length,
        tokenizer=corpus.tokenizer,
        rows=corpus.train.rows,
        num_rows=corpus.train.num_samples,
    )
    reader = MemoryReader(
        backbone, stage_b, window_tokens=lessons.window_tokens, marks=lessons.marks
    )
    # From seed and names, so that all ranks have the same values without a collective.
    reader.initialize(seed=config.training.seed)
    return Course(reader.to(runtime.device()), lessons, config)


class LessonShare(NamedTuple):
    """One rank's share of the lessons of a step.

    Attributes:
        place: position of the step in its phase.
        lessons: lessons of this rank; in the policy phase the episodes collected from them.
    """

    place: PhasePlace
    lessons: list[Any]


class LessonLoader:
    """Shares lessons out over ranks, in order.

    Their numbers go on through all phases; the phase of a lesson follows from the step.

    Args:
        course: makes the lessons.
        stage_b: phases and lessons per step.
        rank: of this process among those that share the lessons out.
        world_size: number of these processes.
        manifest_digest: identifies the data set with the texts and the tokenizer.
        seed: of the lessons.
        is_shared: whether other ranks take the same lessons, and play their episodes with this one.

    Attributes:
        samples_consumed: lessons handed out, to all ranks.
    """

    def __init__(
        self,
        course: Course,
        stage_b: StageBConfig,
        *,
        rank: int,
        world_size: int,
        manifest_digest: str,
        seed: int,
        is_shared: bool = False,
    ) -> None:
        self._course = course
        self._training = stage_b.training
        self._rank = rank
        self._world_size = world_size
        self._manifest_digest = manifest_digest
        self._is_shared = is_shared
        self._seed = seed
        self._steps = 0
        self.samples_consumed = 0

    def next(self, step: int) -> LessonShare:
        """This rank's share of the next step.

        Args:
            step: of Stage B, from 0.
        Raises:
            DataError: if a lesson cannot be made, or a reward is not finite.
        """
        # From the number of the step, which checkpoints and metrics have, too.
        place = place_of(step, self._training)
        # Every rank counts the lessons of all: a position holds at any number of ranks.
        end = self.samples_consumed + self._training.lessons_per_step
        numbers = range(self.samples_consumed, end)[self._rank :: self._world_size]

        def make() -> list[Any]:
            return [self._course.lesson(place.phase, number) for number in numbers]

        if place.phase == "policy":
            # Ranks that share lessons play together: one without a lesson, because it could not be
            # made, would be waited for in the middle of an episode. So all of them fail here.
            lessons = runtime.together(make) if self._is_shared else make()
            lessons = [self._course.collect(lesson) for lesson in lessons]
        else:
            lessons = make()
        self.samples_consumed = end
        self._steps = step + 1
        return LessonShare(place, lessons)

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps; the same on every rank."""
        # With all that the texts follow from: a position means nothing in other lessons.
        position = {"samples_consumed": self.samples_consumed, "steps": self._steps}
        return position | self._identity()

    def _identity(self) -> dict[str, Any]:
        """Everything that determines the content of the lessons."""
        training = self._training
        return {
            "manifest_digest": self._manifest_digest,
            "seed": self._seed,
            "tasks": list(training.tasks),
            "length_ratios": list(training.length_ratios),
            "window_tokens": training.window_tokens,
            "texts_per_lesson": training.texts_per_lesson,
            "phases": [[phase, length] for phase, length in training.phases],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position, on any number of ranks.

        Args:
            state: of `state_dict`; fields that an older version did not save are not checked.
        Raises:
            StateError: if the lessons so far differ from those of this configuration.
        """
        differing = []
        for key, ours in self._identity().items():
            saved = state.get(key, ours)
            # An older version saved fewer fields; those count as equal.
            same = saved == ours
            if key == "phases" and not same:  # later phases may have other lengths
                same = _bounds(saved, state["steps"]) == _bounds(ours, state["steps"])
            if not same:
                name = _SETTINGS.get(key, f"stage_b.training.{key}")
                differing.append(f"{name} ({key}): {saved} there, {ours} here")
        if differing:
            raise StateError(
                f"The lessons of the checkpoint are others: {'; '.join(differing)}. Resume with "
                "the values of the checkpoint, or start Stage B in a new run directory"
            )
        self.samples_consumed = state["samples_consumed"]
        self._steps = state.get("steps", 0)

    def close(self) -> None:
        """Does nothing: no file is open."""


def _bounds(lengths: list[list[Any]], steps_done: int) -> list[tuple[str, int]]:
    """Phase and end of each stretch of the steps so far; a phase under way may become longer."""
    bounds = []
    end = 0
    for phase, length in lengths:
        if end >= steps_done:
            break
        end += length
        if length:
            # Cut at the steps done: what is not yet trained may change.
            bounds.append((str(phase), min(end, steps_done)))
    return bounds
