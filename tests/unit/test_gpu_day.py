"""A GPU day: a stage that dies costs only itself, and wrong predictions are told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.benchmark.run import PAGE, place
from tools.gpu_day.predictions import judge, read_predictions
from tools.gpu_day.run import STAGES, read_results, run_stage, section
from tools.gpu_day.step import VARIANTS, planned

# Writes a row and the id of a process of its own, then does as the name of the stage says.
_STAGE = """
import json, pathlib, subprocess, sys
name, out = sys.argv[1], pathlib.Path(sys.argv[3])
sleeper = subprocess.Popen(["sleep", "600"])
with (out / f"{name}.rows.jsonl").open("w") as file:
    file.write(json.dumps({"name": "copy", "tb_per_second": 1.5, "sleeper": sleeper.pid}) + "\\n")
    file.write('{"name": "cut sh')
if name == "check":
    sleeper.wait()
sys.exit(3 if name == "gemm" else 0)
"""
_COMMAND = [sys.executable, "-c", _STAGE]


# Parts of names of rows that a CPU can only refuse, and of all rows the least number.
_REFUSED = ("fla", "CUDNN", "EFFICIENT")
_LEAST_ROWS = {
    "environment": 3, "check": 9, "gemm": 12, "wkv": 2, "step": 2, "block": 2, "triton": 7,
    "loss": 1, "attention": 12, "tests": 1,
}  # fmt: skip
_SLOW = ("step", "tests")  # starts two trainings; collects tests


def is_alive(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_stage_past_its_limit_is_killed_with_its_children_and_keeps_its_rows(
    tmp_path: Path,
) -> None:
    result = run_stage("check", tmp_path, seconds=1.5, command=_COMMAND, smoke=True)
    assert result["outcome"] == "ended by its limit of 2 s"
    (row,) = result["rows"]
    deadline = time.monotonic() + 5  # a killed process takes a moment
    while is_alive(row["sleeper"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(row["sleeper"])
    assert json.loads((tmp_path / "check.json").read_text()) == result


def test_a_stage_that_fails_does_not_end_the_day_and_the_page_tells_of_it(tmp_path: Path) -> None:
    for name in ("gemm", "environment"):
        run_stage(name, tmp_path, seconds=20, command=_COMMAND, smoke=True)
    text = section(read_results(tmp_path), read_predictions())
    assert "failed with exit code 3." in text
    assert "- copy: tb per second: 1.5, expected 4.3 (3.8 to 4.8) TB/s" in text
    assert "Stages not measured: check, wkv, step, block, triton, loss, attention, tests." in text
    page = place(PAGE.read_text(encoding="utf-8"), "gpu", text)
    assert page.count("## GPU\n") == 1
    assert page.index("failed with exit code 3") < page.index("<!-- begin wkv7 -->")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in STAGES],
)
def test_every_stage_runs_in_small_in_a_process_of_its_own_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert os.getsid(self.pid) == self.pid != os.getsid(0), "killed without this one"
            started.append(self)

    monkeypatch.setattr("tools.gpu_day.run.subprocess.Popen", Noted)
    command = [sys.executable, "-m", "tools.gpu_day.stages"]
    result = run_stage(name, tmp_path, seconds=200, command=command, smoke=True)
    assert result["outcome"] == "done"
    assert [each.args[-4] for each in started] == [name]
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result
    rows = result["rows"]
    assert len(rows) >= _LEAST_ROWS[name]
    failed = [row for row in rows if "failed" in row and not row["name"].startswith(_REFUSED)]
    assert not failed
    for row in rows:
        figures = [x for x in row.values() if isinstance(x, float | int)]
        assert all(math.isfinite(x) and x >= 0 for x in figures), row
    measured = [row for row in rows if {"failed", "not_run"}.isdisjoint(row)]
    assert measured or name in ("check", "triton"), "which are of kernels for GPUs alone"


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(3.8, "right"), (4.8, "right"), (3.79, "WRONG"), (4.81, "WRONG"), (None, "not measured")],
)
def test_a_figure_outside_of_its_range_makes_the_prediction_wrong(
    measured: float | None, verdict: str
) -> None:
    rows = [{"name": "copy", **({} if measured is None else {"tb_per_second": measured})}]
    judged = judge({"environment": {"rows": rows}}, read_predictions())
    assert judged[0]["verdict"] == verdict
    assert {each["verdict"] for each in judged[1:]} == {"not measured"}


def test_the_predictions_are_of_stages_and_variants_that_there_are() -> None:
    for each in read_predictions():
        assert each["stage"] in STAGES
        assert each["low"] <= each["expected"] <= each["high"]
        if each["stage"] == "step":
            assert each["row"] in {variant.name for variant in VARIANTS}


def test_steps_are_predicted_as_the_plan_expects_them() -> None:
    """A change of the plan's model of time changes what is expected of a GPU; ranges are a
    quarter to either side, as far as the worst of the published runs is off."""
    variants = {variant.name: variant for variant in VARIANTS}
    made: dict[str, dict[str, float]] = {}
    for each in read_predictions():
        if each["stage"] != "step" or each["figure"] == "peak_of_planned":
            continue
        name = each["row"]
        made[name] = made.get(name) or planned(variants[name])
        assert each["expected"] == pytest.approx(made[name][each["figure"]], rel=0.01), name
        assert each["high"] / each["expected"] == pytest.approx(1.25, rel=0.01)
        assert each["expected"] / each["low"] == pytest.approx(1.25, rel=0.01)
    assert len(made) >= 5
