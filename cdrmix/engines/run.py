"""Where rank 0 shows what a run measures: the metrics file and the progress.

What one run consists of while it is under way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.saver import Saver
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.starts import StartUp, read_starts
from cdrmix.config.schema import Config
from cdrmix.data.loader import Loader
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
from cdrmix.stage_b.course import LessonLoader


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
        """Start at `step` of `num_steps`; metrics beyond it are cut off.

        Raises:
            StateError: if the metrics file in `folder` cannot be written.
        """
        if runtime.rank() != 0:
            return
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._metrics.truncate_after(step)
        self._progress = Progress(num_steps, initial=step, stream=sys.stderr)

    def step_done(self, step: int, seconds: float, *, waited: float) -> None:
        """Count a step, its wall time, and what of it this rank waited for data, logged or not."""
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        if self._progress is not None:
            self._progress.update(step)

    def take_window(self) -> tuple[int, float, float]:
        """Steps, their seconds, and those waited for data, since this was last asked; at least one
        step is done."""
        window = self._steps, self._seconds, self._waited
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0
        return window

    def go_back(self, step: int) -> None:
        """Cut the metrics off behind `step`, from which the run goes on.

        Raises:
            StateError: if the metrics file cannot be written.
        """
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0
        if self._metrics is not None and self._progress is not None:
            self._metrics.truncate_after(step)
            self._progress.update(step)

    def write(self, step: int, line: dict[str, float]) -> None:
        """Write and show one record.

        Raises:
            StateError: if the metrics file cannot be written.
        """
        if self._metrics is not None and self._progress is not None:
            kept = {name: value for name, value in line.items() if name not in SHOWN_ONLY}
            self._metrics.write(kept)
            self._progress.update(step, line)

    def sync(self) -> None:
        """Make the written metrics durable, before a checkpoint of their step is named."""
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        """End the progress and close the metrics file."""
        if self._progress is not None:
            self._progress.close()
        if self._metrics is not None:
            self._metrics.close()


class Stage(Protocol):
    """What the one loop leaves to a stage of training.

    Attributes:
        num_steps: step at which the stage ends.
    """

    num_steps: int

    def next_batch(self, run: Run) -> Any:
        """This rank's share of the next batch. Raises DataError if it cannot be read."""

    def weight(self, run: Run, batch: Any) -> float:
        """What that share counts in the mean over the global batch."""

    def train_step(self, run: Run, batch: Any, *, weight: float) -> Any:
        """One step; `weight` is that of the global batch. Gives a named tuple with `seconds` and
        `waited`."""

    def evaluate(self, run: Run) -> dict[str, float]:
        """Metrics of an evaluation on the way."""

    def own_loss(self, result: Any) -> tuple[Tensor, float] | None:
        """This rank's part of a step's loss, scalar, and the weight of the global batch, by which
        the sum over ranks is divided; None where only `measure` tells."""

    def measure(self, run: Run, result: Any) -> Any:
        """What a step measured, over all ranks; collective."""

    def judge(self, run: Run, measured: Any) -> Sequence[Verdict | None]:
        """Verdicts on that."""

    def log(self, run: Run, measured: Any, evaluated: dict[str, float]) -> Sequence[Verdict | None]:
        """Write and show that, and an evaluation if there was one; verdicts on the machine."""

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """What this rank saves, so that over all ranks each element comes once."""

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint of this stage into the engine; collective."""

    def saved(self, run: Run) -> dict[str, Any]:
        """What a checkpoint's state says of this stage, as JSON."""


@dataclass(frozen=True)
class Start:
    """What a start of a run has before it builds what it trains.

    Attributes:
        config: resolved configuration.
        choice: profile, degrees and batch sizes.
        directory: where everything is written.
        requests: what signals ask for.
        heartbeat: tells the watchdogs how far this rank is.
        start_up: how long it took so far, by its parts.
        health: judges steps, and keeps what became of the unhealthy ones.
        wall_time: what the time of all starts went to.
    """

    config: Config
    choice: Plan
    directory: RunDirectory
    requests: Requests
    heartbeat: Heartbeat
    start_up: StartUp
    health: Health
    wall_time: WallTime = field(default_factory=WallTime)


@dataclass
class Run:
    """A run under way on this rank.

    Attributes:
        config: resolved configuration.
        choice: profile, degrees and batch sizes.
        topology: this rank's place in the layout.
        directory: where everything is written.
        corpus: token shards and tokenizer.
        loader: batches of this data rank, or its lessons.
        engine: DeepSpeed engine around the backbone.
        observer: metrics file and progress.
        saver: writes the checkpoints.
        requests: what signals ask for.
        heartbeat: tells the watchdogs how far this rank is.
        start_up: how long this start took, by its parts.
        stage: what is trained, on what.
        health: judges steps, and keeps what became of the unhealthy ones.
        wall_time: what the time of all starts went to.
        step: optimizer steps completed.
        unjudged: `Stage.own_loss` of the last step, where all ranks do not know its loss yet.
        samples: generated texts, one per evaluation.
        earlier_seconds: wall time of earlier starts of this run.
    """

    config: Config
    choice: Plan
    topology: Topology
    directory: RunDirectory
    corpus: Corpus
    loader: Loader | LessonLoader
    engine: Any
    observer: Observer
    saver: Saver
    requests: Requests
    heartbeat: Heartbeat
    start_up: StartUp
    stage: Stage
    health: Health
    wall_time: WallTime = field(default_factory=WallTime)
    step: int = 0
    unjudged: tuple[Tensor, float] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    earlier_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    saved_time: float = field(default_factory=time.monotonic)

    @property
    def tokens_seen(self) -> int:
        """Tokens of Stage A, all ranks; earlier starts may have had another global batch."""
        assert isinstance(self.loader, Loader), "lessons are no tokens of the corpus"
        samples = self.loader.samples_consumed - self.health.passed_over_samples
        return samples * self.config.training.sequence_length

    @property
    def seconds(self) -> float:
        """Wall time of all starts of this run."""
        return self.earlier_seconds + time.monotonic() - self.started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop reading ahead, end the writing thread, close the files.

        A rank that fails alone does not wait for what it writes: the others are told of it first.
        """
        self.wall_time.save()
        self.loader.close()
        self.saver.close(waits=kind is None or issubclass(kind, TrainingError))
        self.observer.close()


def make_saver(
    config: Config, choice: Plan, directory: RunDirectory, *, pinned: int | None = None
) -> Saver:
    """What writes the checkpoints of a run directory, and never drops that of step `pinned`."""
    return Saver(
        (directory.checkpoints, *directory.copies),
        keep=config.checkpoint.keep,
        background=choice.saves_in_background,
        pinned=pinned,
    )


def account(run: Run) -> None:
    """Open the account of the wall time, before the metrics of an earlier start are cut back;
    Stage B goes on with that of Stage A."""
    if runtime.rank() != 0 or run.wall_time.is_open:
        return
    folder = run.directory.path
    starts = read_starts(run.directory.path)
    run.wall_time.open(
        folder,
        step=run.step,
        start_up_seconds=run.start_up.seconds,
        watched=(starts[-1].step, starts[-1].ended.timestamp()) if starts else None,
    )
