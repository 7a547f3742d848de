"""Stage B as the loop sees it: lessons for a reader, phase by phase.

The phase of a step follows from the number of the step. A step of memory, adapters and joint is one
optimizer step on all its lessons, each a micro-step of the rank that has it; one of the policy is a
batch of rollouts and up to four optimizer steps on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment, Part, is_stage_b, part_of, reader_logical_name
from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.engines.run import JsonObject, Run
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import StateError
from cdrmix.monitoring.health import Verdict
from cdrmix.monitoring.metrics import record, take_memory_peak_bytes
from cdrmix.parallel.tensor import is_copy
from cdrmix.stage_b.course import Course, LessonLoader, LessonShare
from cdrmix.stage_b.optimizer import (
    Clip,
    PhasePlace,
    in_order,
    learning_rates,
    place_of,
    set_learning,
)
from cdrmix.stage_b.phases import LessonMetrics


class LessonResult(NamedTuple):
    """Result of a step on this rank.

    Attributes:
        place: of the step.
        metrics: of each lesson that counts here; lessons differ in which they have.
        rates: learning rate of every part.
        epochs: optimizer steps taken.
        seconds: wall time, without the wait for lessons and for other ranks before it.
    """

    place: PhasePlace
    metrics: list[LessonMetrics]
    rates: dict[Part, float]
    epochs: int
    seconds: float


class LessonMeasures(NamedTuple):
    """Result of a step over all ranks, the same on each.

    Attributes:
        phase: of the step.
        means: of every metric over the lessons that have it.
        rate: largest learning rate.
        grad_norm: of all that learned, before clipping (L2).
        epochs: optimizer steps taken.
    """

    phase: Phase
    means: dict[str, float]
    rate: float
    grad_norm: float
    epochs: int


class StageB:
    """Stage B.

    Args:
        course: reader, lessons and losses.
        config: of the run.
        clip: of the optimizer; knows the norms.
        loader: lessons of this data rank.
        corpus: that lessons take texts and tokenizer from.
        first_step: steps of Stage A that the backbone has.
        origin: checkpoint that the backbone comes from.

    Attributes:
        name, num_steps, corpus, loader: see `StageState`.
    """

    name: Literal["a", "b"] = "b"

    def __init__(
        self,
        course: Course,
        config: Config,
        clip: Clip,
        loader: LessonLoader,
        corpus: Corpus,
        *,
        first_step: int,
        origin: str,
    ) -> None:
        assert config.stage_b is not None, "Stage B has its section"
        self._course = course
        self._config = config.stage_b
        self._clip = clip
        self.loader = loader
        self._first_step = first_step
        self._origin = origin
        self._is_backbone_trained = False
        self._has_begun = False
        self.corpus = corpus
        self.num_steps = first_step + config.stage_b.training.num_steps

    def next_batch(self, run: Run) -> LessonShare:
        """This rank's share of the next step."""
        step = run.step - self._first_step
        if place_of(step, self._config.training).step == 0 or not self._has_begun:
            # Steps of another phase say nothing about the duration of these. Where a step has few
            # lessons their lengths make it uneven.
            run.heartbeat.forget_step(are_uneven=True)
        self._has_begun = True
        return self.loader.next(step)

    def weight(self, run: Run, batch: LessonShare) -> float:
        """Lessons of this rank, on one stage of a pipeline, whose ranks have the same ones."""
        return float(len(batch.lessons)) if run.topology.counts_tokens else 0.0

    def train_step(self, run: Run, batch: LessonShare, *, weight: float) -> LessonResult:
        """Take one step of a phase; `weight` is its number of lessons."""
        began = time.perf_counter()
        place = batch.place
        rates = learning_rates(place, self._course.learning(place.phase), run.config)
        set_learning(run.engine, rates)
        # Should DeepSpeed skip the step, those of the step before must not be reported for it.
        self._clip.norms.clear()
        # DeepSpeed divides by the micro-steps of a rank and by the ranks; the mean is over lessons.
        slots = run.engine.gradient_accumulation_steps()
        scale = slots * run.topology.degrees.data / weight
        epochs = 1
        if place.phase == "policy":
            metrics, epochs = self._learn_policy(run, batch.lessons, slots, scale, weight)
        else:
            losses = (self._course.loss(place.phase, lesson) for lesson in batch.lessons)
            metrics = self._learn(run.engine, losses, slots, scale)
        # Ranks of a pipeline have the same lessons: one stage counts them.
        counting = metrics if run.topology.counts_tokens else []
        return LessonResult(place, counting, rates, epochs, time.perf_counter() - began)

    def _learn(
        self, engine: Any, losses: Iterable[tuple[Tensor, LessonMetrics]], slots: int, scale: float
    ) -> list[LessonMetrics]:
        """Take one optimizer step, a micro-step per loss; returns the metrics of each.

        Every rank takes as many micro-steps: those beyond its lessons have no gradient, and no
        rank waits in a collective that another leaves out.
        """
        metrics = []
        coming = iter(losses)
        for slot in range(slots):
            lesson = next(coming, None)
            if lesson is not None:
                metrics.append({"loss": lesson[0].detach(), **lesson[1]})
            engine.backward(in_order(engine, None if lesson is None else scale * lesson[0]))
            if slot == slots - 1:  # the gradients are complete, and DeepSpeed's update comes next
                self._clip.prepare(engine.optimizer)
            engine.step()
        return metrics

    def _learn_policy(
        self, run: Run, collected: list[Any], slots: int, scale: float, weight: float
    ) -> tuple[list[LessonMetrics], int]:
        """Take optimizer steps on one batch of episodes until the policy has moved far enough.

        Returns:
            Metrics of the last forward pass, and the number of optimizer steps.
        """
        policy = self._config.policy
        farthest = policy.kl_margin * policy.kl_target
        metrics: list[LessonMetrics] = []
        for epoch in range(policy.epochs):
            # Of all lessons before any is learned from: the mean divergence decides whether to go
            # on.
            losses = [self._course.rollout_loss(each) for each in collected]
            metrics = [
                {**each.metrics, "loss": loss.detach(), **of_loss}
                for each, (loss, of_loss) in zip(collected, losses, strict=True)
            ]
            counting = metrics if run.topology.counts_tokens else []
            # In the first epoch the policy is still the one that played: its divergence is 0.
            if epoch:
                # Summed over all ranks, so that they stop at the same epoch.
                kl = torch.tensor(sum(float(each["kl"]) for each in counting), dtype=torch.float64)
                mean_kl = float(runtime.all_reduce_sum(kl.to(runtime.device()))) / weight
                if mean_kl > farthest:
                    return metrics, epoch
            self._learn(run.engine, losses, slots, scale)
        return metrics, policy.epochs

    def evaluate(self, run: Run) -> dict[str, float]:
        """Returns nothing: the reasoning suite takes too long to run between steps."""
        return {}

    def own_loss(self, result: LessonResult) -> None:
        """Returns None: a loss is judged with its phase, by what `measure` returns."""
        return

    def measure(self, run: Run, result: LessonResult) -> LessonMeasures:
        """Reduce a result over the ranks: each metric's mean over the lessons that have it."""
        # Ranks differ in the metrics that their lessons have; a collective needs one order on all.
        own_names = set().union(*result.metrics)
        names = sorted(set().union(*runtime.all_gather_object(own_names)))
        values = [[float(each[name]) for each in result.metrics if name in each] for name in names]
        # Sums and counts, because ranks may have different numbers of lessons.
        sums = torch.tensor([[sum(each), len(each)] for each in values], dtype=torch.float64)
        totals = runtime.all_reduce_sum(sums.to(runtime.device())).tolist()
        return LessonMeasures(
            phase=result.place.phase,
            means={name: total / n for name, (total, n) in zip(names, totals, strict=True)},
            rate=max(result.rates.values()),
            grad_norm=math.hypot(*self._clip.norms.values()),
            epochs=result.epochs,
        )

    def judge(self, run: Run, measures: LessonMeasures) -> list[Verdict | None]:
        """A verdict on a loss that is not finite."""
        # No spikes: each phase has losses of its own, and lessons differ in length.
        loss = measures.means["loss"]
        return [] if math.isfinite(loss) else [run.health.loss_known(run.step, loss)]

    def log(
        self, run: Run, measures: LessonMeasures, evaluation: dict[str, float]
    ) -> tuple[Verdict | None, ...]:
        """Have rank 0 write and show a step's metrics; returns the verdict on memory.

        Raises:
            StateError: on every rank, if the metrics could not be written.
        """
        group = "policy" if measures.phase == "policy" else "stage_b"
        means = {f"{group}/{name}": value for name, value in measures.means.items()}
        steps, seconds, _ = run.observer.take_window()
        peak = take_memory_peak_bytes()
        usage = (peak, peak / (runtime.device_memory_gib() * 2**30))
        # Of the fullest rank, which is the one that runs out of memory.
        peak, share = map(max, zip(*runtime.all_gather_object(usage), strict=True))
        line = record(
            step=run.step,
            learning_rate=measures.rate,
            grad_norm=measures.grad_norm,
            step_seconds=seconds / steps,
            memory_peak_bytes=peak,
            **means,
            **({"policy/epochs": measures.epochs} if group == "policy" else {}),
            **run.health.metrics(),
        )
        with run.heartbeat.phase("logging"):
            runtime.together(lambda: run.observer.write(run.step, line))
        return (run.health.memory_known(run.step, share),)

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """This rank's share of a checkpoint.

        Data ranks hold a frozen backbone alike, outside of the engine: each saves some tensors.
        """
        yield from engine_state.fragments(run.engine, reader_logical_name)
        if self._config.training.backbone_lr_scale == 0:
            backbone = [
                (name, tensor)
                for name, tensor in self._course.model.named_parameters()
                if part_of(name) == "backbone" and not is_copy(tensor)
            ]
            # In turn, so that each data rank writes about as much.
            mine = dict(backbone[run.topology.data_rank :: run.topology.degrees.data])
            yield from engine_state.whole_fragments(mine, reader_logical_name)

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint of Stage B into the engine; a frozen backbone stays as it is.

        Raises:
            StateError: on every rank, if it is none, or cannot be read.
        """
        if reader.state.get("stage") != "b":
            raise StateError(f"{reader.path}: was saved before Stage B began")
        own = {reader_logical_name(name) for name, _ in run.engine.module.named_parameters()}
        held = set().union(*runtime.all_gather_object(own))  # each stage holds its adapters
        others = {name for name in reader.names() if name in held or not is_stage_b(name)} - own
        engine_state.load_engine(run.engine, reader, reader_logical_name, others=others)
        self._is_backbone_trained = reader.state["stage_b"]["is_backbone_trained"]

    def saved(self, run: Run) -> JsonObject:
        """Origin of the backbone, and whether Stage B has changed it."""
        learns = self._config.training.backbone_lr_scale > 0 and run.step > self._first_step
        return {
            "samples": [],  # texts of Stage A, which readers of a checkpoint expect
            "stage_b": {
                "first_step": self._first_step,
                "origin": self._origin,
                "is_backbone_trained": self._is_backbone_trained or learns,
            },
        }
