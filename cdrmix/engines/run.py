"""A run under way: the protocol of its stages, and the state that the loop and recovery share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from cdrmix import runtime
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.held_out import LOSS, Score
from cdrmix.checkpoint.tiers import TieredSaver
from cdrmix.cluster.heartbeat import Heartbeat
from cdrmix.cluster.starts import StartUp
from cdrmix.config.evaluation import SuiteConfig
from cdrmix.config.schema import Config
from cdrmix.engines.cadence import Cadence
from cdrmix.engines.run_directory import METRICS, RunDirectory
from cdrmix.engines.supervision import Requests
from cdrmix.engines.tiers_of_run import make_saver
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import TrainingError
from cdrmix.hooks.dispatch import Hooks
from cdrmix.monitoring.goodput import WallTime
from cdrmix.monitoring.health import Health, Verdict
from cdrmix.monitoring.metrics import SHOWN_ONLY
from cdrmix.monitoring.peak_memory import PeakMemory
from cdrmix.monitoring.sinks import MetricsFile, Progress
from cdrmix.parallel.topology import Topology
from cdrmix.planning.plan import Plan

JsonObject = dict[str, Any]
Batch = TypeVar("Batch")


class Timed(Protocol):
    """Result of a step on this rank, of which the loop reads the time alone."""

    @property
    def seconds(self) -> float:
        """Wall time of forward, backward and optimizer."""


Result = TypeVar("Result", bound=Timed)


@dataclass
class Observer:
    """Metrics file and progress, on rank 0 alone, and the time window between two logged lines."""

    _files: tuple[MetricsFile, Progress] | None = None
    # Of the steps since the last logged line: wall time, and the share of it spent on reading data.
    window: list[tuple[float, float]] = field(default_factory=list)

    def open(
        self, folder: Path, *, step: int, num_steps: int, tokens_per_step: int | None = None
    ) -> None:
        """Start at `step` of `num_steps`, on rank 0 alone; cut off metrics of later steps.

        `tokens_per_step`, of all ranks, is None where speed is not told in tokens. Raises
        StateError, as every method does, if the metrics file cannot be written.
        """
        metrics = MetricsFile(folder / METRICS)
        # A run that begins again measures the model before its first step again.
        metrics.truncate_after(step or -1)
        progress = Progress(
            num_steps, initial=step, tokens_per_step=tokens_per_step, stream=sys.stderr
        )
        self._files = (metrics, progress)

    def step_done(self, step: int, seconds: float, *, waited: float) -> None:
        """Count a step, logged or not."""
        self.window.append((seconds, waited))
        if self._files is not None:
            self._files[1].step_done(step, seconds)

    def loss_known(self, loss: float) -> None:
        """Show the loss of the last step, which no line of the metrics has."""
        if self._files is not None:
            self._files[1].loss_known(loss)

    def go_back(self, step: int) -> None:
        """Cut off the metrics after `step`, from which the run goes on."""
        self.window = []  # of steps that do not count
        if self._files is not None:
            metrics, progress = self._files
            metrics.truncate_after(step)
            progress.update(step)

    def write(self, step: int, line: dict[str, float]) -> None:
        """Write and show one record."""
        if self._files is not None:
            metrics, progress = self._files
            metrics.write({k: value for k, value in line.items() if k not in SHOWN_ONLY})
            progress.update(step, line)

    def sync(self) -> None:
        """Make the written metrics durable, before a checkpoint of their step gets its name."""
        if self._files is not None:
            self._files[0].sync()

    def end_progress(self) -> None:
        """Leave the bar as it stands: what is shown from now on is below it."""
        if self._files is not None:
            self._files[1].close()

    def close(self) -> None:
        """End the progress and close the metrics file."""
        self.end_progress()
        if self._files is not None:
            self._files[0].close()


class BatchSource(Protocol):
    """Samples or lessons in the run's global order."""

    def state_dict(self) -> JsonObject:
        """Position of the next batch, alike on all ranks; `samples_consumed` counts before it."""

    def load_state_dict(self, state: JsonObject) -> None:
        """Go to a saved position. Raises StateError if it is one in other data."""

    def close(self) -> None:
        """Stop reading ahead."""


class Stage(Protocol[Batch, Result]):
    """Training as the one loop sees it: Stage A and Stage B differ in what they do here.

    Each stage has its own types for a batch, this rank's share of a step, and for the result that
    this rank computes from it.
    """

    name: Literal["a", "b"]  # pretraining, reasoning enablement
    num_steps: int  # at which the stage ends
    corpus: Corpus
    loader: BatchSource  # batches of this data rank
    num_weights: int  # of a batch

    def next_batch(self, run: Run) -> Batch:
        """Read this rank's share of the next step. Raises DataError if it cannot be read."""

    def weights(self, run: Run, batch: Batch) -> Sequence[float]:
        """Weights of that share in the means over the global batch, `num_weights` of them."""

    def train_step(self, run: Run, batch: Batch, *, weights: Sequence[float]) -> Result:
        """Take one step; `weights` are those of the global batch. Returns a result."""

    def own_loss(self, result: Result) -> tuple[Tensor, float] | None:
        """This rank's part of a step's loss, scalar, and the weight of the global batch, by which
        the sum over ranks is divided; None where only `measure` gives a loss."""
        return None

    def measure(self, run: Run, result: Result) -> dict[str, float]:
        """Reduce a result over all ranks to metrics by name; collective."""

    def judge(self, run: Run, metrics: dict[str, float]) -> Sequence[Verdict | None]:
        """Verdicts on a step's loss."""

    def evaluate(self, run: Run) -> dict[str, float]:
        """Metrics of an evaluation between steps, if the stage has one, which sets
        `run.evaluated`."""
        return {}

    def suites_due(self, run: Run, *, looks_again: bool) -> Sequence[SuiteConfig]:
        """Suites that judge the model behind the last step; collective where one is due, or waits
        and `looks_again`."""
        return ()

    def measure_suites(
        self, run: Run, suites: Sequence[SuiteConfig]
    ) -> tuple[dict[str, float], bool]:
        """Metrics of those suites, and whether the score of the step is the best so far;
        collective."""
        return {}, False

    def fragments(self, run: Run) -> Iterator[Fragment]:
        """This rank's share of a checkpoint; over all ranks each element comes once."""

    def load(self, run: Run, reader: CheckpointFile) -> None:
        """Put a checkpoint of this stage into the engine; collective."""

    def inputs(self) -> JsonObject:
        """Entries of a start's record about what is read beside the data set."""
        return {}

    def saved(self, run: Run) -> JsonObject:
        """The stage's entries of a checkpoint's state.json."""


@dataclass(kw_only=True)
class Start:
    """A start of a run before its model is built."""

    config: Config
    plan: Plan  # profile, degrees and batch sizes
    directory: RunDirectory
    requests: Requests  # signals received
    heartbeat: Heartbeat  # reports progress to the watchdogs
    start_up: StartUp  # duration of this start so far, by its parts
    health: Health  # judges steps, and keeps the record of unhealthy ones
    hooks: Hooks = field(default_factory=Hooks)  # code of users and of ours, called at fixed places
    wall_time: WallTime = field(default_factory=WallTime)  # of all starts
    command: Sequence[str] = ()  # words of the user's command, without secrets
    # Folder of the sample corpus that the run was trained on before; None: the usual one.
    sample: Path | None = None
    # Description of the weights that a new run began with; None: its own, or those of a checkpoint.
    start_from: JsonObject | None = None
    is_recorded: bool = False  # an earlier stage of this start has written the record of both
    # Of a Hugging Face model: folder, digest and family of what training began with, and the folder
    # with its small files.
    base: JsonObject | None = None
    base_files: Path | None = None


@dataclass(kw_only=True)
class Run(Start, AbstractContextManager[None], Generic[Batch, Result]):
    """A run under way on this rank: a start with its engine, its stage and its progress."""

    topology: Topology  # this rank's place in the layout
    engine: Any  # DeepSpeed engine around the model
    stage: Stage[Batch, Result]
    saver: TieredSaver  # writes the checkpoints
    cadence: Cadence  # decides when
    observer: Observer = field(default_factory=Observer)
    memory: PeakMemory = field(default_factory=PeakMemory)  # of this rank
    step: int = 0  # optimizer steps completed
    # `Stage.own_loss` of the last step, while its loss over all ranks is not known.
    unjudged: tuple[Tensor, float] | None = None
    # Step and score of the last evaluation, or of the checkpoint that the run goes on from.
    evaluated: tuple[int, Score] | None = None
    earlier_seconds: float = 0.0  # wall time of earlier starts
    started: float = field(default_factory=time.monotonic)
    saved_time: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall time of all starts of this run."""
        return self.earlier_seconds + time.monotonic() - self.started

    @property
    def score(self) -> Score | None:
        """Score of the present step by `evaluation.best_by`; None if it was not measured."""
        step, score = self.evaluated or (None, None)
        return score if step == self.step else None

    def checkpoints(self) -> JsonObject:
        """Names the last and the best checkpoint for metrics.json, on rank 0."""
        best = self.saver.best()
        named: JsonObject | None = None
        if best is not None:
            score = best.score
            measure = {"loss": score.value} if score.by == LOSS else score.as_json()
            named = {"step": best.step, **measure}
        told = {"last": self.saver.saved_step, "best": named, "folder": "checkpoints"}
        tiers = self.saver.tiers()
        return {**told, "tiers": tiers} if tiers else told

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop reading ahead, end the writing thread, close the files.

        A rank that fails alone does not wait for its save: the other ranks are to hear of it first.
        """
        self.wall_time.save()
        self.stage.loader.close()
        # Before the observer: a save under way makes its metrics durable before it ends.
        self.saver.close(waits=kind is None or issubclass(kind, TrainingError))
        if kind is None:  # the run directory has the last step
            self.saver.end()
        self.observer.close()


def make_run(
    start: Start,
    topology: Topology,
    engine: Any,
    stage: Stage[Batch, Result],
    *,
    first_step: int = 0,
) -> Run[Batch, Result]:
    """Returns the run of a start, its stage at `first_step`, whose checkpoint is never dropped."""
    saver = make_saver(start, pinned=first_step or None)  # Stage A is built on none
    cadence = Cadence(start.config, world_size=runtime.world_size(), step=first_step)
    return Run(
        **vars(start),
        topology=topology,
        engine=engine,
        stage=stage,
        saver=saver,
        cadence=cadence,
        step=first_step,
    )
