"""Suites of evaluations in a run: what they leave as it was, what they give, and how they fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cdrmix import runtime
from cdrmix.checkpoint.trained_run import checkpoint_place
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.monitoring.suite_results import read_results
from tests.equal_runs import result_of
from tests.harness import run_ranks
from tests.small_run import STEPS, arguments, before_step, overrides, start
from tests.small_suites import MADE, install

BEST_BY = "infill/made/pass@1"
# Experts drop tokens in training alone: a model left in evaluation mode would train otherwise.
SETTINGS = ["training.ema_decay=0.4", "checkpoint.every_steps=6", "checkpoint.keep=1"]
SETTINGS += ["model.moe.drop_tokens=true", "model.moe.capacity_factor=1.0"]


def suites(**cadence: int | None) -> str:
    """Setting of suites by name and steps between them."""
    listed = [{"name": name, "every_steps": every, "limit": 7} for name, every in cadence.items()]
    return f"evaluation.suites={json.dumps(listed)}"


def train(argv: list[str], stopped_before: int = 0) -> int:
    """One rank of launch/train.py with the suites of the tests, told to stop before a step."""
    install()
    if stopped_before:
        before_step(stopped_before, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return start(argv)


@pytest.fixture(scope="module")
def runs(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run directories of a run without suites and of one with them, each on two ranks."""
    folder = tmp_path_factory.mktemp("suites")
    settings = [
        suites(infill=2, routing=3),
        "evaluation.suites_share=1",
        f"evaluation.best_by={BEST_BY}",
    ]
    for name, more in (("plain", []), ("judged", settings)):
        argv = arguments(small_corpus, folder / name, *overrides([*SETTINGS, *more]))
        assert run_ranks(train, 2, argv) == [0, 0]
    return folder / "plain", folder / "judged"


def random_states(run_dir: Path) -> list[Any]:
    folder = run_dir / "checkpoints" / str(STEPS)
    states = [json.loads(path.read_text())["random"] for path in sorted(folder.glob("rank-*.json"))]
    assert len(states) == 2
    return states


def test_training_is_bit_by_bit_the_same_with_suites(runs: tuple[Path, Path]) -> None:
    (lines, tensors), (judged_lines, judged_tensors) = (result_of(each, STEPS) for each in runs)
    assert len(lines) == len(judged_lines) == STEPS
    for line, judged in zip(lines, judged_lines, strict=True):
        assert line == {key: value for key, value in judged.items() if "suite/" not in key}
    assert tensors.keys() == judged_tensors.keys()
    assert all(tensors[name].equal(judged_tensors[name]) for name in tensors)
    assert random_states(runs[0]) == random_states(runs[1])


def test_scores_are_in_the_metrics_the_folder_of_results_and_the_summary(
    runs: tuple[Path, Path],
) -> None:
    lines = {line["step"]: line for line in read_metrics(runs[1] / "metrics.jsonl")}
    for step in (2, 4, 6):
        assert lines[step]["suite/infill/made/pass@1"] == MADE[step]
        # Seeds are the suite's own: the same numbers each time, and for the average too.
        for n in range(3):
            drawn = f"suite/infill/drawn/number_{n}"
            assert lines[step][drawn] == lines[2][drawn]
        loss, average = (
            lines[step][f"suite/infill/text/{of}nats_per_token"] for of in ("", "ema_")
        )
        assert 0 < abs(loss - average) < 1
    assert not any(key.startswith("suite/infill") for key in lines[3])
    results = [each for each in read_results(runs[1]) if each.suite == "infill"]
    assert [(each.step, each.weights) for each in results] == [
        (step, weights) for step in (2, 4, 6, 8) for weights in ("ema", "trained")
    ]
    assert results[1].rows[0].low == results[1].rows[0].score - 1
    summary = json.loads((runs[1] / "metrics.json").read_text())
    assert summary["suites"]["results"]["infill"]["rows"][1]["score"] == MADE[8]
    assert 0 < summary["suites"]["share_of_time"] < 1
    assert summary["goodput"]["evaluation_seconds"] > summary["suites"]["seconds_between_steps"] > 0
    assert "suites" not in json.loads((runs[0] / "metrics.json").read_text())
    log = (runs[1] / "train.log").read_text()
    assert "suite infill behind step 4 on the average of the weights:" in log


def test_a_suite_that_fails_is_told_and_the_run_goes_on(runs: tuple[Path, Path]) -> None:
    lines = {line["step"]: line for line in read_metrics(runs[1] / "metrics.jsonl")}
    assert [lines[step]["suite/routing/failures"] for step in (3, 6)] == [1, 2]
    log = (runs[1] / "train.log").read_text()
    told = "warning: suite routing failed behind step {}, and the run goes on: {}"
    assert told.format(3, "None: is no file of tasks") in log
    assert told.format(6, "ValueError: a fault of the suite") in log
    assert log.count("Traceback") == 1, "of the fault of the program alone"
    summary = json.loads((runs[1] / "metrics.json").read_text())["suites"]
    assert summary["failures"] == {"routing": 2}
    assert summary["results"]["routing"]["rows"][0]["score"] == 0.5, "it did not fail at the end"


def test_the_best_checkpoint_is_that_of_the_highest_row(runs: tuple[Path, Path]) -> None:
    # Step 4 is no multiple of checkpoint.every_steps.
    named = json.loads((runs[1] / "metrics.json").read_text())["checkpoints"]["best"]
    assert named == {"step": 4, "by": BEST_BY, "score": MADE[4], "examples": 7}
    assert checkpoint_place(runs[1], "best") == runs[1] / "checkpoints" / "4"
    there = {path.name for path in (runs[1] / "checkpoints").iterdir() if path.is_dir()}
    assert there == {"4", "8"}


def test_a_suite_without_time_waits_through_a_restart_and_runs_at_the_end(
    small_corpus: Path, tmp_path: Path
) -> None:
    settings = [suites(infill=2), "evaluation.suites_share=1e-6"]
    argv = arguments(small_corpus, tmp_path / "run", *overrides(settings))
    assert run_ranks(train, 1, argv, 4) == [75]
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("suite infill is due and waits: suites have taken") == 1, "once per wait"
    assert run_ranks(train, 1, [*argv, "--resume", "auto"]) == [0]
    assert [each.step for each in read_results(tmp_path / "run")] == [2, 8]
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("suite infill is due and waits: suites have taken") == 2


def fail() -> bool:
    """True if this rank finds twice that all have failed, and rank 0 then that it is alone."""
    runtime.initialize_distributed()
    found = [runtime.fails_everywhere(within_seconds=30) for _ in range(2)]
    if runtime.rank() == 0:
        found.append(not runtime.fails_everywhere(within_seconds=0.2))
    runtime.barrier()
    runtime.destroy_distributed()
    return all(found)


def test_ranks_find_that_all_of_them_failed_or_one_alone() -> None:
    assert run_ranks(fail, 2) == [True, True]
