"""Sections of a report about Stage B: what it learned, how its agent acts, what comes of it."""

from collections.abc import Mapping
from typing import Any

from cdrmix.monitoring import page
from cdrmix.monitoring.plots import Curve, plot
from cdrmix.monitoring.recorded_run import RecordedRun

# title, unit, curves (label, metric), whether the axis starts at zero
_Figure = tuple[str, str, tuple[tuple[str, str], ...], bool]
_LEARNING: tuple[_Figure, ...] = (
    (
        "Losses",
        "nats",
        (
            ("text", "stage_b/text_loss"),
            ("answers", "stage_b/answer_loss"),
            ("retrieval", "stage_b/retrieval_loss"),
            ("replay", "stage_b/replay_loss"),
            ("drill", "stage_b/drill_loss"),
        ),
        True,
    ),
    (
        "Right",
        "share of the training texts",
        (("found first", "stage_b/recall"), ("answered", "stage_b/answered")),
        True,
    ),
    (
        "Correlation objective",
        "weighted, mean over adapters",
        (("", "stage_b/correlation_loss"),),
        False,
    ),
    ("Router losses", "weighted", (("", "stage_b/router_loss"),), True),
)
_POLICY: tuple[_Figure, ...] = (
    (
        "Reward",
        "mean over rollouts",
        (
            ("return", "policy/return"),
            ("success", "policy/success"),
            ("deviation", "policy/return_std"),
        ),
        True,
    ),
    (
        "Operations",
        "times per rollout",
        tuple(
            (name.replace("_", " "), f"policy/operations/{name}")
            for name in ("summarize", "retrieve", "splice_window", "cache_write")
        ),
        True,
    ),
    ("Entropy", "nats", (("", "policy/entropy"),), True),
    ("Divergence of an update", "nats", (("", "policy/kl"),), True),
    (
        "Shares",
        "of ratios, groups, entries",
        (
            ("clipped", "policy/clip_fraction"),
            ("groups alike", "policy/zero_variance_groups"),
            ("memory filled", "policy/memory_fill"),
        ),
        True,
    ),
    ("Value head", "share of variance explained", (("", "policy/explained_variance"),), False),
    ("Retrieval", "ms", (("", "policy/retrieval_milliseconds"),), True),
    ("Epochs", "optimizer steps on a batch of rollouts", (("", "policy/epochs"),), True),
)


def stage_b_sections(run: RecordedRun) -> str:
    """All sections; nothing for a run without Stage B."""
    if run.config is None or run.config.stage_b is None:
        return ""
    if not any(name.startswith(("stage_b/", "policy/")) for line in run.records for name in line):
        why = page.missing("No step of Stage B has been logged.")
        return page.section("Stage B", why)
    return _reasoning(run) + "".join(
        page.section(title, page.panels(*filter(None, (_figure(run, each) for each in figures))))
        for title, figures in (("Stage B: learning", _LEARNING), ("Memory agent", _POLICY))
    )


def stage_b_tiles(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Scores of the reasoning suite, for the tiles; none before it was run."""
    rows = run.reasoning_rows
    if not rows:
        return []
    count = sum(row["n"] for row in rows)
    mean, alone = (
        sum(row[name] * row["n"] for row in rows) / count for name in ("score", "backbone_score")
    )
    return [("Reasoning", f"{mean:.2f}", f"over all lengths; backbone alone {alone:.2f}")]


def _figure(run: RecordedRun, figure: _Figure) -> str:
    """A figure of what was measured; empty where nothing of it was."""
    title, unit, series, from_zero = figure
    curves = [
        Curve(label, *run.series(name), f"c{number % 4 + 1}", smooth=True)
        for number, (label, name) in enumerate(series)
        if len(run.series(name)[0])
    ]
    if not curves:
        return ""
    key = f"b-{title.lower().replace(' ', '-')}"
    return plot(
        title,
        unit,
        key,
        curves,
        text="{:.3g}".format,
        limits=(0, None) if from_zero else (None, None),
    )


def _reasoning(run: RecordedRun) -> str:
    title = "Reasoning over long texts"
    rows = run.reasoning_rows
    if not rows:
        why = "The suite has not been run. See cdrmix evaluate --suite reasoning."
        return page.section(title, page.missing(why))
    ratios = sorted({row["length_ratio"] for row in rows})
    cells = {(row["task"], row["length_ratio"]): row for row in rows}
    body = [
        page.row(page.text(task), *(_cell(cells.get((task, ratio))) for ratio in ratios))
        for task in dict.fromkeys(row["task"] for row in rows)
    ]
    fewest = min(row["n"] for row in rows)
    most = max(row["n"] for row in rows)
    texts = f"{most}" if fewest == most else f"{fewest} to {most}"
    told = (
        f"Score with memory, and of the backbone's last window alone, over {texts} texts "
        "each that training did not see; lengths in windows."
    )
    head = ["task", *(f"{ratio}x" for ratio in ratios)]
    return page.section(title, page.table(head, body, "heat"), page.note(told))


def _cell(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['score']:.2f}, {row['backbone_score']:.2f}"
