"""Part of a report on the objectives of a run: weights and losses, each over its own tokens.

templates/objectives.html lays it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdrmix.config.objectives import OF_TOKENS
from cdrmix.monitoring.metrics import member_name, member_of
from cdrmix.monitoring.page import Figure
from cdrmix.monitoring.plots import Curve, plot
from cdrmix.monitoring.recorded_run import RecordedRun

_TRAINED = "objective/*/loss"
_HELD_OUT = "eval/objective/*/loss"
_UNIT = "nats per token"
_SIZE = (540, 240)


def objectives_report(run: RecordedRun) -> dict[str, Any] | None:
    """Describes the parts of the loss; None for a run whose loss has none.

    `rows` are (name, weight or None, newest training loss, newest held-out loss), losses in nats
    per token, None where there is none; `z_loss` is the newest, unweighted, and `z_weight` its
    weight.
    """
    objectives = run.config.objectives if run.config else None
    names = dict.fromkeys(
        member
        for name in run.metrics.names
        for family in (_TRAINED, _HELD_OUT)
        if (member := member_of(family, name)) is not None
    )
    if objectives is None and not names:
        return None
    weights = objectives.model_dump() if objectives else {}
    weights |= {each.label: each.weight for each in objectives.plugins} if objectives else {}
    known = [*OF_TOKENS, *(name for name in names if name not in OF_TOKENS)]
    rows = [
        (
            name,
            weights.get(name),
            run.latest(member_name(_TRAINED, name)),
            _final(run).get(name, run.latest(member_name(_HELD_OUT, name))),
        )
        for name in known
        if name in names or weights.get(name)
    ]
    return {
        "rows": rows,
        "z_weight": weights.get("z_loss") or None,
        "z_loss": run.latest("objective/z_loss"),
        "figures": list(_figures(run, [name for name, *_ in rows if name in names])),
    }


def _final(run: RecordedRun) -> dict[str, float]:
    """Held-out losses of the final evaluation, by objective."""
    parts = (run.summary.get("evaluation") or {}).get("objectives") or []
    return {part["objective"]: part["loss"] for part in parts}


def _figures(run: RecordedRun, names: list[str]) -> Iterator[Figure]:
    for name in names:
        held_out = run.with_final(*run.series(member_name(_HELD_OUT, name)), _final(run).get(name))
        curves = [
            Curve("training", *run.series(member_name(_TRAINED, name)), "c1", smooth=True),
            Curve("validation", *held_out, "c2"),
        ]
        yield plot(name, _UNIT, f"objective-{name}", curves, size=_SIZE)
    squares = Curve("", *run.series("objective/z_loss"), "c4", smooth=True)
    if len(squares.steps):
        unit = "squared logarithm, unweighted"
        yield plot("z-loss", unit, "objective-z-loss", [squares], size=_SIZE)
