"""Models side by side: their results of suites and figures of their runs, each row with the best
one marked, or the reason why its scores cannot be compared. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from cdrmix.errors import ConfigError, StateError
from cdrmix.monitoring.run_figures import RUN_FIGURES, figures_of_run
from cdrmix.monitoring.sinks import without_non_finite
from cdrmix.monitoring.suite_results import (
    RESULTS_FOLDER,
    Better,
    Row,
    SuiteResult,
    better,
    interval_text,
    newest_results,
    read_result,
    read_results,
    score_text,
)

# Settings that change the time of an evaluation, or its last digits, and not what is asked; paths
# of data, which digests name; and what the names of rows say.
_HARMLESS = frozenset(
    ("versions", "packages", "lm_eval", "batch_size", "layout", "precision", "dtype", "sandbox")
    + ("max_length", "data", "state", "longer_documents")
)
_DIGESTS = ("digests", "task_digests")  # in place of a path of tasks
# Of documents by themselves, and not of `packed` samples, which have settings of their own.
_OF_DOCUMENTS = ("window", "stride", "documents", "tokens", "bytes", "prefix")
# Another tokenizer has other tokens, which begin and cut documents elsewhere: that is a part of the
# model. What is measured by token is then measured over other pieces of text.
_TOKENIZER = "tokenizer"
_BY_TOKENIZER = ("prefix", "tokens", "packed")
_OF_A_TOKEN = ("nats_per_token", "perplexity", "loss")
_SUITES_BY_TOKEN = ("perplexity", RUN_FIGURES)
_DIGEST = 12  # characters of a digest that a person compares
_HEX = frozenset("0123456789abcdef")
_GAP = "  "
_UNKNOWN = "–"


@dataclass(frozen=True)
class Model:
    """One of the models that are compared: a run, its average of the weights, or a folder that was
    evaluated.

    Attributes:
        label: its name, unlike that of the others.
        source: path, as given.
        weights: `trained`, or `ema` for the average of the weights.
        results: the newest of each suite, by the name of the suite.
    """

    label: str
    source: Path
    weights: str
    results: Mapping[str, SuiteResult]

    def row(self, suite: str, task: str, metric: str) -> Row | None:
        """Score of a task by a metric; None where it was not measured."""
        rows = self.results[suite].rows if suite in self.results else []
        return next((row for row in rows if (row.task, row.metric) == (task, metric)), None)


@dataclass(frozen=True)
class ComparedRow:
    """Scores of one metric of one task.

    Attributes:
        cells: of each model, in the order of the models; None where it was not measured.
        better: direction of the metric; None for a size, such as the number of parameters.
        why_not: reason why the scores cannot be compared; empty if they can.
    """

    suite: str
    task: str
    metric: str
    cells: tuple[Row | None, ...]
    better: Better | None
    why_not: str = ""

    @cached_property
    def best(self) -> tuple[int, ...]:
        """Numbers of the models with the best score; none where there is nothing to choose."""
        scores = {
            number: -cell.score if self.better == "lower" else cell.score
            for number, cell in enumerate(self.cells)
            if cell is not None and cell.score == cell.score  # NaN is no score
        }
        if self.better is None or self.why_not or len(scores) < 2:
            return ()
        highest = max(scores.values())
        best = tuple(number for number, score in scores.items() if score == highest)
        return best if len(best) < len(scores) else ()

    @cached_property
    def is_clear(self) -> bool:
        """True where the interval of the best score meets that of no other model."""
        if len(self.best) != 1:
            return False
        ends = [_ends(cell) for cell in self.cells if cell is not None]
        best = self.cells[self.best[0]]
        assert best is not None, "the best model was measured"
        low, high = _ends(best)
        return sum(low <= other[1] and other[0] <= high for other in ends) == 1


def _ends(row: Row) -> tuple[float, float]:
    """Ends of its interval; the score itself where there is none."""
    return (
        row.score if row.low is None else row.low,
        row.score if row.high is None else row.high,
    )


@dataclass(frozen=True)
class Comparison:
    """Models side by side."""

    models: Sequence[Model]
    rows: Sequence[ComparedRow] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Reasons why rows cannot be compared, each once."""
        return list(dict.fromkeys(row.why_not for row in self.rows if row.why_not))

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `cdrmix compare --json` prints; None for what is not known."""
        models = [
            {
                "label": model.label,
                "source": str(model.source),
                "weights": model.weights,
                "steps": {suite: result.step for suite, result in model.results.items()},
            }
            for model in self.models
        ]
        rows = [
            {
                "suite": row.suite,
                "task": row.task,
                "metric": row.metric,
                "better": row.better,
                "comparable": not row.why_not,
                "why_not": row.why_not,
                "is_clear": row.is_clear,
                "cells": [
                    None
                    if cell is None
                    else {
                        **{name: getattr(cell, name) for name in ("score", "low", "high", "n")},
                        "best": number in row.best,
                    }
                    for number, cell in enumerate(row.cells)
                ],
            }
            for row in self.rows
        ]
        finite: dict[str, Any] = without_non_finite({"runs": models, "rows": rows})
        return finite

    def table(self, width: int | None = None) -> str:
        """Returns the rows as lines of text for a person.

        Args:
            width: columns of the terminal; models that do not fit beside each other follow below.
                None: any width.
        """
        notes = {reason: f"[{number}]" for number, reason in enumerate(self.reasons, 1)}
        names = [f"{row.task} {row.metric} {notes.get(row.why_not, '')}" for row in self.rows]
        named = 2 + max((len(name.strip()) for name in names), default=0)
        columns = [self._column(number) for number in range(len(self.models))]
        blocks = []
        for block in _fitting(columns, None if width is None else width - named):
            lines = [" " * named]
            for number, row in enumerate(self.rows):
                if number == 0 or row.suite != self.rows[number - 1].suite:
                    lines += [row.suite]
                lines.append(f"{_GAP}{names[number].strip()}".ljust(named))
            # of each suite its name, for which a column has no cell
            places = [0, *(n for n, line in enumerate(lines) if line.startswith(_GAP) and n)]
            for column in block:
                for place, cell in zip(places, column, strict=True):
                    lines[place] += _GAP + cell
            blocks.append("\n".join(line.rstrip() for line in lines))
        legend = [f"{note} not comparable: {reason}" for reason, note in notes.items()]
        if any(row.best for row in self.rows):
            legend.insert(0, "* best; ~ best, and its interval meets that of another model")
        return "\n\n".join([*blocks, "\n".join(legend)] if legend else blocks)

    def _column(self, number: int) -> list[str]:
        """Label of a model and its cells, padded to one width; the scores are below each other."""
        texts = [_cell_texts(row, number) for row in self.rows]
        of_scores = max((len(score) for score, _ in texts), default=0)
        cells = [f"{score:>{of_scores}}{rest}" for score, rest in texts]
        size = max(map(len, [self.models[number].label, *cells]))
        return [f"{self.models[number].label:{size}}", *(f"{cell:{size}}" for cell in cells)]


def _cell_texts(row: ComparedRow, number: int) -> tuple[str, str]:
    """Score of one model, and its mark and interval; a dash where nothing was measured."""
    cell = row.cells[number]
    if cell is None:
        return _UNKNOWN, ""
    mark = " "
    if number in row.best:
        mark = "*" if row.is_clear or cell.low is None else "~"
    between = interval_text(cell)
    return score_text(cell.score), f"{mark} {f'({between})' if between else ''}".rstrip()


def _fitting(columns: Sequence[list[str]], room: int | None) -> list[list[list[str]]]:
    """Splits columns into blocks of as many as fit into a width, at least one in each."""
    blocks: list[list[list[str]]] = [[]]
    for column in columns:
        taken = sum(len(_GAP) + len(cells[0]) for cells in [*blocks[-1], column])
        if blocks[-1] and room is not None and taken > room:
            blocks.append([])
        blocks[-1].append(column)
    return blocks


def compare(sources: Sequence[Path], suites: Sequence[str] = ()) -> Comparison:
    """Reads runs and results, and sets them side by side.

    Args:
        sources: run directories, and files of results; files of one model, each of another suite,
            are one model.
        suites: names of those to compare, `run` for the figures of the runs; none: all.
    Raises:
        StateError: if one does not exist, is damaged or holds no results.
        ConfigError: if none holds results of a suite that is asked for.
    """
    models = _labelled(_merged(chain.from_iterable(map(_read, sources))))
    known = sorted({suite for model in models for suite in model.results})
    for suite in suites:
        # A model without them has dashes, as where no suite is asked for.
        if suite in known:
            continue
        advice = f"Write some with `cdrmix evaluate RUN_DIR --suite {suite}`"
        if suite == RUN_FIGURES:
            advice = "A run has them at its end, in metrics.json"
        raise ConfigError(
            f"--suite {suite}: none of these holds results of it; they hold "
            f"{', '.join(known)}. {advice}"
        )
    chosen = list(suites) or [*(name for name in known if name != RUN_FIGURES), RUN_FIGURES]
    rows = [_compared(models, *key) for suite in chosen for key in _keys(models, suite)]
    return Comparison(models, rows)


def _keys(models: Sequence[Model], suite: str) -> list[tuple[str, str, str]]:
    """Suite, task and metric of all its rows, in the order of the first model that has them."""
    found = (
        (suite, row.task, row.metric)
        for model in models
        if suite in model.results
        for row in model.results[suite].rows
    )
    return list(dict.fromkeys(found))


def _read(source: Path) -> list[Model]:
    """Models of one source; a run with results of the average of its weights is two."""
    if source.is_file():
        result = read_result(source)
        return [Model(source.stem, source, result.weights, {result.suite: result})]
    if not source.is_dir():
        raise StateError(
            f"{source}: not found. Give run directories, or files that `cdrmix evaluate "
            "--out FILE` has written"
        )
    results = newest_results([*read_results(source), *figures_of_run(source)])
    if not results:
        raise StateError(
            f"{source}: holds no results, neither metrics.json nor {RESULTS_FOLDER}/*.json. Write "
            f"some with `cdrmix evaluate {source} --suite NAME`"
        )
    models = []
    for weights in sorted({weights for _, weights in results}, reverse=True):
        own = {suite: result for (suite, of), result in results.items() if of == weights}
        models.append(Model(source.resolve().name, source, weights, own))
    return models


def _merged(models: Iterable[Model]) -> list[Model]:
    """Joins files of results of one model, where each is of another suite."""
    joined: list[Model] = []
    for model in models:
        if model.source.is_file():
            for number, other in enumerate(joined):
                is_same = other.source.is_file() and _identity(other) == _identity(model)
                if is_same and other.results.keys().isdisjoint(model.results):
                    name = Path(_identity(model)[0]).name or model.label
                    results = {**other.results, **model.results}
                    joined[number] = replace(other, label=name, results=results)
                    break
            else:
                joined.append(model)
        else:
            joined.append(model)
    return joined


def _identity(model: Model) -> tuple[str, int | None, str]:
    """Source, step and weights of a model of which one file or several hold results."""
    result = next(iter(model.results.values()))
    return result.source, result.step, result.weights


def _labelled(models: Sequence[Model]) -> list[Model]:
    """The models with labels made unique: by as many of the folders around them as it takes, and
    one that is given twice by a number."""
    paths = [(*model.source.resolve().parent.parts, model.label) for model in models]
    labels: list[str] = []
    for model, path in zip(models, paths, strict=True):
        twins = [
            other
            for rival, other in zip(models, paths, strict=True)
            if rival.weights == model.weights and other != path
        ]
        depths = range(1, len(path) + 1)
        unlike = (d for d in depths if all(other[-d:] != path[-d:] for other in twins))
        label = "/".join(path[-next(unlike, 1) :])
        labels.append(label if model.weights == "trained" else f"{label} ({model.weights})")
    return [
        replace(model, label=label if (n := labels[:at].count(label)) == 0 else f"{label} #{n + 1}")
        for at, (model, label) in enumerate(zip(models, labels, strict=True))
    ]


def _compared(models: Sequence[Model], suite: str, task: str, metric: str) -> ComparedRow:
    cells = tuple(model.row(suite, task, metric) for model in models)
    results = {
        model.label: model.results[suite]
        for model, cell in zip(models, cells, strict=True)
        if cell is not None
    }
    direction = better(metric)
    why_not = "; ".join(_differences(_conditions(results, task, metric))) if direction else ""
    return ComparedRow(suite, task, metric, cells, direction, why_not)


def _conditions(
    results: Mapping[str, SuiteResult], task: str, metric: str
) -> dict[str, dict[str, str]]:
    """Settings by label that the scores of a task depend on, as text."""
    tokenizers = {result.settings.get(_TOKENIZER) for result in results.values()}
    counts = {
        row.n
        for result in results.values()
        for row in result.rows
        if (row.task, row.metric) == (task, metric)
    }
    found: dict[str, dict[str, str]] = {}
    for label, result in results.items():
        own = {name: value for name, value in result.settings.items() if name not in _HARMLESS}
        if isinstance(own.get("tasks"), str) and any(name in own for name in _DIGESTS):
            del own["tasks"]
        if len(counts) == 1:  # a limit that left nothing out
            own.pop("limit", None)
        if len(tokenizers) > 1:
            own = {name: value for name, value in own.items() if not name.startswith(_BY_TOKENIZER)}
        if result.suite not in _SUITES_BY_TOKEN or metric not in _OF_A_TOKEN:
            own.pop(_TOKENIZER, None)
        if task.partition(":")[0] == "packed":
            own = {name: value for name, value in own.items() if not name.startswith(_OF_DOCUMENTS)}
        else:
            own.pop("packed", None)
        tasks = {row.task for row in result.rows}
        found[label] = {}
        for name, value in own.items():
            part = _of_task(value, task, tasks)
            inner = part if isinstance(part, Mapping) else {"": part}
            found[label] |= {f"{name} {key}".strip(): _as_text(v) for key, v in inner.items()}
    return found


def _of_task(value: Any, task: str, tasks: set[str]) -> Any:
    """Part of a setting by task that is of one task; another setting as it is.

    Of `mmlu` these are all that begin so, of `humaneval grade 1` that of the whole set.
    """
    if not isinstance(value, Mapping) or tasks.isdisjoint(value):
        return value
    if task in value:
        return value[task]
    wholes = (f"{name}{mark}" for name in value for mark in (" ", ":"))
    names = [whole[:-1] for whole in wholes if task.startswith(whole)]
    names += [name for name in value if name.startswith(f"{task}_")]
    return {name: value[name] for name in names}


def _differences(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Settings that are not the same for all models, each with its values by model."""
    found = []
    for name in dict.fromkeys(chain.from_iterable(settings.values())):
        values = {label: own.get(name, "not named") for label, own in settings.items()}
        if len({*values.values()}) > 1:
            by_value = sorted(values.items(), key=lambda item: item[1])
            parts = [
                f"{value} in {', '.join(label for label, _ in same)}"
                for value, same in groupby(by_value, key=lambda item: item[1])
            ]
            found.append(f"{name.replace('_', ' ')} {', '.join(parts)}")
    return found


def _as_text(value: Any) -> str:
    """Writes a setting; of a digest its beginning."""
    if value is None:
        return "none"
    if isinstance(value, str):
        bare = value.removeprefix("sha256:")
        return bare[:_DIGEST] if len(bare) >= 40 and _HEX.issuperset(bare) else value
    return json.dumps(value, sort_keys=True)
