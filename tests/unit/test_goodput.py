"""What restarts cost, from the records of the starts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdrmix.cluster.goodput import StartRecord, append_start, goodput

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def record(began: int, ended: int, resumed_at: int, step: int, exit_code: int = 1) -> StartRecord:
    times = (NOON + timedelta(seconds=began), NOON + timedelta(seconds=ended))
    return StartRecord(*times, ("a",), exit_code, "", resumed_at=resumed_at, step=step)


def test_steps_since_the_last_checkpoint_are_the_loss_of_a_fault() -> None:
    starts = [record(0, 100, 0, 197), record(110, 200, 190, 400, exit_code=0)]
    assert goodput(starts) == {
        "productive_steps": 400,
        "redone_steps": 7,
        "share": pytest.approx(400 / 407),
        "starts": 2,
        "seconds": 200,
        "seconds_between_starts": 10,
    }


def test_a_run_that_goes_on_counts_its_own_steps_only() -> None:
    cost = goodput([record(0, 50, 300, 400, exit_code=0)])
    assert (cost["productive_steps"], cost["share"]) == (100, 1.0)
    assert goodput([record(0, 5, 400, 400, exit_code=0)])["share"] == 1.0


def test_a_start_without_a_checkpoint_loses_all_its_steps() -> None:
    assert goodput([record(0, 9, 0, 8), record(10, 60, 0, 40, exit_code=0)])["redone_steps"] == 8


def test_the_starts_of_a_run_are_kept_in_a_file(tmp_path: Path) -> None:
    starts = [record(0, 1, 0, 5), record(2, 3, 5, 9, exit_code=0)]
    for number, start in enumerate(starts, start=1):
        assert append_start(tmp_path / "starts.jsonl", start) == starts[:number]
    first = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[0])
    assert first["began"] == "2026-01-01T12:00:00+00:00"
