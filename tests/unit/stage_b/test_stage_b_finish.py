"""The end of Stage B: the suite, a cell of the table at a time."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.parallel.topology import ALONE
from cdrmix.stage_b.long_context import LENGTH_RATIOS
from cdrmix.stage_b.stage_b_session import _reasoning
from tests.unit.reasoning.small_reader import small_config, small_lessons, small_reader


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
