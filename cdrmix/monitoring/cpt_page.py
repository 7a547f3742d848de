"""Part of a report on continual pre-training: what the run has learned and forgotten, step by step.

templates/cpt.html lays it out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdrmix.monitoring.metrics import member_of
from cdrmix.monitoring.page import Figure
from cdrmix.monitoring.plots import Course, Curve, Mark, plane_plot, plot
from cdrmix.monitoring.recorded_run import RecordedRun

_DIGEST = 12  # characters of a digest that a person compares
_COLORS = ("c2", "c3", "c4", "c1")  # of old data; the new data have c1 where there are curves
_FORGOTTEN = "cpt/old/*/forgetting_nats"
_LOSS = "cpt/old/*/loss"
_UNIT = "nats per token"


def cpt_report(run: RecordedRun) -> dict[str, Any] | None:
    """Describes learning and forgetting; None for a run that did not measure them.

    `sets` are (name, kind, digest, tokens, loss before, loss now, change), losses in nats per
    token; empty before the end of the run. `forgetting` and `gain` are the newest, in nats per
    token, the first None without old data.
    """
    gain = run.latest("cpt/gain_nats")
    if gain is None:
        return None
    sets = [
        (
            each.get("name"),
            each.get("kind"),
            str(each.get("digest") or "")[:_DIGEST],
            each.get("tokens"),
            *(each.get(key) for key in ("base_loss", "loss", "change")),
        )
        for each in (run.summary.get("cpt") or {}).get("sets") or []
    ]
    return {
        "sets": sets,
        "gain": gain,
        "forgetting": run.latest("cpt/forgetting_nats"),
        "figures": [*_plane(run), _losses(run)],
    }


def _folders(run: RecordedRun, family: str) -> dict[str, str]:
    """Names of folders of old data with their metrics of a family; one without a name if alone."""
    named = {
        folder: name
        for name in run.metrics.names
        if (folder := member_of(family, name)) is not None
    }
    return named or {"": family.replace("old/*/loss", "old_loss").replace("old/*/", "")}


def _plane(run: RecordedRun) -> list[Figure]:
    """Draws gain and forgetting against each other; nothing without old data."""
    courses = []
    gains = dict(zip(*run.series("cpt/gain_nats"), strict=True))
    for number, (folder, metric) in enumerate(_folders(run, _FORGOTTEN).items()):
        steps, forgotten = run.series(metric)
        across = np.array([gains.get(step, np.nan) for step in steps])
        color = _COLORS[number % len(_COLORS)]
        if np.isfinite(across + forgotten).any():
            courses.append(Course(folder, steps, across, forgotten, color))
    if not courses:
        return []
    drawing = plane_plot(
        "plane",
        courses,
        label="Forgetting of old data over the gain on new data, step by step",
        across="gain on new data",
        up="forgetting of old data",
    )
    return [Figure("Learning and forgetting", f"{_UNIT}, since before the first step", drawing)]


def _losses(run: RecordedRun) -> Figure:
    curves = [Curve("new", *run.series("cpt/new_loss"), "c1")]
    for number, (folder, metric) in enumerate(_folders(run, _LOSS).items()):
        color = _COLORS[number % (len(_COLORS) - 1)]
        curves.append(Curve(folder or "old", *run.series(metric), color))
    marks = [
        Mark(f"{curve.label} before", float(curve.values[0]), curve.color)
        for curve in curves[:2]
        if len(curve.values) and np.isfinite(curve.values[0])
    ]
    return plot("Loss on held-out data", _UNIT, "cpt-loss", curves, marks, size=(540, 300))
