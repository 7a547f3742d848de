"""Points that TensorBoard shows of a run that goes back, and of a disk that is full."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cdrmix.config.tracking import TensorBoardOptions
from cdrmix.tracking import Line, TrackedRun
from cdrmix.tracking.tensorboard_tracker import TensorBoardTracker, _EventFile
from tests.full_disk import file_size_limit
from tests.trackers import points_of_tensorboard


def line(step: int, **values: float) -> Line:
    return Line(1e9 + step, {"step": step, "loss": 1 / step, "tokens_seen": 512 * step, **values})


def started(folder: Path, step: int = -1, **options: bool) -> TensorBoardTracker:
    run = TrackedRun("run", folder, folder, folder, step, {"name": "made"}, False)
    tracker = TensorBoardTracker(TensorBoardOptions(**options))
    tracker.open(run)
    return tracker


def write_killed_and_resumed(folder: Path) -> list[int]:
    """Steps that are shown of a run that wrote 57 steps, and went on from the 50th to the 100th."""
    killed = started(folder)
    killed.write([line(step) for step in range(1, 58)])
    killed.close()
    resumed = started(folder, step=50)
    resumed.write([line(step) for step in range(51, 101)])
    resumed.close()
    return [step for step, _ in points_of_tensorboard(folder)["loss"]]


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    assert write_killed_and_resumed(tmp_path) == list(range(1, 101))


def test_a_resumed_run_without_the_mark_of_its_start_shows_steps_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_EventFile, "write_start", lambda self, step: None)
    steps = write_killed_and_resumed(tmp_path)
    assert len(steps) == 107


def test_a_rewind_hides_later_points_in_steps_and_tokens(tmp_path: Path) -> None:
    text = "".join(f'{{"step": {n}, "tokens_seen": {512 * n}}}\n' for n in range(1, 4))
    (tmp_path / "metrics.jsonl").write_text(text)
    tracker = started(tmp_path, by_tokens=True)
    tracker.write([line(step) for step in range(1, 6)])
    tracker.rewind(3)
    tracker.write([line(4, loss=7.0)])
    tracker.close()
    assert [n for n, _ in points_of_tensorboard(tmp_path)["loss"]] == [1, 2, 3, 4]
    points = points_of_tensorboard(tmp_path / "by_tokens")["loss"]
    assert [n for n, _ in points] == [512, 1024, 1536, 2048]
    assert points[-1][1] == 7.0


def test_keys_are_those_of_the_metrics_and_values_may_be_not_finite(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.write([line(1, **{"suite/x/pass@1": 0.5}), line(2, loss=math.nan, inf=-math.inf)])
    tracker.close()
    points = points_of_tensorboard(tmp_path)
    assert points["suite/x/pass@1"] == [(1, 0.5)]
    assert math.isnan(points["loss"][1][1])
    assert points["inf"] == [(2, -math.inf)]


def test_a_full_disk_leaves_whole_events_and_later_ones_follow(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.write([line(1)])
    with file_size_limit(1500), pytest.raises(OSError, match="too large"):
        tracker.write([line(step) for step in range(2, 40)])
    tracker.write([line(40)])
    tracker.close()
    assert [n for n, _ in points_of_tensorboard(tmp_path)["loss"]] == [1, 40]
