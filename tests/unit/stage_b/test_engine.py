"""Stage B's lessons over steps and ranks, and the steps of its policy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cdrmix.errors import StateError
from cdrmix.stage_b.engine import LessonLoader, LessonResult, StageB
from cdrmix.stage_b.optimizer import (
    Clip,
)
from cdrmix.stage_b.phases import StepMean
from tests.unit.stage_b.short_phases import config, section


@pytest.mark.usefixtures("one_rank")
def test_a_metric_is_the_mean_over_the_lessons_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdrmix.runtime.all_gather_object", lambda own: [own])
    losses = [{"loss": torch.tensor(value)} for value in (1.0, 2.0, 6.0)]
    lessons = [losses[0], losses[1], {**losses[2], "recall": torch.tensor(0.5)}]
    clip = Clip(config())
    stage: Any = StageB(None, section(config()), clip, None, None, 0, 6, "")  # type: ignore[arg-type]
    result = LessonResult("memory", lessons, {"memory": 1.0}, 1, 0.0)
    metrics = stage.measure(None, result)
    assert (metrics["stage_b/loss"], metrics["stage_b/recall"]) == (3.0, 0.5)


class Moving:
    """A course whose policy is `moved` from where it played, by a quarter for each step taken."""

    moved = 0.0

    def rollout_loss(self, collected: Any) -> tuple[torch.Tensor, dict[str, StepMean]]:
        loss, steps = torch.tensor(6.0), torch.tensor(10)
        metrics = {
            "loss": StepMean(loss, torch.tensor(collected.num_learned)),
            "kl": StepMean(10 * torch.tensor(self.moved), steps),
        }
        return loss, metrics


def policy_step(
    monkeypatch: pytest.MonkeyPatch, learned: list[int], **policy: Any
) -> tuple[list[float], dict[str, float]]:
    """Scales of the losses of each optimizer step, and the metrics."""
    settings = section(config())
    changed = settings.policy.model_copy(update=policy)
    settings = settings.model_copy(update={"policy": changed})
    course, scales = Moving(), []
    stage: Any = StageB(course, settings, Clip(config()), None, None, 0, 6, "")  # type: ignore[arg-type]
    topology = SimpleNamespace(counts_tokens=True, degrees=SimpleNamespace(data=2))
    run: Any = SimpleNamespace(engine=None, topology=topology)

    def learn(engine: Any, losses: Any, slots: int, scale: float) -> None:
        assert [loss.item() for loss, _ in losses] == [6.0] * len(learned)
        scales.append(scale)
        course.moved += 0.25

    monkeypatch.setattr(stage, "_learn", learn)
    monkeypatch.setattr("cdrmix.runtime.all_gather_object", lambda own: [own])
    played = [SimpleNamespace(num_learned=number, metrics={}) for number in learned]
    metrics, epochs = stage._learn_policy(run, played, 3)
    result = LessonResult("policy", metrics, {"policy": 1.0}, epochs, 0.0)
    return scales, stage.measure(run, result)


@pytest.mark.usefixtures("one_rank")
def test_steps_of_all_lessons_weigh_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [5, 1, 0], epochs=1)
    # DeepSpeed divides by 3 micro-steps and 2 data ranks
    assert scales == [3 * 2 / 6]
    assert metrics["policy/loss"] == 3 * 6.0 / 6


@pytest.mark.usefixtures("one_rank")
def test_the_divergence_told_is_that_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [5, 1], epochs=3, kl_target=1e6)
    assert (len(scales), metrics["policy/epochs"], metrics["policy/kl"]) == (3, 3, 0.75)
    scales, metrics = policy_step(monkeypatch, [5, 1], epochs=8, kl_target=0.4, kl_margin=1.0)
    assert (len(scales), metrics["policy/epochs"], metrics["policy/kl"]) == (2, 2, 0.5)


@pytest.mark.usefixtures("one_rank")
def test_where_no_rollout_says_anything_no_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [0, 0])
    assert scales == [] and metrics["policy/epochs"] == 0
    assert (metrics["policy/loss"], metrics["policy/kl"], metrics["grad_norm"]) == (0, 0, 0)


class Numbers:
    """A course whose lessons are their numbers."""

    def lesson(self, phase: str, number: int, *, lengths: Any) -> int:
        return number

    def collect(self, lesson: int) -> int:
        return -lesson


def test_ranks_share_out_every_lesson_once_and_a_position_is_one_number() -> None:
    training, course = section(config("lessons_per_step=3")).training, Numbers()
    ranks: list[Any] = [
        LessonLoader(course, training, rank=rank, world_size=2, manifest_digest="1", seed=0)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for step in range(5):
        taken = sorted(lesson for lessons in ranks for lesson in lessons.next(step))
        assert taken == [3 * step, 3 * step + 1, 3 * step + 2]
    alone: Any = LessonLoader(course, training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]
    alone.load_state_dict(ranks[1].state_dict())
    assert alone.next(5) == [-15, -16, -17], "those of the policy's phase are played"
    with pytest.raises(StateError, match=r"data.path \(manifest_digest\): 2 there, 1 here"):
        alone.load_state_dict(ranks[1].state_dict() | {"manifest_digest": "2"})


@pytest.mark.parametrize(
    ("changed", "seed", "named"),
    [
        ({}, 1, "training.seed"),
        ({"tasks": ("logic",)}, 0, "stage_b.training.tasks"),
        ({"length_ratios": (2,)}, 0, "stage_b.training.length_ratios"),
        ({"texts_per_lesson": 1}, 0, "stage_b.training.texts_per_lesson"),
        ({"answer_tokens": 20}, 0, "stage_b.training.answer_tokens"),
        ({"segment_tokens": 12}, 0, "stage_b.training.segment_tokens"),
        ({"question": "first"}, 0, "stage_b.training.question"),
        ({"task_file_share": 0.9}, 0, "stage_b.training.task_file_share"),
        ({"digest": "b" * 64}, 0, "stage_b.training.task_file (task_file): aaa"),
        ({"digest": None}, 0, "stage_b.training.task_file (task_file): aaa"),
        ({"memory_steps": 4}, 0, "stage_b.training.{memory,adapter,joint,policy}_steps"),
    ],
)
def test_stage_b_goes_on_with_the_lessons_that_it_began_with(
    changed: dict[str, Any], seed: int, named: str
) -> None:
    def lessons(seed: int = 0, *, digest: str | None = "a" * 64, **changed: Any) -> Any:
        stage_b = section(config("memory_steps=5", "joint_steps=2"))
        training = stage_b.training.model_copy(update=changed)
        return LessonLoader(
            Numbers(),  # type: ignore[arg-type]
            training,
            rank=0,
            world_size=1,
            manifest_digest="1",
            seed=seed,
            task_file=digest,
        )

    begun = lessons()
    for step in range(5):
        begun.next(step)
    other = lessons(seed, **changed)
    with pytest.raises(StateError) as caught:
        other.load_state_dict(begun.state_dict())
    assert named in str(caught.value)
    assert other.samples_consumed == 0
    longer = lessons(joint_steps=9)  # what is still to come may be longer
    longer.load_state_dict(begun.state_dict())
    assert longer.samples_consumed == begun.samples_consumed
    earlier = {"samples_consumed": 10, "manifest_digest": "1"}  # as an earlier version said it
    lessons(digest=None).load_state_dict(earlier)
    with pytest.raises(StateError, match="task_file"):  # which had no such file
        longer.load_state_dict(earlier)


def test_another_curriculum_is_refused_once_the_policy_has_learned_by_one() -> None:
    def lessons(**changed: Any) -> Any:
        training = section(config("policy_steps=3")).training.model_copy(update=changed)
        return LessonLoader(Numbers(), training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]

    begun, other = lessons(), lessons(curriculum=0.25)
    for step in range(6):
        other.load_state_dict(begun.state_dict())
        begun.next(step)
    state = begun.state_dict()
    with pytest.raises(StateError, match=r"stage_b.training.curriculum .*: 0.5 there, 0.25 here"):
        other.load_state_dict(state)
    del state["curriculum"]  # as of a version that had none
    lessons(curriculum=0.0).load_state_dict(state)
    with pytest.raises(StateError, match=r"curriculum .*: 0.0 there, 0.5 here"):
        lessons().load_state_dict(state)


def test_lengths_enter_one_by_one_over_their_share_of_the_policys_phase() -> None:
    training = section(config()).training.model_copy(update={"length_ratios": (8, 1, 4, 2)})
    of_steps = [training.lengths_at(step, 12) for step in range(14)]
    assert of_steps == [(1,)] * 2 + [(1, 2)] * 2 + [(1, 4, 2)] * 2 + [(8, 1, 4, 2)] * 8
    whole = training.model_copy(update={"curriculum": 0.0})
    assert whole.lengths_at(0, 12) == (8, 1, 4, 2)
    late = training.model_copy(update={"curriculum": 1.0})
    assert late.lengths_at(11, 12) == (1, 4, 2), "the longest comes with the end"


def test_the_loader_asks_for_the_lengths_of_its_step() -> None:
    asked: list[tuple[str, Any]] = []

    class Asked(Numbers):
        def lesson(self, phase: str, number: int, *, lengths: Any) -> int:
            asked.append((phase, lengths))
            return number

    training = section(config("policy_steps=8", "lessons_per_step=1")).training
    loader: Any = LessonLoader(Asked(), training, rank=0, world_size=1, manifest_digest="", seed=0)  # type: ignore[arg-type]
    for step in range(13):
        loader.next(step)
    assert asked[:5] == [("memory", None)] * 3 + [("joint", None)] * 2
    lengths = [each for _, each in asked[5:]]
    assert lengths == [(1,)] * 2 + [(1, 2)] + [(1, 2, 4)] + [(1, 2, 4, 8)] * 4


def test_where_a_phase_begins_the_steps_before_are_no_measure() -> None:
    training, course = section(config("lessons_per_step=3")).training, Numbers()
    forgotten: list[int] = []
    lessons: Any = LessonLoader(course, training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]
    run: Any = SimpleNamespace(step=10)
    run.heartbeat = SimpleNamespace(forget_step=lambda are_uneven: forgotten.append(run.step))
    stage = StageB(
        None, section(config()), Clip(config()), lessons, None, 10, num_steps=16, origin=""
    )  # type: ignore[arg-type]
    for run.step in range(10, 16):
        stage.next_batch(run)
    assert forgotten == [10, 13, 15]
    resumed = StageB(
        None, section(config()), Clip(config()), lessons, None, 10, num_steps=16, origin=""
    )  # type: ignore[arg-type]
    run.step = 14
    resumed.next_batch(run)
    assert forgotten[-1] == 14
