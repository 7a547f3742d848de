"""Reading that adapts: it keeps up with a slow disk, and gives memory back when it is short."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from cdrmix import runtime
from cdrmix.config.resources import ResourcesConfig
from cdrmix.data import remote
from cdrmix.data.loader import Loader
from cdrmix.data.read_ahead import ReadLimits
from cdrmix.data.remote import CacheSize, remember
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines import reading as reading_module
from cdrmix.engines.reading import Reading, read_resources
from cdrmix.runtime.host_use import NetworkUse
from tests.unit.data.test_loader import make_loader
from tests.unit.data.token_folder import write_counting_folder
from tools.benchmark.reading import GIVEN, READ_SECONDS, seconds_a_step, write_tokens


def test_steps_keep_up_with_a_slow_disk_and_without_adapting_do_not(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    adapted, _ = seconds_a_step(tmp_path, {}, read_seconds=READ_SECONDS, steps=50)
    control, at_end = seconds_a_step(tmp_path, GIVEN, read_seconds=READ_SECONDS, steps=12)
    assert adapted < 0.7 * control  # 0.36 on a quiet machine, most of it before the change
    assert at_end == "2 batches, 1 threads"
    record = read_resources(tmp_path)
    assert record["reading"]["reader_threads"] > 1
    assert "steps waited for data" in record["changes"][0]["change"]


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    folder = write_counting_folder(tmp_path / "tokens", 1003 * 4 + 1, max_tokens=600)
    return make_loader(TokenDataset(folder, "train", 4), prefetch=8, readers=4)


def test_memory_that_runs_short_is_given_back_and_told(
    loader: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reading_module, "_MEMORY_SECONDS", 0.0)
    left = [2.0**33]
    reading = Reading(loader, ResourcesConfig(), memory_left=lambda: left[0])
    plain = make_loader(loader._dataset)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for step in range(9):
            left[0] = 2.0**33 if step < 4 else -(2.0**30)
            batch = reading.next_batch(step=step, folder=tmp_path)
            assert (batch["input_ids"] == plain.next()["input_ids"]).all()
            if step < 4:
                assert loader.limits == ReadLimits(8, 4), "a control: nothing is given back yet"
    loader.close()
    assert loader.limits == ReadLimits(1, 1)
    first = "resources: behind step 4: reading ahead: 4 batches by 4 threads instead of 8 batches "
    assert first + "by 4 threads: the host's memory is filled by 1.0 GiB more than the 90 %" in (
        caplog.records[0].message
    )
    assert [change["step"] for change in read_resources(tmp_path)["changes"]] == [4, 5, 6]


def test_a_cache_gives_room_back_where_its_disk_is_nearly_full(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = loader.folder
    files = sorted(folder.glob("*.bin"))
    sizes = [path.stat().st_size for path in files]
    remember(folder, "file:///nowhere", max_bytes=10**6, least_bytes=sizes[0])
    size = remote.cache_size(folder)
    assert size == CacheSize(10**6, sizes[0], 10**6)
    monkeypatch.setattr(reading_module, "_MEMORY_SECONDS", 0.0)
    total, short = 10**9, sizes[-1]
    free = [total]
    usage = type("Usage", (), {"total": total, "free": property(lambda _: free[0])})
    monkeypatch.setattr(reading_module.shutil, "disk_usage", lambda _: usage())
    monkeypatch.setattr(reading_module, "is_in_memory", lambda _: False)
    reading = Reading(loader, ResourcesConfig(), memory_left=lambda: 2.0**33)
    for step, now in enumerate((total, total, int(0.02 * total) - short, total)):
        free[0] = now
        reading.next_batch(step=step, folder=tmp_path)
        expected = sum(sizes) - short if step == 2 else 10**6
        assert size.bytes == expected
        assert len(list(folder.glob("*.bin"))) == len(files) - (step >= 2)
    loader.close()
    told = [change["change"] for change in read_resources(tmp_path)["changes"]]
    assert "the disk is short by" in told[0]
    assert "there is room again" in told[1]


def test_pinned_memory_is_given_back_while_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    released: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(runtime, "release_pinned_memory", lambda: released.append(1))
    monkeypatch.setattr(reading_module, "_MEMORY_SECONDS", 0.0)
    folder = write_counting_folder(tmp_path / "tokens", 1003 * 4 + 1, max_tokens=600)
    loader = make_loader(TokenDataset(folder, "train", 4), prefetch=1, pin=True)
    plain = make_loader(loader._dataset)  # type: ignore[arg-type]
    left = [2.0**33]
    reading = Reading(loader, ResourcesConfig(), memory_left=lambda: left[0])
    for step in range(8):
        left[0] = 2.0**33 if step < 2 else -(2.0**30)
        batch = reading.next_batch(step=step, folder=tmp_path)
        assert (batch["input_ids"] == plain.next()["input_ids"]).all()
        if step == 4:  # what was being read is read
            before = len(pinned)
    loader.close()
    assert 0 < before == len(pinned)
    assert len(released) == 6, "at each look, for what the steps have freed since"
    record = read_resources(tmp_path)
    assert record["reading"] == {"prefetch_batches": 1, "reader_threads": 1, "pinned": False}
    told = "reading ahead: 1 batch by 1 thread, not pinned instead of 1 batch by 1 thread, pinned: "
    assert record["changes"][0]["change"].startswith(told)


def test_a_full_link_is_told_where_data_comes_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(NetworkUse):
        def read(self) -> float:
            return 0.97

    folder = write_counting_folder(tmp_path / "tokens", 1003 * 4 + 1, max_tokens=600)
    read = Loader._read
    monkeypatch.setattr(Loader, "_read", lambda *a: time.sleep(0.05) or read(*a))
    for is_remote in (False, True):
        monkeypatch.setattr(reading_module, "is_between_hosts", lambda _, r=is_remote: r)
        loader = make_loader(TokenDataset(folder, "train", 4), prefetch=1)
        record = tmp_path / str(is_remote)
        record.mkdir()
        reading = Reading(loader, ResourcesConfig(), network=Full())
        for step in range(6):
            reading.next_batch(step=step, folder=record)
        loader.close()
        (change, *_) = read_resources(record)["changes"]
        assert ("its link is at 97 % of its speed" in change["change"]) == is_remote
