"""Parts of a report on its provenance: the starts of a run, the data that it read, and the loss on
each domain of them.

Each part is None for a run that kept no such record. The templates of the same names lay them out.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cdrmix.monitoring.page import Figure
from cdrmix.monitoring.plots import Curve, Moment, plot
from cdrmix.monitoring.recorded_run import RecordedRun

_DIGEST = 12  # characters of a digest or commit that a person compares
_MAX_STARTS = 50
_MAX_CURVES = 24  # domains
_MAX_LABEL = 44  # characters over a chart


def starts(run: RecordedRun) -> dict[str, Any] | None:
    """Describes the newest starts, in order, in words; None where the run kept none."""
    if not run.starts:
        return None
    return {
        "rows": [_start(values) for values in run.starts[-_MAX_STARTS:]],
        "num_starts": len(run.starts),
    }


def start_moments(run: RecordedRun) -> list[Moment]:
    """Returns the steps from which another start trained, with what it changed."""
    return sorted(map(_moment, run.starts[1:]), key=lambda moment: moment.step)


def data_card(run: RecordedRun) -> dict[str, Any] | None:
    """Describes the data of the last start; None where the run kept none.

    `domains` have a name, training and held-out tokens, their weight as a share of all weights or
    None, and the share that their bar covers. `base` and `base_digest` are of the Hugging Face
    model that training began with.
    """
    data, base = (
        next((start[key] for start in reversed(run.starts) if start.get(key)), None)
        for key in ("data", "base")
    )
    return None if data is None else {**_data(data), **_base(base or {})}


def start_problem(values: Mapping[str, Any]) -> str:
    """Reason why the record of a start cannot be described, as after a change by hand; empty for
    one that can."""
    try:
        _start(values)
        _moment(values)
        _data(values.get("data") or {})
        _base(values.get("base") or {})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"is not as a start writes it: {type(error).__name__}: {error}"
    return ""


def domain_losses(run: RecordedRun) -> dict[str, Any] | None:
    """Computes the losses on each domain of the held-out text; None where none was evaluated.

    `rows` are (name, loss in nats per token, perplexity, tokens, share of the worst loss) of the
    final evaluation, the worst first.
    """
    final = [
        each
        for each in (run.summary.get("evaluation") or {}).get("domains") or []
        if isinstance(each.get("loss"), int | float)
    ]
    worst = max((each["loss"] for each in final), default=0.0) or 1.0
    rows = [
        (
            each["domain"],
            each["loss"],
            each.get("perplexity", math.exp(min(each["loss"], 700.0))),
            each.get("tokens"),
            each["loss"] / worst,
        )
        for each in sorted(final, key=lambda each: -each["loss"])
    ]
    ends = {name: loss for name, loss, *_ in rows}
    logged = {
        name.removeprefix("eval/domain/").removesuffix("/loss"): None
        for name in run.metrics.names
        if name.startswith("eval/domain/") and name.endswith("/loss")
    }
    if not rows and not logged:
        return None
    return {
        "rows": rows,
        "figures": [
            _domain_figure(run, name, ends.get(name), number)
            for number, name in enumerate([*logged][:_MAX_CURVES])
        ],
        "num_hidden": max(len(logged) - _MAX_CURVES, 0),
    }


def mixture_in_words(mixture: Mapping[str, Any] | Sequence[Any] | None) -> list[str]:
    """Describes a mixture, or its phases alone, by sentences, one for each phase."""
    if not mixture:
        return ["No mixture was asked for: each sample is read once per epoch."]
    values: Mapping[str, Any] = mixture if isinstance(mixture, Mapping) else {"phases": mixture}
    phases = values.get("phases") or [{}]
    temperature = float(values.get("temperature") or 1.0)
    sentences = []
    for number, phase in enumerate(phases):
        samples, tokens = phase.get("samples"), phase.get("tokens")
        length = f"{samples:,} samples" if samples else f"{tokens:,} tokens" if tokens else ""
        if not length:
            when = "From then to the end" if number else "From the first sample to the last"
        else:
            when = f"The {'next' if number else 'first'} {length}"
        change = phase.get("change", "step")
        become = {"linear": "a change, in equal steps, to ", "cosine": "a smooth change to "}
        shares = _shares_in_words(phase.get("weights"), temperature)
        sentences.append(f"{when}: {become.get(change, '')}{shares}.")
    return sentences


def _shares_in_words(weights: Mapping[str, float] | None, temperature: float) -> str:
    if not weights:
        if temperature == 1.0:
            return "domains by their numbers of samples"
        return f"domains by their numbers of samples, at temperature {temperature:g}"
    powers = {name: weight ** (1 / temperature) for name, weight in weights.items() if weight > 0}
    total = sum(powers.values()) or 1.0
    largest_first = sorted(powers.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.0%}" for name, size in largest_first)


def _start(values: Mapping[str, Any]) -> dict[str, Any]:
    command = values.get("command") or ""
    config = values.get("config")  # its path, or all of its values
    commit = values.get("commit") or ""
    return {
        "number": values.get("number"),
        "began": _time(values.get("began")),
        "from_step": int(values.get("from_step") or 0),
        "version": values.get("version"),
        "commit": commit[:_DIGEST],
        "is_modified": bool(values.get("modified")),
        "where": _hosts(values.get("hosts") or []),
        "plan": _layout(values.get("plan") or {}),
        "stage": values.get("stage"),
        "command": command if isinstance(command, str) else shlex.join(map(str, command)),
        "folder": values.get("folder"),
        "config": config if isinstance(config, str) else None,
        "config_hash": values.get("config_hash"),
        "changes": _changes(values),
        "start_from": _weights(values.get("start_from")),
    }


def _weights(values: Mapping[str, Any] | None) -> str:
    """Says which weights a run began with; empty for its own."""
    if not values:
        return ""
    manifest = (values.get("manifest_sha256") or "")[:_DIGEST]
    return (
        f"weights of step {values['step']:,} of {values['run']}: {values['parameters']:,} "
        f"parameters, manifest {manifest}"
    )


def _moment(values: Mapping[str, Any]) -> Moment:
    short = label = f"start {values.get('number', '')}".strip()
    changes = _changes(values)
    if changes:
        key, old, new = changes[0]
        label += f": {key.rpartition('.')[2]} {old} → {new}"
        if len(label) > _MAX_LABEL:
            label = f"{label[: _MAX_LABEL - 1]}…"
        if len(changes) > 1:
            label += f", {len(changes) - 1} more"
    return Moment(label, float(values.get("from_step") or 0), short)


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    domains = data.get("domains") or []
    has_weights = any(each.get("weight") is not None for each in domains)
    sizes = [
        float((each["weight"] if has_weights else each["train_tokens"]) or 0) for each in domains
    ]
    total = sum(sizes) or 1.0
    return {
        "folder": data.get("folder"),
        "recipe": data.get("recipe"),
        "digest": (data.get("digest") or "").removeprefix("sha256:")[:_DIGEST],
        "tokenizer": (data.get("tokenizer_sha256") or "")[:_DIGEST],
        "domains": [
            (
                each["name"],
                each.get("train_tokens"),
                each.get("validation_tokens"),
                size / total if has_weights else None,
                size / (max(sizes) or 1.0),
            )
            for each, size in zip(domains, sizes, strict=True)
        ],
        "has_weights": has_weights,
        "mixture": mixture_in_words(data.get("mixture")),
    }


def _base(base: Mapping[str, Any]) -> dict[str, Any]:
    if not base:
        return {"base": None, "base_digest": None}
    described = f"{base['family']}, {base['parameters']:,} parameters of {base['folder']}"
    return {"base": described, "base_digest": base["digest"][:_DIGEST]}


def _changes(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (str(change["key"]), _as_configured(change.get("old")), _as_configured(change.get("new")))
        for change in values.get("changes") or []
    ]


def _as_configured(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _time(began: Any) -> str:
    """Writes a time, seconds since 1970 or ISO 8601, in UTC; another text as it is."""
    try:
        if isinstance(began, int | float):
            when = datetime.fromtimestamp(began, UTC)
        else:
            when = datetime.fromisoformat(began)
            when = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return str(began or "–")
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _hosts(hosts: Sequence[Mapping[str, Any]]) -> str:
    """Writes hosts and their ranks: hosts with as many ranks are counted, not listed."""
    if not hosts:
        return "–"
    sizes = [
        len(host["ranks"]) if isinstance(host.get("ranks"), list) else int(host.get("ranks") or 1)
        for host in hosts
    ]
    ranks = "rank" if sizes == [1] * len(sizes) else "ranks"
    if len(hosts) == 1:
        return f"{hosts[0].get('name', '1 host')}: {sizes[0]:,} {ranks}"
    if len({*sizes}) == 1:
        return (
            f"{len(hosts):,} hosts with {sizes[0]:,} {ranks} each, from {hosts[0].get('name')} on"
        )
    return (
        f"{len(hosts):,} hosts with {min(sizes):,} to {max(sizes):,} ranks, {sum(sizes):,} in all"
    )


def _layout(plan: Mapping[str, Any]) -> str:
    degrees = plan.get("degrees") or {}
    above_one = [f"{name} {degree:,}" for name, degree in degrees.items() if degree != 1]
    parts = [str(plan["profile"])] if plan.get("profile") else []
    parts += above_one
    if plan.get("micro_batch_size"):
        accumulation = plan.get("gradient_accumulation_steps") or 1
        parts.append(f"micro batch {plan['micro_batch_size']:,}")
        parts += [f"accumulation {accumulation:,}"] if accumulation > 1 else []
    return ", ".join(parts)


def _domain_figure(run: RecordedRun, name: str, final: float | None, number: int) -> Figure:
    steps, losses = run.with_final(*run.series(f"eval/domain/{name}/loss"), final)
    curve = Curve("", steps, losses, f"c{number % 4 + 1}")
    return plot(name, "nats per token", f"domain-{number}", [curve], size=(360, 160))
