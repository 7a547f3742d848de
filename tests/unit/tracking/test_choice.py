"""Trackers that are refused before a run begins, and those of a run that names none."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from cdrmix.config.load import kept_values, load_config, snapshot_yaml
from cdrmix.config.tracking import TrackerConfig
from cdrmix.errors import ConfigError
from cdrmix.runtime.mounts import file_system, is_between_hosts, is_in_memory
from cdrmix.tracking import choice
from cdrmix.tracking.choice import check_trackers, trackers_of
from cdrmix.tracking.tracker import timed_lines
from tests.small_run import CONFIG

Mount = namedtuple("Mount", "mountpoint fstype")


def trackers(text: str) -> list[TrackerConfig]:
    return list(trackers_of(load_config(CONFIG, [f"monitoring.trackers={text}"])))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tensorbord]", "'tensorbord' is no tracker. Did you mean tensorboard?"),
        ("[{use: wandb, options: {mode: onlin}}]", "options.mode: Input should be 'offline' or"),
        ("[{use: wandb, options: {api_key: x}}]", "(wandb knows: mode, project, entity)"),
        ("[{use: mlflow, options: {uri: 'file:///x'}}]", "is no server: give http(s)://"),
        ("[{use: mlflow, options: {uri: 'http://a:b@c'}}]", "do not belong here. Set MLFLOW_TRAC"),
        ("[mlflow, wandb, mlflow]", "mlflow: named twice. Name each tracker once"),
        ("[{usage: wandb}]", "monitoring.trackers.0.usage: unknown key. Did you mean 'use'?"),
        ("[3]", "monitoring.trackers.0: given 3, allowed is a section with the keys use, options"),
    ],
)
def test_a_wrong_tracker_is_told_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trackers(text)
    assert message in str(caught.value)


def test_names_and_sections_mean_the_same_and_go_on_from_a_snapshot(tmp_path: Path) -> None:
    named = trackers("[tensorboard, {use: wandb, options: {project: x}}, 'tests.trackers:Blocks']")
    assert named[0] == TrackerConfig(use="tensorboard")
    config = load_config(CONFIG, ["monitoring.trackers=[tensorboard, mlflow]"])
    (tmp_path / "kept.yaml").write_text(snapshot_yaml(config))
    assert load_config(tmp_path / "kept.yaml").monitoring == config.monitoring


def test_the_default_is_tensorboard_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trackers("null") == [TrackerConfig(use="tensorboard")]
    assert trackers("[]") == []
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert trackers("null") == []


def test_a_package_that_is_missing_is_told_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(trackers("[tensorboard, wandb, mlflow]"), tmp_path)
    there = {"mlflow", "tensorboard"}
    monkeypatch.setattr(choice, "find_spec", lambda name: name in there or None)
    with pytest.raises(ConfigError) as caught:
        check_trackers(trackers("[tensorboard, wandb, mlflow]"), tmp_path)
    first, second = str(caught.value).splitlines()
    assert "wandb: needs the package wandb. Try pip install 'cdrmix[wandb]'" in first
    assert "mlflow: needs the package sqlalchemy, alembic. Try pip install 'cdrmix[mlfl" in second


def test_online_needs_a_key_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = trackers("[{use: wandb, options: {mode: online}}]")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs the variable WANDB_API_KEY"):
        check_trackers(online, tmp_path)
    check_trackers(online, tmp_path, environment={"WANDB_API_KEY": "key"})
    monkeypatch.setenv("WANDB_API_KEY", "key")
    check_trackers(online, tmp_path)


def test_sqlite_is_refused_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [Mount("/", "ext4"), Mount("/scratch", "xfs"), Mount("/home", "fuse.sshfs")]
    mounts.append(Mount(str(tmp_path), "nfs4"))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert file_system(Path("/home/me/run")) == "sshfs"
    assert file_system(Path("/scratch")) == "xfs"
    assert file_system(Path("/scratches")) == "ext4"
    assert is_between_hosts(Path("/home/me")) and not is_between_hosts(Path("/scratch"))
    assert not is_in_memory(Path("/scratch"))
    with pytest.raises(ConfigError, match=r"is on nfs4, whose locks SQLite cannot\s+rely on"):
        check_trackers(trackers("[mlflow]"), tmp_path / "run")
    check_trackers(trackers("[tensorboard, wandb]"), tmp_path)
    check_trackers(trackers("[{use: mlflow, options: {uri: 'https://host'}}]"), tmp_path)


def test_secrets_among_options_are_kept_nowhere() -> None:
    text = "{use: 'tests.trackers:Service', options: {api_key: planted, project: x, inner: {"
    text += "authToken: planted, max_tokens: 5, url: 'http://me:planted@host/x'}}}"
    config = load_config(CONFIG, [f"monitoring.trackers=[{text}]", f"hooks=[{text}]"])
    assert "planted" not in str(kept_values(config))
    assert "planted" in str(config), "the run itself has it"
    assert kept_values(config)["hooks"][0]["options"]["inner"]["max_tokens"] == 5


def test_times_of_lines_are_counted_back_from_the_last(tmp_path: Path) -> None:
    lines = ['{"step": 1}', '{"step": 5, "step_seconds": 2}', '{"step": 6, "step_seconds": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "lo']))
    last = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert [line.time - last for line in timed_lines(tmp_path / "metrics.jsonl")] == [-11, -3, 0]
