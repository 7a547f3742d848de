"""State of a run as its directory tells it: whether it lives, how far it is, and how it does."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from cdrmix.cluster.starts import (
    LOCK,
    MARKER,
    is_at_its_end,
    parsed_holder,
    process_start_ticks,
    read_starts,
)
from cdrmix.config.redaction import redacted_text
from cdrmix.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL
from cdrmix.live.run_folder import LOG, METRICS, LogLine, RunFolder, began
from cdrmix.monitoring.goodput import WALL_TIME
from cdrmix.monitoring.metric_columns import MetricColumns
from cdrmix.monitoring.metrics import member_name

# waiting: nothing has begun. running: its process lives, or lines come. silent: it runs on another
# host, which cannot be asked from here, and gives no sign. stopped: it ended with all that it did
# saved. lost: it ended without. finished: it has trained all that was asked for.
State = Literal["waiting", "running", "silent", "stopped", "lost", "finished"]
STATES: tuple[State, ...] = ("running", "waiting", "silent", "stopped", "lost", "finished")

EVALUATED = "eval/"  # before the names of what an evaluation of held-out text gives
_RECENT_LINES = 50  # behind a speed
_WARNINGS = 3
# A line is late after this many times the usual time between two, and never before the seconds:
# an evaluation, a save or a suite may stand between two steps.
_LATE_TIMES = 20
_LATE_SECONDS = 60.0
_SILENT_SECONDS = 300.0


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        state, why: and a reason for people, empty where the state says all.
        stage: `a` or `b`; empty where nothing says it.
        num_steps: planned; None where it is not known.
        values: newest of each metric; all of `eval/` are of one evaluation.
        eta_seconds: None for a run that does not train, or whose speed is not known.
        newest_seconds: since the newest line of metrics.jsonl; None without one.
        is_late: no line has come for much longer than it usually takes, in a run that goes on.
        checkpoint: step of the newest, and seconds since then; None without one.
        health: counts of unhealthy judgements by name, since the start of the run.
        warnings: last ones in train.log.
    """

    name: str
    variant: str
    state: State
    why: str
    stage: str
    step: int
    num_steps: int | None
    values: Mapping[str, float]
    eta_seconds: float | None
    newest_seconds: float | None
    is_late: bool
    checkpoint: tuple[int, float] | None
    health: Mapping[str, int]
    warnings: Sequence[LogLine]
    began: str

    @property
    def share(self) -> float | None:
        """Part of the planned steps that is done, 0 to 1."""
        return min(self.step / self.num_steps, 1.0) if self.num_steps else None


def status_of(folder: RunFolder, metrics: MetricColumns, *, name: str) -> Status:
    """Status of a run now.

    Args:
        metrics: its newest records at least, read a moment ago.
        name: of the run, as a person knows it.
    """
    now = time.time()
    step = max(metrics.last_step, _whole(folder.json("metrics.json").get("steps")) or 0)
    interval = _seconds_between_lines(metrics)
    changed = folder.changed(METRICS) if metrics.num_records else None
    newest = None if changed is None else max(0.0, now - changed)
    state, why = _state(folder, step, interval, now)
    is_late = (
        state == "running"
        and newest is not None
        and interval is not None
        and newest > max(_LATE_SECONDS, _LATE_TIMES * interval)
        and _began_seconds(folder, now) > _LATE_SECONDS
    )
    saved = folder.checkpoint
    config = folder.config
    first = began(folder)
    stage = (folder.starts or [{}])[-1].get("stage")
    num_steps = _num_steps(folder)
    return Status(
        name=name,
        variant=config.name if config else str(folder.values.get("name") or ""),
        state=state,
        why=why,
        stage=stage if stage in ("a", "b") else "",
        step=step,
        num_steps=num_steps,
        values=_values(metrics, folder.json("metrics.json")),
        eta_seconds=_eta(folder, metrics, step, num_steps) if state == "running" else None,
        newest_seconds=newest,
        is_late=is_late,
        checkpoint=saved and (saved[0], max(0.0, now - saved[1])),
        health=_health(folder.json("health.json")),
        warnings=[line for line in folder.log if line.level != "INFO"][-_WARNINGS:],
        began=first.strftime("%Y-%m-%d %H:%M") if first else "",
    )


def _values(metrics: MetricColumns, summary: Mapping[str, Any]) -> dict[str, float]:
    """Newest value of each metric; those of held-out text are all of the newest evaluation."""
    newest = {n: v for n in metrics.names if (v := metrics.latest(n)) is not None}
    values = {name: value for name, value in newest.items() if not name.startswith(EVALUATED)}
    logged = {name: metrics.series(name)[0][-1] for name in newest.keys() - values.keys()}
    logged_at = max(logged.values(), default=0)
    final = _final_evaluation(summary)
    # the final one is not among the logged ones; a run that was extended has newer ones
    if final and (_whole(summary.get("steps")) or 0) >= logged_at:
        return values | final
    # a domain, say, of which this evaluation read nothing has an older value
    return values | {name: newest[name] for name, step in logged.items() if step == logged_at}


def _final_evaluation(summary: Mapping[str, Any]) -> dict[str, float]:
    """Values of a run's final evaluation, by the names that logged ones have; empty without one."""
    evaluation = summary.get("evaluation")
    if not isinstance(evaluation, Mapping) or _finite(evaluation.get("loss")) is None:
        return {}
    found: dict[str, Any] = {
        f"{EVALUATED}{name}": evaluation.get(name)
        for name in ("loss", "perplexity", "bits_per_byte")
    }
    average = summary.get("ema_evaluation")
    if isinstance(average, Mapping):
        found["eval/ema_loss"] = average.get("loss")
    for part in ("domain", "objective"):
        entries = evaluation.get(f"{part}s")
        for each in entries if isinstance(entries, list) else []:
            if isinstance(each, Mapping) and isinstance(each.get(part), str):
                found[member_name(f"eval/{part}/*/loss", each[part])] = each.get("loss")
    return {name: value for name, v in found.items() if (value := _finite(v)) is not None}


def _state(folder: RunFolder, step: int, interval: float | None, now: float) -> tuple[State, str]:
    """State, and its reason for people."""
    locked = folder.changed(LOCK)
    finished = folder.changed(MARKER)
    holder = parsed_holder(folder.text(LOCK))
    is_here = holder.get("host") == socket.gethostname()
    if is_here and process_start_ticks(holder["process"]) == holder["started"]:
        has_ended = finished is not None and finished >= (locked or 0.0)
        return ("finished", "") if has_ended else ("running", "")
    config = folder.config
    # a run of an earlier version has no marker, and its summary counts
    if finished is not None or (config is not None and is_at_its_end(folder.path, config)):
        return "finished", ""
    signs = [folder.changed(name) for name in (METRICS, LOG, WALL_TIME)]
    newest = max((sign for sign in signs if sign is not None), default=None)
    if newest is None or (not holder and not folder.changed(METRICS)):
        return "waiting", ""
    is_recent = now - newest < max(_SILENT_SECONDS, _LATE_TIMES * (interval or 0.0))
    ended = _end_of_launch(folder, locked or 0.0)
    if ended is not None:
        return ended
    if not is_here and is_recent:
        return "running", f"on {holder['host']}" if holder else ""
    if holder and not is_here:
        return "silent", f"it ran on {holder['host']}, which cannot be asked from here"
    last = folder.log[-1] if folder.log else None
    stop = last is not None and last.text.startswith("stopped by ")
    saved = max([_whole(folder.json("saves.json").get("step")) or 0, *_saved(folder)])
    why = redacted_text(last.text) if last and (stop or last.level != "INFO") else ""
    return ("stopped", why) if stop or (step and saved >= step) else ("lost", why)


def _saved(folder: RunFolder) -> list[int]:
    return [folder.checkpoint[0]] if folder.checkpoint else []


def _end_of_launch(folder: RunFolder, since: float) -> tuple[State, str] | None:
    """End of the newest start, as `cdrmix launch` has noted it; None where that is still to come,
    or something else started the run."""
    starts = read_starts(folder.path)
    if not starts or starts[-1].ended.timestamp() < since:
        return None
    last = starts[-1]
    if last.exit_code in (EXIT_DONE, EXIT_STOPPED_BY_SIGNAL):
        return "stopped", last.reason
    return "lost", last.reason


def _num_steps(folder: RunFolder) -> int | None:
    """Planned steps, those of Stage B included."""
    of_stage_b = folder.json("plan.json").get("stage_b")
    if isinstance(of_stage_b, Mapping) and (steps := _whole(of_stage_b.get("num_steps"))):
        return steps
    return folder.config.training.num_steps if folder.config else None


def _seconds_between_lines(metrics: MetricColumns) -> float | None:
    """Usual time between the newest lines; None while it is not known."""
    steps, seconds = (values[-_RECENT_LINES:] for values in metrics.series("step_seconds"))
    if len(steps) < 2:
        return None
    return float(median(steps[1:] - steps[:-1]) * median(seconds))


def _eta(
    folder: RunFolder, metrics: MetricColumns, step: int, num_steps: int | None
) -> float | None:
    """Time to the last step (seconds), by the newest steps and what saves and evaluations take."""
    recent = metrics.series("step_seconds")[1][-_RECENT_LINES:]
    if not len(recent) or num_steps is None:
        return None
    parts = folder.json(WALL_TIME).get("parts")
    known = {name: _finite(value) for name, value in parts.items()} if parts else {}
    steps = known.get("productive") or 0.0
    beside = (known.get("checkpoint_stall") or 0.0) + (known.get("evaluation") or 0.0)
    factor = 1 + beside / steps if steps > 0 else 1.0
    return max(0, num_steps - step) * float(median(recent)) * factor


def _began_seconds(folder: RunFolder, now: float) -> float:
    """Time since the newest start took its lock."""
    return now - (folder.changed(LOCK) or 0.0)


def _health(record: Mapping[str, Any]) -> dict[str, int]:
    """Counts of what was unhealthy: skipped steps, rollbacks, loss spikes, warnings."""
    events = [e for e in record.get("events") or [] if isinstance(e, Mapping)]
    spikes = (_whole(e.get("times")) or 0 for e in events if e.get("watched") == "loss_spike")
    names = ("skipped_steps", "rollbacks", "warnings", "lowerings")
    counts = {name: _whole(record.get(name)) or 0 for name in names}
    return {**counts, "spikes": sum(spikes)}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None
