"""Part of a report on Stage B: its losses, its memory agent, and the reasoning suite.

Loaded only for a run that has a Stage B; templates/stage_b.html lays it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdrmix.monitoring.page import Figure, Tile
from cdrmix.monitoring.plots import Curve, plot
from cdrmix.monitoring.recorded_run import RecordedRun

# title, unit, curves (label, metric), whether the axis starts at zero
_Panel = tuple[str, str, tuple[tuple[str, str], ...], bool]
_LEARNING: tuple[_Panel, ...] = (
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
_POLICY: tuple[_Panel, ...] = (
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


@dataclass(frozen=True)
class Score:
    """Mean score of a task at one length, with memory and of the backbone alone."""

    with_memory: float
    backbone: float


@dataclass(frozen=True)
class Scores:
    """The reasoning suite.

    Attributes:
        ratios: lengths in windows, one column each.
        tasks: scores by task, one for each ratio; None where it was not run.
        num_texts: number of texts behind a score, as a range where it differs.
    """

    ratios: Sequence[int]
    tasks: Mapping[str, Sequence[Score | None]]
    num_texts: str


@dataclass(frozen=True)
class StageBReport:
    """The part on Stage B; `scores` is None before the suite was run."""

    is_logged: bool
    scores: Scores | None
    learning: Sequence[Figure]
    policy: Sequence[Figure]


def stage_b_report(run: RecordedRun) -> StageBReport | None:
    """Computes the part on Stage B; None where the configuration has none or cannot be read."""
    if run.config is None or run.config.stage_b is None:
        return None
    names = {name for line in run.records for name in line}
    scores = None
    rows = run.reasoning_rows
    if rows:
        ratios = sorted({row["length_ratio"] for row in rows})
        cells = {
            (row["task"], row["length_ratio"]): Score(row["score"], row["backbone_score"])
            for row in rows
        }
        fewest = min(row["n"] for row in rows)
        most = max(row["n"] for row in rows)
        scores = Scores(
            ratios=ratios,
            # A run may have stored the rows of some lengths or tasks only: the others stay empty.
            tasks={row["task"]: [cells.get((row["task"], r)) for r in ratios] for row in rows},
            num_texts=f"{most}" if fewest == most else f"{fewest} to {most}",
        )
    return StageBReport(
        is_logged=any(name.startswith(("stage_b/", "policy/")) for name in names),
        scores=scores,
        learning=_figures(run, _LEARNING),
        policy=_figures(run, _POLICY),
    )


def stage_b_tiles(run: RecordedRun) -> list[Tile]:
    """Returns a tile with the scores of the reasoning suite; none before it was run."""
    rows = run.reasoning_rows
    if not rows:
        return []
    # Weighted by texts, of which the cells may have different numbers.
    count = sum(row["n"] for row in rows)
    mean, backbone = (
        sum(row[name] * row["n"] for row in rows) / count for name in ("score", "backbone_score")
    )
    return [Tile("Reasoning", f"{mean:.2f}", f"over all lengths; backbone alone {backbone:.2f}")]


def _figures(run: RecordedRun, panels: Sequence[_Panel]) -> list[Figure]:
    """Draws the panels of which something was measured."""
    figures = []
    for title, unit, series, from_zero in panels:
        curves = [
            Curve(label, *run.series(name), f"c{number % 4 + 1}", smooth=True)
            for number, (label, name) in enumerate(series)
            if len(run.series(name)[0])
        ]
        # A phase without a policy, or without replay, has no such series: no empty figure for it.
        if curves:
            key = f"b-{title.lower().replace(' ', '-')}"
            limits = (0, None) if from_zero else (None, None)
            figures.append(plot(title, unit, key, curves, text="{:.3g}".format, limits=limits))
    return figures
