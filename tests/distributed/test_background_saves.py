"""Checkpoints written while training goes on are those of their step, whatever comes between."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.checkpoint import folder, saver, store
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.checkpoints import copy_late
from tests.harness import RanksFailed, run_ranks
from tests.small_run import STEPS, arguments, before_step, refused, start

SAVED_STEPS = (3, 6, STEPS)


def around(function: str, step: int, act: Callable[[], Any]) -> None:
    """Do something before `function` of a checkpoint folder does its work on `step`."""
    original = getattr(folder, function)

    def wrapped(temporary: Path, *args: Any, **kwargs: Any) -> Any:
        if temporary.name.startswith(f"{step}.tmp"):
            act()
        return original(temporary, *args, **kwargs)

    setattr(folder, function, wrapped)


def hold_write(step: int) -> threading.Event:
    """Keep this rank from writing the checkpoint of `step` until the event is set."""
    may_write = threading.Event()

    def wait() -> None:
        assert may_write.wait(60), "training waited for the disk"

    around("write_share", step, wait)
    return may_write


def fail(function: str, step: int, times: int) -> None:
    left = iter(range(times))

    def act() -> None:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "Input/output error", "/disk/file")

    around(function, step, act)


def write_late(rank: int) -> None:
    """What training changes in the two steps after step 3 must not be in its checkpoint."""
    before_step(5, hold_write(3).set)


def copy_late_too(rank: int) -> None:
    """The forward and backward passes of step 4 go on beside the copy, its optimizer does not."""
    copy_late()
    write_late(rank)


def die_while_writing(rank: int) -> None:
    hold_write(6)
    if rank == 0:
        before_step(7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def be_stopped_while_writing(rank: int) -> None:
    may_write = hold_write(6)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, may_write.set).start()

    before_step(6, stop)


def fail_at_first(rank: int) -> None:
    if rank == 1:
        fail("write_share", 6, times=len(saver.RETRY_SECONDS))


def fail_to_write(rank: int) -> None:
    if rank == 1:
        fail("write_share", 6, times=1 + len(saver.RETRY_SECONDS))


def fail_to_name(rank: int) -> None:
    if rank == 0:
        fail("publish", 6, times=1 + len(saver.RETRY_SECONDS))


def fail_at_the_end(rank: int) -> None:
    if rank == 1:
        fail("write_share", STEPS, times=1 + len(saver.RETRY_SECONDS))


def train(argv: list[str], scenario: Callable[[int], None]) -> int:
    """What one rank of launch/train.py does in a scenario."""
    saver.RETRY_SECONDS = (0.0, 0.0)
    scenario(int(os.environ["RANK"]))
    return start(argv)


@pytest.fixture(scope="module")
def in_front(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Run directory of a run on so many ranks that waited for each of its checkpoints."""
    done: dict[int, Path] = {}

    def get(world: int) -> Path:
        if world not in done:
            run_dir = tmp_path_factory.mktemp("in_front") / "run"
            argv = arguments(small_corpus, run_dir, "--set", "checkpoint.background=false")
            assert run_ranks(start, world, argv) == [0] * world
            done[world] = run_dir
        return done[world]

    return get


def contents(checkpoint: Path) -> dict[str, Any]:
    """Digests of the tensors and random states of a whole checkpoint, and its positions."""
    assert folder.damage(checkpoint) == []
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    state = json.loads((checkpoint / "state.json").read_text())
    digests = {name: record["sha256"] for name, record in files.items() if name[:4] == "rank"}
    return digests | {key: state[key] for key in ("step", "loader", "engine", "samples")}


def assert_equal_runs(found: Path, expected: Path, steps: tuple[int, ...] = SAVED_STEPS) -> None:
    for step in steps:
        name = f"checkpoints/{step}"
        assert contents(found / name) == contents(expected / name), f"step {step}"
    lines, expected_lines = (
        [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]
        for run_dir in (found, expected)
    )
    assert lines == expected_lines


@pytest.mark.parametrize("late", [write_late, copy_late_too])
def test_a_checkpoint_is_that_of_its_step_whatever_is_trained_while_it_is_written(
    late: Callable[[int], None],
    small_corpus: Path,
    run_dir: Path,
    in_front: Callable[[int], Path],
) -> None:
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 2, argv, late) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))
    summary = json.loads((run_dir / "metrics.json").read_text())
    assert 0 < summary["goodput"]["checkpoint_stall_seconds"] < summary["seconds"]
    for step in SAVED_STEPS[1:]:  # and one can go on from it
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    small_corpus: Path, run_dir: Path, in_front: Callable[[int], Path]
) -> None:
    argv = arguments(small_corpus, run_dir)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train, 2, argv, die_while_writing)
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 7
    found = store.find_newest(run_dir)
    assert found is not None
    assert (found.step, found.skipped) == (3, ())
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))
    assert not list((run_dir / "checkpoints").glob("*.tmp-*"))


def test_a_signal_while_a_checkpoint_is_written_waits_for_it_and_saves_the_step_reached(
    small_corpus: Path, run_dir: Path, in_front: Callable[[int], Path]
) -> None:
    argv = arguments(small_corpus, run_dir)
    assert run_ranks(train, 2, argv, be_stopped_while_writing) == [75, 75]
    assert (run_dir / "checkpoints" / "latest").read_text() == "7\n"
    assert "stopped by SIGTERM after step 7" in (run_dir / "train.log").read_text()
    assert contents(run_dir / "checkpoints/6") == contents(in_front(2) / "checkpoints/6")
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, in_front(2), steps=(6, STEPS))


def test_a_write_that_fails_at_first_is_told_and_tried_again(
    small_corpus: Path,
    run_dir: Path,
    in_front: Callable[[int], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_ranks(train, 2, arguments(small_corpus, run_dir), fail_at_first) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))
    told = "[rank 1] checkpoint of step 6: /disk/file: Input/output error; tried again in 0 s"
    assert capfd.readouterr().out.count(told) == len(saver.RETRY_SECONDS)


@pytest.mark.parametrize(
    ("scenario", "step", "rank"),
    [(fail_to_write, 6, 1), (fail_to_name, 6, 0), (fail_at_the_end, STEPS, 1)],
)
def test_a_write_that_goes_on_failing_ends_the_run_and_is_never_the_latest(
    scenario: Callable[[int], None],
    step: int,
    rank: int,
    small_corpus: Path,
    run_dir: Path,
    in_front: Callable[[int], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = arguments(small_corpus, run_dir)
    text = refused(argv, capfd, scenario, run=train, code=69)
    told = f"the checkpoint of step {step} was not saved: rank {rank}: /disk/file: Input/output"
    assert told in text
    found = store.find_newest(run_dir)
    assert found is not None
    assert (found.step, found.skipped) == ({6: 3, STEPS: 6}[step], ())
    assert (run_dir / "checkpoints" / "latest").read_text() == f"{found.step}\n"
    assert not list((run_dir / "checkpoints").glob("*.tmp-*"))
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))


def damage(checkpoint: Path) -> None:
    with (checkpoint / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_a_run_goes_on_from_the_copy_of_a_damaged_checkpoint(
    small_corpus: Path, tmp_path: Path, run_dir: Path, in_front: Callable[[int], Path]
) -> None:
    copies = ["--set", f"checkpoint.replica={tmp_path / 'copies'}"]
    argv = arguments(small_corpus, run_dir, *copies)
    assert run_ranks(train, 2, argv, be_stopped_while_writing) == [75, 75]
    (replica,) = (tmp_path / "copies").iterdir()
    assert contents(replica / "7") == contents(run_dir / "checkpoints" / "7")
    damage(run_dir / "checkpoints" / "7")
    assert run_ranks(start, 2, [*argv, "--resume", "auto"]) == [0, 0]
    log = (run_dir / "train.log").read_text()
    assert "skipped checkpoint 7: rank-00000.safetensors: its content has changed" in log
    assert f"resumed from {replica / '7'}" in log
    assert_equal_runs(run_dir, in_front(2), steps=(6, STEPS))


def test_copies_that_cannot_be_written_are_told_and_cost_nothing_else(
    small_corpus: Path, tmp_path: Path, run_dir: Path, in_front: Callable[[int], Path]
) -> None:
    argv = arguments(small_corpus, run_dir, "--set", f"checkpoint.replica={tmp_path / 'copies'}")
    assert run_ranks(train_without_copies, 2, argv, str(tmp_path / "copies")) == [0, 0]
    assert_equal_runs(run_dir, in_front(2))
    (replica,) = (tmp_path / "copies").iterdir()
    names = ["3", "8", "held_out.json", "latest", "tokenizer.json"]
    assert sorted(path.name for path in replica.iterdir()) == names
    log = (run_dir / "train.log").read_text()
    assert f"warning: {replica}: has no checkpoint of step 6: rank 1: " in log


def train_without_copies(argv: list[str], copies: str) -> int:
    """Rank 1 cannot write the copy of step 6."""
    saver.RETRY_SECONDS = ()
    original = folder.write_tensors

    def failing(path: Path, *args: Any) -> Any:
        if path.is_relative_to(copies) and path.parent.name.startswith("6.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    if int(os.environ["RANK"]) == 1:
        folder.write_tensors = failing
    return start(argv)
