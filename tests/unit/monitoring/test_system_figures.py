from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdrmix.hooks import RunView
from cdrmix.monitoring import system_figures
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.monitoring.system_figures import SystemFigures


def view(folder: Path, *, step: int = 0, rank: int = 0) -> RunView:
    config: Any = None
    return RunView(folder, config, "a", rank, 2, num_steps=9, step=step)


def test_a_line_of_the_host_is_written_for_each_of_the_metrics(tmp_path: Path) -> None:
    system = SystemFigures(local_rank=0)
    system.on_start(view(tmp_path))
    (tmp_path / "large").write_bytes(b"x" * 2**20)
    for step in (2, 4):
        assert system.on_log(step, {"loss": 1.0}) is None
    system.on_end("done")
    lines = read_metrics(tmp_path / "system.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    assert {
        *("system/cpu_share", "system/load", "system/memory_available_bytes"),
        *("system/network_received_bytes", "system/network_sent_bytes"),
    } <= lines[0].keys()
    assert 0 <= lines[1]["system/cpu_share"] <= 1
    assert lines[1]["system/memory_available_bytes"] > 2**20
    assert min(lines[1].values()) >= 0
    assert deterministic_part(lines[0]) == {"step": 2}


def test_counters_are_those_since_the_line_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([1_000, 1_500, 1_700])
    name = "system/disk_read_bytes"
    monkeypatch.setattr(system_figures, "_counters", lambda: {name: next(counts)})
    system = SystemFigures(local_rank=0)
    system.on_start(view(tmp_path))
    for step in (1, 2):
        system.on_log(step, {})
    system.on_end("done")
    assert [line[name] for line in read_metrics(tmp_path / "system.jsonl")] == [500, 200]


def test_a_start_and_a_rewind_cut_off_later_lines(tmp_path: Path) -> None:
    for first, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        system = SystemFigures(local_rank=0)
        system.on_start(view(tmp_path, step=first))
        for step in steps:
            system.on_log(step, {})
        if first:
            system.on_rewind(1)
            system.on_log(2, {})
        system.on_end("done")
    assert [line["step"] for line in read_metrics(tmp_path / "system.jsonl")] == [1, 2]


def test_the_first_rank_of_each_host_alone_writes(tmp_path: Path) -> None:
    for rank, local_rank in ((0, 0), (1, 1), (8, 0)):
        system = SystemFigures(local_rank)
        system.on_start(view(tmp_path, rank=rank))
        system.on_log(1, {})
        system.on_error(OSError())
    assert {path.name for path in tmp_path.iterdir()} == {"system.jsonl", "system-rank8.jsonl"}
