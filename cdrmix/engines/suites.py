"""Suites of evaluations in a run: when they judge the model, the time they take, and their scores.

A suite between steps changes nothing that training sees: it draws from seeds of its own, and the
states of all random generators and the mode of the model are afterwards what they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from cdrmix import runtime
from cdrmix.checkpoint.failed_writes import described
from cdrmix.checkpoint.held_out import Score
from cdrmix.config.evaluation import EvaluationConfig, SuiteConfig
from cdrmix.engines.recovery import averaged
from cdrmix.engines.run import JsonObject, Run
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import StateError, TrainingError
from cdrmix.evaluation.suite import (
    Judged,
    conditions,
    named_result,
    request_in_training,
    suite_of,
)
from cdrmix.log import get_logger
from cdrmix.models.backbone import LanguageModel
from cdrmix.monitoring.metrics import member_name
from cdrmix.monitoring.suite_results import RESULTS_FOLDER, SuiteResult, store_result
from cdrmix.optimizers.average import has_average
from cdrmix.parallel.apply import for_inference

logger = get_logger(__name__)

# Ranks that fail alike do so within seconds of each other.
_SECONDS_TO_FAIL = 60.0
_LOGGED_ROWS = 10
# Letters of tasks and metrics that stand as they are in a key, as of pass@1.
_PLAIN = "@,+:"


class Budget:
    """Suites that are due between steps, the first to come first, and the time that they may take.

    Times are seconds of rank 0's clock, whose decision counts.
    """

    def __init__(self, share: float) -> None:
        self.share = share  # of the run's time
        self.spent = 0.0  # by all suites between steps
        self.last: dict[str, float] = {}  # time of the last run of each suite
        self.queue: list[str] = []  # names of suites that are due
        self._told: set[str] = set()  # those of them whose wait was told

    def add(self, names: Iterable[str]) -> None:
        """Has suites wait for their turn, each once."""
        self.queue += [name for name in names if name not in self.queue]

    def fitting(self, elapsed: float) -> list[str]:
        """Names those at the head of the queue that the share has time for, of a run that has taken
        `elapsed` seconds; tells once of each that has to wait.

        A suite that was never run is taken to need no time. None passes another that waits, or a
        long suite would never run among short ones.
        """
        chosen: list[str] = []
        spent = self.spent
        for name in self.queue:
            takes = self.last.get(name, 0.0)
            # Suites take no time of one another: what they take is time of the run.
            if spent + takes > self.share * (elapsed + takes):
                break
            chosen.append(name)
            spent += takes
            elapsed += takes
        for name in self.queue[len(chosen) :]:
            takes = self.last.get(name, 0.0)
            spent += takes
            if name not in self._told:
                logger.info(
                    "suite %s is due and waits: suites have taken %.1f s of %.1f s, it took %.1f s "
                    "the last time, and evaluation.suites_share is %g; it fits at %.0f s",
                    *(name, self.spent, elapsed, takes, self.share, spent / self.share - takes),
                )
                self._told.add(name)
        return chosen

    def ran(self, name: str, seconds: float) -> None:
        """Counts a run of a suite."""
        self.spent += seconds
        self.last[name] = seconds
        self.queue.remove(name)
        self._told.discard(name)


class Suites:
    """Suites of one run, those of `evaluation.suites`.

    Args:
        corpus: data of the run, whose tokenizer and held-out text suites read.
    """

    def __init__(self, settings: EvaluationConfig, corpus: Corpus) -> None:
        self._settings = settings
        self._corpus = corpus
        self._by_name: dict[str, SuiteConfig] = {each.name: each for each in settings.suites}
        self._budget = Budget(settings.suites_share)
        self._failures: dict[str, int] = {}  # by name, since the start of the run
        self._best: Score | None = None  # of all steps measured
        self._last: dict[str, JsonObject] = {}  # newest results by name, for metrics.json

    def due(self, run: Run, *, looks_again: bool) -> list[SuiteConfig]:
        """Suites that are due behind the last step, and those that waited if `looks_again`, as far
        as their share of the time goes; collective where there are any."""
        names = [
            each.name
            for each in self._settings.suites
            if each.every_steps is not None and run.step % each.every_steps == 0
        ]
        self._budget.add(names)
        if not names and not (looks_again and self._budget.queue):
            return []
        # Clocks differ: one of them decides.
        chosen = self._budget.fitting(run.seconds) if runtime.rank() == 0 else []
        return [self._by_name[name] for name in runtime.broadcast_object(chosen)]

    def measure(self, run: Run, suites: Sequence[SuiteConfig]) -> tuple[dict[str, float], bool]:
        """Judges the model by suites between steps, in their share of the time; collective.

        Returns:
            Metrics by name, and whether the score of `best_by` is better than all before it.
        """
        metrics: dict[str, float] = {}
        before = self._best
        for suite in suites:
            began = time.monotonic()
            metrics |= self._judge(run, suite)
            seconds = time.monotonic() - began
            self._budget.ran(suite.name, seconds)
            logger.info(
                "suite %s took %.1f s behind step %d: suites have taken %.1f %% of the run's time",
                *(suite.name, seconds, run.step, 100 * self._budget.spent / run.seconds),
            )
        return metrics, self._best is not before

    def measure_at_the_end(self, run: Run) -> dict[str, float]:
        """Judges the model by all suites and returns the metrics; their time counts for no share.
        Collective."""
        metrics: dict[str, float] = {}
        for suite in self._settings.suites:
            metrics |= self._judge(run, suite)
        return metrics

    def summary(self, run: Run) -> JsonObject:
        """Section `suites` of metrics.json, on rank 0."""
        return {
            "seconds_between_steps": self._budget.spent,
            "share_of_time": self._budget.spent / run.seconds,
            "failures": self._failures,
            "results": self._last,
        }

    def state_dict(self) -> JsonObject:
        """Times, suites that wait, failures and the best score, for a checkpoint."""
        return {
            "spent": self._budget.spent,
            "last": self._budget.last,
            "queue": self._budget.queue,
            "failures": self._failures,
            "best": None if self._best is None else list(self._best),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on as a checkpoint says; None: it was saved without suites."""
        state = state or {}
        # Going back to an earlier checkpoint gives no time back.
        self._budget.spent = max(self._budget.spent, state.get("spent", 0.0))
        self._budget.last = dict(state.get("last", {})) | self._budget.last
        self._budget.queue = [name for name in state.get("queue", []) if name in self._by_name]
        self._failures = dict(state.get("failures", {}))
        best = Score(*state["best"]) if state.get("best") else None
        self._best = best if best is not None and best.by == self._settings.best_by else None

    def _judge(self, run: Run, suite: SuiteConfig) -> dict[str, float]:
        """Metrics of one suite, with the average of the weights too; those of its failure, which is
        told, if it fails on all ranks. Collective."""
        model = for_inference(run.engine.module)
        results: list[SuiteResult] = []
        averages = run.config.training.ema_decay is not None and has_average(run.engine)
        with (
            run.heartbeat.phase("evaluating"),
            run.wall_time.spent("evaluation"),
            _apart_from_training(model, seed=suite.seed),
        ):
            for weights in ("trained", "ema") if averages else ("trained",):
                is_average = weights == "ema"
                # Errors are met inside: all ranks put the weights back together.
                with averaged(run) if is_average else nullcontext():
                    outcome = _attempt(partial(self._ask, run, suite, model, weights))
                if isinstance(outcome, Exception):
                    return self._failed(run, suite, outcome)
                results.append(outcome)
        self._keep(run, results)
        return {
            member_name(
                "suite/*/*/*",
                *(result.suite, row.task, ("ema_" * (result.weights == "ema")) + row.metric),
                safe=_PLAIN,
            ): row.score
            for result in results
            for row in result.rows
        }

    def _ask(self, run: Run, suite: SuiteConfig, model: LanguageModel, weights: str) -> SuiteResult:
        """Result of a suite, stored under the run; rank 0's on all ranks. Collective."""
        judged = Judged(
            model=model,
            tokenizer=self._corpus.tokenizer,
            config=run.config,
            topology=run.topology,
            max_length=run.config.training.sequence_length,
            batch_size=run.plan.micro_batch_size,
            source=str(run.directory.path),
            step=run.step,
            weights=weights,
            data=self._corpus.folder,
            tokenizer_digest=self._corpus.manifest.tokenizer.sha256,
        )
        request = request_in_training(self._settings, suite)
        made = suite_of(suite.name, where="evaluation.suites")
        result = named_result(suite.name, made.measure(judged, request))
        noted = conditions(
            judged,
            request,
            layout=f"{run.plan.degrees.describe()}, {run.plan.name}",
            precision=run.config.training.precision,
        )
        result = replace(result, settings=noted | result.settings)
        # One rank's scores decide on the best checkpoint, which all ranks save together.
        result = runtime.broadcast_object(result)
        runtime.first_rank_does(lambda: _store(run, result))
        return result

    def _keep(self, run: Run, results: Sequence[SuiteResult]) -> None:
        """Keeps and logs what a suite has found; the trained weights come first."""
        trained = results[0]
        self._last[trained.suite] = {
            "step": run.step,
            "rows": [asdict(row) for row in trained.rows],
        }
        for result in results:
            lines = result.table().split("\n")
            of = " on the average of the weights" * (result.weights == "ema")
            logger.info("suite %s behind step %d%s:", result.suite, run.step, of)
            for line in lines[: 1 + _LOGGED_ROWS]:
                logger.info("  %s", line.rstrip())
            if more := len(lines[1 + _LOGGED_ROWS :]):
                place = run.directory.path / RESULTS_FOLDER
                logger.info("  and %d more lines; all scores are in %s", more, place)
        if trained.suite == self._settings.best_suite:
            self._take_score(run, trained)

    def _take_score(self, run: Run, result: SuiteResult) -> None:
        """Has the row of `best_by` be the score of this step."""
        wanted = self._settings.best_by
        by_name = {f"{result.suite}/{row.task}/{row.metric}": row for row in result.rows}
        row = by_name.get(wanted)
        if row is None:
            if runtime.rank() == 0:
                logger.warning(
                    "warning: evaluation.best_by = %s: the suite has no such row, so that no "
                    "checkpoint is the best. It has %s",
                    *(wanted, ", ".join(by_name)),
                )
            return
        if not math.isfinite(row.score):
            return
        score = Score(row.score, row.n, wanted)
        run.evaluated = (run.step, score)
        best = self._best
        if best is None or not score.compares_with(best) or score.rank < best.rank:
            self._best = score

    def _failed(self, run: Run, suite: SuiteConfig, error: Exception) -> dict[str, float]:
        """Tells of a failure, and counts it."""
        failures = self._failures.get(suite.name, 0) + 1
        self._failures[suite.name] = failures
        told = described(error)
        if isinstance(error, torch.OutOfMemoryError):
            runtime.release_memory()
        self._last[suite.label] = {"step": run.step, "failed": told}
        if runtime.rank() == 0:
            logger.warning(
                "warning: suite %s failed behind step %d, and the run goes on: %s",
                *(suite.name, run.step, told),
                # A fault of the program, which is not the user's to mend, with its traceback.
                exc_info=None if isinstance(error, TrainingError) else error,
            )
        return {member_name("suite/*/failures", suite.label): float(failures)}


@contextmanager
def _apart_from_training(model: LanguageModel, *, seed: int) -> Iterator[None]:
    """Context of a suite, whose draws depend on `seed` alone: random states and the mode of the
    model are put back behind it."""
    state = runtime.random_state()
    was_training = model.training
    runtime.seed_everything(seed, deterministic=False)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        runtime.restore_random_state(state)


def _attempt(action: Callable[[], SuiteResult]) -> SuiteResult | Exception:
    """Result of a collective action, or this rank's error if there is one on all of them. An error
    of some ranks alone is raised there: the others wait in a collective, and nothing can be told
    them."""
    try:
        return action()
    except Exception as error:
        if not runtime.fails_everywhere(within_seconds=_SECONDS_TO_FAIL):
            raise
        return error


def _store(run: Run, result: SuiteResult) -> None:
    try:
        store_result(run.directory.path, result)
    except OSError as error:
        raise StateError(f"{error.filename}: cannot be written: {error.strerror}") from error
