"""`cdrmix slurm` on a real SLURM: requeued, preempted and stopped before the time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.cluster.slurm_lab import SlurmLab, slurm_lab
from tests.harness import run_ranks
from tests.small_run import arguments, overrides, start

STEPS = 60
SETTINGS = (
    "checkpoint.every_steps=1000",
    "evaluation.every_steps=null",
    f"training.max_steps={STEPS}",
    "launch.environment.MASTER_ADDR=127.0.0.1",  # n1 and n2 are names of SLURM's alone
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with slurm_lab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


@pytest.fixture(scope="module")
def uninterrupted(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of an uninterrupted run on two ranks."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    flags = arguments(small_corpus, run_dir, *overrides(SETTINGS))
    assert run_ranks(start, 2, flags) == [0, 0]
    return run_dir


def submit(slurm: SlurmLab, data: Path, run_dir: Path, *flags: str) -> str:
    """Queue a run on both nodes, one rank each; the job's number."""
    run = arguments(data, run_dir, *overrides(SETTINGS))
    nodes = ("--nodes", "2", "--gpus-per-node", "1", "--cpu")
    words = ("-m", "cdrmix.cli", "slurm", *run, *nodes, *flags, "--submit")
    return slurm.run(sys.executable, *words).splitlines()[-1]


def wait_until(happened: Callable[[], bool], log: Path, *, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.2)


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def resumptions(run_dir: Path) -> int:
    return (run_dir / "train.log").read_text().count("resumed from")


def assert_equal_runs(run_dir: Path, uninterrupted: Path) -> None:
    lines = [
        [deterministic_part(line) for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (run_dir, uninterrupted)
    ]
    assert lines[0] == lines[1]
    evaluated = [
        json.loads((folder / "metrics.json").read_text())["evaluation"]
        for folder in (run_dir, uninterrupted)
    ]
    assert evaluated[0] == evaluated[1]


def test_a_requeued_and_preempted_job_ends_as_if_nothing_had_happened(
    slurm: SlurmLab, uninterrupted: Path, small_corpus: Path, run_dir: Path
) -> None:
    job = submit(slurm, small_corpus, run_dir)
    log = run_dir / f"slurm-{job}.log"
    wait_until(lambda: steps(run_dir) >= 5, log)
    slurm.run("scontrol", "requeue", job)
    wait_until(lambda: resumptions(run_dir) == 1, log)
    seen = steps(run_dir)
    wait_until(lambda: steps(run_dir) >= seen + 3, log)
    more_important = ("-p", "high", "-N", "2", "--exclusive", "-o", "/dev/null")
    slurm.run("sbatch", *more_important, "--wrap", "sleep 1")
    wait_until(lambda: resumptions(run_dir) == 2, log)
    wait_until(lambda: slurm.state(job) in ("", "COMPLETED"), log)
    assert "ended with code 75 after TERM" in log.read_text()
    assert f"job {job}: start 2 ended with code 0" in log.read_text()
    assert_equal_runs(run_dir, uninterrupted)


def test_under_the_deepspeed_launcher_a_signal_saves_and_requeues(
    slurm: SlurmLab, uninterrupted: Path, small_corpus: Path, run_dir: Path
) -> None:
    job = submit(slurm, small_corpus, run_dir, "--starter", "deepspeed")
    log = run_dir / f"slurm-{job}.log"
    wait_until(lambda: steps(run_dir) >= 5, log)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as the time limit does
    wait_until(lambda: slurm.state(job) in ("", "COMPLETED"), log)
    assert "start 0 ended with code 75 after USR1" in log.read_text()
    assert "start 1 ended with code 0" in log.read_text()
    assert resumptions(run_dir) == 1
    assert_equal_runs(run_dir, uninterrupted)


def test_an_error_of_the_users_is_not_requeued(
    slurm: SlurmLab, small_corpus: Path, run_dir: Path
) -> None:
    job = submit(slurm, small_corpus, run_dir, "--set", "data.path=/nowhere")
    log = run_dir / f"slurm-{job}.log"
    wait_until(lambda: slurm.state(job) in ("", "FAILED"), log)
    assert log.read_text().count("start 0 ended with code 2") == 1


def test_the_scripts_of_both_starters_are_good_shell(small_corpus: Path, tmp_path: Path) -> None:
    for flags in ([], ["--starter", "deepspeed"], ["--chain", "3"]):
        run_dir = tmp_path / f"it's {len(flags)} {''.join(flags[:1])}"
        words = [*arguments(small_corpus, run_dir), "--nodes", "2", "--gpus-per-node", "1", "--cpu"]
        words += flags
        done = subprocess.run(
            [sys.executable, "-m", "cdrmix.cli", "slurm", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        text = Path(done.stdout.strip()).read_text()
        assert "@" not in text.replace("B:USR1@120", "").replace('"$@"', "")
        checked = subprocess.run(["bash", "-n", done.stdout.strip()], check=False)
        assert checked.returncode == 0
