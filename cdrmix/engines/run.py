"""A run under way: the protocol of its stages, and the state that the loop and recovery share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.saver import Saver
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.starts import StartUp
from cdrmix.config.schema import Config
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.engines.supervision import Requests
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import TrainingError
from cdrmix.monitoring.goodput import WallTime
from cdrmix.monitoring.health import Health, Verdict
from cdrmix.monitoring.metrics import SHOWN_ONLY
from cdrmix.monitoring.sinks import MetricsFile, Progress
from cdrmix.parallel.topology import Topology
from cdrmix.planning.plan import Plan

JsonObject = dict[str, Any]


class Observer:
    """Metrics file and progress of rank 0, and the time window between two logged lines.

    The other ranks keep the window and write nothing.
    """

    def __init__(self) -> None:
        self._metrics: MetricsFile | None = None
        self._progress: Progress | None = None
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0

    def open(self, folder: Path, *, step: int, num_steps: int) -> None:
        """Start at `step` of `num_steps`; cut off metrics of later steps.

        Raises:
            StateError: if the metrics file in `folder` cannot be written.
        """
        if runtime.rank() != 0:
            return
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._metrics.truncate_after(step)
        self._progress = Progress(num_steps, initial=step, stream=sys.stderr)

    def step_done(self, step: int, seconds: float, *, waited: float) -> None:
        """Count a step, logged or not: its wall time, and the share of it spent on reading data."""
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        if self._progress is not None:
            self._progress.update(step)

    def take_window(self) -> tuple[int, float, float]:
        """Steps, their seconds, and seconds of reading data since the last call; starts anew."""
        window = self._steps, self._seconds, self._waited
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0
        return window

    def go_back(self, step: int) -> None:
        """Cut off the metrics after `step`, from which the run goes on; may raise StateError."""
        self.take_window()  # of steps that do not count
        if self._metrics is not None and self._progress is not None:
            self._metrics.truncate_after(step)
            self._progress.update(step)

    def write(self, step: int, line: dict[str, float]) -> None:
        """Write and show one record; may raise StateError."""
        if self._metrics is not None and self._progress is not None:
            self._metrics.write({k: value for k, value in line.items() if k not in SHOWN_ONLY})
            self._progress.update(step, line)

    def sync(self) -> None:
        """Make the written metrics durable, before a checkpoint of their step gets its name."""
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        """End the progress and close the metrics file."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()


class BatchSource(Protocol):
    """Samples or lessons in the run's global order."""

    def state_dict(self) -> JsonObject:
        """Position at which the next batch begins, the same on every rank; its `samples_consumed`
        counts those before it."""

    def load_state_dict(self, state: JsonObject) -> None:
        """Go to a saved position. Raises StateError if it is one in other data."""

    def close(self) -> None:
        """Stop reading ahead."""


class StageState(Protocol):
    """State of a stage between two steps, as checkpoints hold it.

    Attributes:
        name: a, pretraining, or b, reasoning enablement.
        num_steps: step at which the stage ends.
        corpus: data set that the stage reads.
    """

    name: Literal["a", "b"]
    num_steps: int
    corpus: Corpus

    @property
    def loader(self) -> BatchSource:
        """Batches of this data rank."""

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """This rank's share of a checkpoint; over all ranks each element comes once."""

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint of this stage into the engine; collective."""

    def saved(self, run: Run) -> JsonObject:
        """The stage's entries of a checkpoint's state.json."""


class Timed(Protocol):
    """Result of a step.

    Attributes:
        seconds: wall time of forward, backward and optimizer.
    """

    @property
    def seconds(self) -> float: ...


Batch = TypeVar("Batch")
Result = TypeVar("Result", bound=Timed)
Measures = TypeVar("Measures")


class Stage(StageState, Protocol[Batch, Result, Measures]):
    """Training as the one loop sees it: Stage A and Stage B differ in what they do here.

    A `Batch` is this rank's share of a step, a `Result` what this rank computed from it, and
    `Measures` are the result reduced over all ranks.
    """

    def next_batch(self, run: Run) -> Batch:
        """Read this rank's share of the next step. Raises DataError if it cannot be read."""

    def weight(self, run: Run, batch: Batch) -> float:
        """Weight of that share in the mean over the global batch."""

    def train_step(self, run: Run, batch: Batch, *, weight: float) -> Result:
        """Take one step; `weight` is that of the global batch."""

    def evaluate(self, run: Run) -> dict[str, float]:
        """Metrics of an evaluation between steps."""

    def own_loss(self, result: Result) -> tuple[Tensor, float] | None:
        """This rank's part of a step's loss, scalar, and the weight of the global batch, by which
        the sum over ranks is divided; None where only `measure` gives a loss."""

    def measure(self, run: Run, result: Result) -> Measures:
        """Reduce a result over all ranks; collective."""

    def judge(self, run: Run, measures: Measures) -> Sequence[Verdict | None]:
        """Verdicts on a step's loss."""

    def log(
        self, run: Run, measures: Measures, evaluation: dict[str, float]
    ) -> Sequence[Verdict | None]:
        """Write and show a step's metrics, with those of an evaluation if there was one; returns
        verdicts on the machine."""


@dataclass(kw_only=True)
class Start:
    """A start of a run before its model is built.

    Attributes:
        config: resolved configuration.
        plan: profile, degrees and batch sizes.
        directory: the run directory.
        requests: signals received.
        heartbeat: reports progress to the watchdogs.
        start_up: duration of this start so far, by its parts.
        health: judges steps, and keeps the record of unhealthy ones.
        wall_time: account of the time of all starts.
    """

    config: Config
    plan: Plan
    directory: RunDirectory
    requests: Requests
    heartbeat: Heartbeat
    start_up: StartUp
    health: Health
    wall_time: WallTime = field(default_factory=WallTime)


@dataclass(kw_only=True)
class Run(Start):
    """A run under way on this rank: a start with its engine, its stage and its progress.

    Attributes:
        topology: this rank's place in the layout.
        engine: DeepSpeed engine around the model.
        stage: the stage under way.
        saver: writes the checkpoints.
        observer: metrics file and progress.
        step: optimizer steps completed.
        unjudged: `Stage.own_loss` of the last step, while its loss over all ranks is not known.
        earlier_seconds: wall time of earlier starts of this run.
    """

    topology: Topology
    engine: Any
    stage: StageState
    saver: Saver
    observer: Observer = field(default_factory=Observer)
    step: int = 0
    unjudged: tuple[Tensor, float] | None = None
    earlier_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    saved_time: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall time of all starts of this run."""
        return self.earlier_seconds + time.monotonic() - self.started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop reading ahead, end the writing thread, close the files.

        A rank that fails alone does not wait for its save: that takes the other ranks, which are
        to hear of the failure first.
        """
        self.wall_time.save()
        self.stage.loader.close()
        # Before the observer: a save under way makes its metrics durable before it ends.
        self.saver.close(waits=kind is None or issubclass(kind, TrainingError))
        self.observer.close()


def make_run(
    start: Start, topology: Topology, engine: Any, stage: StageState, *, first_step: int = 0
) -> Run:
    """Returns the run of a start, its stage at `first_step`.

    The checkpoint of that step, on which Stage B is built, is never dropped.
    """
    config = start.config
    directory = start.directory
    saver = Saver(
        (directory.checkpoints, *directory.copies),
        keep=config.checkpoint.keep,
        background=start.plan.saves_in_background,
        pinned=first_step or None,  # Stage A is built on none
    )
    return Run(
        **vars(start), topology=topology, engine=engine, stage=stage, saver=saver, step=first_step
    )
