"""`micro_batch_size: auto`: the largest that fits, and the run that the size given would be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equal_runs import assert_equal_runs
from tests.harness import RanksFailed, run_ranks
from tests.small_run import arguments, overrides, start

AUTO = "training.micro_batch_size=auto"
SHORT = ("evaluation.every_steps=null", "checkpoint.every_steps=null", "training.max_steps=3")


@dataclass
class Room:
    """Memory that the probe finds in a test: for so many samples a micro batch."""

    samples: int
    cache: Path
    runs_out_at: int | None = None  # micro batch at which a rank runs out of memory
    is_probed: bool = True


def start_with_room(argv: list[str], room: Room) -> int:
    """Starts a rank whose steps are real, and whose readings of memory are made up."""
    from cdrmix.engines import found_micro_batch
    from cdrmix.engines import micro_batch_probe as probe

    found_micro_batch._FOLDER = str(room.cache)
    original = probe._peak

    def peak(config: Any, plan: Any, *others: Any) -> int:
        assert room.is_probed, "it was found before"
        original(config, plan, *others)
        if plan.micro_batch_size == room.runs_out_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plan.micro_batch_size * 2**30

    probe._peak = peak
    probe._limit = lambda *_: (room.samples + 0.5) * 2**30  # type: ignore[assignment]
    return start(argv)


def plan_of(run_dir: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run_dir / "plan.json").read_text())
    return plan


# Ranks, global batch, settings, and the size that the made-up memory has room for. The layout is
# given: the plan would choose it by the micro batch that it takes itself.
LAYOUTS = {
    "one rank, experts": (1, 4, [], 2),
    "two ranks, ZeRO-2, average": (
        2,
        8,
        ["model.moe=null", "training.ema_decay=0.9", "parallel.data=2", "parallel.sequence=1"],
        2,
    ),
    "a pipeline": (2, 8, ["model.moe=null", "parallel.pipeline=2"], 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_auto_is_that_with_the_size_given_bit_by_bit(
    layout: str, small_corpus: Path, tmp_path: Path
) -> None:
    ranks, batch, more, size = LAYOUTS[layout]
    settings = [*SHORT, *more, f"training.global_batch_size={batch}"]
    profile = ["--profile", "zero2"] if "ZeRO-2" in layout else []

    def run(name: str, micro: str, room: Room) -> Path:
        argv = arguments(small_corpus, tmp_path / name, *overrides([*settings, micro]), *profile)
        assert run_ranks(start_with_room, ranks, argv, room) == [0] * ranks
        return tmp_path / name

    room = Room(size, tmp_path / "cache")
    auto = run("auto", AUTO, room)
    given = run("given", f"training.micro_batch_size={size}", room)
    assert plan_of(auto)["micro_batch_size"] == plan_of(given)["micro_batch_size"] == size
    assert_equal_runs(auto, given, steps=3)
    told = plan_of(auto)["reasons"][-1]
    assert "that fits, found by trying" in told
    assert "by the plan (" in told
    if ranks == 2:
        return
    # Another run, and a start that goes on, take what was found; another model does not.
    room.is_probed = False
    assert plan_of(run("again", AUTO, room))["micro_batch_size"] == size
    assert_equal_runs(tmp_path / "again", given, steps=3)
    with pytest.raises(RanksFailed, match="it was found before"):
        run("other", AUTO, Room(size, tmp_path / "empty", is_probed=False))


def test_a_size_that_runs_out_of_memory_is_not_tried_by_the_next_start(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    settings = overrides([*SHORT, "model.moe=null", AUTO])
    argv = arguments(small_corpus, run_dir, *settings)
    room = Room(8, tmp_path / "cache", runs_out_at=4)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(start_with_room, 2, argv, room)
    assert {outcome.value for outcome in failed.value.outcomes} <= {1, None, "SIGKILL"}
    assert json.loads((run_dir / "out_of_memory_4.json").read_text())["step"] == 0
    assert run_ranks(start_with_room, 2, [*argv, "--resume", "auto"], room) == [0, 0]
    assert plan_of(run_dir)["micro_batch_size"] == 2


def test_one_process_goes_on_below_a_size_that_ran_out_of_memory(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    settings = overrides([*SHORT, "model.moe=null", AUTO])
    room = Room(8, tmp_path / "cache", runs_out_at=8)
    assert run_ranks(start_with_room, 1, arguments(small_corpus, run_dir, *settings), room) == [0]
    assert plan_of(run_dir)["micro_batch_size"] == 4
    assert not list(run_dir.glob("out_of_memory*"))
