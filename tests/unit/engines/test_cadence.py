"""The interval of saves that measured times ask for, within the user's range."""

from __future__ import annotations

import pytest

from cdrmix.config.load import load_config
from cdrmix.engines.cadence import Cadence, SaveTimes
from cdrmix.errors import ConfigError
from tests.small_run import CONFIG

STEPS = ("checkpoint.every_steps=auto", "checkpoint.auto_range=[10, 1000]")
MINUTES = (
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=auto",
    "checkpoint.auto_range=[1, 60]",
)


def cadence(*settings: str, world_size: int = 1) -> Cadence:
    return Cadence(load_config(CONFIG, settings), world_size=world_size)


def due(made: Cadence, until: int) -> list[int]:
    steps = []
    for step in range(1, until + 1):
        if made.is_due(step):
            steps.append(step)
            made.saved(step)
    return steps


def test_saves_take_one_percent_of_the_time_where_no_rate_of_failures_is_given() -> None:
    made = cadence(*STEPS)
    assert due(made, 25) == [10, 20]
    told = made.adapt(SaveTimes(0.5, 0.0), step_seconds=1.0)
    assert told is not None
    assert told.startswith("a save every 50 steps instead of 10 steps: training waits 500 ms")
    assert due(made, 150) == [70, 120]
    # As long as it is written, though training hardly waits for it.
    slow = cadence(*STEPS)
    slow.adapt(SaveTimes(0.01, 300.0), step_seconds=1.0)
    assert slow.setting == {"checkpoint.every_steps": 300}


def test_at_a_rate_of_failures_the_interval_is_youngs() -> None:
    made = cadence(*MINUTES, "failures.per_device_hour=0.001", world_size=200)
    # A failure in 5 hours: sqrt(2 * 4 s * 18,000 s) = 379 s.
    told = made.adapt(SaveTimes(4.0, 4.0), step_seconds=1.0)
    assert made.minutes == pytest.approx(379 / 60, rel=0.02)
    assert told is not None and "with a failure every 5 hours this costs least" in told


def test_the_mean_of_the_last_saves_counts_and_small_differences_do_not() -> None:
    made = cadence(*STEPS)
    made.adapt(SaveTimes(2.0, 0.0), step_seconds=1.0)
    assert made.adapt(SaveTimes(2.2, 0.0), step_seconds=1.0) is None
    # No save since: the steps alone are longer.
    assert made.adapt(SaveTimes(0.0, 0.0), step_seconds=2.0) is not None
    for _ in range(4):
        made.adapt(SaveTimes(1.0, 0.0), step_seconds=1.0)
    assert made.setting == {"checkpoint.every_steps": 100}


@pytest.mark.parametrize(
    ("stall", "chosen"), [(1e-4, 10), (1e3, 1000)], ids=["lower bound", "upper bound"]
)
def test_the_bounds_hold(stall: float, chosen: int) -> None:
    made = cadence(*STEPS)
    made.adapt(SaveTimes(0.5, 0.0), step_seconds=1.0)
    for _ in range(4):
        made.adapt(SaveTimes(stall, 0.0), step_seconds=1.0)
    assert made.setting == {"checkpoint.every_steps": chosen}
    assert made.adapt(SaveTimes(stall, 0.0), step_seconds=1.0) is None


def test_what_is_given_stays() -> None:
    made = cadence("checkpoint.every_steps=7")
    assert made.adapt(SaveTimes(9.0, 9.0), step_seconds=1.0) is None
    assert due(made, 20) == [7, 14]
    assert made.state_dict() == {}
    assert due(cadence("checkpoint.every_steps=null"), 20) == []
    assert cadence("checkpoint.every_minutes=2.5").minutes == 2.5


def test_a_checkpoint_of_another_range_or_key_is_gone_on_from_within_this_one() -> None:
    before = cadence(*STEPS)
    before.adapt(SaveTimes(5.0, 0.0), step_seconds=1.0)
    state = before.state_dict()
    same, other = cadence(*STEPS), cadence(*MINUTES)
    narrower = cadence(STEPS[0], "checkpoint.auto_range=[1, 20]")
    for made in (same, narrower, other):
        made.load_state_dict(state, step=33)
    assert due(same, 1100) == [533, 1033]
    assert narrower.setting == {"checkpoint.every_steps": 20}
    assert other.minutes == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["every_steps=auto"], "chooses within auto_range"),
        (["every_steps=auto", "auto_range=[3]"], "chooses within auto_range"),
        (["every_steps=auto", "auto_range=[30, 3]"], "chooses within auto_range"),
        (["every_steps=null", "every_minutes=auto", "auto_range=[0, 3]"], "above 0"),
        (["every_steps=auto", "auto_range=[1.5, 3]"], "whole steps"),
        (["every_minutes=auto", "auto_range=[1, 3]"], "Give every_steps = null"),
        (["auto_range=[1, 3]"], "bounds what a run chooses"),
        (["every_steps=often"], "allowed is a whole number from 1 or auto, or null"),
    ],
)
def test_a_range_that_cannot_be_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        cadence(*(f"checkpoint.{setting}" for setting in settings))
