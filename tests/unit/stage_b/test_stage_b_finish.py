"""The end of Stage B: the suite, a cell of the table at a time."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.parallel.topology import ALONE
from cdrmix.reasoning.own_tasks import read_own_tasks
from cdrmix.stage_b.long_context import LENGTH_RATIOS
from cdrmix.stage_b.stage_b_session import _reasoning
from tests.unit.reasoning.own_rows import write_rows
from tests.unit.reasoning.small_reader import (
    small_config,
    small_lessons,
    small_reader,
    tokenizer,
)


def test_every_cell_of_the_suite_has_the_time_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdrmix.stage_b.long_context.LENGTH_RATIOS", LENGTH_RATIOS[:3])
    config, entered = small_config(tasks=("logic", "arithmetic")), list[str]()
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"reasoning_examples": 1})}
    )

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    heartbeat = SimpleNamespace(phase=phase)
    run: Any = SimpleNamespace(config=config, heartbeat=heartbeat, topology=ALONE)
    course: Any = SimpleNamespace(model=small_reader(config), lessons=small_lessons(config))
    rows = _reasoning(run, course)
    assert entered == ["reasoning"] * 6
    assert [row.task for row in rows] == sorted((row.task for row in rows), reverse=True)
    assert {row.task for row in rows} == {"logic", "arithmetic"}


def test_rows_of_a_users_file_have_cells_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cdrmix.stage_b.long_context.LENGTH_RATIOS", (4,))
    path = write_rows(tmp_path / "tasks.jsonl")
    config = small_config(tasks=("logic",), task_file=str(path))
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"reasoning_examples": 2})}
    )
    assert config.stage_b is not None
    own = read_own_tasks(config.stage_b.training, window_tokens=64, encode=tokenizer().encode)
    lessons = dataclasses.replace(small_lessons(config), own=own)
    heartbeat = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    run: Any = SimpleNamespace(config=config, heartbeat=heartbeat, topology=ALONE)
    course: Any = SimpleNamespace(model=small_reader(config), lessons=lessons)
    assert [(row.task, row.n) for row in _reasoning(run, course)] == [("logic", 2), ("keys", 2)]
