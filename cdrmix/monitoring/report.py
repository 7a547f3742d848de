"""report.html: one self-contained page on how a run went, from its run directory alone.

`make_report` computes what the page shows, as dataclasses; templates/report.html lays it out. A
run that is still going, or that died, has a report too: the page names each file that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from cdrmix.config.schema import RoutingConfig
from cdrmix.monitoring.page import Figure, Tile, compact, formatted, render
from cdrmix.monitoring.plots import Curve, Mark, plot
from cdrmix.monitoring.recorded_run import RecordedRun, read_run
from cdrmix.monitoring.sinks import duration, write_text_atomic

# A page of hundreds of evaluations stays readable.
_MAX_SAMPLES = 50
_MAX_EVENTS = 50
_UNKNOWN = "–"
# Parts of metrics.json that have sections of their own.
_SHOWN_ELSEWHERE = ("evaluation", "baselines", "samples", "goodput", "start_up")


@dataclass(frozen=True)
class Predictor:
    """The model or a baseline, with its validation loss (nats per token)."""

    name: str
    loss: float
    perplexity: float
    share_of_worst: float
    is_model: bool


@dataclass(frozen=True)
class BaselineComparison:
    """The model against its baselines; `margin` is the loss of the best of them less its own."""

    predictors: Sequence[Predictor]
    margin: float


@dataclass(frozen=True)
class Spending:
    """Seconds that one part of the run took, and their share of all."""

    part: str
    seconds: float
    share: float


@dataclass(frozen=True)
class ExpertShare:
    """An expert's share of its layer's token assignments.

    Attributes:
        share: None where it is not finite.
        is_above: whether it is above the even share.
        strength: opacity of the cell, by the distance from the even share.
    """

    share: float | None
    is_above: bool = False
    strength: float = 0.0


@dataclass(frozen=True)
class ExpertLayerFigures:
    """Routing of a layer at the final evaluation; entropy in bits."""

    number: int
    shares: Sequence[ExpertShare]
    entropy: float | None
    overflow: float | None
    is_collapsed: bool
    is_too_full: bool


@dataclass(frozen=True)
class Sample:
    """Text that the model generated after a step."""

    step: float | None
    prompt: str
    text: str


@dataclass(frozen=True)
class Report:
    """Everything that the page shows beside the files of the run directory themselves.

    Attributes:
        name: name of the run.
        state: state as far as the run directory tells.
        num_bad_losses: logged steps with a loss that is not finite.
        spent: parts of the wall time over all starts.
        start_up: parts of the last start.
        samples: newest first, the earlier ones thinned out.
        num_earlier_samples: earlier ones before the thinning.
        routing: figures on routing; empty for a dense model.
        expert_layers: empty where there was no final evaluation by layer.
        plan, summary: without the parts that are shown elsewhere.
        stage_b: `cdrmix.monitoring.stage_b_page.StageBReport`, for a run that has a Stage B.
    """

    name: str
    state: Literal["no final summary", "unfinished", "finished"]
    num_bad_losses: int
    tiles: Sequence[Tile]
    loss: Figure
    has_evaluations: bool
    comparison: BaselineComparison | None
    optimizer: Sequence[Figure]
    speed: Sequence[Figure]
    spent: Sequence[Spending]
    start_up: Sequence[Spending]
    routing: Sequence[Figure]
    expert_layers: Sequence[ExpertLayerFigures]
    samples: Sequence[Sample]
    num_earlier_samples: int
    plan: Mapping[str, Any]
    summary: Mapping[str, Any]
    stage_b: Any


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run directory and returns its path.

    Raises:
        StateError: if there is no metrics.jsonl, or the page cannot be written.
    """
    run = read_run(run_dir)
    path = run_dir / "report.html"
    page = render(
        "monitoring/templates/report.html",
        run=run,
        report=make_report(run),
        max_events=_MAX_EVENTS,
    )
    write_text_atomic(path, page)
    return path


def make_report(run: RecordedRun) -> Report:
    """Computes the contents of the page."""
    state: Literal["no final summary", "unfinished", "finished"] = "finished"
    if not run.summary:
        state = "no final summary"
    elif run.num_steps and run.last_step < run.num_steps:
        state = "unfinished"
    stage_b = None
    tiles = _tiles(run)
    if run.reasoning_rows or (run.config and run.config.stage_b):
        # Only here: a run without a Stage B loads nothing of it.
        from cdrmix.monitoring import stage_b_page

        stage_b = stage_b_page.stage_b_report(run)
        tiles += stage_b_page.stage_b_tiles(run)
    samples = [
        Sample(_number(sample.get("step")), sample.get("prompt", ""), sample.get("text", ""))
        for sample in run.summary.get("samples") or []
    ]
    optimizer, speed = _training_figures(run)
    losses = [
        Curve("training", *run.series("loss"), "c1", smooth=True),
        Curve("validation", *run.validation_losses(), "c2"),
    ]
    baselines = run.summary.get("baselines") or {}
    marks = [
        Mark(f"{name} {value:.4f}", value)
        for name in ("unigram", "bigram")
        if (value := _number(baselines.get(f"{name}_loss"))) is not None
    ]
    title = "Training and validation"
    return Report(
        name=run.summary.get("name") or (run.config.name if run.config else run.folder.name),
        state=state,
        num_bad_losses=sum(not math.isfinite(line.get("loss", 0.0)) for line in run.records),
        tiles=tiles,
        loss=plot(title, "nats per token", "loss", losses, marks, size=(1120, 330)),
        has_evaluations=bool(len(losses[1].steps)),
        comparison=_comparison(run),
        optimizer=optimizer,
        speed=speed,
        spent=_spendings(run.summary.get("goodput") or {}),
        start_up=_spendings(run.summary.get("start_up") or {}),
        routing=_routing(run),
        expert_layers=_expert_layers(run),
        # The last one, then every n-th of the earlier ones; n rounds up, so they are _MAX_SAMPLES.
        samples=samples[-1:] + samples[:-1][:: -(-len(samples[:-1]) // _MAX_SAMPLES) or 1],
        num_earlier_samples=len(samples[:-1]),
        plan={name: v for name, v in run.plan.items() if name not in ("reasons", "deepspeed")},
        summary={name: v for name, v in run.summary.items() if name not in _SHOWN_ELSEWHERE},
        stage_b=stage_b,
    )


def _tiles(run: RecordedRun) -> list[Tile]:
    # The final evaluation where there is one, else the newest that was logged on the way.
    evaluation = run.summary.get("evaluation") or {}
    loss, perplexity, bits_per_byte = (
        _number(evaluation.get(name, run.latest(f"eval/{name}")))
        for name in ("loss", "perplexity", "bits_per_byte")
    )
    seconds = _number(run.summary.get("seconds"))
    in_stage_b = _number((run.summary.get("stage_b") or {}).get("seconds"))
    if in_stage_b is not None:
        seconds = (seconds or 0.0) + in_stage_b
    # Of a run without a summary, from the logged lines.
    speeds = run.series("tokens_per_second")[1]
    speed = _number(run.summary.get("tokens_per_second_median"))
    if speed is None and len(speeds):
        speed = median(speeds)
    tokens = _number(run.summary.get("tokens_seen", run.latest("tokens_seen")))
    when = "at the end" if evaluation else "so far"
    tiles = [
        Tile("Validation loss", formatted(loss, ".4f"), f"nats per token, {when}"),
        Tile("Perplexity", formatted(perplexity, ".2f"), "per token"),
        Tile("Bits per byte", formatted(bits_per_byte, ".3f"), "of held-out text"),
        Tile("Trained on", _UNKNOWN if tokens is None else compact(tokens), "tokens"),
        Tile("Time", _UNKNOWN if seconds is None else duration(seconds), "from start to end"),
        Tile("Throughput", formatted(speed, ",.0f"), "tokens per second, median"),
    ]
    total = _number(run.plan.get("total_params"))
    active = _number(run.plan.get("active_params"))
    if total is not None:
        unit = "parameters" if active is None else f"parameters, {compact(active)} active"
        tiles.append(Tile("Size", compact(total), unit))
    if run.is_stage_b_alone:
        tiles = [tile for tile in tiles if tile.value != _UNKNOWN]
    return tiles


def _comparison(run: RecordedRun) -> BaselineComparison | None:
    """Compares the model with its baselines; None without a final evaluation or without them."""
    baselines = run.summary.get("baselines") or {}
    model = _number((run.summary.get("evaluation") or {}).get("loss"))
    losses = {
        "bigram, Kneser-Ney": _number(baselines.get("bigram_loss")),
        "unigram, add-one": _number(baselines.get("unigram_loss")),
    }
    known = {name: loss for name, loss in losses.items() if loss is not None}
    if model is None or not known:
        return None
    # Bars by the worst loss, so that the longest fills its cell.
    worst = max([model, *known.values()])
    # exp(709.8) is the largest double: a diverged model has a finite perplexity too.
    predictors = [
        Predictor(name, loss, math.exp(min(loss, 700.0)), loss / worst, name == "this model")
        for name, loss in {"this model": model, **known}.items()
    ]
    return BaselineComparison(predictors, margin=min(known.values()) - model)


def _training_figures(run: RecordedRun) -> tuple[list[Figure], list[Figure]]:
    """Draws the figures on the optimizer, and those on speed and memory."""
    clip = run.config.training.gradient_clipping if run.config else 0
    marks = [Mark(f"clipped at {clip:g}", clip)] if clip else []
    steps, peak = run.series("memory_peak_bytes")
    rate = Curve("", *run.series("learning_rate"), "c3")
    norm = Curve("", *run.series("grad_norm"), "c4", smooth=True)
    speed = Curve("", *run.series("tokens_per_second"), "c1", smooth=True)
    memory = Curve("", steps, peak / 2**30, "c2")
    limits = (0, None)
    rounded = "{:,.0f}".format
    short = "{:.3g}".format
    gib = "{:.2f}".format
    optimizer = [
        plot("Learning rate", "per step", "learning-rate", [rate], text=short, limits=limits),
        plot("Gradient norm", "L2, before clipping", "grad-norm", [norm], marks),
    ]
    return optimizer, [
        plot("Throughput", "tokens per second", "speed", [speed], text=rounded, limits=limits),
        plot("Peak memory", "GiB, largest rank", "memory", [memory], text=gib, limits=limits),
    ]


def _spendings(times: Mapping[str, Any]) -> list[Spending]:
    """Returns each part that took time, of a mapping of <part>_seconds and `seconds` in all."""
    return [
        Spending(name.removesuffix("_seconds"), seconds, seconds / times["seconds"])
        for name, seconds in times.items()
        if name.endswith("_seconds") and seconds > 0
    ]


def _routing(run: RecordedRun) -> list[Figure]:
    steps, overflow = run.series("moe/overflow_fraction")
    entropy = run.series("moe/routing_entropy_bits")
    if not len(steps) and not len(entropy[0]):
        return []
    limits = run.config.health.routing if run.config else RoutingConfig()
    most = limits.max_overflow_fraction
    marks = []
    moe = run.config.model.moe if run.config else None
    if moe is not None and moe.num_experts >= 2:
        even = math.log2(moe.num_experts)
        least = limits.min_entropy_share * even
        marks = [Mark(f"at least {least:.2f}", least), Mark(f"even {even:.2f}", even)]
    balance = Curve("", *run.series("moe/load_balance_loss"), "c3", smooth=True)
    z_loss = Curve("", *run.series("moe/z_loss"), "c4", smooth=True)
    return [
        plot(
            "Overflow",
            "of assignments, beyond capacity",
            "overflow",
            [Curve("", steps, 100 * overflow, "c2", smooth=True)],
            [Mark(f"limit {most:.0%}", 100 * most)],
            text="{:.3g}%".format,
            limits=(0, None),
        ),
        plot(
            "Entropy",
            "bits, mean over layers",
            "entropy",
            [Curve("", *entropy, "c1", smooth=True)],
            marks,
        ),
        plot("Load-balance loss", "unweighted", "balance", [balance], [Mark("even 1", 1.0)]),
        plot("Router z-loss", "unweighted", "z-loss", [z_loss]),
    ]


def _expert_layers(run: RecordedRun) -> list[ExpertLayerFigures]:
    layers = (run.summary.get("evaluation") or {}).get("layers") or []
    num_experts = max((len(layer["utilisation"]) for layer in layers), default=0)
    limits = run.config.health.routing if run.config else RoutingConfig()
    rows = []
    for layer in layers:
        shares = []
        for share in map(_number, layer["utilisation"]):
            if share is None or not math.isfinite(share):
                shares.append(ExpertShare(None))
                continue
            ratio = share * num_experts
            # Fullest from 2.8 times the even share on, yet pale enough to read the number on it.
            strength = min(abs(math.log2(max(ratio, 1e-9))) / 1.5, 1) * 0.75
            shares.append(ExpertShare(share, ratio > 1, strength))
        entropy = _number(layer.get("routing_entropy_bits"))
        overflow = _number(layer.get("overflow_fraction"))
        least = limits.min_entropy_share * math.log2(num_experts)
        row = ExpertLayerFigures(
            number=layer["layer"],
            shares=shares,
            entropy=entropy,
            overflow=overflow,
            is_collapsed=entropy is not None and entropy < least,
            is_too_full=overflow is not None and overflow > limits.max_overflow_fraction,
        )
        rows.append(row)
    return rows


def _number(value: Any) -> float | None:
    """Reads a JSON value as a number; values that are not finite were written as text."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
