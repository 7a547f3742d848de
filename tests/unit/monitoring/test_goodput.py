"""Where the time of a run went, over starts that ended well, were lost, or left half a word."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cdrmix.monitoring.goodput import PARTS, WALL_TIME, WallTime

START_UP = 0.5


def opened(run_dir: Path, step: int, watched: tuple[int, float] | None = None) -> WallTime:
    account = WallTime()
    account.open(run_dir, step=step, start_up_seconds=START_UP, watched=watched)
    return account


def trained(account: WallTime, first: int, last: int, seconds: float = 0.01) -> None:
    for step in range(first, last + 1):
        account.step_done(step, seconds)


def log(run_dir: Path, step: int) -> None:
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")


def aged(run_dir: Path, seconds: float) -> None:
    """As if everything there had been written so long ago."""
    path = run_dir / WALL_TIME
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"until": written["until"] - seconds}))


def test_parts_and_the_rest_sum_to_the_time_since_the_command(tmp_path: Path) -> None:
    account = opened(tmp_path, 0)
    began = time.monotonic()
    with account.spent("checkpoint_stall"):
        time.sleep(0.02)
    account.step_done(1, 0.005)
    cost = account.to_json()
    assert cost["checkpoint_stall_seconds"] == pytest.approx(0.02, abs=0.1)
    assert cost["start_up_seconds"] == START_UP
    parts = [cost[f"{part}_seconds"] for part in (*PARTS, "other")]
    assert sum(parts) == pytest.approx(cost["seconds"])
    assert cost["seconds"] == pytest.approx(START_UP + time.monotonic() - began, abs=0.1)
    assert cost["share"] == pytest.approx(0.005 / cost["seconds"])
    assert (cost["share_of_steps"], cost["starts"]) == (1.0, 1)


def test_a_killed_start_is_charged_to_its_last_sign_of_life_and_then_down(tmp_path: Path) -> None:
    account = opened(tmp_path, 0)
    trained(account, 1, 10)
    account.save()
    aged(tmp_path, 30)
    log(tmp_path, 17)  # seven steps since, none of them saved; this is written 30 s later
    cost = opened(tmp_path, 10).to_json()
    assert (cost["starts"], cost["productive_steps"], cost["redone_steps"]) == (2, 10, 7)
    assert cost["share_of_steps"] == pytest.approx(10 / 17)
    assert cost["productive_seconds"] == pytest.approx(0.1)
    # the command of the second start came START_UP before now, the last sign after that
    assert cost["redone_seconds"] == pytest.approx(30 - START_UP, abs=0.2)
    assert cost["down_seconds"] == pytest.approx(0, abs=0.2)


def test_the_time_between_two_starts_is_down(tmp_path: Path) -> None:
    trained(account := opened(tmp_path, 0), 1, 10)
    account.save()
    aged(tmp_path, 20)
    cost = opened(tmp_path, 10).to_json()
    assert (cost["productive_steps"], cost["redone_steps"]) == (10, 0)
    assert cost["down_seconds"] == pytest.approx(20 - START_UP, abs=0.2)
    assert cost["seconds"] == pytest.approx(20 + START_UP, abs=0.2)


def test_who_watched_the_lost_start_knows_its_last_step(tmp_path: Path) -> None:
    trained(account := opened(tmp_path, 0), 1, 10)
    account.save()
    log(tmp_path, 12)
    after, before = time.time() + 1, time.time() - 60
    assert opened(tmp_path, 10, (15, before)).to_json()["redone_steps"] == 2
    (tmp_path / WALL_TIME).unlink()
    trained(account := opened(tmp_path, 0), 1, 10)
    account.save()
    assert opened(tmp_path, 10, (15, after)).to_json()["redone_steps"] == 5


def test_a_start_from_an_older_checkpoint_loses_what_counted_before(tmp_path: Path) -> None:
    trained(account := opened(tmp_path, 0), 1, 20)
    account.save()
    cost = opened(tmp_path, 15).to_json()
    assert (cost["productive_steps"], cost["redone_steps"]) == (15, 5)
    assert cost["productive_seconds"] == pytest.approx(0.15)
    assert cost["redone_seconds"] == pytest.approx(0.05)


def test_a_checkpoint_later_than_the_account_counts(tmp_path: Path) -> None:
    trained(account := opened(tmp_path, 0), 1, 10)
    account.save()
    log(tmp_path, 14)
    cost = opened(tmp_path, 13).to_json()
    assert (cost["productive_steps"], cost["redone_steps"]) == (13, 1)


def test_steps_that_are_rolled_back_are_lost(tmp_path: Path) -> None:
    trained(account := opened(tmp_path, 100), 101, 110)
    account.go_back(104)
    trained(account, 105, 110)
    cost = account.to_json()
    assert (cost["productive_steps"], cost["redone_steps"]) == (10, 6)


def test_a_damaged_account_is_begun_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / WALL_TIME).write_text("{")
    with caplog.at_level("WARNING", logger="cdrmix"):
        assert opened(tmp_path, 5).to_json()["starts"] == 1
    assert json.loads((tmp_path / WALL_TIME).read_text())["step"] == 5


def test_an_account_that_is_not_open_writes_nothing(tmp_path: Path) -> None:
    account = WallTime()
    trained(account, 1, 3)
    account.save()
    assert list(tmp_path.iterdir()) == []
