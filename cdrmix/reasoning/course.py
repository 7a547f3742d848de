"""Stage B as its engine sees it: lessons of a reader, and what is learned from them."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.parallel.frozen_stages import chained
from cdrmix.reasoning import phases
from cdrmix.reasoning.lessons import Lesson, Lessons
from cdrmix.reasoning.parts import Part
from cdrmix.reasoning.phases import Collected, Metrics
from cdrmix.reasoning.reader import MemoryReader


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
        self.lessons, self._config = lessons, config

    def learning(self, phase: Phase) -> frozenset[Part]:
        """Parts that learn in a phase."""
        training = phases.section(self._config).training
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
