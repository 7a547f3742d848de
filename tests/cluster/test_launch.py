"""`cdrmix launch` on this machine: started again where it was lost, and only there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import store
from cdrmix.monitoring.sinks import read_metrics
from tests.cluster.conftest import STEPS
from tests.cluster.supervised_launch import SupervisedLaunch, launch_beside
from tests.equal_runs import assert_equal_runs
from tests.harness import ROOT, run_ranks
from tests.small_run import arguments, overrides, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SETTINGS = ("checkpoint.every_steps=10", "evaluation.every_steps=null")


def run_flags(data: Path, *settings: str) -> list[str]:
    """Flags of a run of STEPS steps, without a run directory."""
    return arguments(data, None, *overrides([*SETTINGS, *settings]), "--max-steps", str(STEPS))


def logged(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def starts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]


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
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def test_an_error_of_the_users_is_not_tried_again(small_corpus: Path, run_dir: Path) -> None:
    settings = ["data.path=/nowhere"]
    flags = ["--nproc", "1", *run_flags(small_corpus), *overrides(settings)]
    with SupervisedLaunch(run_dir, flags) as run:
        assert run.wait() == 2
        assert run.output.count("error: ") == 1
        assert "/nowhere/manifest.json: not found" in run.output
    assert not (run_dir / "starts.jsonl").exists()


def test_two_jobs_on_one_run_directory_do_not_meet(small_corpus: Path, run_dir: Path) -> None:
    # the first one lasts until the second has been refused, however slow the machine is, and
    # leaves it the CPU meanwhile
    resting = "hooks=[{use: 'tests.noting_hooks:Resting', options: {seconds: 0.5}}]"
    run = run_flags(small_corpus, resting, f"launch.environment.PYTHONPATH={ROOT}")
    flags = ["--nproc", "1", *run, "--max-steps", "1000000"]
    with SupervisedLaunch(run_dir, flags) as first:
        first.wait_until(lambda: len(logged(run_dir)) >= 1)
        second = launch_beside(run_dir, [*flags, "--resume", "auto"])
        assert second.returncode == 2, second.stdout
        assert "another job is running in this directory" in second.stdout
        first.signal(signal.SIGTERM)
        assert first.wait() == 75, first.output
    assert [line["exit_code"] for line in starts(run_dir)] == [75]


def test_ranks_save_and_end_when_the_command_itself_is_killed(
    uninterrupted: Path, small_corpus: Path, run_dir: Path
) -> None:
    flags = run_flags(small_corpus, "checkpoint.every_steps=1000")
    with SupervisedLaunch(run_dir, ["--nproc", "2", *flags]) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 5)
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    found = store.find_newest(run_dir)
    assert found is not None
    assert 5 <= found.step < STEPS
    assert run_ranks(start, 2, [*flags, "--run-dir", str(run_dir), "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


# libfaketime 0.9.10 gives the kernel negative times where the monotonic clock is left true and
# Python (since 3.11) sleeps until a time (its issue 426): this leaves sleeping to the kernel.
SLEEP = """
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *t, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, t, left) ? errno : 0;
}
"""


def shifted_clock(offset: Path) -> list[str]:
    """A command that starts another one whose clock is off by what the file says, such as +1d.

    The monotonic clock stays true, as it does where a time service or a person sets the clock.
    """
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("no libfaketime (apt-get install faketime)")
    sleep = offset.with_name("sleep.so")
    compiler = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-x", "c", "-o", str(sleep), "-"]
    subprocess.run(compiler, input=SLEEP, text=True, check=True)
    variables = {
        "LD_PRELOAD": f"{sleep}:{libraries[0]}",
        "FAKETIME_TIMESTAMP_FILE": offset,
        "FAKETIME_CACHE_DURATION": 1,
        "FAKETIME_DONT_FAKE_MONOTONIC": 1,
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


@pytest.mark.compiler
def test_a_clock_that_jumps_forth_and_back_changes_nothing(
    uninterrupted: Path, small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0")
    flags = ["--nproc", "2", *run_flags(small_corpus)]
    log = run_dir / "train.log"
    with SupervisedLaunch(run_dir, flags, prefix=shifted_clock(offset)) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 10)
        offset.write_text("+3d")
        run.wait_until(lambda: len(logged(run_dir)) >= 30)
        offset.write_text("-7d")
        assert run.wait() == 0, run.output
    written = [line.split()[0] for line in log.read_text().splitlines() if "INFO" in line]
    first, last = (date.fromisoformat(day) for day in (written[0], written[-1]))
    assert (first - last).days in (7, 8), "the ranks' clock has jumped"
    assert [line["exit_code"] for line in starts(run_dir)] == [0]
    cost = json.loads((run_dir / "metrics.json").read_text())["goodput"]
    assert 0 < cost["productive_seconds"] < cost["seconds"] < 600
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def test_a_run_that_is_lost_too_often_is_given_up(small_corpus: Path, run_dir: Path) -> None:
    flags = ["--nproc", "1", "--max-restarts", "0", *run_flags(small_corpus)]
    with SupervisedLaunch(run_dir, flags) as run:
        run.wait_until(lambda: len(logged(run_dir)) >= 5)
        run.rank_process(0).kill()
        assert run.wait() == 1
        assert "Given up after 0 restarts" in run.output


# Read by every Python that finds it: rank 1 has memory for ten forward passes of two samples.
SHORT_OF_MEMORY = """
import importlib.abc, importlib.util, os, sys

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "cdrmix.models.backbone":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), make_short(module.Backbone))
        return spec

def make_short(backbone):
    import torch
    forward, calls = backbone.forward, []
    def fail(self, input_ids, *args, **kwargs):
        calls.append(1)
        if len(calls) > 10 and len(input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, input_ids, *args, **kwargs)
    backbone.forward = fail

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Patch())
"""


def test_a_run_short_of_memory_goes_on_in_smaller_micro_batches(
    small_corpus: Path, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHORT_OF_MEMORY)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    settings = ["training.micro_batch_size=2", "checkpoint.every_steps=2"]
    settings += ["checkpoint.background=false"]  # or a busy disk has not got that of step 4 yet
    flags = [*run_flags(small_corpus, *settings), "--max-steps", "10"]
    with SupervisedLaunch(run_dir, ["--nproc", "2", "--max-restarts", "1", *flags]) as run:
        assert run.wait() == 0, run.output
        told = "rank 1 ran out of memory after step 5 with micro batches of 2 samples"
        assert run.output.count(told) == 1
        assert "rank 1 on" in run.output
        assert "ended with exit code 1 and the others did not follow" in run.output
        assert "Traceback" not in run.output
    assert [line["exit_code"] for line in starts(run_dir)] == [1, 0]
    assert starts(run_dir)[1]["resumed_at"] == 4
    assert [line["step"] for line in logged(run_dir)] == [*range(1, 11)]
    plan = json.loads((run_dir / "plan.json").read_text())
    assert (plan["micro_batch_size"], plan["gradient_accumulation_steps"]) == (1, 4)
