"""Saves within a range that the user gives: chosen alike on all ranks, by what they take."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint import folder
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.engines.reading import read_resources
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.small_run import STEPS, arguments, overrides, start

IN_FRONT = ("checkpoint.background=false", "checkpoint.keep=9")
AUTO = (*IN_FRONT, "checkpoint.every_steps=auto")
TO_3 = overrides([*AUTO, "checkpoint.auto_range=[1, 3]"])


def start_on_a_slow_disk(argv: list[str]) -> int:
    """What a rank does whose disk takes long; one such rank is enough."""
    original = folder.write_share

    def write_slowly(*args: object) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
        original(*args)

    folder.write_share = write_slowly
    return start(argv)


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(each.name) for each in (run_dir / "checkpoints").iterdir() if each.is_dir())


def values(run_dir: Path) -> list[dict]:
    return [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def slow(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with saves that take far more than 1 % of the time, in a range of 1 to 3 steps."""
    run_dir = tmp_path_factory.mktemp("slow") / "run"
    argv = arguments(small_corpus, run_dir, *TO_3)
    assert run_ranks(start_on_a_slow_disk, 2, argv) == [0, 0]
    return run_dir


def test_saves_on_a_slow_disk_become_as_rare_as_allowed_which_is_told(slow: Path) -> None:
    # As often as allowed until the first one is timed, which the next logged step tells.
    assert saved_steps(slow) == [1, 2, 5, STEPS]
    log = (slow / "train.log").read_text()
    (told,) = re.findall(r"saves: behind step 2: (.*)", log)
    assert told.startswith("a save every 3 steps instead of 1 step: training waits ")
    assert told.endswith(" 1% of the time at most, as far as checkpoint.auto_range allows")
    record = read_resources(slow)
    assert record["saves"] == {"checkpoint.every_steps": 3}
    assert {"step": 2, "change": told} in record["changes"]


def start_with_a_slow_copy(argv: list[str]) -> int:
    """What a rank does whose host takes long to copy the state; one such rank is enough."""
    original = HostMemory.copier

    def copier(self: HostMemory, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        copy = original(self, tensors)

        def slowly() -> Any:
            if os.environ["RANK"] == "1":
                time.sleep(0.9)
            return copy()

        return slowly

    HostMemory.copier = copier  # type: ignore[method-assign]
    return start(argv)


def test_a_slow_copy_on_one_rank_counts_on_all(small_corpus: Path, run_dir: Path) -> None:
    argv = arguments(small_corpus, run_dir, *TO_3, "--set", "checkpoint.background=true")
    assert run_ranks(start_with_a_slow_copy, 2, argv) == [0, 0]
    log = (run_dir / "train.log").read_text()
    (milliseconds,) = re.findall(r"saves: behind step 2: .* training waits (\d+) ms", log)
    assert int(milliseconds) > 300  # the optimizer of rank 1 alone has waited for it
    assert saved_steps(run_dir) == [1, 2, 5, STEPS]


def test_no_number_of_training_depends_on_when_it_saves(slow: Path, small_corpus: Path) -> None:
    fixed = slow.parent / "fixed"
    assert run_ranks(start, 2, arguments(small_corpus, fixed, *overrides(IN_FRONT))) == [0, 0]
    assert saved_steps(fixed) == [3, 6, STEPS]
    assert values(slow) == values(fixed)


def test_a_resumed_run_goes_on_with_the_chosen_interval(slow: Path, small_corpus: Path) -> None:
    run_dir = slow.parent / "resumed"
    shutil.copytree(slow, run_dir)
    for step in (5, STEPS):
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    argv = arguments(small_corpus, run_dir, *TO_3, "--resume", "auto")
    # On a disk that is fast by now: what was measured before counts.
    assert run_ranks(start, 2, argv) == [0, 0]
    assert saved_steps(run_dir) == [1, 2, 5, STEPS]
    assert values(run_dir) == values(slow)


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        # A failure each 1.8 ms costs more than any save: as often as allowed.
        (("checkpoint.auto_range=[2, 5]", "failures.per_device_hour=1e6"), [2, 4, 6, 8]),
        # Within the range of today, though a longer one was chosen.
        (("checkpoint.auto_range=[2, 2]",), [2, 4, 6, 8]),
    ],
)
def test_saves_are_no_more_often_than_the_range_allows(
    settings: Sequence[str], saved: list[int], small_corpus: Path, run_dir: Path
) -> None:
    argv = arguments(small_corpus, run_dir, *overrides([*AUTO, *settings]))
    assert run_ranks(start, 2, argv) == [0, 0]
    assert saved_steps(run_dir) == saved


def test_minutes_are_counted_by_one_clock_for_all_ranks(small_corpus: Path, run_dir: Path) -> None:
    minutes = ["checkpoint.every_minutes=auto", "checkpoint.every_steps=null"]
    bounds = ["checkpoint.auto_range=[1e-9, 60]"]
    argv = arguments(small_corpus, run_dir, *overrides([*IN_FRONT, *minutes, *bounds]))
    assert run_ranks(start_on_a_slow_disk, 2, argv) == [0, 0]
    # At the lower bound before the first step; then saves of 0.3 s are to take 1 % of the time.
    assert saved_steps(run_dir) == [0, STEPS]
    chosen = read_resources(run_dir)["saves"]["checkpoint.every_minutes"]
    assert 0.5 <= chosen < 60
