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
        is_shared: bool = False,
    ) -> None:
        self._course, self._training = course, stage_b.training
        self._rank, self._world_size = rank, world_size
        self._manifest_digest, self._is_shared = manifest_digest, is_shared
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
        self.samples_consumed = end
        return Share(place, lessons)

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps; the same on every rank."""
        return {
            "samples_consumed": self.samples_consumed,
            "manifest_digest": self._manifest_digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, on whatever ranks.

        Raises:
            StateError: if the lessons so far were of another data set.
        """
        saved = state.get("manifest_digest", self._manifest_digest)  # of older versions: not told
        if saved != self._manifest_digest:
            raise StateError(
                f"The lessons of the checkpoint are of another data set: manifest_digest {saved} "
                f"there, {self._manifest_digest} here. Resume with the data.path of the "
                "checkpoint, or start Stage B in a new run directory"
            )
        self.samples_consumed = state["samples_consumed"]

    def close(self) -> None:
        """Nothing is open."""
