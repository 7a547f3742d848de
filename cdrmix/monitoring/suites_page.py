"""Part of a report on suites of evaluations: newest scores with intervals, and their course.

templates/suites.html lays it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdrmix.errors import StateError
from cdrmix.monitoring.page import Figure
from cdrmix.monitoring.plots import Curve, plot
from cdrmix.monitoring.recorded_run import RecordedRun
from cdrmix.monitoring.suite_results import (
    RESULTS_FOLDER,
    Row,
    SuiteResult,
    better,
    interval_text,
    newest_results,
    read_result,
    score_text,
)

_MAX_FIGURES = 12  # of one suite


def suites_report(run: RecordedRun) -> dict[str, Any] | None:
    """Describes the results of suites; None for a run without any.

    `suites` have a title, the step of the newest result, its `rows` (task, metric, score, interval,
    examples) and `figures` of scores over steps where there are several. `problems` are messages on
    files that cannot be read, and on suites that failed during the run; `share` is the part of its
    time that suites took between steps, None where there were none.
    """
    results: list[SuiteResult] = []
    problems: list[str] = []
    for path in sorted((run.folder / RESULTS_FOLDER).glob("*.json")):
        try:
            results.append(read_result(path))
        except StateError as error:
            problems.append(str(error))
    in_run = run.summary.get("suites") or {}
    for name, times in (in_run.get("failures") or {}).items():
        last = (in_run.get("results") or {}).get(name) or {}
        why = f", the last time with: {last['failed']}" if "failed" in last else ""
        problems.append(f"Suite {name} failed during the run, {times:,} times{why}")
    if not results and not problems:
        return None
    suites = []
    for (suite, weights), newest in sorted(newest_results(results).items()):
        own = [each for each in results if (each.suite, each.weights) == (suite, weights)]
        suites.append(
            {
                "title": suite if weights == "trained" else f"{suite}, average of the weights",
                "step": newest.step,
                "rows": [
                    (row.task, row.metric, score_text(row.score), interval_text(row), row.n)
                    for row in newest.rows
                ],
                "figures": _courses(f"suite-{suite}-{weights}", newest.rows, own),
                "num_hidden": max(len(newest.rows) - _MAX_FIGURES, 0),
            }
        )
    return {"suites": suites, "problems": problems, "share": in_run.get("share_of_time")}


def _courses(key: str, rows: Sequence[Row], results: Sequence[SuiteResult]) -> list[Figure]:
    """Scores of the first rows over the steps; nothing for a single step."""
    by_step = sorted((each.step, each) for each in results if each.step is not None)
    if len(by_step) < 2:
        return []
    figures = []
    for number, wanted in enumerate(rows[:_MAX_FIGURES]):
        points = [
            (step, row.score)
            for step, result in by_step
            for row in result.rows
            if (row.task, row.metric) == (wanted.task, wanted.metric)
        ]
        steps, scores = np.array(points, dtype=np.float64).T
        curve = Curve("", steps, scores, f"c{number % 4 + 1}")
        title = f"{wanted.task} {wanted.metric}"
        direction = better(wanted.metric)
        unit = f"{direction} is better" if direction else ""
        figures.append(plot(title, unit, f"{key}-{number}", [curve], size=(360, 160)))
    return figures
