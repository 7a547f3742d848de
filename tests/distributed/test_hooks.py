"""Hooks of runs on real ranks: their order, what they ask for, how they fail, what they keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.small_run import arguments, overrides, start

HOOKS = "tests.noting_hooks"


def hook(name: str, *, called: str | None = None, on_error: str = "stop", **options: Any) -> dict:
    """Entry of the section `hooks`."""
    made = {"use": f"{HOOKS}:{name}", "options": options, "on_error": on_error}
    return made | ({"name": called} if called else {})


def with_hooks(*hooks: dict) -> list[str]:
    return overrides([f"hooks={json.dumps(hooks)}"])


def notes(run_dir: Path, rank: int, name: str = "noting") -> list[list[Any]]:
    lines = (run_dir / f"notes-{name}-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def noted(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run on two pipeline stages with four micro-batches, with a hook."""
    run_dir = tmp_path_factory.mktemp("hooks") / "run"
    layout = ["parallel.pipeline=2", "training.micro_batch_size=2"]
    settings = [*layout, "training.precision=fp32", "model.moe=null", "checkpoint.every_steps=4"]
    argv = arguments(small_corpus, run_dir, *overrides(settings), *with_hooks(hook("Noting")))
    assert run_ranks(start, 2, argv) == [0, 0]
    return run_dir


def test_events_come_in_order_once_a_step_on_both_stages_of_a_pipeline(noted: Path) -> None:
    both = [[note[:3] for note in notes(noted, rank)] for rank in (0, 1)]
    assert both[0] == both[1]
