"""`cdrmix launch` on this machine: started again where it was lost, and only there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import store
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.cluster.supervised_launch import SupervisedLaunch, launch_beside
from tests.harness import run_ranks
from tests.small_run import arguments, overrides, start

STEPS = 60
SETTINGS = ("checkpoint.every_steps=10", "evaluation.every_steps=null")


def run_flags(data: Path, *settings: str) -> list[str]:
    """Flags of a run of STEPS steps, without a run directory."""
    return arguments(data, None, *overrides([*SETTINGS, *settings]), "--max-steps", str(STEPS))


@pytest.fixture(scope="module")
def uninterrupted(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of an uninterrupted run on two ranks."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run_ranks(start, 2, [*run_flags(small_corpus), "--run-dir", str(run_dir)]) == [0, 0]
    return run_dir


def logged(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def starts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


def digests(run_dir: Path) -> dict[str, str]:
    """File names and digests of the last checkpoint's tensors."""
    found = store.find(run_dir)
    assert found is not None
    assert found.step == STEPS
    manifest = json.loads((found.path / "manifest.json").read_text())
    files = manifest["files"]
    return {name: files[name]["sha256"] for name in files if name.endswith(".safetensors")}


def test_a_lost_run_goes_on_and_ends_as_if_nothing_had_happened(
    uninterrupted: Path, small_corpus: Path, run_dir: Path
) -> None:
    flags = ["--nproc", "2", "--max-restarts", "1", *run_flags(small_corpus)]
    with SupervisedLaunch(run_dir, flags) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 15)
        run.rank_process(1).kill()
        run.wait_until(lambda: "resumed from" in (run_dir / "train.log").read_text())
        run.wait_until(lambda: len(logged(run_dir)) >= 25)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75
        assert "start 1 was lost at step" in run.output
        assert "died at step" in run.output
    with SupervisedLaunch(run_dir, [*flags, "--resume", "auto"]) as run:
        assert run.wait() == 0, run.output

    assert [line["exit_code"] for line in starts(run_dir)] == [1, 75, 0]
    assert not (run_dir / "launch").exists()
    lost, resumed = starts(run_dir)[:2]
    assert resumed["resumed_at"] >= 10
    cost = json.loads((run_dir / "metrics.json").read_text())["goodput"]
    assert (cost["starts"], cost["productive_steps"]) == (3, STEPS)
    assert cost["redone_steps"] == lost["step"] - resumed["resumed_at"]
    assert [deterministic_part(line) for line in logged(run_dir)] == [
        deterministic_part(line) for line in logged(uninterrupted)
    ]
    assert digests(run_dir) == digests(uninterrupted)


def test_an_error_of_the_users_is_not_tried_again(small_corpus: Path, run_dir: Path) -> None:
    settings = ["data.path=/nowhere"]
    flags = ["--nproc", "1", *run_flags(small_corpus), *overrides(settings)]
    with SupervisedLaunch(run_dir, flags) as run:
        assert run.wait() == 2
        assert run.output.count("error: ") == 1
        assert "/nowhere/manifest.json: not found" in run.output
    assert not (run_dir / "starts.jsonl").exists()


def test_two_jobs_on_one_run_directory_do_not_meet(small_corpus: Path, run_dir: Path) -> None:
    # the first one lasts until the second has been refused, however slow the machine is
    flags = ["--nproc", "1", *run_flags(small_corpus), "--max-steps", "1000000"]
    with SupervisedLaunch(run_dir, flags) as first:
        first.wait_until(lambda: len(logged(run_dir)) >= 1)
        second = launch_beside(run_dir, [*flags, "--resume", "auto"])
        assert second.returncode == 2, second.stdout
        assert "another job is running in this directory" in second.stdout
        first.signal(signal.SIGTERM)
        assert first.wait() == 75, first.output
    assert [line["exit_code"] for line in starts(run_dir)] == [75]


def test_ranks_save_and_end_when_the_command_itself_is_killed(
    small_corpus: Path, run_dir: Path
) -> None:
    flags = ["--nproc", "2", *run_flags(small_corpus, "checkpoint.every_steps=1000")]
    with SupervisedLaunch(run_dir, flags) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 5)
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    found = store.find(run_dir)
    assert found is not None
    assert 5 <= found.step < STEPS


def test_a_run_that_is_lost_too_often_is_given_up(small_corpus: Path, run_dir: Path) -> None:
    flags = ["--nproc", "1", "--max-restarts", "0", *run_flags(small_corpus)]
    with SupervisedLaunch(run_dir, flags) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 5)
        run.rank_process(0).kill()
        assert run.wait() == 1
        assert "Given up after 0 restarts" in run.output
