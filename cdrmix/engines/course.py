"""What Stage B trains and by what: the contract between its engine and its content."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from cdrmix import runtime
from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.engines.stage_a import Corpus
from cdrmix.models.backbone import Backbone
from cdrmix.reasoning.course import ReaderCourse
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.parts import Part
from cdrmix.reasoning.reader import MemoryReader

Metrics = dict[str, Tensor]


class Collected(Protocol):
    """Episodes of a lesson, played by the present policy, and means over them."""

    @property
    def metrics(self) -> Metrics: ...


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

    def loss(self, phase: Phase, lesson: Any) -> tuple[Tensor, Metrics]:
        """Loss of a lesson in a phase without rollouts, a scalar, and what it measured."""

    def collect(self, lesson: Any) -> Collected:
        """Episodes of a lesson of the policy's phase.

        Raises DataError if a reward is not finite.
        """

    def rollout_loss(self, collected: Any) -> tuple[Tensor, Metrics]:
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
