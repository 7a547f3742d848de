"""Faults of the file systems that a run stands on, of one rank alone, and what is left by them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import files, folder, saver
from cdrmix.engines import life_cycle, training_data
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import ROOT, run_ranks
from tests.small_run import before_step, overrides, refused, start

EARLIER = ROOT / "tests" / "data" / "earlier_run"


def arguments(run_dir: Path, *more: str) -> list[str]:
    """Command line that goes on with the earlier run, or a copy of it, on its data set."""
    config = EARLIER / "run" / "config_snapshot.yaml"
    flags = ["--config", str(config), "--set", f"data.path={EARLIER / 'data'}"]
    return [*flags, "--run-dir", str(run_dir), *(more or ("--resume", "auto"))]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was stopped behind step 4 of 8."""
    return Path(shutil.copytree(EARLIER / "run", tmp_path / "run"))


def fail_on_last_rank(argv: list[str], where: str, number: int, times: int) -> int:
    """What one rank does, with a file system that fails the last rank `times` times."""
    files.READ_RETRY_SECONDS, saver.RETRY_SECONDS = (0.0, 0.0), (0.0, 0.0)  # type: ignore[assignment]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        module: Any = {"digest": files, "write_share": folder}[where]
        original: Callable[..., Any] = getattr(module, where)
        left = [times]

        def failing(path: Path, *args: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args)

        setattr(module, where, failing)
    return start(argv)


def losses(run_dir: Path) -> list[dict[str, float]]:
    # without the loss by domain, which the version of the earlier run did not have
    lines = [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]
    return [{k: v for k, v in line.items() if not k.startswith("eval/domain/")} for line in lines]


@pytest.mark.parametrize(
    ("where", "number"), [("digest", errno.ESTALE), ("write_share", errno.EIO)]
)
def test_a_file_system_that_fails_one_rank_ends_all_to_be_started_again(
    where: str, number: int, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = refused(arguments(stopped), capfd, where, number, 99, run=fail_on_last_rank, code=69)
    assert "rank 1: " in text and "set-aside" not in text
    assert (stopped / "checkpoints" / "4").is_dir()
    assert not (stopped / "finished.json").exists()
    # and where it fails for a moment only, nobody notices
    assert run_ranks(fail_on_last_rank, 2, arguments(stopped), where, number, 1) == [0, 0]
    assert [line["step"] for line in losses(stopped)] == list(range(1, 9))
    whole = read_metrics(EARLIER / "whole_metrics.jsonl")
    assert losses(stopped)[-1]["loss"] == pytest.approx(whole[-1]["loss"], abs=1e-5)
    assert json.loads((stopped / "finished.json").read_text())["step"] == 8


def test_a_checkpoint_volume_that_is_not_mounted_is_no_step_0(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (stopped / "checkpoints").rename(stopped.parent / "volume")
    (stopped / "checkpoints").mkdir()
    (stopped / "saves.json").write_text('{"step": 4}')
    before = (stopped / "metrics.jsonl").read_bytes()
    text = refused(arguments(stopped), capfd)
    assert "holds no checkpoint, though this run has come to step 4 and saved" in text
    assert (stopped / "metrics.jsonl").read_bytes() == before


def start_on_other_data(argv: list[str], other: str) -> int:
    """What one rank does, whose host has another data set if it is the second."""
    if os.environ["RANK"] == "1":
        training_data.local_folder = lambda *_: Path(other)
    return start(argv)


def test_hosts_with_different_data_sets_are_refused(
    stopped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(EARLIER / "data", other)
    content = json.loads((other / "manifest.json").read_text())
    content["source"]["built"] = "elsewhere"
    (other / "manifest.json").write_text(json.dumps(content))
    text = refused(arguments(stopped), capfd, str(other), run=start_on_other_data)
    assert "ranks have different data sets" in text
    assert "rank 0 on " in text and "rank 1 on " in text


def start_on_other_weights(argv: list[str]) -> int:
    """What one rank does, whose host has another copy of the configuration if it is the second."""
    if os.environ["RANK"] == "1":
        argv = [*argv, "--set", "training.weight_decay=0.25"]
    return start(argv)


def test_hosts_with_different_configurations_are_refused(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (stopped / "config_snapshot.yaml").read_bytes()
    text = refused(arguments(stopped), capfd, run=start_on_other_weights)
    assert "ranks have different configurations" in text
    assert "rank 0 on " in text and "rank 1 on " in text
    assert (stopped / "config_snapshot.yaml").read_bytes() == before


@pytest.mark.parametrize(("minutes", "saved"), [("1e-9", [5, 6, 7, 8]), ("60", [8])])
def test_a_checkpoint_is_saved_after_so_many_minutes(
    minutes: str, saved: list[int], stopped: Path
) -> None:
    settings = ("checkpoint.every_steps=null", f"checkpoint.every_minutes={minutes}")
    argv = arguments(stopped, "--resume", "auto", *overrides((*settings, "checkpoint.keep=9")))
    assert run_ranks(start, 1, argv) == [0]
    folders = [each.name for each in (stopped / "checkpoints").iterdir() if each.is_dir()]
    assert sorted(map(int, folders)) == [4, *saved]


def start_and_lose_the_lock(argv: list[str], run_dir: str) -> int:
    """What a rank does whose file server gives its lock to another job before step 6."""
    holder = {"host": "another", "process": 7, "started": "5"}
    before_step(5, lambda: (Path(run_dir) / ".lock").write_text(json.dumps(holder)))
    return start(argv)


def test_a_run_whose_directory_another_job_has_taken_over_names_no_checkpoint(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(start_and_lose_the_lock, 1, arguments(stopped), str(stopped)) == [2]
    assert "process 7 on another has taken this run directory over" in capfd.readouterr().out
    assert sorted(os.listdir(stopped / "checkpoints")) == ["4", "latest"]


def start_and_stop_at_once(argv: list[str]) -> int:
    """What a rank does that is told to stop before its first step."""
    original = life_cycle.train

    def train(run: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(run)

    life_cycle.train = train
    return start(argv)


def test_a_finished_run_that_goes_on_is_not_marked_as_finished(stopped: Path) -> None:
    (stopped / "finished.json").write_text("{}")
    (stopped / "metrics.json").write_text("{}")
    assert run_ranks(start_and_stop_at_once, 1, arguments(stopped)) == [75]
    assert not (stopped / "finished.json").exists()
    assert not (stopped / "metrics.json").exists()


def count_digests(argv: list[str], record: str) -> int:
    """What one rank does, noting each file whose content it compares with its digest."""
    original = files.digest

    def digest(path: Path, *args: Any) -> Any:
        with open(record, "a") as file:
            file.write(f"{path.name}\n")
        return original(path, *args)

    files.digest = digest
    return start(argv)


def test_a_resume_digests_each_file_of_the_checkpoint_once(stopped: Path, tmp_path: Path) -> None:
    record = tmp_path / "digested"
    argv = arguments(stopped, "--resume", "auto", "--set", "training.max_steps=4")
    run_ranks(count_digests, 2, argv, str(record))
    names = record.read_text().split()
    assert "state.json" in names
    assert sorted(names) == sorted(set(names))


def test_a_new_run_that_stops_at_the_step_it_resumed_at_has_a_checkpoint_of_its_own(
    stopped: Path, tmp_path: Path
) -> None:
    checkpoint = EARLIER / "run" / "checkpoints" / "4"
    copied = Path(shutil.copytree(checkpoint, tmp_path / "copied"))
    argv = arguments(tmp_path / "new", "--resume", str(copied))
    assert run_ranks(start_and_stop_at_once, 1, argv) == [75]
    assert (tmp_path / "new" / "checkpoints" / "latest").read_text() == "4\n"
    assert run_ranks(start, 1, arguments(tmp_path / "new")) == [0]
    # bit by bit as the run that it was taken from goes on
    assert run_ranks(start, 1, arguments(stopped)) == [0]
    assert losses(tmp_path / "new") == losses(stopped)[4:]
