"""The archive of a run's checkpoints: whole ones alone, whatever the store does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from cdrmix.checkpoint import archive as archive_module
from cdrmix.checkpoint.archive import Archive, Uploads
from cdrmix.checkpoint.files import damage, save_number
from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.engines.archive_of_run import check_archive
from cdrmix.engines.tiers_of_run import fetched
from cdrmix.errors import ConfigError, InfrastructureError, StateError
from tests.checkpoints import save_checkpoint, whole


class Faulty(LocalFileSystem):
    """A store with a fault from the n-th file on that is opened for writing: it is silent until
    `may_answer` is set, or full."""

    protocol = "faulty"
    silent_from: int | None = None
    full_from: int | None = None
    may_answer = threading.Event()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        if "w" in mode:
            cls = type(self)
            if cls.silent_from is not None:
                cls.silent_from -= 1
                if cls.silent_from < 0:
                    assert cls.may_answer.wait(30)
            if cls.full_from is not None:
                cls.full_from -= 1
                if cls.full_from < 0:
                    raise RuntimeError("quota exceeded")  # as of a package for some store
        return super().open(path, mode, **settings)


@pytest.fixture
def faulty() -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.silent_from = Faulty.full_from = None
    Faulty.may_answer = threading.Event()
    yield Faulty
    Faulty.may_answer.set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder with the checkpoints of steps 1 to 3."""
    root = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        held = [whole("w", torch.full((8,), float(step)))]
        save_checkpoint(root, step, held, state={}, rank_state={}, keep=9)
    return root


def archive_at(url: Path | str, seconds: float = 20) -> Archive:
    return Archive(str(url), answer_seconds=seconds)


def config_with(path: Path | str) -> Config:
    setting = f"checkpoint.tiers.archive={{path: '{path}'}}"
    return load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml", [setting])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_fetched_is_what_was_archived(root: Path, tmp_path: Path, scheme: str) -> None:
    store = archive_at(f"{scheme}{tmp_path}/archive/run")
    assert store.steps() == []
    for step in (1, 3):
        store.upload(root / str(step))
    assert store.steps() == [3, 1]
    assert store.save_numbers() == {3: 3, 1: 1}
    back = tmp_path / "back" / "checkpoints"
    assert fetched(store, 3, back)
    assert damage(back / "3") == []
    assert save_number(back / "3") == 3
    assert (back / "latest").read_text() == "3\n"


def test_an_upload_that_ends_in_the_middle_is_no_checkpoint_and_is_made_good(
    root: Path, tmp_path: Path, faulty: type[Faulty]
) -> None:
    place = tmp_path / "archive"
    store = archive_at(f"faulty://{place}")
    store.upload(root / "1")
    faulty.full_from = 2
    with pytest.raises(InfrastructureError, match="step 2 cannot be archived: quota exceeded"):
        store.upload(root / "2")
    assert any((place / "2").iterdir())
    assert store.steps() == [1]
    faulty.full_from = None
    store.upload(root / "2")
    assert store.steps() == [2, 1]
    assert damage(place / "2") == []


def test_a_damaged_archive_is_told_and_leaves_nothing(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = archive_at(tmp_path / "archive")
    store.upload(root / "3")
    weights = tmp_path / "archive" / "3" / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    back = tmp_path / "back"
    assert not fetched(store, 3, back)
    assert "rank-00000.safetensors: its content has changed" in caplog.text
    assert list(back.iterdir()) == []
    with pytest.raises(StateError, match="content has changed"):  # of the source, too
        alter = root / "2" / "rank-00000.safetensors"
        alter.write_bytes(alter.read_bytes()[:-1] + b"\xff")
        store.upload(root / "2")
    assert store.steps() == [3]


def test_a_manifest_leads_nowhere_else(root: Path, tmp_path: Path) -> None:
    store = archive_at(tmp_path / "archive")
    store.upload(root / "3")
    manifest = tmp_path / "archive" / "3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("rank-00000.json", "../../../x.json"))
    assert not fetched(store, 3, tmp_path / "back")
    assert store.save_numbers() == {}


def test_a_store_that_stops_answering_is_given_up_and_later_ones_are_archived(
    root: Path,
    tmp_path: Path,
    faulty: type[Faulty],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive_module, "UPLOAD_RETRY_SECONDS", ())
    caplog.set_level(logging.INFO)
    uploads = Uploads(archive_at(f"faulty://{tmp_path}/a", 0.2), every_steps=None, keep=None)
    faulty.silent_from = 1
    uploads.offer(root / "1")
    assert uploads.pinned == {1}
    uploads.finish(seconds=20)
    assert "has no checkpoint of step 1: " in caplog.text
    assert "no answer for 0.2 s" in caplog.text
    assert uploads.pinned == frozenset()
    faulty.silent_from = None
    uploads.offer(root / "2")
    uploads.finish(seconds=20)
    uploads.close()
    assert (uploads.steps, uploads.failures) == ([2], 1)


def test_the_end_of_a_run_does_not_wait_for_a_silent_store(
    root: Path, tmp_path: Path, faulty: type[Faulty], caplog: pytest.LogCaptureFixture
) -> None:
    uploads = Uploads(archive_at(f"faulty://{tmp_path}/a"), every_steps=None, keep=None)
    faulty.silent_from = 1
    uploads.offer(root / "1")
    uploads.finish(seconds=0.1)
    uploads.close()
    assert "has no checkpoint of step 1: not done within 0 s" in caplog.text


def test_the_newest_waiting_checkpoint_is_archived_and_the_newest_stay(
    root: Path, tmp_path: Path, faulty: type[Faulty]
) -> None:
    faulty.silent_from = 0
    uploads = Uploads(archive_at(f"faulty://{tmp_path}/a"), every_steps=None, keep=1)
    for step in (1, 2, 3):
        uploads.offer(root / str(step))
    assert 3 in uploads.pinned
    assert len(uploads.pinned) <= 2
    faulty.silent_from = None
    faulty.may_answer.set()
    uploads.finish(seconds=20)
    uploads.close()
    assert uploads.steps == [3]


def test_an_interval_leaves_checkpoints_out_but_the_last(root: Path, tmp_path: Path) -> None:
    uploads = Uploads(archive_at(tmp_path / "a"), every_steps=5, keep=None)
    for step in (1, 2, 3):
        uploads.offer(root / str(step), is_last=step == 3)
        uploads.finish(seconds=20)
    uploads.close()
    assert uploads.steps == [3, 1]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://127.0.0.1/archive", "cannot be written"),
        ("nothing://bucket/archive", "Protocol not known: nothing"),
        ("{file}/archive", "cannot be written: Not a directory"),
        ("file://<redacted>@host/archive", "a snapshot holds no credentials"),
    ],
)
def test_an_archive_that_cannot_be_written_is_refused(url: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = config_with(url.format(file=tmp_path / "file"))
    with pytest.raises(ConfigError, match=why):
        check_archive(config, tmp_path / "run", resume="never")


def test_a_new_run_writes_over_no_other_of_its_name(root: Path, tmp_path: Path) -> None:
    config = config_with(tmp_path / "archive")
    check_archive(config, tmp_path / "run", resume="never")
    archive_at(tmp_path / "archive" / "run").upload(root / "3")
    check_archive(config, tmp_path / "run", resume="auto")
    with pytest.raises(StateError, match="has checkpoints of an earlier run"):
        check_archive(config, tmp_path / "elsewhere" / "run", resume="never")
