"""Ends of starts after which `cdrmix launch` starts a run again, and after which it does not."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cdrmix.cluster import launch as module
from cdrmix.cluster.handover import launch_environment, users_files
from cdrmix.cluster.launch import launch, make_job
from cdrmix.cluster.messages import Outcome
from cdrmix.cluster.start_records import add_start_record
from cdrmix.cluster.starts import read_starts
from cdrmix.config.load import load_config, snapshot_yaml
from cdrmix.config.redaction import redacted, redacted_text
from cdrmix.errors import ConfigError
from tests.conftest import TINY

# Exit code, last step and newest checkpoint of a start.
End = tuple[int, int, int]


def ended(
    ends: list[End], run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 1
) -> tuple[int, int]:
    """Exit code of the command after starts that end so, and how many there were."""
    remaining = list(ends)

    def start_once(*_: Any) -> Outcome:
        code, step, saved = remaining.pop(0)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints" / "latest").write_text(f"{saved}\n")
        return Outcome(code, "as the test says", step)

    monkeypatch.setattr(module, "_start_once", start_once)
    monkeypatch.setattr(module, "_FIRST_WAIT_SECONDS", 0.0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    job = make_job(
        config=TINY,
        overrides=(),
        hostfile=None,
        ranks_per_host=1,
        max_restarts=max_restarts,
        profile=None,
        run_dir=run_dir,
        resume="auto",
    )
    try:
        return launch(job), len(ends) - len(remaining)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [
        ([(2, 0, 0), (0, 9, 9)], 2, 1),  # the user's error at first
        ([(3, 0, 0), (0, 9, 9)], 3, 1),
        ([(69, 0, 0), (0, 9, 9)], 0, 2),  # passing
        ([(69, 0, 0), (69, 0, 0), (0, 9, 9)], 69, 2),  # too often
        ([(1, 5, 4), (2, 0, 4), (0, 9, 9)], 2, 2),  # one restart: the second start was the last
        ([(1, 5, 4), (1, 7, 6), (2, 0, 6), (0, 9, 9)], 2, 3),
        ([(1, 5, 4), (1, 7, 6), (1, 9, 8), (0, 9, 9)], 0, 4),  # each gets further
        ([(1, 5, 0), (1, 5, 0), (0, 9, 9)], 1, 2),  # none does
        ([(75, 5, 5), (0, 9, 9)], 75, 1),
    ],
)
def test_restarts_count_what_gets_no_further(
    ends: list[End], code: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(ends, tmp_path / "run", monkeypatch) == (code, starts)


def test_an_error_before_a_step_is_lost_after_a_good_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [(1, 5, 4), (2, 0, 4), (3, 4, 4), (0, 9, 9)]
    assert ended(ends, tmp_path / "a", monkeypatch, max_restarts=3) == (0, 4)
    ends = [(1, 5, 4), (2, 6, 4), (0, 9, 9)]  # in training, such as the stop of health
    assert ended(ends, tmp_path / "b", monkeypatch, max_restarts=3) == (2, 2)


def test_a_snapshot_holds_names_and_the_run_gets_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["launch.environment.TOKEN=hunter2", "data.path=https://me:hun@ter2@host/set"]
    config = load_config(TINY, settings)
    snapshot = tmp_path / "config_snapshot.yaml"
    snapshot.write_text(snapshot_yaml(config))
    assert "hunter2" not in snapshot.read_text()
    assert "ter2" not in snapshot.read_text()
    again = load_config(snapshot)
    assert again.data.path == "https://<redacted>@host/set"
    assert list(again.launch.environment) == ["TOKEN"]
    with pytest.raises(ConfigError, match=r"launch\.environment\.TOKEN = <redacted>: a snapshot"):
        launch_environment(again)
    monkeypatch.setenv("TOKEN", "swordfish")
    assert launch_environment(again) == {"TOKEN": "swordfish"}
    assert redacted(config.model_dump()) == again.model_dump()
    assert redacted_text("no://secret/a@b and s3://k:s@b/c") == (
        "no://secret/a@b and s3://<redacted>@b/c"
    )


def test_only_the_users_own_variables_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, checkout = tmp_path / "home", tmp_path / "checkout"
    for folder in (home, checkout):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text("LD_PRELOAD=/evil.so\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(checkout)
    assert users_files() == [home / ".deepspeed_env"]
    (home / ".deepspeed_env").chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        users_files()


def test_hostfiles_name_nothing_but_hosts(tmp_path: Path) -> None:
    from cdrmix.cluster.hosts import read_hostfile

    hostile = (
        "-oProxyCommand=touch${IFS}x slots=1",
        "--help slots=1",
        "a;touch slots=1",
        "$(touch) slots=1",
        "a,b slots=1",
        "me@host slots=1",
        "^file slots=1",
        "a\x00b slots=1",
        "../a slots=1",
        "a slots=99999999999999999999",
        f"{'a' * 300} slots=1",
    )
    path = tmp_path / "hosts"
    path.write_text("\n".join(hostile))
    with pytest.raises(ConfigError) as error:
        read_hostfile(path)
    assert str(error.value).count("is not NAME slots=N") == len(hostile)
    path.write_bytes(b"\xff slots=1\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hostfile(path)
    path.write_text("node-1.cluster_a slots=8\n10.0.0.7 slots=1\n")
    assert [host.name for host in read_hostfile(path)] == ["node-1.cluster_a", "10.0.0.7"]


@pytest.mark.parametrize("character", ["\n", "\r", "\u2028", "\x1b"])
def test_a_name_is_one_line(character: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        load_config(TINY, [f'name="a\\u{ord(character):04x}touch x"'])


def test_a_start_is_noted_with_the_step_that_its_own_record_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    add_start_record(run_dir, {"from_step": 7})  # of an earlier start

    def start_once(*_: Any) -> Outcome:
        add_start_record(run_dir, {"from_step": 60})  # of --resume PATH, with no step to take
        return Outcome(0, "", 0)

    monkeypatch.setattr(module, "_start_once", start_once)
    monkeypatch.setattr(module, "_Signals", lambda: None)
    job = make_job(
        config=TINY,
        overrides=(),
        hostfile=None,
        ranks_per_host=1,
        max_restarts=0,
        profile=None,
        run_dir=run_dir,
        resume=str(tmp_path / "other"),
    )
    assert launch(job) == 0
    (start,) = read_starts(run_dir)
    assert (start.resumed_at, start.step) == (60, 60)


def test_a_host_out_of_reach_is_told_before_the_ranks_are_said_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hostfile = tmp_path / "my hosts"
    hostfile.write_text("node-1 slots=1\nnode-2 slots=1\n")

    def run_on(name: str, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 255 * (name == "node-2"), "", "")

    monkeypatch.setattr(module, "run_on", run_on)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module, "_Signals", lambda: None)
    job = make_job(
        config=TINY,
        overrides=(),
        hostfile=hostfile,
        ranks_per_host=None,
        max_restarts=0,
        profile=None,
        run_dir=tmp_path / "run",
        resume="never",
    )
    with (
        caplog.at_level("INFO"),
        pytest.raises(ConfigError, match="cannot reach node-2 by ssh") as error,
    ):
        launch(job)
    assert f"`cdrmix doctor --hostfile '{hostfile}'` tells more" in str(error.value)
    assert "starting the ranks" not in caplog.text


def test_a_launch_goes_on_in_the_run_directory_that_it_is_to_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config_snapshot.yaml").write_text(snapshot_yaml(load_config(TINY)))
    for run_dir, expected in ((None, run), (tmp_path / "new", tmp_path / "new")):
        job = make_job(
            config=None,
            overrides=(),
            hostfile=None,
            ranks_per_host=1,
            max_restarts=0,
            profile=None,
            run_dir=run_dir,
            resume=str(run),
        )
        assert job.run_dir == expected
