"""Tables of a profile: the dearest kernels, collectives, phases of a step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from cdrmix.runtime.phases import PHASES

_NUM_KERNELS = 20
_MICROSECONDS = 1e6
_NANOSECONDS = 1e9
# Ranges of gloo's collectives, which other threads run (torch 2.13, ProcessGroupGloo.cpp).
_GLOO = "gloo:"


class Call(NamedTuple):
    """One collective."""

    collective: str
    size_bytes: int  # of what this rank gives
    seconds: float


def kernels(profiled: profile, *, by_shape: bool) -> list[dict[str, Any]]:
    """Rows of the kernels that took the most time themselves, in this order: name, calls, seconds,
    share of all kernels' seconds, FLOPs where torch knows a formula, and shapes if told apart.

    Time is the devices' where a GPU was profiled, else that of the CPU.
    """
    on_device = profiled.use_device is not None
    rows = []
    for each in profiled.key_averages(group_by_input_shape=by_shape):
        micros = each.self_device_time_total if on_device else each.self_cpu_time_total
        # Ranges of phases and steps, and those of collectives, which have a table of their own.
        if each.is_user_annotation or each.key.startswith((_GLOO, "ProfilerStep")):
            continue
        row = {"name": each.key, "calls": each.count, "seconds": micros / _MICROSECONDS}
        if by_shape:
            row["shapes"] = str(each.input_shapes)
        if each.flops:
            row["flops"] = int(each.flops)
        rows.append(row)
    total = math.fsum(row["seconds"] for row in rows)
    rows = sorted(rows, key=lambda row: -row["seconds"])[:_NUM_KERNELS]
    return [{**row, "share": row["seconds"] / total if total else 0.0} for row in rows]


def flops(profiled: profile) -> int:
    """FLOPs of matrix products and convolutions that torch dispatched, recomputed ones included.

    Fused attention on CPUs and kernels of others are not among them.
    """
    return sum(int(each.flops) for each in profiled.key_averages() if each.flops)


def phases(profiled: profile) -> list[dict[str, Any]]:
    """Rows of a step's phases in their order, as the CPU saw them: phase, calls, seconds. One that
    is inside of another counts in both."""
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for each in profiled.events() or ():
        is_on_cpu = each.device_type == DeviceType.CPU
        if is_on_cpu and each.is_user_annotation and each.name in PHASES:
            calls[each.name] += 1
            seconds[each.name] += each.time_range.elapsed_us() / _MICROSECONDS
    return [
        {"phase": name, "calls": calls[name], "seconds": seconds[name]}
        for name in PHASES
        if calls[name]
    ]


def communication(profiled: profile) -> list[dict[str, Any]]:
    """Rows by collective, the longest first: collective, calls, bytes, seconds.

    Seconds are from a collective's start to its end on this rank, with the wait for others; those
    that run at the same time count each.
    """
    assert profiled.profiler is not None, "it has run"
    found = profiled.profiler.kineto_results
    assert found is not None, "it has ended"
    return summed(calls_of(found.events()))


def calls_of(events: Iterable[Any]) -> Iterator[Call]:
    """Collectives among the events of a trace, gloo's and NCCL's.

    gloo's are ranges with an input, whose shape stands in them where shapes are recorded. NCCL's
    are kernels that carry what was asked for (torch 2.13, ParamCommsUtils.hpp).
    """
    for event in events:
        name = event.name()
        seconds = event.duration_ns() / _NANOSECONDS
        if name.startswith(_GLOO):
            size = sum(map(_size, event.shapes(), event.dtypes()))
            yield Call(name.removeprefix(_GLOO), size, seconds)
        elif name.startswith("nccl") and event.device_type() != DeviceType.CPU:
            told = json.loads(f"{{{event.metadata_json() or ''}}}")
            size = int(told.get("In msg nelems", 0)) * _WIDTHS.get(str(told.get("dtype")), 0)
            yield Call(str(told.get("Collective name", name)), size, seconds)


def summed(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Rows of `communication` from single calls."""
    rows: dict[str, dict[str, Any]] = {}
    for call in calls:
        row = rows.setdefault(
            call.collective, {"collective": call.collective, "calls": 0, "bytes": 0, "seconds": 0.0}
        )
        row["calls"] += 1
        row["bytes"] += call.size_bytes
        row["seconds"] += call.seconds
    return sorted(rows.values(), key=lambda row: -row["seconds"])


# Bytes of an element, by the names that c10 gives its types, in a trace and in NCCL's kernels.
_WIDTHS = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    **{
        name: getattr(torch, kind).itemsize
        for name, kind in {
            "Float": "float32",
            "Double": "float64",
            "BFloat16": "bfloat16",
            "Half": "float16",
            "Long": "int64",
            "Int": "int32",
            "Byte": "uint8",
            "Char": "int8",
            "Bool": "bool",
        }.items()
    },
}


def _size(shape: list[int], kind: str) -> int:
    return math.prod(shape) * _WIDTHS.get(kind, 0) if shape else 0
