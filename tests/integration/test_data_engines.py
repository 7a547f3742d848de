"""A data build by datatrove, by a real SLURM and by Ray: the same bytes as by local processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.remote_jobs import Engine
from cdrmix.errors import DataError
from tests.cluster.slurm_lab import slurm_lab
from tests.harness import ROOT

pytest.importorskip("rensa", reason="the [data] extra is not installed")

TASK_BYTES = 60_000


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over two packages of the standard library, with two stages."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = [
        {"name": name, "type": "local", "path": str(stdlib / name), "domain": "code"}
        for name in ("json", "logging")
    ]
    values = {
        "sources": sources,
        "steps": ["normalise", "dedup"],
        "tokenizer": {"vocab_size": 512},
        "shards": {"validation_share": 0.2},
    }
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    file.write_text(json.dumps(values))
    return file


@pytest.fixture(scope="module")
def built(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of what a local process makes of it."""
    out = tmp_path_factory.mktemp("built") / "out"
    build_dataset(recipe, out, workers=1, task_bytes=TASK_BYTES)
    return digests(out)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A running SLURM that commands of this process and its children find."""
    pytest.importorskip("datatrove", reason="the [slurm] extra is not installed")
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_lab(folder) as lab, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, lab.environment[name])
        patch.setenv("PYTHONPATH", str(ROOT))  # tasks import this module
        yield


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.*")}


@dataclass(frozen=True)
class Toy:
    """A job that makes one file."""

    out: Path
    fails: str | None = None

    def is_done(self) -> bool:
        return self.out.exists()


def make_file(toy: Toy) -> None:
    """Make the file, once; the first process at a job that fails by signal dies before, and every
    process at one that always fails, until something is left out."""
    before = toy.out.with_suffix(".died")
    if toy.fails == "always" and not toy.out.with_suffix(".left_out").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if toy.fails == "signal" and not before.exists():
        before.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if toy.fails == "error":
        raise DataError("this task cannot be done")
    with toy.out.open("x") as file:
        file.write("done")


def leave_out(job: Toy) -> bool:
    """Has a job that kills its process do without what it reads, as a build does."""
    job.out.with_suffix(".left_out").touch()
    return True


def check_killed_workers_and_errors(engine: Engine, folder: Path) -> None:
    """A killed worker's job is done again, others are not, and an error of the user's arrives."""
    jobs = [Toy(folder / f"{n}", fails="signal" if n == 1 else None) for n in range(4)]
    jobs[3].out.write_text("done before")
    with engine as running:
        running.run_all(make_file, jobs, what="toys")
        assert [job.out.read_text() for job in jobs] == [*3 * ["done"], "done before"]
        assert (folder / "1.died").exists()
        deadly = Toy(folder / "deadly", fails="always")
        others = [Toy(folder / f"beside-{n}") for n in range(2)]
        running.run_all(make_file, [deadly, *others], what="toys", blame=leave_out)
        assert [job.out.read_text() for job in (deadly, *others)] == 3 * ["done"]
        assert deadly.out.with_suffix(".left_out").exists()
        with pytest.raises(DataError, match="this task cannot be done"):
            running.run_all(make_file, [Toy(folder / "never", fails="error")], what="toys")


def test_datatrove_ranks_give_the_same_bytes(
    recipe: Path, built: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datatrove", reason="the [slurm] extra is not installed")
    from datatrove.executor import LocalPipelineExecutor

    from cdrmix.corpus.slurm_jobs import SlurmEngine

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    num_ranks = []

    class Local(SlurmEngine):
        """Runs the ranks on this machine, where nothing is ever in a queue."""

        def _ask_queue(self):
            return subprocess.CompletedProcess([], 0, stdout="", stderr="")

        def _new_array(self, step, num_tasks, logs):
            num_ranks.append(num_tasks)
            return LocalPipelineExecutor([step], tasks=num_tasks, workers=1, logging_dir=str(logs))

    engine = Local(tmp_path / "jobs", max_tasks=1, sbatch={})
    build_dataset(recipe, tmp_path / "out", workers=1, engine=engine, task_bytes=TASK_BYTES)
    assert digests(tmp_path / "out") == built
    tasks, *others = num_ranks
    assert tasks > 2 and others == [tasks, tasks, 2], "stages, encoding, and a stream per split"
    completed = tmp_path / "jobs" / "0" / "completions"
    assert len(list(completed.iterdir())) == tasks


def test_slurm_gives_the_same_bytes(
    slurm: None, recipe: Path, built: dict[str, str], tmp_path: Path
) -> None:
    build_dataset(
        recipe,
        tmp_path / "out",
        workers=3,
        engine="slurm",
        sbatch={"partition": "low", "time": "5"},
        task_bytes=TASK_BYTES,
    )
    assert digests(tmp_path / "out") == built


def test_tasks_that_sbatch_refuses_are_told(slurm: None, recipe: Path, tmp_path: Path) -> None:
    options = {"partition": "none"}
    with pytest.raises(DataError, match="sbatch refused the tasks.*launch_script"):
        build_dataset(recipe, tmp_path / "out", workers=1, engine="slurm", sbatch=options)


def test_slurm_does_a_killed_task_again_and_no_other(slurm: None, tmp_path: Path) -> None:
    from cdrmix.corpus.slurm_jobs import SlurmEngine

    engine = SlurmEngine(tmp_path / "slurm", max_tasks=2, sbatch={})
    check_killed_workers_and_errors(engine, tmp_path)


def test_a_build_on_slurm_killed_itself_goes_on_where_it_was(
    slurm: None, recipe: Path, built: dict[str, str], tmp_path: Path
) -> None:
    from cdrmix.corpus.slurm_jobs import SlurmEngine

    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from cdrmix.corpus.build import build_dataset; "
        "build_dataset(Path(sys.argv[1]), Path(sys.argv[2]), workers=1, engine='slurm', "
        f"task_bytes={TASK_BYTES})"
    )
    with subprocess.Popen([sys.executable, "-c", code, recipe, out], cwd=ROOT) as process:
        wait_until(lambda: list(out.glob("work/pass-0/[!.]*")), process)
        process.kill()
    done = {path: path.stat().st_ino for path in out.glob("work/pass-0/[!.]*")}
    found: dict[Path, int] = {}

    class Looking(SlurmEngine):
        def run_all(self, function, jobs, *, what, **options):
            super().run_all(function, jobs, what=what, **options)
            if what == "encode":
                found.update({path: path.stat().st_ino for path in done})

    engine = Looking(out / "work" / "slurm", max_tasks=2, sbatch={})
    build_dataset(recipe, out, workers=1, engine=engine, task_bytes=TASK_BYTES)
    assert done and found == done, "what was done was done again"
    assert digests(out) == built


def wait_until(happened: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ray_gives_the_same_bytes_and_does_a_killed_task_again(
    recipe: Path, built: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the [ray] extra is not installed")
    from cdrmix.corpus.ray_jobs import RayEngine

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "out"
    build_dataset(recipe, out, workers=2, engine="ray", task_bytes=TASK_BYTES)
    assert digests(out) == built
    check_killed_workers_and_errors(RayEngine(max_tasks=2), tmp_path)
