"""Stage B as the loop sees it: lessons for a reader, phase by phase.

A lesson is a batch of texts that one rank learns from in one micro-step. Except for the weights all
is a pure function of (phase, number, lengths): a lesson is the same on any rank and at any time.
Losses and metrics are means over a lesson, and those of a step means over its lessons. Only the
policy's are means over the steps of episodes, of all lessons and ranks alike.

The phase of a step follows from its number. A step is one optimizer step on all its lessons; one of
the policy is a batch of rollouts and up to `policy.epochs` optimizer steps on it, none if no
rollout says anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import (
    Box,
    Fragment,
    Part,
    Span,
    is_stage_b,
    part_of,
    reader_logical_name,
)
from cdrmix.config.reasoning import ANSWER_TOKENS, Phase, StageBConfig, StageBTraining
from cdrmix.engines.run import JsonObject, Run, Stage
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import StateError
from cdrmix.log import get_logger
from cdrmix.monitoring.health import Verdict
from cdrmix.parallel.tensor import is_copy
from cdrmix.reasoning.memory_reader import is_used
from cdrmix.reasoning.tasks import TEXT_VERSION
from cdrmix.runtime.phases import phase
from cdrmix.stage_b.optimizer import Clip, in_order, learning_rates, place_of
from cdrmix.stage_b.phases import Course, LessonMetrics, StepMean

logger = get_logger(__name__)

# Configuration keys of the fields of a loader's state that are not under stage_b.training.
_SETTINGS = {
    "manifest_digest": "data.path",
    "seed": "training.seed",
    "phases": "stage_b.training.{memory,adapter,joint,policy}_steps",
}
# Values of fields that positions of earlier versions do not have: what all lessons had then.
_BEFORE = {
    "curriculum": 0.0,
    "hidden_evidence_share": None,
    "task_file": None,
    "task_file_share": None,
    "answer_tokens": ANSWER_TOKENS,
    "segment_tokens": None,
    "question": "last",
}


@dataclass
class LessonLoader:
    """Shares lessons out over ranks, in order; their numbers go on through all phases."""

    course: Course  # makes the lessons
    training: StageBTraining
    rank: int  # of this process among those that share the lessons out
    world_size: int  # number of these processes
    manifest_digest: str  # of the data set with the texts and the tokenizer
    seed: int  # of the lessons
    task_file: str | None = None  # sha256 of the tasks of the user's; None without
    is_shared: bool = False  # other ranks take the same lessons, and play them with this one
    samples_consumed: int = 0  # lessons handed out so far, to all ranks
    _steps: int = 0

    def next(self, step: int) -> list[Any]:
        """This rank's lessons of a step of Stage B; DataError if one cannot be made or played."""
        # From the number of the step, which checkpoints and metrics have, too.
        phase, place, length = place_of(step, self.training)
        lengths = self.training.lengths_at(place, length) if phase == "policy" else None
        # Every rank counts the lessons of all: a position holds at any number of ranks.
        end = self.samples_consumed + self.training.lessons_per_step
        numbers = range(self.samples_consumed, end)[self.rank :: self.world_size]

        def make() -> list[Any]:
            return [self.course.lesson(phase, number, lengths=lengths) for number in numbers]

        # Ranks that share lessons play together: one without a lesson, because it could not be
        # made, would be waited for in the middle of an episode. So all of them fail here.
        plays = phase == "policy"
        lessons = runtime.together(make) if plays and self.is_shared else make()
        if plays:
            lessons = [self.course.collect(lesson) for lesson in lessons]
        self.samples_consumed = end
        self._steps = step + 1
        return lessons

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps; the same on every rank."""
        training = self.training
        return {
            "samples_consumed": self.samples_consumed,
            "steps": self._steps,
            # All that the texts follow from: a position means nothing in other lessons.
            "manifest_digest": self.manifest_digest,
            "text_version": TEXT_VERSION,
            "seed": self.seed,
            "tasks": list(training.tasks),
            "length_ratios": list(training.length_ratios),
            "curriculum": training.curriculum,
            "hidden_evidence_share": training.hidden_evidence_share,
            "window_tokens": training.window_tokens,
            "texts_per_lesson": training.texts_per_lesson,
            "answer_tokens": training.answer_tokens,
            "segment_tokens": training.segment_tokens,
            "question": training.question,
            # By its content, as the file may move.
            "task_file": self.task_file,
            "task_file_share": None if self.task_file is None else training.task_file_share,
            "phases": [[phase, length] for phase, length in training.phases],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position, on any number of ranks; StateError if the lessons differ."""
        if state.get("text_version", 1) != TEXT_VERSION:
            logger.warning(
                "texts of the tasks are made otherwise than in the version that this run began "
                "with: it goes on, and not as it would have without the interruption"
            )
        differing = []
        for key, ours in self.state_dict().items():
            if key in ("samples_consumed", "steps", "text_version"):
                continue
            saved = state.get(key, _BEFORE.get(key, ours))  # an older version saved fewer fields
            same = saved == ours
            if key == "phases" and not same:  # later phases may have other lengths
                there, here = (
                    [phase for phase, length in lengths for _ in range(length)]
                    for lengths in (saved, ours)
                )
                same = there[: state["steps"]] == here[: state["steps"]]
            if key == "curriculum" and not same:  # of the policy's phase alone
                same = place_of(state.get("steps", 1) - 1, self.training).phase != "policy"
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


class LessonResult(NamedTuple):
    """Result of a step on this rank."""

    phase: Phase
    metrics: list[LessonMetrics]  # of each lesson that counts here; not all have the same
    rates: dict[Part, float]  # learning rates
    epochs: int  # optimizer steps taken
    seconds: float  # wall time, without the wait for lessons and for other ranks before it


@dataclass
class StageB(Stage[list[Any], LessonResult]):
    """Reasoning enablement.

    The reasoning suite takes too long to run between steps: there is nothing to `evaluate`. A loss
    is judged with its phase, by what `measure` returns, and not by `own_loss`.
    """

    course: Course  # reader, lessons and losses
    settings: StageBConfig
    clip: Clip  # of the optimizer; knows the norms
    loader: LessonLoader
    corpus: Corpus  # that lessons take texts and tokenizer from
    first_step: int  # steps of Stage A that the backbone has
    num_steps: int  # of both stages together
    origin: str  # checkpoint that the backbone comes from
    name: Literal["a", "b"] = "b"
    num_weights: int = 1
    _is_backbone_trained: bool = False
    _has_begun: bool = False

    def next_batch(self, run: Run) -> list[Any]:
        """This rank's lessons of the next step; in the policy phase the episodes collected."""
        step = run.step - self.first_step
        if place_of(step, self.settings.training).step == 0 or not self._has_begun:
            # Steps of another phase say nothing about the duration of these. Where a step has few
            # lessons their lengths make it uneven.
            run.heartbeat.forget_step(are_uneven=True)
        self._has_begun = True
        return self.loader.next(step)

    def weights(self, run: Run, batch: list[Any]) -> tuple[float]:
        """Lessons of this rank, on one stage of a pipeline, whose ranks have the same ones."""
        return (float(len(batch)) if run.topology.counts_tokens else 0.0,)

    def train_step(self, run: Run, batch: list[Any], *, weights: Sequence[float]) -> LessonResult:
        """Take one step of a phase; the weight is its number of lessons."""
        (weight,) = weights
        began = time.perf_counter()
        place = place_of(run.step - self.first_step, self.settings.training)
        rates = learning_rates(place, self.course.learning(place.phase), run.config)
        for group in run.engine.optimizer.param_groups:
            group["lr"] = rates[group["part"]]
        for name, parameter in run.engine.module.named_parameters():
            # `in_order` takes gradients of these alone.
            is_there = is_used(name, self.settings.memory.parts)
            parameter.requires_grad_(is_there and rates[part_of(name)] > 0)
        # Should DeepSpeed skip the step, those of the step before must not be reported for it.
        self.clip.norms.clear()
        # DeepSpeed divides by the micro-steps of a rank and by the ranks; the mean is over lessons.
        slots = run.engine.gradient_accumulation_steps()
        scale = slots * run.topology.degrees.data / weight
        epochs = 1
        if place.phase == "policy":
            metrics, epochs = self._learn_policy(run, batch, slots)
        else:
            losses = (self.course.loss(place.phase, lesson) for lesson in batch)
            metrics = self._learn(run.engine, losses, slots, scale)
        # Ranks of a pipeline have the same lessons: one stage counts them.
        counting = metrics if run.topology.counts_tokens else []
        return LessonResult(place.phase, counting, rates, epochs, time.perf_counter() - began)

    def _learn(
        self, engine: Any, losses: Iterable[tuple[Tensor, LessonMetrics]], slots: int, scale: float
    ) -> list[LessonMetrics]:
        """Take one optimizer step, a micro-step per loss; returns the metrics of each."""
        metrics = []
        coming = iter(losses)
        # As many on every rank, with no gradient beyond its lessons: none waits in a collective.
        for slot in range(slots):
            with phase("forward"):
                lesson = next(coming, None)
            if lesson is not None:
                metrics.append({"loss": lesson[0].detach(), **lesson[1]})
            with phase("backward"):
                engine.backward(in_order(engine, None if lesson is None else scale * lesson[0]))
            with phase("optimizer"):
                if slot == slots - 1:  # the gradients are complete; DeepSpeed's update comes next
                    self.clip.prepare(engine.optimizer)
                engine.step()
        return metrics

    def _learn_policy(
        self, run: Run, collected: list[Any], slots: int
    ) -> tuple[list[LessonMetrics], int]:
        """Take optimizer steps on one batch of episodes until the policy has moved far enough.

        The loss is a mean over the steps learned from, of all lessons and ranks. Returns metrics of
        the policy after the last optimizer step, and the number of these.
        """
        policy = self.settings.policy
        is_counted = run.topology.counts_tokens  # ranks of a pipeline have the same episodes
        num_learned = sum(each.num_learned for each in collected) if is_counted else 0
        (learned,) = _summed([float(num_learned)])
        if learned == 0:
            # No step on a gradient of zero: AdamW would still move the policy by its momentum.
            return self._judged(collected), 0
        scale = slots * run.topology.degrees.data / learned
        metrics: list[LessonMetrics] = []
        for epoch in range(1, policy.epochs + 1):
            self._learn(run.engine, map(self.course.rollout_loss, collected), slots, scale)
            metrics = self._judged(collected)
            divergences = [_total_and_count(each["kl"]) for each in metrics if is_counted]
            # Over all ranks, so that they stop at the same epoch.
            kl, steps = _summed([sum(each[part] for each in divergences) for part in range(2)])
            if kl / steps > policy.kl_margin * policy.kl_target:
                return metrics, epoch
        return metrics, policy.epochs

    @torch.no_grad()
    def _judged(self, collected: list[Any]) -> list[LessonMetrics]:
        """Metrics of each lesson's episodes under the present policy."""
        with phase("forward"):
            return [{**each.metrics, **self.course.rollout_loss(each)[1]} for each in collected]

    def measure(self, run: Run, result: LessonResult) -> dict[str, float]:
        """Reduce a result over the ranks: each metric's mean over the lessons that have it, or over
        all their steps."""
        # Ranks differ in the metrics that their lessons have; a collective needs one order on all.
        own_names = set().union(*result.metrics)
        names = sorted(set().union(*runtime.all_gather_object(own_names)))
        # Sums and counts, because ranks may have different numbers of lessons.
        sums = [0.0] * (2 * len(names))
        for lesson in result.metrics:
            for place, name in enumerate(names):
                if name in lesson:
                    total, count = _total_and_count(lesson[name])
                    sums[2 * place] += total
                    sums[2 * place + 1] += count
        totals = _summed(sums)
        group = "policy" if result.phase == "policy" else "stage_b"
        metrics: dict[str, float] = {}
        for name, total, count in zip(names, totals[::2], totals[1::2], strict=True):
            # Without a step to learn from, the loss is 0.
            metrics[f"{group}/{name}"] = total / count if count else 0.0
        if group == "policy":
            metrics["policy/epochs"] = result.epochs
        metrics["learning_rate"] = max(result.rates.values())
        metrics["grad_norm"] = math.hypot(*self.clip.norms.values())
        return metrics

    def judge(self, run: Run, metrics: dict[str, float]) -> list[Verdict | None]:
        """A verdict on a loss that is not finite."""
        # No spikes: each phase has losses of its own, and lessons differ in length.
        loss = metrics["policy/loss" if "policy/loss" in metrics else "stage_b/loss"]
        return [] if math.isfinite(loss) else [run.health.loss_known(run.step, loss)]

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """This rank's share of a checkpoint."""
        yield from engine_state.fragments(run.engine, reader_logical_name)
        # Data ranks hold a frozen backbone alike, outside of the engine: each saves some tensors.
        if self.settings.training.backbone_lr_scale == 0:
            backbone = [
                (name, tensor)
                for name, tensor in self.course.model.named_parameters()
                if part_of(name) == "backbone" and not is_copy(tensor)
            ]
            for name, tensor in backbone[run.topology.data_rank :: run.topology.degrees.data]:
                box = Box.whole(tensor.shape)
                values = tensor.detach().reshape(-1).float()
                logical_name = reader_logical_name(name)
                yield Fragment(logical_name, "param", box.shape, Span.whole(box), values)

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint of Stage B into the engine; a frozen backbone stays as it is."""
        if reader.state.get("stage") != "b":
            raise StateError(f"{reader.path}: was saved before Stage B began")
        own = {reader_logical_name(name) for name, _ in run.engine.module.named_parameters()}
        held = set().union(*runtime.all_gather_object(own))  # each stage holds its adapters
        others = {name for name in reader.names() if name in held or not is_stage_b(name)} - own
        engine_state.load_engine(run.engine, reader, reader_logical_name, others=others)
        self._is_backbone_trained = reader.state["stage_b"]["is_backbone_trained"]

    def inputs(self) -> JsonObject:
        """Tasks of the user's, if there are some, with the digest of their file."""
        own = self.course.lessons.own
        if own is None:
            return {}
        rows = {"train_rows": len(own.train), "held_out_rows": len(own.held_out)}
        return {"task_file": {"file": str(own.path.absolute()), "digest": own.digest, **rows}}

    def saved(self, run: Run) -> JsonObject:
        """Origin of the backbone, and whether Stage B has changed it."""
        learns = self.settings.training.backbone_lr_scale > 0 and run.step > self.first_step
        return {
            "samples": [],  # texts of Stage A, which readers of a checkpoint expect
            "stage_b": {
                "first_step": self.first_step,
                "origin": self.origin,
                "is_backbone_trained": self._is_backbone_trained or learns,
            },
        }


def _total_and_count(metric: Tensor | StepMean) -> tuple[float, float]:
    """Sum and count of a lesson's metric; a mean over the lesson counts once."""
    if isinstance(metric, StepMean):
        return float(metric.total), float(metric.steps)
    return float(metric), 1.0


def _summed(values: list[float]) -> list[float]:
    """Sums of float64 over all ranks; collective."""
    summed = torch.tensor(values, dtype=torch.float64).to(runtime.device())
    return runtime.all_reduce_sum(summed).tolist()
