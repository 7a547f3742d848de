"""Stage B as its engine sees it: lessons of a reader, and what is learned from them.

What Stage B trains and by what: the contract between its engine and its content.

Lessons as the loop reads them: the steps of Stage B in order, shared out over ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

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
from cdrmix.stage_b import phases
from cdrmix.stage_b.optimizer import ParameterPlace, place_of
from cdrmix.stage_b.phases import Collected, Metrics


class ReaderCourse:
    """Lessons for a reader.

    Args:
        reader: learns.
        lessons: what from.
        config: weights of the losses, and whether the backbone learns too.

    Attributes:
        model: the reader.
        lessons: what from.
    """

    def __init__(self, reader: MemoryReader, lessons: Lessons, config: Config) -> None:
        self.model = reader
        self.lessons = lessons
        self._config = config

    def learning(self, phase: Phase) -> frozenset[Part]:
        """Parts that learn in a phase."""
        training = phases.metrics_section(self._config).training
        return phases.learning(phase, with_backbone=training.backbone_lr_scale > 0)

    def lesson(self, phase: Phase, number: int) -> Lesson:
        """Lesson `number` of a phase, from 0.

        Raises:
            DataError: if a shard of the corpus is missing or truncated.
        """
        return self.lessons.lesson(phase, number).to(self.model.backbone.device)

    def loss(self, phase: Phase, lesson: Lesson) -> tuple[Tensor, Metrics]:
        """Loss of a lesson in a phase without rollouts, and what it measured."""
        return chained(
            self.model.backbone,
            partial(phases.phase_loss, self.model, phase, lesson, self._config),
            learning=(p for p in self.model.parameters() if p.requires_grad),
            learns_inside="adapters" in self.learning(phase),
        )

    def collect(self, lesson: Lesson) -> Collected:
        """Episodes of a lesson of the policy's phase.

        Raises:
            DataError: if a reward is not finite.
        """
        return phases.collect(self.model, lesson, self._config, self.lessons.tokenizer)

    def rollout_loss(self, collected: Collected) -> tuple[Tensor, Metrics]:
        """Loss of the present policy on collected episodes, and what it measured."""
        return phases.rollout_loss(self.model, collected, self._config)


LessonMetrics = dict[str, Tensor]


class CollectedEpisodes(Protocol):
    """Episodes of a lesson, played by the present policy, and means over them."""

    @property
    def metrics(self) -> LessonMetrics: ...


class Course(Protocol):
    """Lessons for a reader. A lesson is a batch of texts, learned from as a whole on one rank.

    But for the weights all is a pure function of (phase, number): a lesson is the same on whatever
    rank and whenever it is taken. Losses and metrics are means over the lesson, and those of a step
    means over its lessons.
    """

    @property
    def model(self) -> nn.Module:
        """The reader, with its backbone."""

    def learning(self, phase: Phase) -> frozenset[Part]:
        """Parts that learn in a phase."""

    def lesson(self, phase: Phase, number: int) -> Any:
        """Lesson `number` of a phase, from 0. Raises DataError if it cannot be made."""

    def loss(self, phase: Phase, lesson: Any) -> tuple[Tensor, LessonMetrics]:
        """Loss of a lesson in a phase without rollouts, a scalar, and what it measured."""

    def collect(self, lesson: Any) -> CollectedEpisodes:
        """Episodes of a lesson of the policy's phase.

        Raises DataError if a reward is not finite.
        """

    def rollout_loss(self, collected: Any) -> tuple[Tensor, LessonMetrics]:
        """Loss of the present policy on them, and what it measured, `kl` among it (nats)."""


def make_course(config: Config, backbone: Backbone, corpus: Corpus) -> ReaderCourse:
    """Lessons of a configuration for a reader around a backbone, with initial values.

    Args:
        config: with a Stage B.
        backbone: on this rank's device.
        corpus: gives the tokenizer, and plain text.
    """
    assert config.stage_b is not None, "Stage B has its section"
    lessons = Lessons(
        config.stage_b.training,
        seed=config.training.seed,
        window_tokens=config.stage_b.training.window_tokens or config.training.sequence_length,
        tokenizer=corpus.tokenizer,
        rows=corpus.train.rows,
        num_rows=corpus.train.num_samples,
    )
    reader = MemoryReader(
        backbone, config.stage_b, window_tokens=lessons.window_tokens, marks=lessons.marks
    )
    reader.initialize(seed=config.training.seed)
    return ReaderCourse(reader.to(runtime.device()), lessons, config)


class LessonShare(NamedTuple):
    """This rank's share of a step.

    Attributes:
        place: of the step.
        lessons: of this rank; in the policy's phase the episodes collected from them.
    """

    place: ParameterPlace
    lessons: list[Any]


class LessonLoader:
    """Lessons in order, as the loop reads them.

    Their numbers go on through all phases; which phase a lesson is of follows from the step.

    Args:
        course: makes the lessons.
        stage_b: phases and lessons per step.
        rank: of this process among those that share lessons out.
        world_size: how many they are.
        manifest_digest: names the data set that texts and tokenizer are of.
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
        place = place_of(step, self._training)
        begin = self.samples_consumed
        end = self.samples_consumed + self._training.lessons_per_step
        mine = range(begin, end)[self._rank :: self._world_size]

        def made() -> list[Any]:
            return [self._course.lesson(place.phase, number) for number in mine]

        plays = place.phase == "policy"
        # who has no lesson would be waited for in the middle of an episode
        lessons = runtime.together(made) if plays and self._is_shared else made()
        if plays:
            lessons = [self._course.collect(lesson) for lesson in lessons]
        self.samples_consumed = end
        self._steps = step + 1
        return LessonShare(place, lessons)

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps; the same on every rank."""
        position = {"samples_consumed": self.samples_consumed, "steps": self._steps}
        return position | self._identity()

    def _identity(self) -> dict[str, Any]:
        """All that says what a lesson is, and what is learned from it."""
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
        """Go on from there, on whatever ranks.

        Args:
            state: of `state_dict`; one of an older version tells less, and is checked by that.
        Raises:
            StateError: if the lessons so far were others than these would be.
        """
        names = {
            "manifest_digest": "data.path",
            "seed": "training.seed",
            "phases": "stage_b.training.{memory,adapter,joint,policy}_steps",
        }
        differing = []
        for key, ours in self._identity().items():
            saved = state.get(key, ours)
            same = saved == ours
            if key == "phases" and not same:  # those to come may have other lengths
                same = _bounds(saved, state["steps"]) == _bounds(ours, state["steps"])
            if not same:
                name = names.get(key, f"stage_b.training.{key}")
                differing.append(f"{name} ({key}): {saved} there, {ours} here")
        if differing:
            raise StateError(
                f"The lessons of the checkpoint are others: {'; '.join(differing)}. Resume with "
                "the values of the checkpoint, or start Stage B in a new run directory"
            )
        self.samples_consumed = state["samples_consumed"]
        self._steps = state.get("steps", 0)

    def close(self) -> None:
        """Nothing is open."""


def _bounds(phases: list[list[Any]], steps_done: int) -> list[tuple[str, int]]:
    """Phase and end of each stretch of the steps so far; a phase under way may become longer."""
    bounds = []
    end = 0
    for phase, length in phases:
        if end >= steps_done:
            break
        end += length
        if length:
            bounds.append((str(phase), min(end, steps_done)))
    return bounds
