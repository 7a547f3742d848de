"""The report's section on wall time: where it went, and how the last start began.

report.html: one self-contained page that shows how a run went, from the run directory alone.

Whatever is missing is named in its place: a run that is still going, or that died, has a report
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cdrmix.config.schema import RoutingConfig
from cdrmix.monitoring import page
from cdrmix.monitoring.plots import Curve, Mark
from cdrmix.monitoring.plots import plot as _plot
from cdrmix.monitoring.recorded_run import RecordedRun, read_run
from cdrmix.monitoring.sinks import duration, write_text_atomic
from cdrmix.monitoring.stage_b_page import stage_b_sections, stage_b_tiles

_MEANINGS = {
    "productive": "steps that the final weights contain",
    "redone": "steps that were lost, or rolled back, and done again",
    "checkpoint_stall": "steps waiting for a checkpoint",
    "evaluation": "held-out loss and samples",
    "start_up": "from each command to the first step",
    "down": "between two starts",
    "other": "baselines, report, and what is between steps",
}


def time_section(run: RecordedRun) -> str:
    """Goodput and start-up as metrics.json has them."""
    goodput = run.summary.get("goodput")
    start_up = run.summary.get("start_up")
    if not goodput or not start_up:
        why = run.problems.get("metrics.json", "metrics.json holds no goodput.")
        return page.section("Wall time", page.missing(why))
    new = goodput["productive_steps"]
    redone = goodput["redone_steps"]
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


_MAX_SAMPLES = 50  # pages of hundreds of evaluations stay readable
_MAX_EVENTS = 50
_UNKNOWN = "–"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory and give its path.

    Raises:
        StateError: if there is no metrics.jsonl, or the page cannot be written.
    """
    run = read_run(run_dir)
    name = run.summary.get("name") or (run.config.name if run.config else run_dir.name)
    sections = (
        partial(_header, name),
        _tiles,
        _loss,
        _health,
        _optimizer,
        _speed,
        time_section,
        _routing,
        _experts,
        stage_b_sections,
        _samples,
        _plan,
        _environment,
        _summary,
        _config,
    )
    # of the run that Stage A was: its own report has them
    elsewhere = (_loss, _routing, _experts, _samples) if run.is_stage_b_alone else ()
    path = run_dir / "report.html"
    parts = [make(run) for make in sections if make not in elsewhere]
    write_text_atomic(path, page.document(f"{name} · CDRmix", parts))
    return path


def _header(name: str, run: RecordedRun) -> str:
    of = f" of {run.num_steps:,}" if run.num_steps else ""
    where = f"step {run.last_step:,}{of}"
    if not run.summary:
        badge = "no final summary"
        tone = "warn"
        where += " · still running, or ended before its end: see train.log"
    elif run.num_steps and run.last_step < run.num_steps:
        badge = "unfinished"
        tone = "warn"
    else:
        badge = "finished"
        tone = "good"
    bad = sum(not math.isfinite(line.get("loss", 0.0)) for line in run.records)
    alarm = page.note(f"Logged steps with a loss that is not finite: {bad}.", "bad") if bad else ""
    return (
        f'<header><h1>{page.text(name)}</h1><span class="badge {tone}">{badge}</span>'
        f"<p>{page.text(run.folder.name)} · {where}</p>{alarm}</header>"
    )


def _tiles(run: RecordedRun) -> str:
    evaluation = run.summary.get("evaluation") or {}

    def judged(name: str) -> float | None:
        return _number(evaluation.get(name, run.latest(f"eval/{name}")))

    in_stage_b = _number((run.summary.get("stage_b") or {}).get("seconds"))
    seconds = _number(run.summary.get("seconds"))
    if in_stage_b is not None:
        seconds = (seconds or 0.0) + in_stage_b
    speeds = run.series("tokens_per_second")[1]
    speed = _number(run.summary.get("tokens_per_second_median"))
    if speed is None and len(speeds):
        speed = median(speeds)
    tokens = _number(run.summary.get("tokens_seen", run.latest("tokens_seen")))
    total = _number(run.plan.get("total_params"))
    active = _number(run.plan.get("active_params"))
    when = "at the end" if evaluation else "so far"
    items = [
        ("Validation loss", _shown(judged("loss"), "{:.4f}"), f"nats per token, {when}"),
        ("Perplexity", _shown(judged("perplexity"), "{:.2f}"), "per token"),
        ("Bits per byte", _shown(judged("bits_per_byte"), "{:.3f}"), "of held-out text"),
        ("Trained on", _UNKNOWN if tokens is None else page.compact(tokens), "tokens"),
        ("Time", _UNKNOWN if seconds is None else duration(seconds), "from start to end"),
        ("Throughput", _shown(speed, "{:,.0f}"), "tokens per second, median"),
    ]
    if total is not None:
        unit = "parameters" if active is None else f"parameters, {page.compact(active)} active"
        items.append(("Size", page.compact(total), unit))
    if run.is_stage_b_alone:
        items = [item for item in items if item[1] != _UNKNOWN]
    return page.tiles([*items, *stage_b_tiles(run)])


def _loss(run: RecordedRun) -> str:
    baselines = run.summary.get("baselines") or {}
    marks = [
        Mark(f"{name} {value:.4f}", value)
        for name in ("unigram", "bigram")
        if (value := _number(baselines.get(f"{name}_loss"))) is not None
    ]
    curves = [
        Curve("training", *run.series("loss"), "c1", smooth=True),
        Curve("validation", *run.validation_losses(), "c2"),
    ]
    drawing = _plot(
        "Training and validation", "nats per token", "loss", curves, marks, size=(1120, 330)
    )
    evaluated = "" if len(curves[1].steps) else page.missing("No evaluation has been logged.")
    return page.section("Loss", drawing, evaluated, _baselines(run, baselines))


def _baselines(run: RecordedRun, baselines: Mapping[str, Any]) -> str:
    model = _number((run.summary.get("evaluation") or {}).get("loss"))
    losses = {
        "this model": model,
        "bigram, Kneser-Ney": _number(baselines.get("bigram_loss")),
        "unigram, add-one": _number(baselines.get("unigram_loss")),
    }
    known = {name: loss for name, loss in losses.items() if loss is not None}
    if model is None or len(known) < 2:
        return page.missing("No baselines: no final evaluation, or evaluation.baselines is off.")
    rows = [
        page.row(
            page.text(name),
            f"{loss:.4f}",
            f"{math.exp(min(loss, 700.0)):,.1f}",
            page.bar(loss / max(known.values()), own=name == "this model"),
        )
        for name, loss in known.items()
    ]
    best = min(loss for name, loss in known.items() if name != "this model")
    tone, verdict = ("good", "below") if model < best else ("bad", "NOT below")
    said = f"The model is {abs(best - model):.4f} nats per token {verdict} the best baseline."
    head = ("predictor", "nats per token", "perplexity", "")
    counted = "Baselines are counted on the tokens that were trained on. "
    return page.table(head, rows, "wide") + page.note(counted + said, tone)


def _health(run: RecordedRun) -> str:
    if "health.json" in run.problems:
        return page.section("Health", page.missing(run.problems["health.json"]))
    events: Sequence[Mapping[str, Any]] = run.health.get("events") or []
    if not events:
        return page.section("Health", page.note("Nothing unhealthy was seen.", "good"))
    shown = events[-_MAX_EVENTS:]
    left_out = f" ({len(shown)} newest of {len(events)})" if len(shown) < len(events) else ""
    counts = {
        name: run.health.get(name) or 0 for name in ("skipped_steps", "rollbacks", "warnings")
    }
    said = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
    rows = [_event_row(event) for event in shown]
    head = ("steps", "what", "times", "at first", "action", "outcome")
    return page.section("Health", page.table(head, rows, ""), page.note(f"{said}{left_out}."))


def _event_row(event: Mapping[str, Any]) -> str:
    first = event["first_step"]
    last = event["last_step"]
    steps = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    what = event["watched"].replace("_", " ")
    times = f"{event['times']:,}"
    cells = (steps, what, times, event["why"], event["action"], event["outcome"])
    return page.row(*map(page.text, cells))


def _optimizer(run: RecordedRun) -> str:
    rate = Curve("", *run.series("learning_rate"), "c3")
    norm = Curve("", *run.series("grad_norm"), "c4", smooth=True)
    clip = run.config.training.gradient_clipping if run.config else 0
    clipped = [Mark(f"clipped at {clip:g}", clip)] if clip else []
    return page.section(
        "Optimizer",
        page.panels(
            _plot(
                "Learning rate",
                "per step",
                "learning-rate",
                [rate],
                text="{:.3g}".format,
                limits=(0, None),
            ),
            _plot("Gradient norm", "L2, before clipping", "grad-norm", [norm], clipped),
        ),
    )


def _speed(run: RecordedRun) -> str:
    speed = Curve("", *run.series("tokens_per_second"), "c1", smooth=True)
    steps, peak = run.series("memory_peak_bytes")
    memory = Curve("", steps, peak / 2**30, "c2")
    return page.section(
        "Speed and memory",
        page.panels(
            _plot(
                "Throughput",
                "tokens per second",
                "speed",
                [speed],
                text="{:,.0f}".format,
                limits=(0, None),
            ),
            _plot(
                "Peak memory",
                "GiB, largest rank",
                "memory",
                [memory],
                text="{:.2f}".format,
                limits=(0, None),
            ),
        ),
    )


def _routing(run: RecordedRun) -> str:
    steps, overflow = run.series("moe/overflow_fraction")
    entropy = run.series("moe/routing_entropy_bits")
    if not len(steps) and not len(entropy[0]):
        return page.section(
            "Routing", page.missing("Nothing has been logged; a dense model has no routing.")
        )
    num_experts = _num_experts(run)
    limits = _routing_limits(run)
    marks = _entropy_marks(limits, num_experts) if num_experts else ()
    most = limits.max_overflow_fraction
    limit = Mark(f"limit {most:.0%}", 100 * most)
    percent = Curve("", steps, 100 * overflow, "c2", smooth=True)
    balance = Curve("", *run.series("moe/load_balance_loss"), "c3", smooth=True)
    z_loss = Curve("", *run.series("moe/z_loss"), "c4", smooth=True)
    bits = Curve("", *entropy, "c1", smooth=True)
    return page.section(
        "Routing",
        page.panels(
            _plot(
                "Overflow",
                "of assignments, beyond capacity",
                "overflow",
                [percent],
                [limit],
                text="{:.3g}%".format,
                limits=(0, None),
            ),
            _plot("Entropy", "bits, mean over layers", "entropy", [bits], marks),
            _plot("Load-balance loss", "unweighted", "balance", [balance], [Mark("even 1", 1.0)]),
            _plot("Router z-loss", "unweighted", "z-loss", [z_loss]),
        ),
    )


def _routing_limits(run: RecordedRun) -> RoutingConfig:
    return run.config.health.routing if run.config else RoutingConfig()


def _entropy_marks(limits: RoutingConfig, num_experts: int) -> tuple[Mark, Mark]:
    """Where routing counts as collapsed and the most, in bits."""
    most = math.log2(num_experts)
    least = limits.min_entropy_share * most
    return Mark(f"at least {least:.2f}", least), Mark(f"even {most:.2f}", most)


def _num_experts(run: RecordedRun) -> int | None:
    if run.config is None or run.config.model.moe is None or run.config.model.moe.num_experts < 2:
        return None
    return run.config.model.moe.num_experts


def _experts(run: RecordedRun) -> str:
    layers = (run.summary.get("evaluation") or {}).get("layers") or []
    if not layers:
        why = run.problems.get("metrics.json", "metrics.json holds no evaluation by layer.")
        return page.section("Experts at the final evaluation", page.missing(why))
    num_experts = max(len(layer["utilisation"]) for layer in layers)
    head = ["layer", *map(str, range(num_experts)), "entropy, bits", "overflow"]
    limits = _routing_limits(run)
    rows = [_expert_row(layer, limits, num_experts) for layer in layers]
    legend = (
        "Percent of the layer's token assignments that each expert got: "
        f"{100 / num_experts:.1f} is even, orange is more, blue is less. "
        "Red: entropy or overflow beyond its limit."
    )
    title = "Experts at the final evaluation"
    return page.section(title, page.table(head, rows, "heat"), page.note(legend))


def _expert_row(layer: Mapping[str, Any], limits: RoutingConfig, num_experts: int) -> str:
    cells = "".join(_share_cell(_number(share), num_experts) for share in layer["utilisation"])
    entropy = _number(layer.get("routing_entropy_bits"))
    overflow = _number(layer.get("overflow_fraction"))
    collapsed = entropy is not None and entropy < _entropy_marks(limits, num_experts)[0].value
    too_full = overflow is not None and overflow > limits.max_overflow_fraction
    return (
        f"<tr><th>{layer['layer']}</th>{cells}"
        f'<td class="{"bad" if collapsed else ""}">{_shown(entropy, "{:.3f}")}</td>'
        f'<td class="{"bad" if too_full else ""}">{_shown(overflow, "{:.1%}")}</td></tr>'
    )


def _share_cell(share: float | None, num_experts: int) -> str:
    if share is None or not math.isfinite(share):
        return "<td>–</td>"
    return f'<td style="background:{_heat(share * num_experts)}">{100 * share:.1f}</td>'


def _heat(ratio: float) -> str:
    """Colour of a share that is `ratio` times the even one; fullest from 2.8 times on."""
    strength = min(abs(math.log2(max(ratio, 1e-9))) / 1.5, 1) * 0.75
    rgb = "224 122 20" if ratio > 1 else "58 120 232"
    return f"rgb({rgb} / {strength:.2f})"


def _samples(run: RecordedRun) -> str:
    samples: Sequence[Mapping[str, Any]] = run.summary.get("samples") or []
    if not samples:
        why = run.problems.get("metrics.json", "metrics.json holds no generated text.")
        return page.section("Generated text", page.missing(why))
    *earlier, last = samples
    thinned = earlier[:: -(-len(earlier) // _MAX_SAMPLES)] if earlier else []
    parts = [_sample(last)]
    if thinned:
        left_out = f" ({len(thinned)} of {len(earlier)})" if len(thinned) < len(earlier) else ""
        parts.append(page.details(f"Earlier samples{left_out}", *map(_sample, thinned)))
    return page.section("Generated text", *parts)


def _sample(sample: Mapping[str, Any]) -> str:
    prompt = page.text(sample.get("prompt", ""))
    text = page.text(sample.get("text", ""))
    step = _shown(_number(sample.get("step")), "{:,.0f}")
    return f"{page.note(f'after step {step}')}\n<pre><b>{prompt}</b>{text}</pre>"


def _plan(run: RecordedRun) -> str:
    if not run.plan:
        return page.section("Plan", page.missing(run.problems.get("plan.json", "It is empty.")))
    shown = {name: v for name, v in run.plan.items() if name not in ("reasons", "deepspeed")}
    reasons = page.bullets(run.plan.get("reasons") or [])
    return page.section("Plan", page.key_values(shown), reasons)


def _environment(run: RecordedRun) -> str:
    if not run.environment:
        why = run.problems.get("environment.json", "It is empty.")
        return page.section("Environment", page.missing(why))
    return page.section(
        "Environment", page.details("Versions and devices", page.key_values(run.environment))
    )


def _summary(run: RecordedRun) -> str:
    elsewhere = ("evaluation", "baselines", "samples", "goodput", "start_up")
    rest = {name: value for name, value in run.summary.items() if name not in elsewhere}
    if not rest:
        why = run.problems.get("metrics.json", "It is empty.")
        return page.section("Final summary", page.missing(why))
    return page.section("Final summary", page.details("metrics.json", page.key_values(rest)))


def _config(run: RecordedRun) -> str:
    why = run.problems.get("config_snapshot.yaml")
    shown = page.details("config_snapshot.yaml", f"<pre>{page.text(run.config_text)}</pre>")
    return page.section(
        "Configuration", page.missing(why) if why else "", shown if run.config_text else ""
    )


def _number(value: Any) -> float | None:
    """A JSON value as a number; non-finite ones were written as text."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _shown(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else form.format(value)
