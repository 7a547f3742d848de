"""Lessons as the loop reads them: the steps of Stage B in order, shared out over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from cdrmix import runtime
from cdrmix.config.reasoning import StageBConfig
from cdrmix.engines.course import Course
from cdrmix.engines.stage_b_optim import Place, place_of
from cdrmix.errors import StateError


class Share(NamedTuple):
    """This rank's share of a step.

    Attributes:
        place: of the step.
        lessons: of this rank; in the policy's phase the episodes collected from them.
    """

    place: Place
    lessons: list[Any]


class Lessons:
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
        self._course, self._training = course, stage_b.training
        self._rank, self._world_size = rank, world_size
        self._manifest_digest, self._is_shared = manifest_digest, is_shared
        self._seed, self._steps = seed, 0
        self.samples_consumed = 0

    def next(self, step: int) -> Share:
        """This rank's share of the next step.

        Args:
            step: of Stage B, from 0.
        Raises:
            DataError: if a lesson cannot be made, or a reward is not finite.
        """
        place = place_of(step, self._training)
        begin, end = self.samples_consumed, self.samples_consumed + self._training.lessons_per_step
        mine = range(begin, end)[self._rank :: self._world_size]

        def made() -> list[Any]:
            return [self._course.lesson(place.phase, number) for number in mine]

        plays = place.phase == "policy"
        # who has no lesson would be waited for in the middle of an episode
        lessons = runtime.together(made) if plays and self._is_shared else made()
        if plays:
            lessons = [self._course.collect(lesson) for lesson in lessons]
        self.samples_consumed, self._steps = end, step + 1
        return Share(place, lessons)

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
    bounds, end = [], 0
    for phase, length in phases:
        if end >= steps_done:
            break
        end += length
        if length:
            bounds.append((str(phase), min(end, steps_done)))
    return bounds
