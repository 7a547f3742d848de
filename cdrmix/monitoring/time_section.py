"""The report's section on wall time: where it went, and how the last start began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.monitoring import page
from cdrmix.monitoring.recorded_run import Run

_MEANINGS = {
    "productive": "steps that the final weights contain",
    "redone": "steps that were lost, or rolled back, and done again",
    "checkpoint_stall": "steps waiting for a checkpoint",
    "evaluation": "held-out loss and samples",
    "start_up": "from each command to the first step",
    "down": "between two starts",
    "other": "baselines, report, and what is between steps",
}


def time_section(run: Run) -> str:
    """Goodput and start-up as metrics.json has them."""
    goodput, start_up = run.summary.get("goodput"), run.summary.get("start_up")
    if not goodput or not start_up:
        why = run.problems.get("metrics.json", "metrics.json holds no goodput.")
        return page.section("Wall time", page.missing(why))
    new, redone = goodput["productive_steps"], goodput["redone_steps"]
    said = (
        f"{goodput['share']:.1%} of the time went into steps that count, and {new:,} of "
        f"{new + redone:,} steps were new ({goodput['share_of_steps']:.1%}). "
        f"Starts: {goodput['starts']}."
    )
    head = ("spent on", "seconds", "share", "", "")
    began = "The last start, from the command to the end of its first step, by its parts:"
    return page.section(
        "Wall time",
        page.note(said),
        page.table(head, _rows(goodput, _MEANINGS), "wide"),
        page.note(began),
        page.table(head[:4], _rows(start_up, {}), "wide"),
    )


def _rows(measured: Mapping[str, Any], meanings: Mapping[str, str]) -> list[str]:
    """A row for each part that took time."""
    total = measured["seconds"]
    parts = {
        name.removesuffix("_seconds"): seconds
        for name, seconds in measured.items()
        if name.endswith("_seconds") and seconds > 0
    }
    return [
        page.row(
            page.text(part.replace("_", " ")),
            f"{seconds:,.1f}",
            f"{seconds / total:.1%}",
            *([page.text(meanings[part])] if meanings else []),
            page.bar(seconds / total, own=part == "productive"),
        )
        for part, seconds in parts.items()
    ]
