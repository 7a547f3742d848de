"""Part of a report on Stage B: its losses, its memory agent, and the reasoning suite.

Loaded only for a run that has a Stage B; templates/stage_b.html lays it out.
"""

from itertools import groupby
from typing import Any

from cdrmix.monitoring.page import Figure
from cdrmix.monitoring.plots import Curve, plot
from cdrmix.monitoring.recorded_run import RecordedRun

# Figure, its unit, curve (without a label if alone), metric; rows of a figure follow each other.
_CURVES = (
    ("Losses", "nats", "text", "stage_b/text_loss"),
    ("Losses", "nats", "answers", "stage_b/answer_loss"),
    ("Losses", "nats", "retrieval", "stage_b/retrieval_loss"),
    ("Losses", "nats", "replay", "stage_b/replay_loss"),
    ("Losses", "nats", "drill", "stage_b/drill_loss"),
    ("Right", "share of the training texts", "found first", "stage_b/recall"),
    ("Right", "share of the training texts", "answered", "stage_b/answered"),
    ("Correlation objective", "weighted, mean over adapters", "", "stage_b/correlation_loss"),
    ("Router losses", "weighted", "", "stage_b/router_loss"),
    ("Reward", "mean over rollouts", "return", "policy/return"),
    ("Reward", "mean over rollouts", "success", "policy/success"),
    ("Reward", "mean over rollouts", "deviation", "policy/return_std"),
    ("Operations", "times per rollout", "summarize", "policy/operations/summarize"),
    ("Operations", "times per rollout", "retrieve", "policy/operations/retrieve"),
    ("Operations", "times per rollout", "splice window", "policy/operations/splice_window"),
    ("Operations", "times per rollout", "cache write", "policy/operations/cache_write"),
    ("Entropy", "nats", "", "policy/entropy"),
    ("Divergence of an update", "nats", "", "policy/kl"),
    ("Shares", "of ratios, groups, entries", "clipped", "policy/clip_fraction"),
    ("Shares", "of ratios, groups, entries", "groups alike", "policy/zero_variance_groups"),
    ("Shares", "of ratios, groups, entries", "memory filled", "policy/memory_fill"),
    ("Value head", "share of variance explained", "", "policy/explained_variance"),
    ("Retrieval", "ms", "", "policy/retrieval_milliseconds"),
    ("Epochs", "optimizer steps on a batch of rollouts", "", "policy/epochs"),
)
# All other axes start at zero.
_SIGNED = ("Correlation objective", "Value head")


def stage_b_report(run: RecordedRun) -> dict[str, Any]:
    """Computes the part on Stage B.

    `scores` of the suite, None before it was run, are by task: one (with memory, of the backbone)
    for each length in windows of `ratios`, or None where that was not run. `controls` has a table
    for each task that `cdrmix evaluate --suite reasoning --controls` answered.
    """
    scores = None
    rows = run.reasoning_rows
    if rows:
        ratios = sorted({row["length_ratio"] for row in rows})
        cells = {
            (row["task"], row["length_ratio"]): (row["score"], row["backbone_score"])
            for row in rows
        }
        fewest = min(row["n"] for row in rows)
        most = max(row["n"] for row in rows)
        scores = {
            "ratios": ratios,
            # A run may have stored the rows of some lengths or tasks only: the others stay empty.
            "tasks": {row["task"]: [cells.get((row["task"], r)) for r in ratios] for row in rows},
            "num_texts": f"{most}" if fewest == most else f"{fewest} to {most}",
        }
    figures: dict[str, list[Figure]] = {"stage_b": [], "policy": []}  # by group of metrics
    for (title, unit), named in groupby(_CURVES, key=lambda row: row[:2]):
        group = ""
        curves = []
        for number, (_, _, label, name) in enumerate(named):
            group = name.partition("/")[0]
            steps, values = run.series(name)
            if len(steps):
                curves.append(Curve(label, steps, values, f"c{number % 4 + 1}", smooth=True))
        # A phase without a policy, or without replay, has no such series: no empty figure for it.
        if curves:
            key = f"b-{title.lower().replace(' ', '-')}"
            limits = (None, None) if title in _SIGNED else (0, None)
            figures[group].append(
                plot(title, unit, key, curves, text="{:.3g}".format, limits=limits)
            )
    return {
        "is_logged": run.has_stage_b_steps,
        "scores": scores,
        "controls": _controls(run),
        "learning": figures["stage_b"],
        "policy": figures["policy"],
    }


def _controls(run: RecordedRun) -> list[dict[str, Any]]:
    """Tables of rivals and controls, one a task: a row for each of them, a cell for each length."""
    answered = [row for row in run.reasoning.get("rows") or [] if row.get("controls")]
    tables = []
    for task in dict.fromkeys(row["task"] for row in answered):
        by_ratio = {row["length_ratio"]: row["controls"] for row in answered if row["task"] == task}
        ratios = sorted(by_ratio)
        names = dict.fromkeys(name for cells in by_ratio.values() for name in cells)
        tables.append(
            {
                "task": task,
                "ratios": ratios,
                "rows": {name: [by_ratio[ratio].get(name) for ratio in ratios] for name in names},
            }
        )
    return tables
