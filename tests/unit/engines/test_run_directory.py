"""A run directory is made once, never overwritten, and held by one job at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from cdrmix.config.load import config_hash, load_config
from cdrmix.config.schema import Config
from cdrmix.engines import run_directory
from cdrmix.engines.run_directory import RunDirectory, open_run_directory
from cdrmix.errors import InfrastructureError, StateError
from tests.conftest import TINY


@pytest.fixture
def config() -> Config:
    return load_config(TINY)


def take(config: Config, path: Path | None, resume: str = "never") -> RunDirectory:
    return open_run_directory(config, requested=path, resume=resume)


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_second_job_is_refused_until_the_first_is_over(
    config: Config, run_dir: Path, resume: str
) -> None:
    with (
        take(config, run_dir),
        pytest.raises(StateError, match=f"{run_dir}: another job is running in this directory"),
    ):
        take(config, run_dir, resume)
    with take(config, run_dir, resume) as again:
        assert again.path == run_dir


@pytest.mark.parametrize(
    "holder",
    [
        "",
        json.dumps({"host": "gone", "process": 1, "started": "5"}),
        json.dumps({"host": os.uname().nodename, "process": os.getpid(), "started": "5"}),
    ],
    ids=["of an earlier version", "another host", "a process that ended here"],
)
def test_the_lock_of_a_dead_client_is_waited_for(
    holder: str, config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.mkdir()
    lease = (run_dir / ".lock").open("w")  # a lock of its own: flock is of the open file
    fcntl.flock(lease, fcntl.LOCK_EX)
    lease.write(holder)
    lease.flush()
    monkeypatch.setattr(run_directory, "_SECONDS_BETWEEN_TRIES", 0.01)
    monkeypatch.setattr(run_directory, "_SECONDS_FOR_LEASE", 0.05)
    with pytest.raises(InfrastructureError, match="or its lock is left behind") as error:
        take(config, run_dir)
    assert error.value.exit_code == 69
    monkeypatch.setattr(run_directory, "_SECONDS_FOR_LEASE", 60.0)
    began = time.monotonic()
    threading.Timer(0.2, lease.close).start()
    with take(config, run_dir):
        assert 0.1 < time.monotonic() - began < 30
        held = json.loads((run_dir / ".lock").read_text())
        assert (held["host"], held["process"]) == (os.uname().nodename, os.getpid())


def test_a_file_system_without_locks_is_refused_with_what_to_mount(
    config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre without -o flock

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateError, match="no locks between hosts") as error:
        take(config, run_dir)
    assert "-o flock" in str(error.value) and "another job" not in str(error.value)
    assert os.listdir(run_dir) == [".lock"]


def test_a_directory_with_anything_of_a_run_in_it_is_only_resumed(
    config: Config, run_dir: Path
) -> None:
    run_dir.mkdir()
    (run_dir / "config_snapshot.yaml").touch()
    with pytest.raises(StateError, match="never overwritten. Give --resume auto"):
        take(config, run_dir)
    with take(config, run_dir, "auto") as directory:
        assert directory.checkpoints == run_dir / "checkpoints"


def test_what_a_refused_start_leaves_is_no_run(config: Config, run_dir: Path) -> None:
    with take(config, run_dir):
        (run_dir / "train.log").write_text("error: no data\n")
    with take(config, run_dir):
        assert (run_dir / "train.log").read_text() == "error: no data\n"


def test_a_new_directory_is_named_by_time_and_configuration(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with take(config, None) as directory:
        assert directory.path.is_dir()
    name = rf"experiments/\d{{8}}-\d{{6}}-{config_hash(config)}"
    assert re.fullmatch(name, directory.path.as_posix())


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/30"])
def test_a_resumed_path_is_gone_on_with_in_the_run_it_lies_in(
    config: Config, run_dir: Path, inside: str
) -> None:
    checkpoint = run_dir / "checkpoints" / "30"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    with take(config, None, str(run_dir / inside)) as directory:
        assert directory.path == run_dir


def test_a_checkpoint_copied_out_of_its_run_is_gone_on_with_in_a_new_one(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "backup" / "step-30"
    copy.mkdir(parents=True)
    (copy / "manifest.json").touch()
    with take(config, None, str(copy)) as directory:
        assert directory.path.parts[0] == "experiments"
    assert [path.name for path in copy.iterdir()] == ["manifest.json"]


def test_one_run_s_checkpoint_is_never_gone_on_with_in_another_run(
    config: Config, tmp_path: Path
) -> None:
    for name in ("mine", "other"):
        (tmp_path / name / "checkpoints" / "30").mkdir(parents=True)
    with pytest.raises(StateError, match="other: the run directory exists and is never overwr"):
        take(config, tmp_path / "other", str(tmp_path / "mine"))
    for path in (tmp_path / "mine", tmp_path / "new"):
        with take(config, path, str(tmp_path / "mine")) as directory:
            assert directory.path == path


def test_auto_needs_a_directory(config: Config) -> None:
    with pytest.raises(StateError, match="--resume auto: needs --run-dir"):
        take(config, None, "auto")


def test_a_directory_that_cannot_be_made_is_told_with_its_reason(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"file/run: cannot write .* \(Not a directory\)"):
        take(config, tmp_path / "file" / "run")


def with_copies(config: Config, folder: Path) -> Config:
    checkpoint = config.checkpoint.model_copy(update={"replica": str(folder)})
    return config.model_copy(update={"checkpoint": checkpoint})


def test_runs_of_one_name_keep_their_copies_apart(config: Config, tmp_path: Path) -> None:
    config = with_copies(config, tmp_path / "copies")
    with take(config, tmp_path / "a" / "run") as one, take(config, tmp_path / "b" / "run") as other:
        ((copy,), (another,)) = (one.copies, other.copies)
        assert copy != another
        assert copy.is_dir()


def test_copies_of_an_earlier_run_are_only_resumed(
    config: Config, tmp_path: Path, run_dir: Path
) -> None:
    config = with_copies(config, tmp_path / "copies")
    with take(config, run_dir) as directory:
        (directory.copies[0] / "10").mkdir()
    shutil.rmtree(run_dir)
    with pytest.raises(StateError, match="which are never overwritten. Give --resume auto"):
        take(config, run_dir)
    with take(config, run_dir, "auto") as again:
        assert again.copies == directory.copies


def test_a_folder_for_copies_that_cannot_be_made_is_refused(
    config: Config, tmp_path: Path, run_dir: Path
) -> None:
    (tmp_path / "file").touch()
    config = with_copies(config, tmp_path / "file" / "copies")
    with pytest.raises(StateError, match=r"checkpoint.replica = .*cannot be written \(Not a dir"):
        take(config, run_dir)
    assert not (tmp_path / "file" / "copies").exists()
