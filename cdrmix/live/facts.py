"""Figures of a run in words, for terminals and pages alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from cdrmix.live.status import State, Status
from cdrmix.monitoring.page import amount_of_bytes, compact
from cdrmix.monitoring.sinks import duration

Level = Literal["", "good", "warn", "bad"]

UNKNOWN = "–"
LEVELS: dict[State, Level] = {
    "running": "good",
    "finished": "good",
    "waiting": "",
    "stopped": "warn",
    "silent": "warn",
    "lost": "bad",
}
# Control characters, marks of direction, lone surrogates.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_Format = Callable[[float], str]
_SHORT: _Format = "{:.4g}".format
# Metric, label and format of those that every run or some runs have, in their order.
_METRICS: tuple[tuple[str, str, _Format], ...] = (
    ("loss", "loss", "{:.4f}".format),
    ("stage_b/loss", "loss of Stage B", "{:.4f}".format),
    ("eval/loss", "held-out loss", "{:.4f}".format),
    ("eval/ema_loss", "of the average", "{:.4f}".format),
    ("cpt/forgetting_nats", "forgetting", "{:+.4f}".format),
    ("stage_b/recall", "recall", "{:.3f}".format),
    ("stage_b/answered", "answered", "{:.3f}".format),
    ("policy/return", "return", "{:.3f}".format),
    ("policy/success", "success", "{:.3f}".format),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("step_seconds", "step time", lambda value: f"{value:.3g} s"),
    ("learning_rate", "learning rate", "{:.3g}".format),
    ("grad_norm", "gradient norm", _SHORT),
    ("tokens_seen", "tokens seen", compact),
    ("memory_peak_bytes", "memory peak", amount_of_bytes),
    ("moe/routing_entropy_bits", "routing entropy", lambda value: f"{value:.3f} bits"),
    ("moe/overflow_fraction", "overflow", "{:.2%}".format),
)
_COUNTS = {
    "skipped_steps": ("skipped", "skipped"),
    "rollbacks": ("rollback", "rollbacks"),
    "spikes": ("spike", "spikes"),
    "lowerings": ("lower rate", "lower rates"),
}


@dataclass(frozen=True)
class Fact:
    """A figure with its name."""

    name: str
    value: str
    level: Level = ""


def facts(status: Status) -> Iterator[Fact]:
    """Yields what is known of a run, figures first."""
    for metric, name, text in _METRICS:
        if (value := status.values.get(metric)) is not None:
            is_wrong = value != value or abs(value) == float("inf")
            yield Fact(name, str(value) if is_wrong else text(value), "bad" if is_wrong else "")
    yield _health(status)
    if status.checkpoint is not None:
        step, age = status.checkpoint
        yield Fact("checkpoint", f"step {step:,}, {duration(age)} ago")
    elif status.state != "waiting":
        yield Fact("checkpoint", "none")
    if status.newest_seconds is not None:
        level: Level = "bad" if status.is_late else ""
        yield Fact("newest line", f"{duration(status.newest_seconds)} ago", level)


def _health(status: Status) -> Fact:
    counted = [
        f"{count:,} {names[count != 1]}"
        for key, names in _COUNTS.items()
        if (count := status.health.get(key, 0))
    ]
    if counted:
        return Fact("health", ", ".join(counted), "warn")
    if warned := status.health.get("warnings", 0):
        return Fact("health", f"{warned:,} warning{'s' if warned > 1 else ''}", "warn")
    return Fact("health", "good", "good")


def state_text(status: Status) -> str:
    """State of a run in a word, or two where it stands still."""
    return "running, late" if status.is_late else status.state


def state_level(status: Status) -> Level:
    """Colour of the state of a run."""
    return "bad" if status.is_late else LEVELS[status.state]


def progress_text(status: Status) -> str:
    """Stage, step and the planned steps."""
    stage = f"stage {status.stage.upper()}, " if status.stage else ""
    planned = f" of {status.num_steps:,}" if status.num_steps else ""
    return f"{stage}step {status.step:,}{planned}"


def eta_text(status: Status) -> str:
    """Time left; a dash where it is not known."""
    return UNKNOWN if status.eta_seconds is None else duration(status.eta_seconds)


def plain(text: str) -> str:
    """Text of a run without control characters, of which a terminal would make commands."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)
