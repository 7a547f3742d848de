"""Tiers of a host: what is written there, by whom, and what dead runs leave."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cdrmix.checkpoint import folder, host_saver
from cdrmix.checkpoint.files import damage
from cdrmix.checkpoint.host_saver import HostSaver
from cdrmix.checkpoint.host_tiers import HostTier, host_tiers
from cdrmix.checkpoint.tiers import TieredSaver
from cdrmix.cluster.tier_leftovers import left_tiers, remove_left_tiers
from cdrmix.config.checkpoint import CheckpointConfig
from tests.checkpoints import whole


def tiers_in(place: Path, keep: int = 1) -> tuple[HostTier, ...]:
    memory = {"folder": str(place / "memory"), "every_steps": 1, "keep": keep}
    config = CheckpointConfig.model_validate({"tiers": {"memory": memory}})
    return host_tiers(config, place / "run")


def saver_in(place: Path, keep: int = 1, *, background: bool = False) -> TieredSaver:
    hosts = HostSaver(tiers_in(place, keep), place / "run", background=background)
    roots = [place / "run" / "checkpoints"]
    return TieredSaver(roots, hosts=hosts, uploads=None, keep=2, background=background)


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


def test_saves_to_memory_go_on_while_the_run_directory_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_in(tmp_path, background=True)
    is_slow = threading.Event()
    original = folder.write_share

    def write_share(temporary: Path, *args: Any) -> None:
        assert temporary.parent.name != "checkpoints" or is_slow.wait(60)
        original(temporary, *args)

    monkeypatch.setattr(folder, "write_share", write_share)
    (tier,) = tiers_in(tmp_path)
    weights = torch.full((1000,), 1.0)
    for step, begin in ((1, saver.start), (2, saver.start_in_host_tiers)):
        begin(step, [whole("w", weights.fill_(step))], state={}, rank_state={})
        saver.wait_for_copy()
        weights.fill_(-1.0)  # training goes on
        while not (tier.folder / str(step) / "manifest.json").exists():
            saver.advance(saver.votes())
        while saver.votes()[2]:  # the tier's save is at work
            saver.advance(saver.votes())
        saver.advance(saver.votes())
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]"))
    saver.start_in_host_tiers(3, [whole("w", weights)], state={}, rank_state={})
    saver.start_in_host_tiers(4, [whole("w", weights)], state={}, rank_state={})
    assert saver.tiers()["left_out"] == 1, "the save of step 3 is not waited for"
    is_slow.set()
    saver.wait()
    saver.close()
    values = {
        path.name: load_file(path / "rank-00000.safetensors")["param/w"].unique().tolist()
        for path in (tmp_path / "run/checkpoints/1", tier.folder / "3")
    }
    assert values == {"1": [1.0], "3": [-1.0]}


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
