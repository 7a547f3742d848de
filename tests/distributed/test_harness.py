"""The harness itself: a rank that goes wrong must neither hang a test nor hide its reason."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed

from cdrmix import runtime
from tests.harness import RanksFailed, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, int]:
    runtime.initialize_distributed()
    total = runtime.all_reduce_sum(torch.tensor(runtime.rank() + offset))
    return runtime.rank(), int(total)


def large_result() -> torch.Tensor:
    return torch.arange(1_000_000)


def fail_on_rank_one() -> None:
    print("rank", os.environ["RANK"], "was here")
    if os.environ["RANK"] == "1":
        raise ValueError("no such expert")
    time.sleep(600)


def exit_with(code: int) -> None:
    sys.exit(code)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_godot(folder: Path) -> None:
    started = subprocess.Popen(["sleep", "600"])
    (folder / os.environ["RANK"]).write_text(f"{os.getpid()} {started.pid}")
    time.sleep(600)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    assert run_ranks(sum_of_ranks, world_size, 10) == [(rank, total) for rank in range(world_size)]


def test_results_larger_than_a_pipe_arrive_whole() -> None:
    assert torch.equal(run_ranks(large_result, 1)[0], torch.arange(1_000_000))


def test_a_failing_rank_shows_its_traceback_and_stops_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="no such expert") as failure:
        run_ranks(fail_on_rank_one, 2)
    assert [outcome.kind for outcome in failure.value.outcomes] == ["stopped", "raised"]
    assert "in fail_on_rank_one" in str(failure.value)
    assert "rank 1 was here" in str(failure.value)
    assert time.monotonic() - started < 60


def test_an_exit_code_and_a_deadly_signal_are_named() -> None:
    with pytest.raises(RanksFailed, match="exited with code 75"):
        run_ranks(exit_with, 1, 75)
    with pytest.raises(RanksFailed, match="died by SIGKILL"):
        run_ranks(kill_itself, 1)


def test_the_time_limit_shows_where_ranks_hang_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="in wait_for_godot") as failure:
        run_ranks(wait_for_godot, 2, tmp_path, timeout=2)
    assert [outcome.kind for outcome in failure.value.outcomes] == ["stopped", "stopped"]
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert not [pid for pid in pids if alive(pid)]


def test_only_a_function_of_module_level_is_taken() -> None:
    with pytest.raises(ValueError, match="module level"):
        run_ranks(lambda: None, 1)
