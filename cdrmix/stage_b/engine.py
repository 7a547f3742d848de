"""Stage B as the loop sees it: lessons for a reader, phase by phase.

The phase of a step follows from the number of the step. A step of memory, adapters and joint is one
optimizer step on all its lessons, each a micro-step of the rank that has it; one of the policy is a
batch of rollouts and up to four optimizer steps on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint import engine_state
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment, Part, is_stage_b, part_of, reader_logical_name
from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.engines.run import Run
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
    """What a step measured.

    Attributes:
        place: of the step.
        measured: metrics of each lesson that counts here; one may lack what it has nothing of.
        rates: of every part.
        epochs: optimizer steps taken.
        seconds: wall time; in the loop, with the wait for lessons and other ranks.
        waited: seconds of it in which lessons were made and episodes played.
    """

    place: PhasePlace
    measured: list[LessonMetrics]
    rates: dict[Part, float]
    epochs: int
    seconds: float
    waited: float = 0.0


class LessonMeasures(NamedTuple):
    """What a step measured over all ranks, the same on each.

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
        course: what is trained, and by what.
        config: of the run.
        clip: of the optimizer; knows the norms.
        first_step: steps of Stage A that the backbone has.
        origin: where the backbone comes from.

    Attributes:
        num_steps: see `Stage`.
    """

    def __init__(
        self, course: Course, config: Config, clip: Clip, *, first_step: int, origin: str
    ) -> None:
        assert config.stage_b is not None, "Stage B has its section"
        self._course = course
        self._config = config.stage_b
        self._clip = clip
        self._first_step = first_step
        self._origin = origin
        self._is_backbone_trained = False
        self._has_begun = False
        self.num_steps = first_step + config.stage_b.training.num_steps

    def next_batch(self, run: Run) -> LessonShare:
        """This rank's share of the next step."""
        assert isinstance(run.loader, LessonLoader), "Stage B runs on lessons"
        step = run.step - self._first_step
        if place_of(step, self._config.training).step == 0 or not self._has_begun:
            # no step before it was of its kind; lessons differ in length, and so do steps of few
            run.heartbeat.forget_step(are_uneven=True)
        self._has_begun = True
        return run.loader.next(step)

    def weight(self, run: Run, batch: LessonShare) -> float:
        """Lessons of this rank, on one stage of a pipeline, whose ranks have the same ones."""
        return float(len(batch.lessons)) if run.topology.counts_tokens else 0.0

    def train_step(self, run: Run, batch: LessonShare, *, weight: float) -> LessonResult:
        """One step of a phase; `weight` is its number of lessons."""
        began = time.perf_counter()
        place = batch.place
        rates = learning_rates(place, self._course.learning(place.phase), run.config)
        set_learning(run.engine, rates)
        self._clip.norms.clear()
        # DeepSpeed divides by the micro-steps of a rank and by the ranks
        slots = run.engine.gradient_accumulation_steps()
        scale = slots * run.topology.degrees.data / weight
        epochs = 1
        if place.phase == "policy":
            measured, epochs = self._learn_policy(run, batch.lessons, slots, scale, weight)
        else:
            losses = (self._course.loss(place.phase, lesson) for lesson in batch.lessons)
            measured = self._learn(run.engine, losses, slots, scale)
        own = measured if run.topology.counts_tokens else []
        return LessonResult(place, own, rates, epochs, time.perf_counter() - began)

    def _learn(
        self, engine: Any, losses: Iterable[tuple[Tensor, LessonMetrics]], slots: int, scale: float
    ) -> list[LessonMetrics]:
        """One optimizer step, a micro-step per loss; what each of them measured.

        Every rank takes as many micro-steps; those beyond its lessons teach nothing.
        """
        measured = []
        coming = iter(losses)
        for slot in range(slots):
            own = next(coming, None)
            if own is not None:
                measured.append({"loss": own[0].detach(), **own[1]})
            engine.backward(in_order(engine, None if own is None else scale * own[0]))
            if slot == slots - 1:
                self._clip.prepare(engine.optimizer)
            engine.step()
        return measured

    def _learn_policy(
        self, run: Run, collected: list[Any], slots: int, scale: float, weight: float
    ) -> tuple[list[LessonMetrics], int]:
        """Epochs on one batch of episodes, until the policy has moved far enough; what the last
        forward pass measured, and how many epochs were taken."""
        policy = self._config.policy
        farthest = policy.kl_margin * policy.kl_target
        measured: list[LessonMetrics] = []
        for epoch in range(policy.epochs):
            losses = [self._course.rollout_loss(each) for each in collected]
            measured = [
                {**each.metrics, "loss": loss.detach(), **found}
                for each, (loss, found) in zip(collected, losses, strict=True)
            ]
            own = measured if run.topology.counts_tokens else []
            if epoch and self._kl(own) / weight > farthest:
                return measured, epoch
            self._learn(run.engine, losses, slots, scale)
        return measured, policy.epochs

    @staticmethod
    def _kl(measured: list[LessonMetrics]) -> float:
        """Sum over the lessons of all ranks, which decide alike."""
        own = torch.tensor(sum(float(each["kl"]) for each in measured), dtype=torch.float64)
        return float(runtime.all_reduce_sum(own.to(runtime.device())))

    def evaluate(self, run: Run) -> dict[str, float]:
        """Nothing: what is read at the end would take too long on the way."""
        return {}

    def own_loss(self, result: LessonResult) -> None:
        """Losses of different phases say nothing about each other; `measure` tells of each."""
        return

    def measure(self, run: Run, result: LessonResult) -> LessonMeasures:
        """Reduce what a step measured over the ranks."""
        return LessonMeasures(
            phase=result.place.phase,
            means=_means_over_ranks(result.measured),
            rate=max(result.rates.values()),
            grad_norm=math.hypot(*self._clip.norms.values()),
            epochs=result.epochs,
        )

    def judge(self, run: Run, measured: LessonMeasures) -> list[Verdict | None]:
        """A verdict on a loss that is not finite."""
        loss = measured.means["loss"]
        return [] if math.isfinite(loss) else [run.health.loss_known(run.step, loss)]

    def log(
        self, run: Run, measured: LessonMeasures, evaluated: dict[str, float]
    ) -> tuple[Verdict | None, ...]:
        """Have rank 0 write and show what a step measured; gives the verdict on memory.

        Raises:
            StateError: on every rank, if the metrics could not be written.
        """
        group = "policy" if measured.phase == "policy" else "stage_b"
        means = {f"{group}/{name}": value for name, value in measured.means.items()}
        steps, seconds, _ = run.observer.take_window()
        peak = take_memory_peak_bytes()
        own = (peak, peak / (runtime.device_memory_gib() * 2**30))
        peak, share = map(max, zip(*runtime.all_gather_object(own), strict=True))
        line = record(
            step=run.step,
            learning_rate=measured.rate,
            grad_norm=measured.grad_norm,
            step_seconds=seconds / steps,
            memory_peak_bytes=peak,
            **means,
            **({"policy/epochs": measured.epochs} if group == "policy" else {}),
            **run.health.metrics(),
        )
        with run.heartbeat.phase("logging"):
            runtime.together(lambda: run.observer.write(run.step, line))
        return (run.health.memory_known(run.step, share),)

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """What this rank saves: of a frozen backbone, which data ranks hold alike, its share."""
        yield from engine_state.fragments(run.engine, reader_logical_name)
        if self._config.training.backbone_lr_scale == 0:
            backbone = [
                (name, tensor)
                for name, tensor in self._course.model.named_parameters()
                if part_of(name) == "backbone" and not is_copy(tensor)
            ]
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
        held = set().union(*runtime.all_gather_object(own))  # adapters are on their stages
        others = {name for name in reader.names() if name in held or not is_stage_b(name)} - own
        engine_state.load_engine(run.engine, reader, reader_logical_name, others=others)
        self._is_backbone_trained = reader.state["stage_b"]["is_backbone_trained"]

    def saved(self, run: Run) -> dict[str, Any]:
        """What a checkpoint says of Stage B."""
        learns = self._config.training.backbone_lr_scale > 0 and run.step > self._first_step
        return {
            "stage": "b",
            "stage_b": {
                "first_step": self._first_step,
                "origin": self._origin,
                "is_backbone_trained": self._is_backbone_trained or learns,
            },
        }


def _means_over_ranks(measured: list[LessonMetrics]) -> dict[str, float]:
    """Every metric per lesson of the step that has it, the same on every rank."""
    own_names = set().union(*measured)
    names = sorted(set().union(*runtime.all_gather_object(own_names)))
    found = [[float(each[name]) for each in measured if name in each] for name in names]
    own = torch.tensor([[sum(each), len(each)] for each in found], dtype=torch.float64)
    totals = runtime.all_reduce_sum(own.to(runtime.device())).tolist()
    return {name: value / count for name, (value, count) in zip(names, totals, strict=True)}
