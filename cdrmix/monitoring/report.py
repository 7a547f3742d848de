"""report.html: one self-contained page on how a run went, from its run directory alone.

`_contents` computes what the page shows; templates/report.html lays it out. A run that is still
going, or that died, has a report too: the page names each file that is missing.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from cdrmix.config.faults import RoutingConfig
from cdrmix.config.redaction import redacted
from cdrmix.config.schema import Config
from cdrmix.config.yaml_text import dump_yaml
from cdrmix.errors import StateError
from cdrmix.monitoring.cpt_page import cpt_report
from cdrmix.monitoring.metric_columns import MetricColumns, read_columns
from cdrmix.monitoring.objectives_page import objectives_report
from cdrmix.monitoring.page import PAGE, Figure, Tile, compact, formatted, render
from cdrmix.monitoring.plan_page import plan_card
from cdrmix.monitoring.plots import Curve, Mark, Moment, plot
from cdrmix.monitoring.profile_page import profile_report
from cdrmix.monitoring.provenance_page import (
    data_card,
    domain_losses,
    start_moments,
    start_problem,
    starts,
)
from cdrmix.monitoring.recorded_run import RecordedRun
from cdrmix.monitoring.sinks import duration, write_text_atomic
from cdrmix.monitoring.suites_page import suites_report

# A page of hundreds of evaluations stays readable.
_MAX_SAMPLES = 50
_MAX_EVENTS = 50
_UNKNOWN = "–"
_FROM_ZERO = (0, None)  # ends of an axis
# Parts of metrics.json that have sections of their own.
_SHOWN_ELSEWHERE = (
    *("evaluation", "ema_evaluation", "baselines", "samples"),
    *("goodput", "start_up", "cpt", "suites"),
)


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run directory and returns its path.

    Raises StateError if there is no metrics.jsonl, or the page cannot be written.
    """
    path = run_dir / "report.html"
    write_text_atomic(path, render_report(read_run(run_dir)))
    return path


def render_report(
    run: RecordedRun,
    template: str = "monitoring/templates/report.html",
    *,
    frame: str = PAGE,
    **values: Any,
) -> str:
    """Renders the report: by a template that extends report.html, inside of a frame, a template
    that lays out the block `main`; both may take further values."""
    return render(template, frame=frame, run=run, report=_contents(run), **values)


def read_run(run_dir: Path, metrics: MetricColumns | None = None) -> RecordedRun:
    """Reads a run directory, with `metrics` in place of its metrics.jsonl where they are given.

    Raises StateError if there is no metrics.jsonl.
    """
    path = run_dir / "metrics.jsonl"
    if metrics is None and not path.is_file():
        raise StateError(
            f"{path}: not found. A report is made of a run directory, which holds metrics.jsonl "
            "from the first logged step on."
        )
    # A live run or one that died lacks some files: each is a problem to name, and no error.
    problems: dict[str, str] = {}
    config_text = ""
    config = None
    snapshot = run_dir / "config_snapshot.yaml"
    try:
        config_text = snapshot.read_text(encoding="utf-8")
        values = yaml.safe_load(config_text)
        config = Config.model_validate(values)
        public_values = redacted(values)  # a snapshot of an earlier version holds secrets
        if public_values != values:
            config_text = dump_yaml(public_values)
    except FileNotFoundError:
        problems[snapshot.name] = f"{snapshot.name} is missing."
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        problems[snapshot.name] = f"{snapshot.name} cannot be read: {error}"
    return RecordedRun(
        folder=run_dir,
        metrics=read_columns(path) if metrics is None else metrics,
        summary=_read_json(run_dir / "metrics.json", problems),
        plan=_read_json(run_dir / "plan.json", problems),
        environment=_read_json(run_dir / "environment.json", problems),
        health=_read_json(run_dir / "health.json", problems),
        reasoning=_read_json(run_dir / "reasoning.json", problems),
        starts=_read_starts(run_dir / "starts", problems),
        config_text=config_text,
        config=config,
        problems=problems,
    )


def _contents(run: RecordedRun) -> dict[str, Any]:
    """Everything that the page shows beside the files of the run directory themselves."""
    state = "finished"
    if not run.summary:
        state = "no final summary"
    elif run.num_steps and run.last_step < run.num_steps:
        state = "unfinished"
    stage_b = None
    if run.config and run.config.stage_b:
        # Only here: a run without a Stage B loads nothing of it.
        from cdrmix.monitoring.stage_b_page import stage_b_report

        stage_b = stage_b_report(run)
    optimizer, speed = _training_figures(run)
    samples = [
        {"prompt": "", "text": "", **sample, "step": _number(sample.get("step"))}
        for sample in run.summary.get("samples") or []
    ]
    return {
        "name": run.summary.get("name") or (run.config.name if run.config else run.folder.name),
        "state": state,
        "num_bad_losses": int((~np.isfinite(run.series("loss")[1])).sum()),
        "max_events": _MAX_EVENTS,
        "tiles": _tiles(run),
        "loss": _loss_figure(run),
        "has_evaluations": bool(len(_validation(run)[0])),
        "comparison": _comparison(run),
        "domains": domain_losses(run),
        "objectives": objectives_report(run),
        "cpt": cpt_report(run),
        "suites": suites_report(run),
        "profile": profile_report(run),
        "starts": starts(run),
        "data": data_card(run),
        "uneven": _uneven_routing(run),
        "optimizer": optimizer,
        "speed": speed,
        "spent": _spendings(run.summary.get("goodput") or {}),
        "start_up": _spendings(run.summary.get("start_up") or {}),
        # Unknown without a configuration: then the page says what is missing.
        "is_dense": run.config is not None and run.config.model.moe is None,
        "routing": [*_routing(run), *_mixer_routing(run)],
        "expert_layers": _expert_layers(run),
        # The last one, then every n-th of the earlier ones; n rounds up, so they are _MAX_SAMPLES.
        "samples": samples[-1:] + samples[:-1][:: -(-len(samples[:-1]) // _MAX_SAMPLES) or 1],
        "num_earlier_samples": len(samples[:-1]),
        "plan": plan_card(run.plan),
        "summary": {name: v for name, v in run.summary.items() if name not in _SHOWN_ELSEWHERE},
        "stage_b": stage_b,
    }


def _validation(run: RecordedRun, *, of: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and losses (nats per token) of all evaluations, the final one included; `of`
    is `ema_` for those of the average of the weights."""
    final = (run.summary.get(f"{of}evaluation") or {}).get("loss")
    return run.with_final(*run.series(f"eval/{of}loss"), final)


def _loss_figure(run: RecordedRun) -> Figure:
    losses = [
        Curve("training", *run.series("loss"), "c1", smooth=True),
        Curve("validation", *_validation(run), "c2"),
    ]
    average = _validation(run, of="ema_")
    if len(average[0]):
        losses.append(Curve("validation of the average", *average, "c3"))
    baselines = run.summary.get("baselines") or {}
    marks = [
        Mark(f"smoothed {name} {value:.4f}", value)
        for name in ("unigram", "bigram")
        if (value := _number(baselines.get(f"{name}_loss"))) is not None
    ]
    return plot(
        "Training and validation",
        "nats per token",
        "loss",
        losses,
        marks,
        moments=start_moments(run),
        size=(1120, 330),
        narrow=(540, 300),
    )


def _tiles(run: RecordedRun) -> list[Tile]:
    # The final evaluation where there is one, else the newest that was logged on the way.
    evaluation = run.summary.get("evaluation") or {}
    loss, perplexity, bits_per_byte = (
        _number(evaluation.get(name, run.latest(f"eval/{name}")))
        for name in ("loss", "perplexity", "bits_per_byte")
    )
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
        _time_tile(run),
        Tile("Throughput", formatted(speed, ",.0f"), "tokens per second, median"),
    ]
    average = (run.summary.get("ema_evaluation") or {}).get("loss", run.latest("eval/ema_loss"))
    if (of_average := _number(average)) is not None:
        unit = f"nats per token, of the weights, {when}"
        tiles.insert(1, Tile("Loss of the average", formatted(of_average, ".4f"), unit))
    total = _number(run.plan.get("total_params"))
    active = _number(run.plan.get("active_params"))
    if total is not None:
        trained = _number(run.plan.get("trained_params"))
        unit = "parameters"
        if active not in (None, total):
            unit += f", {compact(active)} active"
        if trained not in (None, total):
            unit += f", {compact(trained)} trained"
        tiles.append(Tile("Size", compact(total), unit))
    if run.is_stage_b_alone:
        tiles = [tile for tile in tiles if tile.value != _UNKNOWN]
    rows = run.reasoning_rows
    if rows:
        # Weighted by texts, of which the cells may have different numbers.
        count = sum(row["n"] for row in rows)
        mean, backbone = (
            sum(row[name] * row["n"] for row in rows) / count
            for name in ("score", "backbone_score")
        )
        unit = f"over all lengths; backbone alone {backbone:.2f}"
        tiles.append(Tile("Reasoning", f"{mean:.2f}", unit))
    return tiles


def _time_tile(run: RecordedRun) -> Tile:
    """The wall time that the goodput accounts for, or of a run without one that of its training."""
    wall_time = _number((run.summary.get("goodput") or {}).get("seconds"))
    if wall_time is not None:
        return Tile("Time", duration(wall_time), "from the first command to the end")
    # Without start-ups, steps that were redone, and the time between two starts.
    of_stages = (run.summary, run.summary.get("stage_b") or {})
    known = [s for stage in of_stages if (s := _number(stage.get("seconds"))) is not None]
    return Tile(
        "Training time", duration(sum(known)) if known else _UNKNOWN, "start-up and breaks left out"
    )


def _comparison(run: RecordedRun) -> dict[str, Any] | None:
    """The model and its baselines; None without a final evaluation or without baselines.

    `predictors` have a name, loss (nats per token), perplexity and share of the worst loss, the
    model first; `margin` is the loss of the best baseline, named `best`, less the model's.
    """
    baselines = run.summary.get("baselines") or {}
    model = _number((run.summary.get("evaluation") or {}).get("loss"))
    losses = {
        "smoothed bigram": _number(baselines.get("bigram_loss")),
        "smoothed unigram": _number(baselines.get("unigram_loss")),
    }
    known = {name: loss for name, loss in losses.items() if loss is not None}
    if model is None or not known:
        return None
    # Bars by the worst loss, so that the longest fills its cell.
    worst = max([model, *known.values()])
    # exp(709.8) is the largest double: a diverged model has a finite perplexity too.
    predictors = [
        (name, loss, math.exp(min(loss, 700.0)), loss / worst)
        for name, loss in {"this model": model, **known}.items()
    ]
    best = min(known, key=lambda name: known[name])
    return {
        "predictors": predictors,
        "best": best,
        "margin": known[best] - model,
    }


def _training_figures(run: RecordedRun) -> tuple[list[Figure], list[Figure]]:
    """Draws the figures on the optimizer, and those on speed and memory."""
    clip = run.config.training.gradient_clipping if run.config else 0
    marks = [Mark(f"clipped at {clip:g}", clip)] if clip else []
    steps, peak = run.series("memory_peak_bytes")
    rate = Curve("", *run.series("learning_rate"), "c3")
    norm = Curve("", *run.series("grad_norm"), "c4", smooth=True)
    speed = Curve("", *run.series("tokens_per_second"), "c1", smooth=True)
    memory = Curve("", steps, peak / 2**30, "c2")
    short = "{:.3g}".format
    whole = "{:,.0f}".format
    gib = "{:.2f}".format
    return [
        plot(
            "Learning rate",
            "per step",
            "learning-rate",
            [rate],
            moments=[Moment(each.short, each.step) for each in start_moments(run)],
            text=short,
            limits=_FROM_ZERO,
        ),
        plot("Gradient norm", "L2, before clipping", "grad-norm", [norm], marks),
    ], [
        plot("Throughput", "tokens per second", "speed", [speed], text=whole, limits=_FROM_ZERO),
        plot("Peak memory", "GiB, largest rank", "memory", [memory], text=gib, limits=_FROM_ZERO),
    ]


def _spendings(times: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(part, seconds, share) of each part that took time, of <part>_seconds and all `seconds`."""
    return [
        (name.removesuffix("_seconds"), seconds, seconds / times["seconds"])
        for name, seconds in times.items()
        if name.endswith("_seconds") and seconds > 0
    ]


def _mixer_routing(run: RecordedRun) -> list[Figure]:
    """Draws the use of the experts of Routing Mamba; nothing without such mixers."""
    entropy = Curve("", *run.series("routing_mamba/routing_entropy_bits"), "c1", smooth=True)
    if not len(entropy.steps):
        return []
    marks = []
    sizes = run.config.model.routing_mamba if run.config else None
    if run.config is not None and sizes is not None and sizes.num_experts > 1:
        even = math.log2(sizes.num_experts)
        least = run.config.health.routing.min_entropy_share * even
        marks = [Mark(f"at least {least:.2f}", least), Mark(f"even {even:.2f}", even)]
    unit = "bits, mean over such mixers"
    return [plot("Entropy of Routing Mamba", unit, "mixer-entropy", [entropy], marks)]


def _routing(run: RecordedRun) -> list[Figure]:
    """Draws the figures on routing; none for a dense model."""
    steps, overflow = run.series("moe/overflow_fraction")
    entropy = Curve("", *run.series("moe/routing_entropy_bits"), "c1", smooth=True)
    if not len(steps) and not len(entropy.steps):
        return []
    limits = run.config.health.routing if run.config else RoutingConfig()
    most = Mark(f"limit {limits.max_overflow_fraction:.0%}", 100 * limits.max_overflow_fraction)
    marks = []
    bounds = _entropy_bounds(run)
    if bounds is not None:
        least, even = bounds
        marks = [Mark(f"at least {least:.2f}", least), Mark(f"even {even:.2f}", even)]
    judged = [Moment("judged from here", run.unjudged_steps + 1)] if run.unjudged_steps else []
    above = Curve("", steps, 100 * overflow, "c2", smooth=True)
    balance = Curve("", *run.series("moe/load_balance_loss"), "c3", smooth=True)
    z_loss = Curve("", *run.series("moe/z_loss"), "c4", smooth=True)
    percent = "{:.3g}%".format
    unit = "of assignments, beyond capacity"
    return [
        plot(
            "Overflow",
            unit,
            "overflow",
            [above],
            [most],
            moments=judged,
            text=percent,
            limits=_FROM_ZERO,
        ),
        plot("Entropy", "bits, mean over layers", "entropy", [entropy], marks, moments=judged),
        plot("Load-balance loss", "unweighted", "balance", [balance], [Mark("even 1", 1.0)]),
        plot("Router z-loss", "unweighted", "z-loss", [z_loss]),
    ]


def _entropy_bounds(run: RecordedRun) -> tuple[float, float] | None:
    """Least healthy and largest entropy of routing, in bits; None where there is no choice."""
    moe = run.config.model.moe if run.config else None
    if run.config is None or moe is None or moe.num_experts < 2:
        return None
    even = math.log2(moe.num_experts)
    return run.config.health.routing.min_entropy_share * even, even


def _uneven_routing(run: RecordedRun) -> list[str]:
    """Faults of the routing at the last logged step, each with its limit."""
    faults = []
    limits = run.config.health.routing if run.config else RoutingConfig()
    overflow = run.latest("moe/overflow_fraction")
    if overflow is not None and overflow > limits.max_overflow_fraction:
        faults.append(
            f"overflow is {overflow:.1%}, above its limit of {limits.max_overflow_fraction:.1%}"
        )
    entropy = run.latest("moe/routing_entropy_bits")
    bounds = _entropy_bounds(run)
    if entropy is not None and bounds is not None and entropy < bounds[0]:
        faults.append(f"entropy is {entropy:.2f} bits, below its limit of {bounds[0]:.2f}")
    return faults


def _expert_layers(run: RecordedRun) -> list[dict[str, Any]]:
    """Routing by layer at the final evaluation, entropy in bits; empty without one by layer."""
    layers = (run.summary.get("evaluation") or {}).get("layers") or []
    num_experts = max((len(layer["utilisation"]) for layer in layers), default=0)
    limits = run.config.health.routing if run.config else RoutingConfig()
    rows = []
    for layer in layers:
        entropy = _number(layer.get("routing_entropy_bits"))
        overflow = _number(layer.get("overflow_fraction"))
        least = limits.min_entropy_share * math.log2(num_experts)
        shares: list[tuple[float | None, str]] = []  # None where not finite, and a colour
        for share in map(_number, layer["utilisation"]):
            if share is None or not math.isfinite(share):
                shares.append((None, ""))
                continue
            ratio = share * num_experts
            # Fullest from 2.8 times the even share on, yet pale enough to read the number on it.
            strength = min(abs(math.log2(max(ratio, 1e-9))) / 1.5, 1) * 0.75
            color = "224 122 20" if ratio > 1 else "58 120 232"
            shares.append((share, f"rgb({color} / {strength:.2f})"))
        row = {
            "number": layer["layer"],
            "shares": shares,
            "entropy": entropy,
            "overflow": overflow,
            "is_collapsed": entropy is not None and entropy < least,
            "is_too_full": overflow is not None and overflow > limits.max_overflow_fraction,
        }
        rows.append(row)
    return rows


def _read_json(path: Path, problems: dict[str, str]) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems[path.name] = f"{path.name} is missing."
        return {}
    except (OSError, ValueError) as error:
        problems[path.name] = f"{path.name} cannot be read: {error}"
        return {}
    if not isinstance(content, dict):
        problems[path.name] = f"{path.name} does not hold an object."
        return {}
    return content


def _read_starts(folder: Path, problems: dict[str, str]) -> list[Mapping[str, Any]]:
    """Reads the record of each start, in order; none where the run kept none."""
    found: dict[str, str] = {}
    starts = []
    for path in sorted(folder.glob("*.json")):
        start = _read_json(path, found)
        if start and (reason := start_problem(start)):
            found[path.name] = f"{path.name} {reason}."
        elif start:
            starts.append(start)
    problems |= {f"starts/{name}": f"starts/{text}" for name, text in found.items()}
    return sorted(starts, key=lambda start: _number(start.get("number")) or 0.0)


def _number(value: Any) -> float | None:
    """Reads a JSON value as a number; values that are not finite were written as text."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
