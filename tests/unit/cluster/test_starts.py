"""The starts of a run, and what a start says of its own beginning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdrmix.cluster.starts import STARTS, StartRecord, StartUp, append_start, read_starts

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TELL = """
import json
from cdrmix.cluster.starts import StartUp
print(json.dumps(StartUp().to_json()))
"""


def record(began: int, ended: int, resumed_at: int, step: int, exit_code: int = 1) -> StartRecord:
    times = (NOON + timedelta(seconds=began), NOON + timedelta(seconds=ended))
    return StartRecord(*times, ("a",), exit_code, "", resumed_at=resumed_at, step=step)


def test_the_starts_of_a_run_are_kept_in_a_file(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    starts = [record(0, 1, 0, 5), record(2, 3, 5, 9, exit_code=0)]
    for number, start in enumerate(starts, start=1):
        append_start(tmp_path, start)
        assert read_starts(tmp_path) == starts[:number]
    first = json.loads((tmp_path / STARTS).read_text().splitlines()[0])
    assert first["began"] == "2026-01-01T12:00:00+00:00"


def test_a_start_that_was_not_written_whole_stands_in_nobodys_way(tmp_path: Path) -> None:
    starts = [record(0, 1, 0, 5), record(2, 3, 5, 9)]
    append_start(tmp_path, starts[0])
    with (tmp_path / STARTS).open("a") as file:
        file.write('{"began": "2026-01-01T1\n{}\n')
    append_start(tmp_path, starts[1])
    assert read_starts(tmp_path) == starts


def test_a_start_counts_from_the_command_that_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_COMMANDED", str(time.time() - 86_400))
    start_up = StartUp()
    time.sleep(0.02)
    start_up.done("data")
    start_up.done("model")
    time.sleep(0.02)
    start_up.done("data")
    assert start_up.step_done()
    assert not start_up.step_done()
    measured = start_up.to_json()
    time.sleep(0.01)
    start_up.done("data")  # of a stage that follows in the same start
    assert start_up.to_json() == measured
    assert list(measured)[:2] == ["launcher_seconds", "imports_seconds"]
    assert measured["launcher_seconds"] + measured["imports_seconds"] == pytest.approx(
        86_400, abs=2
    )
    assert 0.04 <= measured["data_seconds"] < 1
    assert measured["seconds"] == pytest.approx(86_400, abs=2)
    assert sum(s for part, s in measured.items() if part != "seconds") == measured["seconds"]


def test_a_start_finds_the_launcher_that_nobody_told_it_of(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TELL)
    launcher = "import subprocess, sys, time; time.sleep(.5); subprocess.run(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    environment.pop("CDRMIX_COMMANDED", None)
    done = subprocess.run(
        [sys.executable, "-c", launcher, sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert 0.4 < measured["launcher_seconds"] < 5
    assert 0 < measured["imports_seconds"] < 5
