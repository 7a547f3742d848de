"""Micro batches that were found before: taken for what they were found for, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.load import load_config
from cdrmix.engines import found_micro_batch
from cdrmix.engines.found_micro_batch import Found, key_of, read, write
from cdrmix.planning.cluster import processes
from cdrmix.planning.profile import choose
from tests.small_run import CONFIG

FOUND = Found.now(
    4, used_bytes=900, share=0.9, tried={1: 300, 4: 900}, limit_bytes=1_000, seconds=2.5
)


def key(*settings: str) -> dict[str, Any]:
    config = load_config(CONFIG, ["training.micro_batch_size=auto", *settings])
    return key_of(config, choose(config, processes(2)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(found_micro_batch, "_FOLDER", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_found_is_taken_by_the_run_itself_and_by_others(
    cache: Path, tmp_path: Path
) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    assert read(key(), here) is None
    write(key(), FOUND, here)
    assert read(key(), here) == read(key(), other) == FOUND
    for path in cache.iterdir():
        path.unlink()
    assert read(key(), here) == FOUND, "the run directory goes with the run"
    assert read(key(), other) is None


@pytest.mark.parametrize(
    "setting",
    [
        "training.sequence_length=128",
        "training.precision=bf16",
        "model.hidden_size=256",
        "training.global_batch_size=16",
        "resources.memory_share=0.5",
        "training.ema_decay=0.9",
        "optimizer.kind=muon",
        "data.segment_documents=true",
        "parallel.pipeline=2",
    ],
)
def test_a_run_that_takes_other_memory_has_another_key(setting: str) -> None:
    assert key(setting) != key()
    assert key("training.learning_rate=0.002") == key()
    assert key("training.seed=7") == key()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda text: text[:40], "passed over"),
        (lambda text: "[]", "not of this model"),
        (lambda text: text.replace('"micro_batch_size": 4', '"micro_batch_size": "4"'), "not of"),
        (lambda text: text.replace('"micro_batch_size": 4', '"micro_batch_size": 0'), "not of"),
        (lambda text: text.replace('"precision": "fp32"', '"precision": "bf16"'), "not of this"),
    ],
    ids=["cut", "no entry", "text", "zero", "foreign"],
)
def test_an_entry_that_is_damaged_or_foreign_is_passed_over_with_a_line(
    spoil: Callable[[str], str],
    told: str,
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(key(), FOUND, tmp_path)
    (tmp_path / "resources.json").unlink()
    assert read(key(), tmp_path) == FOUND
    (path,) = cache.iterdir()
    spoiled = spoil(path.read_text())
    assert spoiled != path.read_text()
    path.write_text(spoiled)
    with caplog.at_level(logging.INFO):
        assert read(key(), tmp_path) is None
    assert told in caplog.records[-1].message


def test_the_record_of_reading_stays_beside_it(cache: Path, tmp_path: Path) -> None:
    record = tmp_path / "resources.json"
    record.write_text(json.dumps({"reading": {"reader_threads": 3}}))
    write(key(), FOUND, tmp_path)
    kept = json.loads(record.read_text())
    assert kept["reading"] == {"reader_threads": 3}
    assert kept["micro_batch"]["found"]["micro_batch_size"] == 4
