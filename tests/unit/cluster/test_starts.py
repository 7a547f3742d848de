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

from cdrmix.cluster.starts import (
    STARTS,
    StartRecord,
    StartUp,
    append_start,
    end_of_run,
    read_starts,
)
from cdrmix.config.load import load_config, snapshot_yaml
from cdrmix.config.resuming import config_of_start
from cdrmix.errors import ConfigError
from tests.conftest import TINY

REASON = TINY.with_name("cdrmix-reason-tiny.yaml")
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


def finished(folder: Path, *overrides: str, config: Path = TINY, stage: str = "a") -> Path:
    """A run directory as far as its end is read from it."""
    folder.mkdir()
    own = load_config(config, overrides)
    (folder / "config_snapshot.yaml").write_text(snapshot_yaml(own))
    step = own.training.num_steps
    (folder / "finished.json").write_text(json.dumps({"step": step, "stage": stage}))
    return folder


def test_a_finished_run_is_at_its_end_unless_more_is_asked_for(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "training.max_steps=60")

    def end(*overrides: str) -> str | None:
        config = config_of_start(None, overrides, run_dir=run, resume="auto")
        return end_of_run(config, run_dir=run, resume="auto")

    said = end()
    assert said is not None
    assert said.startswith(f"the run is at its end (step 60 of 60): {run}/report.html.")
    assert said.endswith("To train on, give --set training.max_steps=N")
    assert end("training.max_steps=60") == said
    assert end("training.max_steps=61") is None
    assert end("training.max_steps=61", "training.learning_rate=1e-3") is None
    for other in ("training.learning_rate=1e-3", "checkpoint.keep=9", "training.max_steps=50"):
        with pytest.raises(ConfigError, match="at its end") as caught:
            end(other)
        assert other.partition("=")[0] in str(caught.value)
        assert "give --set training.max_steps=N" in str(caught.value)


def test_a_run_whose_last_checkpoints_were_removed_trains_them_again(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "training.max_steps=60")
    config = config_of_start(None, [], run_dir=run, resume="auto")
    for step in (40, 60):
        (run / "checkpoints" / str(step)).mkdir(parents=True)
    assert end_of_run(config, run_dir=run, resume="auto") is not None
    (run / "checkpoints" / "60").rmdir()
    assert end_of_run(config, run_dir=run, resume="auto") is None


def test_other_values_for_a_finished_run_are_an_error_and_no_warning(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", "training.max_steps=60")
    root = Path(__file__).parents[3]
    other = ["--run-dir", str(run), "--resume", "auto", "--set", "training.learning_rate=3e-3"]
    for command in (["-m", "cdrmix.cli", "train"], [str(root / "launch" / "train.py")]):
        words = [sys.executable, *command, *other]
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
        told = done.stdout + done.stderr
        assert done.returncode == 2, told
        assert "at its end (step 60 of 60)" in told and "learning_rate" in told
        assert "warning" not in told


def test_the_end_is_that_of_the_directory_to_go_on_in(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    config = load_config(TINY)
    assert end_of_run(config, run_dir=run, resume="never") is None
    assert end_of_run(config, run_dir=None, resume=str(run)) is not None
    assert end_of_run(config, run_dir=tmp_path / "new", resume=str(run)) is None, "another run"
    assert end_of_run(config, run_dir=tmp_path / "new", resume="auto") is None
    assert end_of_run(config, run_dir=None, resume=str(run / "checkpoints" / "4")) is None
    last = str(run / "checkpoints" / str(config.training.num_steps))
    (tmp_path / "link").symlink_to(run)
    for place in (last, str(run / "checkpoints"), str(tmp_path / "link"), f"{run}/../run"):
        assert end_of_run(config, run_dir=run, resume=place) is not None, place
    assert end_of_run(config, run_dir=tmp_path / "new", resume=last) is None, "another run"
    (run / "finished.json").unlink()
    assert end_of_run(config, run_dir=run, resume="auto") is None


def test_another_stage_is_more_to_train(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", "training.stage=a", config=REASON)
    config = load_config(REASON, ["training.stage=b"])
    assert end_of_run(config, run_dir=run, resume="auto") is None
    run = finished(tmp_path / "b", config=REASON, stage="b")
    said = end_of_run(load_config(REASON), run_dir=run, resume="auto")
    assert said is not None and "--set stage_b.training.policy_steps=N" in said
    longer = load_config(REASON, ["stage_b.training.policy_steps=9999"])
    assert end_of_run(longer, run_dir=run, resume="auto") is None
