from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from cdrmix.profiling import tables


@dataclass
class Event:
    """Event of a trace as torch's tracer gives it: on a GPU, which this machine may lack, NCCL's
    kernels carry what was asked for."""

    kernel: str
    seconds: float
    told: dict[str, Any] = field(default_factory=dict)
    device: DeviceType = DeviceType.CUDA
    inputs: tuple[list[int], ...] = ()
    kinds: tuple[str, ...] = ()

    def name(self) -> str:
        return self.kernel

    def duration_ns(self) -> int:
        return int(self.seconds * 1e9)

    def device_type(self) -> DeviceType:
        return self.device

    def metadata_json(self) -> str:
        return json.dumps(self.told)[1:-1]

    def shapes(self) -> list[list[int]]:
        return [*self.inputs]

    def dtypes(self) -> list[str]:
        return [*self.kinds]


def test_collectives_of_nccl_and_gloo_are_summed_by_name() -> None:
    reduced = {"Collective name": "allreduce", "In msg nelems": 1_000, "dtype": "BFloat16"}
    gathered = {"Collective name": "_allgather_base", "In msg nelems": 10, "dtype": "Float"}
    events = [
        *[Event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0.25, reduced)] * 3,
        Event("ncclDevKernel_AllGather_RING_LL", 1.0, gathered),
        Event("nccl:all_reduce", 9.0, reduced, DeviceType.CPU),  # the call, and no work
        Event("aten::mm", 5.0),
        Event("gloo:broadcast", 0.5, {}, DeviceType.CPU, ([4, 5],), ("double",)),
        Event("gloo:broadcast", 0.5, {}, DeviceType.CPU, ([],), ("",)),
    ]
    assert tables.summed(tables.calls_of(events)) == [
        {"collective": "_allgather_base", "calls": 1, "bytes": 40, "seconds": 1.0},
        {"collective": "broadcast", "calls": 2, "bytes": 160, "seconds": 1.0},
        {"collective": "allreduce", "calls": 3, "bytes": 6_000, "seconds": 0.75},
    ]


def test_kernels_are_told_apart_by_shape_where_wanted_and_flops_are_counted() -> None:
    small, large = torch.ones(4, 8), torch.ones(64, 8)
    with profile(record_shapes=True, with_flops=True) as profiled, record_function("forward"):
        for each in (small, large, large):
            each @ each.t()
    (row,) = (row for row in tables.kernels(profiled, by_shape=False) if row["name"] == "aten::mm")
    flops = 2 * 8 * (4 * 4 + 2 * 64 * 64)
    assert (row["calls"], row["flops"]) == (3, flops)
    assert tables.flops(profiled) == flops
    by_shape = [r for r in tables.kernels(profiled, by_shape=True) if r["name"] == "aten::mm"]
    assert sorted(row["calls"] for row in by_shape) == [1, 2]
    assert {row["shapes"] for row in by_shape} == {"[[4, 8], [8, 4]]", "[[64, 8], [8, 64]]"}
    shares = [row["share"] for row in tables.kernels(profiled, by_shape=False)]
    assert sum(shares) == pytest.approx(1)
    (phase,) = tables.phases(profiled)
    assert (phase["phase"], phase["calls"]) == ("forward", 1)
