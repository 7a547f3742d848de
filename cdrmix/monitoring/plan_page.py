"""Part of a report on the plan of a run, written for people: units, words, and nothing empty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from cdrmix.monitoring.page import compact

# Keys that `rows` write in words of their own, or that have parts of their own.
_WRITTEN = (
    "profile", "profile_path", "degrees", "micro_batch_size", "gradient_accumulation_steps",
    "activation_checkpointing", "sequence_checkpoint_tokens", "memory_per_rank_bytes",
    "saves_in_background", "total_params", "active_params", "trained_params",
    "reasons", "warnings", "deepspeed", "stage_b",
)  # fmt: skip


def plan_card(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a plan for people.

    `rows` are by name; `memory` has (part, bytes, share of the largest part), the largest first and
    the sum last; `reasons` are (about, why).
    """
    rows = {
        "profile": _profile(plan),
        "layout": _layout(plan.get("degrees") or {}),
        "batch": _batch(plan),
        "parameters": _parameters(plan),
        "activations": _activations(plan),
        "checkpoints": _saving(plan.get("saves_in_background")),
    }
    # A key that a later version writes is shown too, as it is.
    others = {name: value for name, value in plan.items() if name not in _WRITTEN}
    sizes = dict(plan.get("memory_per_rank_bytes") or {})
    total = sizes.pop("total", None) or sum(sizes.values())
    largest = max(sizes.values(), default=0) or 1
    by_size = sorted(sizes.items(), key=lambda item: -item[1])
    memory = [(name.replace("_", " "), size, size / largest) for name, size in by_size if size]
    if memory:
        memory.append(("together", total, 0.0))
    parted = [
        reason.partition(": " if ": " in reason else " = ") for reason in plan.get("reasons") or []
    ]
    rows = {name: text for name, text in rows.items() if text}
    reasons = [(about, why) if why else ("", about) for about, _, why in parted]
    if plan.get("stage_b"):
        inner = plan_card(plan["stage_b"])
        rows |= {f"Stage B: {name}": text for name, text in inner["rows"].items()}
        reasons += inner["reasons"]
    return {
        "rows": rows | others,
        "memory": memory,
        "reasons": reasons,
        "warnings": plan.get("warnings") or [],
    }


def _profile(plan: Mapping[str, Any]) -> str:
    name = str(plan.get("profile") or "")
    file = PurePath(plan.get("profile_path") or "")
    return f"{name} ({file})" if file.name else name


def _layout(degrees: Mapping[str, int]) -> str:
    if not degrees:
        return ""
    # Sequence and expert groups are of ranks that the other three count already.
    ranks = 1
    for name in ("data", "tensor", "pipeline"):
        ranks *= degrees.get(name, 1)
    if ranks == 1:
        return "1 rank"
    parallel = [f"{name} {degree:,}" for name, degree in degrees.items() if degree != 1]
    return f"{ranks:,} ranks: {', '.join(parallel)}"


def _batch(plan: Mapping[str, Any]) -> str:
    micro = plan.get("micro_batch_size")
    if not micro:
        return ""
    steps = plan.get("gradient_accumulation_steps") or 1
    times = "" if steps == 1 else f", {steps:,} micro batches before each optimizer step"
    return f"{micro:,} sample{'' if micro == 1 else 's'} per data rank at a time{times}"


def _parameters(plan: Mapping[str, Any]) -> str:
    total, active = plan.get("total_params"), plan.get("active_params")
    if total is None:
        return ""
    used = "" if active in (None, total) else f", {compact(active)} of them active for a token"
    return f"{compact(total)}{used}"


def _activations(plan: Mapping[str, Any]) -> str:
    recomputed = plan.get("activation_checkpointing")
    if recomputed is None:
        return ""
    text = "computed again in the backward pass"
    if recomputed in ("none", False):  # plans of earlier versions have true and false
        text = "kept for the backward pass"
    elif recomputed == "selective":
        text = "kept for the backward pass where they are dear, computed again where they are cheap"
    tokens = plan.get("sequence_checkpoint_tokens")
    return f"{text}, in stretches of {tokens:,} tokens" if tokens else text


def _saving(is_in_background: bool | None) -> str:
    if is_in_background is None:
        return ""
    return "written while training goes on" if is_in_background else "written while training waits"
