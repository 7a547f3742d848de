"""Profiles of steps: what they change, what they hold, and where a run stops or goes on in them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cdrmix.monitoring.sinks import read_metrics
from cdrmix.runtime.phases import PHASES
from tests.equal_runs import result_of
from tests.harness import run_ranks
from tests.small_run import STEPS, arguments, before_step, overrides, start

DENSE = ["model.moe=null", "training.micro_batch_size=2", "evaluation.every_steps=4"]


def train(argv: list[str], stopped_before: int = 0) -> tuple[int, list[str]]:
    """One rank of launch/train.py, told to stop before a step; its exit code, and what of the
    profiler was imported."""
    if stopped_before:
        before_step(stopped_before, lambda: os.kill(os.getpid(), signal.SIGTERM))
    code = start(argv)
    return code, sorted(name for name in sys.modules if name.startswith("cdrmix.profiling"))


@pytest.fixture(scope="module")
def runs(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two ranks, and the same one profiled, stopped in the window and gone on there."""
    folder = tmp_path_factory.mktemp("profile")
    plain = arguments(
        small_corpus, folder / "plain", *overrides([*DENSE, "monitoring.system=false"])
    )
    assert run_ranks(train, 2, plain) == [(0, []), (0, [])]
    settings = [*DENSE, "profile={steps: [3, 6], ranks: [0, 1]}"]
    profiled = arguments(small_corpus, folder / "profiled", *overrides(settings))
    assert [code for code, _ in run_ranks(train, 2, profiled, 3)] == [75, 75]
    assert [code for code, _ in run_ranks(train, 2, [*profiled, "--resume", "auto"])] == [0, 0]
    return folder / "plain", folder / "profiled"


def found(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / "profile" / f"{name}.json").read_text())


def names_in_trace(run_dir: Path, name: str) -> set[str]:
    with gzip.open(run_dir / "profile" / found(run_dir, name)["trace"], "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_training_is_bit_by_bit_the_same_in_a_window(runs: tuple[Path, Path]) -> None:
    (lines, tensors), (profiled_lines, profiled_tensors) = (result_of(each, STEPS) for each in runs)
    assert len(lines) == STEPS
    assert lines == profiled_lines
    assert all(tensors[name].equal(profiled_tensors[name]) for name in tensors)


def test_each_rank_has_what_was_done_of_the_window_before_and_behind_a_stop(
    runs: tuple[Path, Path],
) -> None:
    names = {path.name for path in (runs[1] / "profile").iterdir()}
    parts = [f"rank{rank}_steps_{steps}" for rank in (0, 1) for steps in ("3-4", "5-6")]
    assert names == {f"{part}{end}" for part in parts for end in (".json", ".pt.trace.json.gz")}
    for part in parts:
        first, last = (int(step) for step in part.rpartition("_")[2].split("-"))
        assert found(runs[1], part)["steps"] == [first, last]
        names = names_in_trace(runs[1], part)
        steps = {name for name in names if name.startswith("ProfilerStep")}
        # The stop is seen at the beginning of a fifth step, behind its batch.
        assert steps == {
            f"ProfilerStep#{step}" for step in range(first, last + (2 if first == 3 else 1))
        }
        assert {"data", "forward", "backward", "optimizer"} <= names
        # A stop saves, and so does step 6, behind the window; an evaluation is behind step 4.
    assert "checkpoint" in names_in_trace(runs[1], "rank1_steps_3-4")


def test_phases_kernels_and_collectives_are_in_tables(runs: tuple[Path, Path]) -> None:
    tables = found(runs[1], "rank1_steps_5-6")
    calls = {row["phase"]: row["calls"] for row in tables["phases"]}
    # Two micro-batches of two samples on each rank make the global batch of eight.
    assert calls["data"] == 2
    assert calls["forward"] == calls["backward"] == calls["optimizer"] == 4
    assert [*calls] == [name for name in PHASES if name in calls]
    spent = sum(row["seconds"] for row in tables["phases"] if row["phase"] != "checkpoint")
    assert 0 < spent < 1.01 * tables["seconds"]
    kernels = tables["kernels"]
    assert len(kernels) == 20
    assert [row["seconds"] for row in kernels] == sorted(
        (r["seconds"] for r in kernels), reverse=True
    )
    assert "aten::mm" in {row["name"] for row in kernels}
    assert not {"forward", "ProfilerStep#5"} & {row["name"] for row in kernels}
    collectives = {row["collective"]: row for row in tables["communication"]}
    lines = {line["step"]: line for line in read_metrics(runs[1] / "metrics.jsonl")}
    assert lines[5]["loss"] > 0
    params = json.loads((runs[1] / "plan.json").read_text())["trained_params"]
    # Gradients of both steps in float32, and little beside them.
    assert 8 * params < collectives["all_reduce"]["bytes"] < 8.2 * params
    assert collectives["all_reduce"]["seconds"] > 0
    assert 0.5 < tables["flops"]["counted"] / tables["flops"]["planned"] < 1.1


def test_of_an_evaluation_in_the_window_the_time_alone_is_recorded(runs: tuple[Path, Path]) -> None:
    before, behind = (found(runs[1], f"rank0_steps_{steps}") for steps in ("3-4", "5-6"))
    calls = {row["phase"]: row["calls"] for row in before["phases"]}
    assert calls["evaluation"] == 1
    # they differ by 64 FLOPs of 1.1e9
    assert before["flops"]["counted"] == pytest.approx(behind["flops"]["counted"], rel=1e-6)


def test_stages_of_a_pipeline_have_their_phases_and_the_end_of_a_run_ends_the_window(
    small_corpus: Path, run_dir: Path
) -> None:
    settings = [*DENSE, "parallel.pipeline=2", "profile={steps: [2, 9], ranks: [0, 1]}"]
    argv = arguments(small_corpus, run_dir, *overrides(settings), "--max-steps", "3")
    assert [code for code, _ in run_ranks(train, 2, argv)] == [0, 0]
    for rank in (0, 1):
        tables = found(run_dir, f"rank{rank}_steps_2-3")
        calls = {row["phase"]: row["calls"] for row in tables["phases"]}
        assert calls["forward"] == 8, "four micro-batches of two steps"
        assert calls["backward"] == 12, "and both sums of gradients of each step"
        assert calls["optimizer"] == 2
        sent = {row["collective"]: row["calls"] for row in tables["communication"]}
        assert sent["send"] == sent["recv"] == 8
