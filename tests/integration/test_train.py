"""Whole training runs as users start them, and what becomes of them when something dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cdrmix.checkpoint import store
from cdrmix.config.load import load_config
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import RANK_ENVIRONMENT, ROOT, reserved_port, run_ranks
from tests.launcher import Launch, launch
from tests.small_run import arguments, overrides, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STEPS = 40
CORES = len(os.sched_getaffinity(0))
# Each takes .2 s to 2.5 s to import, in every rank: compilers, trackers, plots, another trainer.
NOT_FOR_A_STEP = {
    *("torch._dynamo", "torch._inductor.config", "sympy", "setuptools"),
    *("mlflow", "tensorboard", "wandb", "matplotlib", "transformers"),
    "cdrmix.stage_b.engine",
}


def long_enough_to_interrupt(data: Path, run_dir: Path, *more: str) -> list[str]:
    settings = ["checkpoint.every_steps=1000", "evaluation.every_steps=20"]
    length = ["--max-steps", str(STEPS)]
    return arguments(data, run_dir, *overrides(settings), *length, *more)


@pytest.fixture(scope="module")
def finished(
    small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run directory and output of an uninterrupted run on two ranks under the launcher."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    argv = long_enough_to_interrupt(small_corpus, run_dir)
    more_threads_than_a_share = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(CORES))
    return run_dir, launch(["launch/train.py", *argv], nproc=2, env=more_threads_than_a_share)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_run_ends_well_and_tells_how_it_goes(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = finished
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == [f"{n}/{STEPS}" for n in range(1, STEPS + 1)]
    for part in ("loss ", "lr ", "grad ", " tok/s", "mem ", "eta "):
        assert part in shown[-1]
    assert len([line for line in lines if line.startswith(f"eval 20/{STEPS} ")]) == 1
    assert f"report: {run_dir / 'report.html'}" in lines
    assert "Traceback" not in done.stderr


def test_the_run_directory_holds_what_it_promises(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, _ = finished
    config = load_config(run_dir / "config_snapshot.yaml")
    assert config.training.max_steps == STEPS
    assert read_json(run_dir / "ds_config.json")["train_batch_size"] == 8
    plan = read_json(run_dir / "plan.json")
    assert plan["degrees"] == {"data": 2, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1}
    assert (plan["micro_batch_size"], plan["gradient_accumulation_steps"]) == (4, 1)
    assert "plan: profile zero1" in (run_dir / "train.log").read_text()
    assert (run_dir / "checkpoints" / "latest").read_text() == f"{STEPS}\n"
    report = (run_dir / "report.html").read_text()
    assert config.name in report
    assert 'src="http' not in report
    found = store.find_newest(run_dir)
    assert found is not None
    assert (found.step, found.skipped) == (STEPS, ())


def test_the_metrics_have_their_names_and_add_up(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, _ = finished
    lines = read_metrics(run_dir / "metrics.jsonl")
    always = {
        *("step", "loss", "learning_rate", "grad_norm", "tokens_seen", "tokens_per_second"),
        *("memory_peak_bytes", "step_seconds", "moe/overflow_fraction"),
        *("moe/routing_entropy_bits", "moe/load_balance_loss", "moe/z_loss"),
    }
    domains = ("code", "prose")
    evaluated = {
        *("eval/loss", "eval/perplexity", "eval/bits_per_byte"),
        *(f"eval/domain/{domain}/loss" for domain in domains),
    }
    for line in lines:
        assert line.keys() == (always | evaluated if line["step"] == 20 else always)
    assert [line["tokens_seen"] for line in lines] == [8 * 64 * n for n in range(1, STEPS + 1)]
    assert lines[-1]["loss"] < lines[0]["loss"] - 1

    summary = read_json(run_dir / "metrics.json")
    assert (summary["name"], summary["steps"]) == ("cdrmix-core-tiny", STEPS)
    assert summary["loss"] == lines[-1]["loss"]
    evaluation = summary["evaluation"]
    assert abs(evaluation["loss"] - lines[-1]["loss"]) < 0.5
    assert evaluation["tokens"] == 1000 // 64 * 64
    assert [each["domain"] for each in evaluation["domains"]] == [*domains]
    assert [layer["layer"] for layer in evaluation["layers"]] == [0, 1]
    for layer in evaluation["layers"]:
        assert sum(layer["utilisation"]) == pytest.approx(1)
    assert [sample["step"] for sample in summary["samples"]] == [20, STEPS]


def test_each_rank_takes_its_share_of_the_cores(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    environment = read_json(finished[0] / "environment.json")
    assert environment["world_size"] == 2
    assert environment["threads_per_rank"] == max(1, CORES // 2)


def _launcher(run: Launch) -> int:
    return run.process.pid


def _launch_py(run: Launch) -> int:
    """The process between the launcher and its ranks, which started them."""
    return psutil.Process(run.rank_pids()[0]).ppid()


@pytest.mark.parametrize(
    ("victim", "number"),
    [(_launcher, signal.SIGTERM), (_launcher, signal.SIGKILL), (_launch_py, signal.SIGKILL)],
)
def test_ranks_that_lose_their_launcher_save_and_the_resumed_run_is_the_uninterrupted_one(
    victim: Callable[[Launch], int],
    number: int,
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    small_corpus: Path,
    run_dir: Path,
) -> None:
    argv = long_enough_to_interrupt(small_corpus, run_dir)
    metrics = run_dir / "metrics.jsonl"
    with Launch(["launch/train.py", *argv], nproc=2) as run:
        run.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5)
        os.kill(victim(run), number)
        run.wait(timeout=60)  # fails where a process is left behind

    assert "stopped by" in (run_dir / "train.log").read_text()
    found = store.find_newest(run_dir)
    assert found is not None
    assert found.skipped == ()
    assert 5 <= found.step < STEPS

    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    expected = finished[0]
    assert [deterministic_part(line) for line in read_metrics(metrics)] == [
        deterministic_part(line) for line in read_metrics(expected / "metrics.jsonl")
    ]
    ends = [read_json(folder / "metrics.json") for folder in (run_dir, expected)]
    assert ends[0]["evaluation"] == ends[1]["evaluation"]
    assert ends[0]["samples"] == ends[1]["samples"]


def started_by(*command: str | Path, argv: list[str]) -> None:
    """Run a command to its end, with CPU ranks that find each other by themselves."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    on_one_core = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = subprocess.run(
        [*command, "launch/train.py", *argv],
        cwd=ROOT,
        env={**os.environ, **RANK_ENVIRONMENT, **as_root, **on_one_core, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "world_size"),
    [
        (("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT"), 2),
        ((), 1),
    ],
)
def test_torchrun_and_plain_python_start_it_too(
    command: tuple[str, ...], world_size: int, small_corpus: Path, run_dir: Path
) -> None:
    hook = "hooks=[{use: 'tests.noting_hooks:NotingImports'}]"
    argv = arguments(small_corpus, run_dir, "--max-steps", "2", "--set", hook)
    with reserved_port() as port:
        words = [str(port) if word == "PORT" else word for word in command]
        started_by(sys.executable, *words, argv=argv)
    assert read_json(run_dir / "metrics.json")["steps"] == 2
    assert read_json(run_dir / "environment.json")["world_size"] == world_size
    for rank in range(world_size):
        modules = {*read_json(run_dir / f"imports-{rank}.json")}
        assert "deepspeed.runtime.engine" in modules
        assert not NOT_FOR_A_STEP & modules, "imported before the first step is over"


def test_mpirun_starts_it_too(small_corpus: Path, run_dir: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no program mpirun")
    argv = arguments(small_corpus, run_dir, "--max-steps", "2")
    started_by(mpirun, "-n", "2", sys.executable, argv=argv)
    assert read_json(run_dir / "environment.json")["world_size"] == 2
