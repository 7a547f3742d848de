"""Results of evaluation suites: rows of scores with intervals, stored under a run. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cdrmix.errors import StateError
from cdrmix.monitoring.sinks import write_json_atomic

RESULTS_FOLDER = "evaluations"  # in a run directory
_NUM_RESAMPLES = 1_000
_INTERVAL = (2.5, 97.5)  # percentiles
# Words of the metrics that are the better the lower they are; of all others a higher score is.
_OF_LOWER = frozenset(
    ("loss", "nats", "perplexity", "ppl", "overflow", "error", "errors", "brier", "ter")
    + ("forgetting", "empty", "truncated", "timeout", "timeouts", "killed", "seconds")
)
_WITHOUT_BEST = ("tokens_seen", "parameters", "utilisation")

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Row:
    """One score of a suite.

    Attributes:
        task: what was asked, such as a task of the harness, a domain or a layer.
        metric: name and unit, such as `pass@1`, `nats_per_token` or `bits_per_byte`.
        low, high: its 95 % interval; None where the score is no mean over examples.
        n: examples (count).
    """

    task: str
    metric: str
    score: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class SuiteResult:
    """Rows of one suite on one model.

    Attributes:
        source: of the model: its run directory, checkpoint or folder, as given.
        step: optimizer steps of its training; None if that is not known.
        weights: `trained`, or `ema` for the average of the weights.
        settings: all that the scores depend on beside the model, such as seeds, windows, the
            prefix token, digests of tasks and versions of packages.
        details: further parts of the printed JSON object that are no scores.
        notes: lines for a person below the table, such as a bound that a score misses.
    """

    suite: str
    rows: list[Row]
    source: str = ""
    step: int | None = None
    weights: str = "trained"
    settings: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `cdrmix evaluate --json` prints."""
        content = asdict(self)
        return content | content.pop("details")

    def table(self) -> str:
        """Returns the rows as lines of text for a person."""
        width = max((len(row.task) for row in self.rows), default=4)
        named = max((len(row.metric) for row in self.rows), default=6)
        lines = [
            f"{'task':{width}}  {'metric':{named}}  {'score':>9}  {'95 % interval':20}  {'n':>7}"
        ]
        for row in self.rows:
            between = "" if row.low is None else f"{row.low:.4f} to {row.high:.4f}"
            lines.append(
                f"{row.task:{width}}  {row.metric:{named}}  {row.score:9.4f}  {between:20}"
                f"  {row.n:7,}"
            )
        return "\n".join(lines + self.notes)


def lower_is_better(metric: str) -> bool:
    """True for losses, perplexities, bits per byte, overflow and shares of what failed; false for
    accuracies, pass@k, entropy and the like.

    Args:
        metric: as of `Row`, or as the harness names it, such as `word_perplexity,none`.
    """
    if "per_second" in metric:
        return False
    words = re.split(r"[^a-z]+", metric.lower())
    return not _OF_LOWER.isdisjoint(words) or "bits_per_byte" in metric


def better(metric: str) -> Better | None:
    """Direction of a metric; None for sizes and shares of which neither end is the better one."""
    if any(name in metric for name in _WITHOUT_BEST):
        return None
    return "lower" if lower_is_better(metric) else "higher"


def score_text(value: float) -> str:
    """Writes a score in four decimals, and a large one, which is a count or a speed, in none."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4f}"


def interval_text(row: Row) -> str:
    """Writes the interval of a score; empty where there is none."""
    if row.low is None or row.high is None:
        return ""
    return f"{score_text(row.low)} to {score_text(row.high)}"


def bootstrap_interval(
    values: Sequence[float], weights: Sequence[float] | None = None, *, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of a mean, by drawing as many examples again, with replacement.

    Args:
        values: of each example; one or more.
        weights: of the examples in the mean, such as their tokens; None: equal.
    """
    of_each = np.asarray(values, dtype=np.float64)
    shares = np.ones_like(of_each) if weights is None else np.asarray(weights, dtype=np.float64)
    draw = np.random.default_rng(seed)
    means = []
    for _ in range(_NUM_RESAMPLES):  # one at a time: all together would fill the memory
        chosen = draw.integers(len(of_each), size=len(of_each))
        means.append(np.average(of_each[chosen], weights=shares[chosen]))
    low, high = np.percentile(means, _INTERVAL)
    return float(low), float(high)


def store_result(run_dir: Path, result: SuiteResult) -> Path:
    """Writes a result into a run directory, in place of one of the same step and weights."""
    folder = run_dir / RESULTS_FOLDER
    folder.mkdir(exist_ok=True)
    average = "" if result.weights == "trained" else f"-{result.weights}"
    path = folder / f"{result.suite}-{result.step}{average}.json"
    write_json_atomic(path, result.as_json())
    return path


def set_aside_results(run_dir: Path, *, after: int) -> None:
    """Gives the results of steps behind `after` the ending `.cut`, when a run goes on from there:
    the model of those steps may become another one.

    Raises StateError if one cannot be renamed.
    """
    for path in (run_dir / RESULTS_FOLDER).glob("*.json"):
        step = re.search(r"-(\d+)(-ema)?$", path.stem)
        if step is not None and int(step[1]) > after:
            try:
                path.rename(path.with_suffix(".cut"))
            except OSError as error:
                raise StateError(f"{path}: cannot be renamed: {error.strerror}") from error


def read_result(path: Path) -> SuiteResult:
    """Reads one result. Raises StateError if the file is missing or none."""
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {name: content[name] for name in ("suite", "source", "step", "weights", "settings")}
        rows = [_row(row) for row in content["rows"]]
        return SuiteResult(**known, rows=rows, notes=content.get("notes", []))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: is no result of a suite ({type(error).__name__}: {error}). Write one with "
            "`cdrmix evaluate RUN_DIR --suite NAME`"
        ) from error


def _row(values: Mapping[str, Any]) -> Row:
    """Row of its JSON object, which may have more columns; values that are not finite were written
    as text."""
    low, high = (None if values[end] is None else float(values[end]) for end in ("low", "high"))
    names = str(values["task"]), str(values["metric"])
    return Row(*names, float(values["score"]), low, high, int(values["n"]))


def newest_results(results: Sequence[SuiteResult]) -> dict[tuple[str, str], SuiteResult]:
    """Result of the latest step of each suite and weights."""
    newest: dict[tuple[str, str], SuiteResult] = {}
    for result in sorted(results, key=lambda each: -1 if each.step is None else each.step):
        newest[result.suite, result.weights] = result
    return newest


def read_results(run_dir: Path) -> list[SuiteResult]:
    """Reads the results in a run directory, by suite, step and weights. Raises StateError if one is
    damaged."""
    results = [read_result(path) for path in (run_dir / RESULTS_FOLDER).glob("*.json")]
    return sorted(results, key=lambda each: (each.suite, each.step or 0, each.weights))
