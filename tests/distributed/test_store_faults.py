"""The checkpoint store when processes die and disks fill: real kills, real limits, real ranks."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from cdrmix import runtime
from cdrmix.checkpoint import saver
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import damage
from cdrmix.checkpoint.fragments import Box, Fragment, Span
from cdrmix.checkpoint.saver import Saver
from cdrmix.checkpoint.store import find_newest
from cdrmix.errors import StateError
from tests.checkpoints import save_checkpoint
from tests.harness import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("leaves_nothing")

KILLS = 25
# What makes a save durable; between any two of them the disk differs from before.
DURABLE_OPERATIONS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def write(root: Path, step: int, *, numel: int = 1000, background: bool = False) -> None:
    shape = (numel,)
    weights = torch.full(shape, float(step))
    held = [Fragment("w", "param", shape, Span.whole(Box.whole(shape)), weights)]
    if not background:
        save_checkpoint(root, step, held, state={"note": step}, rank_state={}, keep=2)
        return
    writing = Saver([root], keep=2, background=True)
    writing.start(step, held, state={"note": step}, rank_state={})
    writing.wait_for_copy()
    weights.fill_(-1.0)  # training goes on
    writing.wait()
    writing.close()


def check(root: Path, *, at_least: int) -> int:
    """Assert that what is found is whole, and `latest` names a whole one; returns its step."""
    found = find_newest(root)
    assert found is not None
    assert found.skipped == (), "a kill must leave no damaged checkpoint behind"
    assert found.step >= at_least
    with CheckpointFile(found.path) as reader:
        assert reader.full("w").unique().tolist() == [found.step]
        assert reader.state["note"] == found.step
    for folder in root.iterdir():
        assert not folder.name.isdigit() or damage(folder) == [], f"{folder} is no whole checkpoint"
    named = root / (root / "latest").read_text().strip()
    replaced = named.with_name(f"{named.name}.replaced")
    assert damage(named if named.exists() else replaced) == []
    return found.step


def in_child(action: Callable[[], None]) -> int:
    """Start `action` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return child


def killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def save_until_operation(
    root: Path, step: int, number: int, *, after: bool, background: bool
) -> None:
    """Save, and be killed just before or just after the `number`-th durable operation."""
    count = 0

    def counted(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def operation(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == number and not after:
                die()
            try:
                return real(*args, **kwargs)
            finally:
                if count == number:
                    die()

        return operation

    for name in DURABLE_OPERATIONS:
        setattr(os, name, counted(name))
    write(root, step, background=background)


def kill_at_every_operation(folder: str, same_step: bool, background: bool) -> int:
    """Kills survived, each from a run directory in which steps 1 and 2 are saved."""
    kills = 0
    for after in (False, True):
        for number in range(1, 1000):
            root = Path(folder) / f"{after}-{number}" / "checkpoints"
            write(root, 1)
            write(root, 2)
            step = 2 if same_step else 3
            child = in_child(
                lambda: save_until_operation(
                    *(root, step, number),  # noqa: B023
                    after=after,  # noqa: B023
                    background=background,
                )
            )
            if not killed(child):
                break
            kills += 1
            check(root, at_least=2)
            write(root, 4)
            assert check(root, at_least=4) == 4
            assert not list(root.glob("*.tmp-*")), "leftovers go at the next save"
            shutil.rmtree(root.parent)
    return kills


@pytest.mark.parametrize(("same_step", "background"), [(False, False), (True, False), (True, True)])
def test_a_kill_before_or_after_any_durable_operation_loses_nothing(
    tmp_path: Path, same_step: bool, background: bool
) -> None:
    (kills,) = run_ranks(kill_at_every_operation, 1, str(tmp_path), same_step, background)
    assert kills > 30


def await_step(root: Path, step: int) -> None:
    """Wait until a process that saves has finished that step."""
    deadline = time.monotonic() + 30
    while int((root / "latest").read_text()) < step:
        assert time.monotonic() < deadline, f"step {step} is not saved"
        time.sleep(0.001)


def kill_at_random_times(folder: str, background: bool) -> list[int]:
    """Step found after each kill of a process that does nothing but save."""
    root = Path(folder)
    generator = random.Random(0)
    write(root, 1)
    steps = [1]
    for _ in range(KILLS):

        def save_on(first: int = steps[-1] + 1) -> None:
            for step in range(first, first + 10_000):
                write(root, step, numel=200_000, background=background)

        child = in_child(save_on)
        began = time.monotonic()
        await_step(root, steps[-1] + generator.randrange(3))
        # somewhere in the save that follows, on a machine as busy as it is
        time.sleep(generator.uniform(0.0, 0.02 + (time.monotonic() - began)))
        os.kill(child, signal.SIGKILL)
        assert killed(child)
        steps.append(check(root, at_least=steps[-1]))
    return steps


@pytest.mark.parametrize("background", [False, True])
def test_kills_at_random_times_never_lose_a_finished_save(tmp_path: Path, background: bool) -> None:
    (steps,) = run_ranks(kill_at_random_times, 1, str(tmp_path), background)
    assert len(steps) == KILLS + 1
    assert steps[-1] > KILLS / 2, "the processes saved before they were killed"


def die_in_the_middle_on_one_rank(folder: str) -> None:
    runtime.initialize_distributed()
    half = Span(Box.whole((8,)), 4 * runtime.rank(), 4)

    def held(*, dies: bool) -> Iterator[Fragment]:
        yield Fragment("w", "param", (8,), half, torch.ones(4))
        if dies:
            die()

    save_checkpoint(Path(folder), 1, held(dies=False), state={"note": 1}, rank_state={}, keep=2)
    save_checkpoint(
        Path(folder), 2, held(dies=runtime.rank() == 1), state={}, rank_state={}, keep=2
    )


def test_a_rank_killed_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_in_the_middle_on_one_rank, 2, str(tmp_path))
    assert failed.value.outcomes[1].kind == "signalled"
    assert check(tmp_path, at_least=1) == 1


def save_with_a_file_size_limit(folder: str) -> str:
    saver.RETRY_SECONDS = (0.0,)
    root = Path(folder)
    write(root, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(StateError) as refused:
        write(root, 2, numel=200_000)
    return str(refused.value)


def test_a_file_that_may_not_grow_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    (message,) = run_ranks(save_with_a_file_size_limit, 1, str(tmp_path))
    assert "step 2 was not saved: rank 0: " in message
    assert "rank-00000.safetensors: File too large" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "latest"]
    assert check(tmp_path, at_least=1) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leaves_the_older_checkpoints_and_is_survived(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "RETRY_SECONDS", (0.0,))
    root = small_disk / "checkpoints"
    write(root, 1, numel=100_000)
    write(root, 2, numel=100_000)
    with pytest.raises(StateError, match="safetensors: No space left on device"):
        write(root, 3, numel=100_000)
    assert sorted(path.name for path in root.iterdir()) == ["1", "2", "latest"]
    assert check(root, at_least=2) == 2
    shutil.rmtree(root / "1")
    write(root, 3, numel=100_000)
    assert check(root, at_least=3) == 3
