"""A peak above the rate at which the base ended is warned of, unless old data are replayed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cdrmix.config.load import load_config
from cdrmix.engines.rewarming import base_learning_rate, warn_of_rewarming
from cdrmix.engines.start_point import of_checkpoint
from tests.made_run import made_run
from tests.small_run import CONFIG

# 1e-2 falls to 1e-3 from the first step to the tenth; the run took seven
BASE = (
    "training.max_steps=10",
    "training.warmup_steps=0",
    "training.schedule=linear",
    "training.learning_rate=1e-2",
    "training.min_learning_rate=1e-3",
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made_run(tmp_path / "base", *BASE)
    return tmp_path / "base" / "checkpoints" / "7"


def warned(base: Path, caplog: pytest.LogCaptureFixture, *settings: str) -> bool:
    point = of_checkpoint(base)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        start = f"training.start_from={base}"
        warn_of_rewarming(load_config(CONFIG, [start, *settings]), point)
    return "is above 0.004, at which" in caplog.text


def test_the_rate_of_the_bases_last_step_follows_from_its_own_schedule(base: Path) -> None:
    assert base_learning_rate(of_checkpoint(base)) == pytest.approx(1e-2 - 0.9e-2 * 6 / 9)
    state = json.loads((base / "state.json").read_text())
    (base / "state.json").write_text(json.dumps(state | {"stage": "b"}))
    assert base_learning_rate(of_checkpoint(base)) is None


def test_a_higher_peak_is_warned_of_unless_there_is_replay(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    high, low = "training.learning_rate=0.02", "training.learning_rate=0.002"
    assert warned(base, caplog, high)
    assert warned(base, caplog, high, "cpt.replay={source: /old, fraction: 0}")
    assert not warned(base, caplog, high, "cpt.replay={source: /old}")
    assert not warned(base, caplog, low)
