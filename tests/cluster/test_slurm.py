"""`cdrmix slurm` on a real SLURM: requeued, preempted and stopped before the time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from cdrmix.checkpoint import store
from cdrmix.config.load import load_config
from cdrmix.config.yaml_text import dump_yaml
from tests import small_reasoning_run
from tests.cluster.conftest import STEPS
from tests.cluster.slurm_lab import SlurmLab, slurm_lab
from tests.equal_runs import assert_equal_runs
from tests.harness import ROOT, run_ranks
from tests.small_run import CONFIG, SMALL, arguments, overrides, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SETTINGS = (
    "checkpoint.every_steps=1000",
    "evaluation.every_steps=null",
    f"training.max_steps={STEPS}",
    "launch.environment.MASTER_ADDR=127.0.0.1",  # n1 and n2 are names of SLURM's alone
    # as for the ranks of one host, which an uninterrupted run has here
    "launch.environment.OMP_NUM_THREADS=1",
    "parallel.expert=1",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with slurm_lab(tmp_path_factory.mktemp("slurm"), binds_tasks=True) as lab:
        yield lab


def submit(slurm: SlurmLab, run: Sequence[str], *flags: str, cores: int = 2) -> str:
    """Queue a run on both nodes, one rank of so many cores each; the job's number."""
    nodes = ("--nodes", "2", "--gpus-per-node", "1", "--cpu", "--cpus-per-task", str(cores))
    words = ("-m", "cdrmix.cli", "slurm", *run, *nodes, *flags, "--submit")
    return slurm.run(sys.executable, *words)


def cores_of_rank(run_dir: Path) -> int:
    """Cores on which SLURM let rank 0 of the last start run."""
    environment = json.loads((run_dir / "environment.json").read_text())
    return int(environment["device"]["cores"])


def wait_until(happened: Callable[[], bool], log: Path, *, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"no {log}"
        time.sleep(0.2)


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_steps(run_dir: Path, count: int) -> bool:
    return steps(run_dir) >= count


def resumptions(run_dir: Path) -> int:
    return (run_dir / "train.log").read_text().count("resumed from")


def test_a_requeued_and_preempted_job_ends_as_if_nothing_had_happened(
    slurm: SlurmLab, uninterrupted: Path, small_corpus: Path, run_dir: Path
) -> None:
    job = submit(slurm, arguments(small_corpus, run_dir, *overrides(SETTINGS)))
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
    assert cores_of_rank(run_dir) == 2, "a task that asks for no cores gets one here"
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def write_config(path: Path, data: Path, max_steps: int, *, rest: float) -> None:
    """A configuration of any length, whose learning rate does not depend on it.

    `rest` is a pause after each step, s.
    """
    constant = ("training.min_learning_rate=3e-3", f"training.max_steps={max_steps}")
    resting = f"hooks=[{{use: 'tests.noting_hooks:Resting', options: {{seconds: {rest}}}}}]"
    importable = f"launch.environment.PYTHONPATH={ROOT}"  # in jobs too
    settings = [*SMALL, *SETTINGS, *constant, resting, importable, f"data.path={data}"]
    text = dump_yaml(load_config(ROOT / CONFIG, settings).model_dump())
    path.write_text(text)
    # a run that is resumed takes its own configuration
    own = path.parent / "run" / "config_snapshot.yaml"
    if own.exists():
        own.write_text(text)


def has_line(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def has_left(slurm: SlurmLab, job: str) -> bool:
    """Whether a job is over, and not only waiting for its next start."""
    return slurm.state(job) in ("", "COMPLETED")


def submit_endless(slurm: SlurmLab, data: Path, folder: Path, starter: str) -> str:
    """Queue a run that ends only by its time limit, a minute before which USR1 comes."""
    write_config(folder / "config.yaml", data, 1_000_000, rest=1.0)
    limit = ("--time", "00:30:00", "--option", "signal=B:USR1@60")
    run = ("--config", str(folder / "config.yaml"), "--run-dir", str(folder / "run"))
    return submit(slurm, run, "--starter", starter, *limit, cores=1)


def let_time_run_out(slurm: SlurmLab, job: str) -> None:
    """Lower the time limit of a running job to one or two minutes from now.

    A limit from the start would count the time that a busy machine takes to start two runs.
    """
    *hours, minutes, _ = slurm.run("squeue", "-h", "-j", job, "-o", "%M").split(":")
    assert not hours, "the first step came after an hour"
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes) + 2}")


def test_a_time_limit_saves_and_requeues_under_both_starters(
    slurm: SlurmLab, small_corpus: Path, tmp_path: Path
) -> None:
    jobs: dict[Path, tuple[str, Path]] = {}
    for starter in ("srun", "deepspeed"):  # side by side, on the same nodes
        folder = tmp_path / starter
        folder.mkdir()
        job = submit_endless(slurm, small_corpus, folder, starter)
        jobs[folder] = job, folder / "run" / f"slurm-{job}.log"

    for folder, (_, log) in jobs.items():
        wait_until(partial(has_steps, folder / "run", 2), log)
    for job, _ in jobs.values():
        let_time_run_out(slurm, job)

    ends: dict[Path, int] = {}
    for folder, (job, log) in jobs.items():
        wait_until((folder / "run" / "checkpoints" / "latest").exists, log)
        found = store.find_newest(folder / "run")
        assert found is not None
        ends[folder] = found.step + 10
        write_config(folder / "config.yaml", small_corpus, ends[folder], rest=0)
        wait_until(partial(has_line, log, "ended with code 75 after USR1"), log)
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    for job, log in jobs.values():
        wait_until(partial(has_left, slurm, job), log)
        assert "ended with code 0" in log.read_text()
        assert cores_of_rank(log.parent) == 1

    whole = tmp_path / "uninterrupted"
    for folder, end in sorted(ends.items(), key=lambda item: item[1]):
        write_config(tmp_path / "config.yaml", small_corpus, end, rest=0)
        argv = ["--config", str(tmp_path / "config.yaml"), "--run-dir", str(whole)]
        argv += ["--set", f"training.max_steps={end}", "--resume", "auto"]
        assert run_ranks(start, 2, argv) == [0, 0]
        assert_equal_runs(folder / "run", whole, steps=end)


def test_an_error_of_the_users_is_not_requeued(
    slurm: SlurmLab, small_corpus: Path, run_dir: Path
) -> None:
    settings = [*SETTINGS, "data.path=/nowhere"]
    job = submit(slurm, arguments(small_corpus, run_dir, *overrides(settings)))
    log = run_dir / f"slurm-{job}.log"
    wait_until(lambda: slurm.state(job) in ("", "FAILED"), log)
    assert log.read_text().count("start 0 ended with code 2") == 1


def test_a_reasoning_run_goes_on_from_each_stage(
    slurm: SlurmLab, small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    stage_a_steps = 12
    settings = (
        f"training.max_steps={stage_a_steps}",
        "checkpoint.every_steps=1000",
        "stage_b.training.adapter_steps=12",
        "parallel.expert=1",
        "launch.environment.MASTER_ADDR=127.0.0.1",
    )
    argv = small_reasoning_run.arguments(small_corpus, run_dir, tmp_path, *overrides(settings))
    job = submit(slurm, argv)
    log = run_dir / f"slurm-{job}.log"
    wait_until(lambda: steps(run_dir) >= 3, log)
    slurm.run("scontrol", "requeue", job)  # in Stage A
    wait_until(lambda: resumptions(run_dir) == 1, log)
    wait_until(lambda: steps(run_dir) >= stage_a_steps + 2, log)
    assert (run_dir / "metrics.json").exists(), "the summary of Stage A"
    slurm.run("scontrol", "requeue", job)  # in Stage B
    wait_until(lambda: slurm.state(job) in ("", "COMPLETED"), log)
    assert f"job {job}: start 2 ended with code 0" in log.read_text()
    assert log.read_text().count("after TERM") == 2
    whole = tmp_path / "whole"
    argv = small_reasoning_run.arguments(small_corpus, whole, tmp_path, *overrides(settings))
    assert run_ranks(start, 2, argv) == [0, 0]
    ends = [store.find_newest(folder) for folder in (run_dir, whole)]
    assert ends[0] is not None and ends[1] is not None
    assert ends[0].step == ends[1].step
    assert_equal_runs(run_dir, whole, steps=ends[1].step)


NAMES = ("plain", 'it\'s a "name" @RUN_DIR@ $(touch x)', "日本 # [1]")


def test_slurm_takes_the_scripts_as_they_are_meant(
    slurm: SlurmLab, small_corpus: Path, tmp_path: Path
) -> None:
    for name, flags in zip(NAMES, ([], ["--starter", "deepspeed"], ["--chain", "3"]), strict=True):
        run_dir = tmp_path / name
        secret = "launch.environment.TOKEN=hunter2 '$(touch x)'"
        words = [*arguments(small_corpus, run_dir), "--nodes", "2", "--gpus-per-node", "1", "--cpu"]
        words += [*overrides([secret, f"name={name!r}"]), "--option", "job-name=a b", *flags]
        script = Path(slurm.run(sys.executable, "-m", "cdrmix.cli", "slurm", *words))
        assert script == run_dir / "job.sbatch"
        assert script.stat().st_mode & 0o777 == 0o700
        assert "hunter2" not in script.read_text()
        assert (run_dir / "job.environment").stat().st_mode & 0o777 == 0o600
        subprocess.run(["bash", "-n", script], check=True)
        slurm.run("sbatch", "--test-only", str(script))
        job = slurm.run("sbatch", "--parsable", "--hold", str(script)).partition(";")[0]
        shown = slurm.run("scontrol", "show", "job", job)
        slurm.run("scancel", job)
        assert "NumNodes=2" in shown
        assert "TimeLimit=1-00:00:00" in shown
        assert "JobName=a b\n" in shown
        assert f"Command={script}" in shown, shown
        assert f"StdOut={run_dir}/slurm-" in shown, shown
        assert "Requeue=1" in shown
    assert not Path("x").exists()


def test_sbatch_takes_scripts_of_both_starters_a_chain_and_options(
    slurm: SlurmLab, small_corpus: Path, tmp_path: Path
) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "1", "--cpu"]
    both = ["--cpus-per-task", "2", "--mem", "7G", "--time", "1-12"]
    options = overrides_of_sbatch("partition=high", "mem-per-cpu=1500M", "no-requeue", "time=90")
    for number, flags in enumerate(
        ([], both, ["--starter", "deepspeed", *both], ["--chain", "3"], options)
    ):
        run_dir = tmp_path / str(number)
        run = arguments(small_corpus, run_dir)
        script = slurm.run(sys.executable, "-m", "cdrmix.cli", "slurm", *run, *words, *flags)
        slurm.run("sbatch", "--test-only", script)
        lines = [line for line in Path(script).read_text().splitlines() if "#SBATCH" in line]
        names = [line.partition("=")[0] for line in lines]
        assert len(names) == len(set(names)), lines
    job = slurm.run("sbatch", "--parsable", "--hold", script)
    shown = slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    for text in ("Partition=high", "MinMemoryCPU=1500M", "Requeue=0", "TimeLimit=01:30:00"):
        assert text in shown, shown


def overrides_of_sbatch(*options: str) -> list[str]:
    return [word for option in options for word in ("--option", option)]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--option", "partition=gpu"), "no partition gpu here. There are low, high"),
        (("--mem", "9G"), "9 GiB, and a node of partition low has 7.8 GiB"),
        (("--cpus-per-task", "3"), "1 tasks of 3 cores: a node of partition low has 2"),
        (("--option", "nodelist=n7", "--submit"), "sbatch refuses it: "),
    ],
)
def test_what_slurm_would_refuse_is_told_before_it_is_queued(
    flags: Sequence[str], problem: str, slurm: SlurmLab, small_corpus: Path, run_dir: Path
) -> None:
    words = ("slurm", *arguments(small_corpus, run_dir), "--nodes", "2", "--gpus-per-node", "1")
    done = subprocess.run(
        [sys.executable, "-m", "cdrmix.cli", *words, "--cpu", *flags],
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert problem in done.stderr
    assert slurm.run("squeue", "-h") == ""
