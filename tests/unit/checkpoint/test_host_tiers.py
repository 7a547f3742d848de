"""Tiers of a host: what is written there, by whom, and what dead runs leave."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import torch

from cdrmix.checkpoint import host_saver
from cdrmix.checkpoint.files import damage
from cdrmix.checkpoint.host_saver import HostSaver
from cdrmix.checkpoint.host_tiers import HostTier, host_tiers
from cdrmix.checkpoint.tiers import TieredSaver
from cdrmix.cluster.tier_leftovers import left_tiers, remove_left_tiers
from cdrmix.config.schema import CheckpointConfig
from tests.checkpoints import whole


def tiers_in(place: Path, keep: int = 1) -> tuple[HostTier, ...]:
    memory = {"folder": str(place / "memory"), "every_steps": 1, "keep": keep}
    config = CheckpointConfig.model_validate({"tiers": {"memory": memory}})
    return host_tiers(config, place / "run")


def saver_in(place: Path, keep: int = 1) -> TieredSaver:
    hosts = HostSaver(tiers_in(place, keep), place / "run", background=False)
    roots = [place / "run" / "checkpoints"]
    return TieredSaver(roots, hosts=hosts, uploads=None, keep=2, background=False)


def save(saver: TieredSaver, step: int, *, on_hosts: bool = False) -> None:
    held = [whole("w", torch.full((1000,), float(step)))]
    begin = saver.start_in_host_tiers if on_hosts else saver.start
    begin(step, held, state={}, rank_state={})
    saver.wait()


def test_a_hosts_tier_has_its_own_saves_and_those_of_the_run_directory(tmp_path: Path) -> None:
    saver = saver_in(tmp_path, keep=2)
    assert saver.host_tiers_due(1)
    save(saver, 1, on_hosts=True)
    save(saver, 2)
    assert not saver.host_tiers_due(2), "the save of the run directory is one of the tier, too"
    save(saver, 3, on_hosts=True)
    (tier,) = tiers_in(tmp_path)
    names = sorted(path.name for path in tier.folder.iterdir() if path.name.isdigit())
    assert names == ["2", "3"]
    assert damage(tier.folder / "3") == []
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("[0-9]*")] == ["2"]
    manifests = [tier.folder / "2", tmp_path / "run/checkpoints/2"]
    assert len({(each / "manifest.json").read_text() for each in manifests}) == 1
    saver.end()
    assert not tier.folder.exists()


def test_a_memory_without_room_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_in(tmp_path)
    monkeypatch.setattr(host_saver, "available_memory_gib", lambda: 4000 / 2**30)
    save(saver, 1)
    assert "checkpoint.tiers.memory: has no checkpoint of step 1: rank 0: " in caplog.text
    assert "no room: 0 MB to write, 0 MB free" in caplog.text
    assert saver.saved_step == 1
    monkeypatch.setattr(host_saver, "available_memory_gib", lambda: 5000 / 2**30)
    save(saver, 2)
    assert saver.tiers()["memory"] == {"steps": [2], "failed": 1}


def test_a_folder_that_is_not_ours_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tier,) = tiers_in(tmp_path)
    tier.folder.parent.mkdir()
    (tmp_path / "trap").mkdir()
    tier.folder.symlink_to(tmp_path / "trap")
    saver = saver_in(tmp_path)
    save(saver, 1)
    saver.end()
    assert "is not a folder of this user" in caplog.text
    assert list((tmp_path / "trap").iterdir()) == []
    assert saver.saved_step == 1


def test_dead_runs_are_told_and_only_what_no_run_needs_is_removed(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    save(saver, 1)
    run, memory = tmp_path / "run", tmp_path / "memory"
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert list(left_tiers(memory)) == []
    (left,) = left_tiers(memory)
    assert left.run == run
    assert "--resume auto may go on from it" in str(left)
    assert remove_left_tiers(memory) == []
    (run / "tiers.json").write_text(json.dumps({"memory": str(left.path)}))
    assert list(left_tiers(tmp_path / "nothing", tmp_path)) == [left]
    (run / "finished.json").write_text("{}")
    assert len(remove_left_tiers(memory)) == 1
    assert not left.path.exists()
