"""Page with pictures of models side by side.

templates/comparison.html lays it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cdrmix.errors import StateError
from cdrmix.monitoring.comparison import RUN_FIGURES, ComparedRow, Comparison
from cdrmix.monitoring.page import Figure, render
from cdrmix.monitoring.plots import Span, interval_plot
from cdrmix.monitoring.sinks import write_text_atomic
from cdrmix.monitoring.suite_results import interval_text, score_text

_COLORS = ("c1", "c2", "c3", "c4")
_MAX_LINES = 48  # of one picture


def write_comparison(path: Path, compared: Comparison) -> None:
    """Writes the page. Raises StateError if its folder is missing or it cannot be written."""
    if not path.parent.is_dir():
        raise StateError(f"{path}: its folder does not exist. Make it, or give another --out")
    page = render(
        "monitoring/templates/comparison.html", models=compared.models, suites=suites_of(compared)
    )
    write_text_atomic(path, page)


def suites_of(compared: Comparison) -> list[dict[str, Any]]:
    """Suites with their `rows` and `figures`, and `notes` on the rows that cannot be compared, by
    the reason; rows have a cell for each model, of which `score` and `interval` are texts."""
    labels = [model.label for model in compared.models]
    suites = []
    for suite in dict.fromkeys(row.suite for row in compared.rows):
        rows = [row for row in compared.rows if row.suite == suite]
        shown = [
            {
                "task": row.task,
                "metric": row.metric,
                "better": row.better,
                "why_not": row.why_not,
                "cells": [
                    {
                        "label": label,
                        "score": "–" if cell is None else score_text(cell.score),
                        "interval": "" if cell is None else interval_text(cell),
                        "is_best": number in row.best,
                        "is_clear": row.is_clear,
                    }
                    for number, (label, cell) in enumerate(zip(labels, row.cells, strict=True))
                ],
            }
            for row in rows
        ]
        figures = [] if suite == RUN_FIGURES else _figures(suite, rows, labels)
        title = "figures of the runs" if suite == RUN_FIGURES else suite
        notes: dict[str, list[str]] = {}
        for row in rows:
            if row.why_not:
                notes.setdefault(row.why_not, []).append(f"{row.task} {row.metric}")
        suites.append({"title": title, "rows": shown, "figures": figures, "notes": notes})
    return suites


def _figures(suite: str, rows: Sequence[ComparedRow], labels: Sequence[str]) -> list[Figure]:
    """One picture for each metric, of as many tasks as are readable; of several models, of tasks
    that two have results of."""
    figures = []
    least = min(2, len(labels))
    rows = [row for row in rows if sum(cell is not None for cell in row.cells) >= least]
    for number, metric in enumerate(dict.fromkeys(row.metric for row in rows)):
        own = [row for row in rows if row.metric == metric]
        groups = []
        for row in own[: max(1, _MAX_LINES // (len(labels) + 1))]:
            spans = [
                Span(label, cell.score, cell.low, cell.high, _COLORS[place % len(_COLORS)])
                for place, (label, cell) in enumerate(zip(labels, row.cells, strict=True))
                if cell is not None and math.isfinite(cell.score)
            ]
            if spans:
                groups.append((row.task + (", not comparable" if row.why_not else ""), spans))
        better = {None: "", "lower": "lower is better", "higher": "higher is better"}
        unit = ", ".join(
            part
            for part in (
                better[own[0].better],
                f"the first {len(groups)} of {len(own)} tasks" if len(groups) < len(own) else "",
            )
            if part
        )
        drawing = None
        if groups:
            label = f"{metric} of each model, with intervals"
            drawing = interval_plot(f"{suite}-{number}", groups, label=label, text=score_text)
        figures.append(Figure(metric, unit, drawing))
    return figures
