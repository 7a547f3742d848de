"""Kinds of devices that are refused by name; torch's and its extensions' answers are planted."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cdrmix import runtime
from cdrmix.errors import ConfigError
from cdrmix.runtime import hardware
from cdrmix.sessions import session


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def refusal() -> str:
    with pytest.raises(ConfigError) as refused:
        hardware.accelerator()
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_processors_are_taken_where_there_is_nothing_else() -> None:
    assert hardware.accelerator() == "cpu"


@pytest.mark.parametrize(
    ("kind", "named", "why"),
    [
        ("xpu", "an Intel GPU (xpu)", "oneCCL"),
        ("hpu", "an Intel Gaudi (hpu)", "fixed shapes"),
        ("npu", "a Huawei Ascend (npu)", "HCCL"),
        ("mps", "an Apple GPU (mps)", "float64"),
        ("mlu", "the accelerator mlu", "nothing here was run on it"),
    ],
)
def test_another_kind_that_is_asked_for_is_refused_by_name(
    kind: str, named: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", kind)
    told = refusal()
    assert told.startswith(f"DS_ACCELERATOR = {kind}: ")
    assert f"refuses {named}: " in told
    assert why in told
    assert told.endswith("Set DS_ACCELERATOR=cpu to train on CPUs")


def plant_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)


def plant_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def plant_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_npu")
    module.__spec__ = SimpleNamespace(name="torch_npu")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (plant_xpu, "this host has an Intel GPU (xpu)"),
        (plant_mps, "this host has an Apple GPU (mps)"),
        (plant_npu, "this host has a Huawei Ascend (npu)"),
    ],
)
def test_another_kind_that_is_here_is_refused_unless_processors_are_asked_for(
    plant: object, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(plant)
    plant(monkeypatch)
    assert refusal().startswith(f"{named}: ")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert hardware.accelerator() == "cpu"
    # One beside a device that can be used is of no interest.
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware.accelerator() == "cuda"


def test_another_choice_of_deepspeed_is_told() -> None:
    def deepspeed(name: str) -> SimpleNamespace:
        chosen = SimpleNamespace(_name=name)
        return SimpleNamespace(accelerator=SimpleNamespace(get_accelerator=lambda: chosen))

    hardware.check_deepspeed_agrees(deepspeed("cpu"))
    with pytest.raises(ConfigError, match="DeepSpeed has chosen the accelerator cuda, and torch"):
        hardware.check_deepspeed_agrees(deepspeed("cuda"))


def test_speed_of_bf16_on_this_cpu_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(runtime.matmul_flops_per_second(precision) > 1e7 for precision in ("bf16", "fp32"))
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    caplog.set_level(logging.INFO)
    for half, level, words in ((1.2e9, "WARNING", "fp32 is faster"), (9e10, "INFO", "bf16 pays")):
        speeds = {"bf16": half, "fp32": 8e10}
        monkeypatch.setattr(runtime, "matmul_flops_per_second", speeds.__getitem__)
        caplog.clear()
        session._compare_bf16()
        (line,) = caplog.records
        assert (line.levelname, words in line.getMessage()) == (level, True)
