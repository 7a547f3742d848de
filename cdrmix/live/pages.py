"""Contents of the served pages: the table of runs, a run, and runs side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from cdrmix.config.resuming import changes_between
from cdrmix.errors import TrainingError
from cdrmix.live.facts import UNKNOWN, eta_text, facts, progress_text, state_level, state_text
from cdrmix.live.run_folder import METRICS
from cdrmix.live.runs import DAMAGE, Listed, Runs, ServedRun
from cdrmix.live.status import STATES, Status
from cdrmix.monitoring.comparison import Comparison, compare
from cdrmix.monitoring.comparison_page import suites_of
from cdrmix.monitoring.metric_columns import MetricColumns
from cdrmix.monitoring.page import Figure, render
from cdrmix.monitoring.plots import COLORS, Curve, plot
from cdrmix.monitoring.report import read_run, render_report
from cdrmix.monitoring.sinks import duration

# Parts of a page: with its frame, for a browser that follows it all of what may change, or its
# figures alone.
Part = Literal["page", "main", "status"]

MOST_COMPARED = len(COLORS)
_REPORT = "report.html"
# Files that a report is made of.
_READ_BY_REPORT = (
    *(METRICS, "config_snapshot.yaml", "metrics.json", "plan.json", "environment.json"),
    *("health.json", "reasoning.json", "starts", "evaluations"),
)
_PICTURES = (
    ("loss", "Training loss", "nats per token", {"text": "{:#.4g}".format}),
    ("eval/loss", "Held-out loss", "nats per token", {"text": "{:#.4g}".format}),
    (
        "tokens_per_second",
        "Throughput",
        "tokens per second",
        {"text": "{:,.0f}".format, "limits": (0, None)},
    ),
    ("grad_norm", "Gradient norm", "L2, before clipping", {"text": "{:#.3g}".format}),
)
_MOST_LETTERS = 120  # of a value of a configuration


def address(kind: str, key: str) -> str:
    """Path of a page of a run."""
    return f"/{kind}/{quote(key)}"


def list_page(runs: Runs, part: Part) -> str:
    """Table of all runs."""
    rows = [_row(listed) for listed in runs.listed()]
    template = "live/templates/table.html" if part == "status" else "live/templates/list.html"
    return _rendered(
        template, part, rows=rows, states=STATES, root=str(runs.root), most=MOST_COMPARED
    )


def _row(listed: Listed) -> dict[str, Any]:
    """Cells of a run, each as (text, value to sort by)."""
    run, status = listed.run, listed.status
    row = {"key": run.key, "address": address("run", run.key), "damage": listed.damage}
    if status is None:
        return row
    figures: dict[str, tuple[str, Any]] = {
        "step": (f"{status.step:,}", status.step),
        **{
            name: (UNKNOWN, "") if value is None else (text.format(value), value)
            for name, metric, text in (
                ("loss", "loss", "{:.4f}"),
                ("held-out", "eval/loss", "{:.4f}"),
                ("tokens/s", "tokens_per_second", "{:,.0f}"),
            )
            for value in [status.values.get(metric)]
        },
        "left": (eta_text(status), status.eta_seconds if status.eta_seconds is not None else ""),
        "started": (status.began or UNKNOWN, status.began),
    }
    return row | {
        "status": status,
        "state": state_text(status),
        "level": state_level(status),
        "share": status.share,
        "figures": figures,
    }


def run_page(runs: Runs, run: ServedRun, part: Part) -> str:
    """A run with the pictures of its report. Raises TrainingError or one of DAMAGE where its files
    cannot be read."""
    status = run.status()
    values = {
        "status": status,
        "state": state_text(status),
        "level": state_level(status),
        "progress": progress_text(status),
        "eta": eta_text(status) if status.eta_seconds is not None else "",
        "facts": list(facts(status)),
        "age": None if status.newest_seconds is None else duration(status.newest_seconds),
        "mark": _mark(run, status),
        "key": run.key,
        "report_address": (
            address("report", run.key) if run.folder.changed(_REPORT) is not None else None
        ),
    }
    if part == "status":
        return render("live/templates/status.html", **values)
    recorded = read_run(run.path, runs.metrics(run))
    return render_report(recorded, "live/templates/run.html", frame=_frame(part), **values)


def _mark(run: ServedRun, status: Status) -> str:
    """Text that changes where the pictures of a run do."""
    times = [run.folder.changed(name) for name in _READ_BY_REPORT]
    return _digest([times, status.step])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def compare_page(runs: Runs, chosen: Sequence[ServedRun], part: Part) -> str:
    """Runs side by side: overlaid curves, differences of configuration, results of suites."""
    statuses = [run.status() for run in chosen]
    names = [f"{chr(ord('A') + number)}" for number in range(len(chosen))]
    values: dict[str, Any] = {
        "runs": [
            {
                "letter": letter,
                "color": color,
                "key": run.key,
                "address": address("run", run.key),
                "state": state_text(status),
                "level": state_level(status),
                "progress": progress_text(status),
                "status": status,
            }
            for letter, color, run, status in zip(names, COLORS, chosen, statuses, strict=False)
        ],
        "mark": _digest([_mark(run, s) for run, s in zip(chosen, statuses, strict=True)]),
    }
    if part == "status":
        return render("live/templates/compared.html", **values)
    compared, without = _results(chosen)
    return _rendered(
        "live/templates/compare.html",
        part,
        **values,
        figures=_overlaid(runs, chosen, names),
        differences=_differences(chosen),
        models=compared.models if compared else (),
        suites=suites_of(compared) if compared else (),
        without=without,
    )


def _overlaid(runs: Runs, chosen: Sequence[ServedRun], names: Sequence[str]) -> list[Figure]:
    """Curves of all runs over the same steps, one picture for each metric that was logged."""
    metrics = [runs.metrics(run, compared=True) for run in chosen]
    figures = []
    for metric, title, unit, options in _PICTURES:
        curves = [
            Curve(name, *_series(run, columns, metric), color, smooth=metric != "eval/loss")
            for run, name, columns, color in zip(chosen, names, metrics, COLORS, strict=False)
        ]
        if any(np.isfinite(curve.values).any() for curve in curves):
            key = f"compared-{metric.replace('/', '-')}"
            figures.append(plot(title, unit, key, curves, size=(540, 300), **options))
    return figures


def _series(run: ServedRun, columns: MetricColumns, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, the final evaluation included."""
    steps, values = columns.series(metric)
    summary = run.folder.json("metrics.json")
    last = summary.get("steps")
    if metric != "eval/loss" or not isinstance(last, int) or last in steps:
        return steps, values
    final = (summary.get("evaluation") or {}).get("loss")
    if not isinstance(final, int | float):
        return steps, values
    place = np.searchsorted(steps, last)  # not the end, in a run that was made longer
    return np.insert(steps, place, last), np.insert(values, place, final)


def _differences(chosen: Sequence[ServedRun]) -> list[tuple[str, list[str]]]:
    """Keys in which configurations differ, with the value of each run."""
    first, *others = [dict(run.folder.values) for run in chosen]
    changes = [{key: (a, b) for key, a, b in changes_between(first, other)} for other in others]
    rows = []
    for key in dict.fromkeys(key for each in changes for key in each):
        of_first = next(each[key][0] for each in changes if key in each)
        values = [of_first, *(each[key][1] if key in each else of_first for each in changes)]
        rows.append((key, [_text(value) for value in values]))
    return sorted(rows)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _results(chosen: Sequence[ServedRun]) -> tuple[Comparison | None, Mapping[str, str]]:
    """Results of suites and figures of the runs that have some; and by key why others have none."""
    sources, without = [], {}
    for run in chosen:
        try:
            compare([run.path])
            sources.append(run.path)
        except (TrainingError, *DAMAGE) as error:
            without[run.key] = str(error)
    return (compare(sources) if sources else None), without


def message_page(title: str, text: str) -> str:
    """A page that says why there is nothing to see."""
    return _rendered("live/templates/message.html", "page", heading=title, text=text)


def _rendered(template: str, part: Part, **values: Any) -> str:
    return render(template, frame=_frame(part), **values)


def _frame(part: Part) -> str:
    return "live/templates/frame.html" if part == "page" else "live/templates/part.html"


@dataclass(frozen=True)
class StaticFile:
    """A file of the package that pages load: path below the package, and its type."""

    path: str
    media_type: str


STATIC = {
    "page.css": StaticFile("monitoring/templates/page.css", "text/css"),
    "live.css": StaticFile("live/templates/live.css", "text/css"),
    "icon.svg": StaticFile("live/templates/icon.svg", "image/svg+xml"),
    "live.js": StaticFile("live/templates/live.js", "text/javascript"),
}
