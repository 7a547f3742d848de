"""Reading that adapts: it keeps up with a slow disk, and gives memory back when it is short."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cdrmix.config.resources import ResourcesConfig
from cdrmix.data import remote
from cdrmix.data.loader import Loader
from cdrmix.data.read_ahead import ReadLimits
from cdrmix.data.remote import CacheSize, remember
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines import reading as reading_module
from cdrmix.engines.reading import Reading, read_resources
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
