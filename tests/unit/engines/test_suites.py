"""Time that suites take between steps: within their share, first come first, and told."""

from __future__ import annotations

import random

import pytest

from cdrmix.engines.suites import Budget


def course(budget: Budget, seconds: dict[str, float], *, steps: int, every: int) -> dict[str, int]:
    """Runs of each suite in steps of a second, with suites that take about so many seconds."""
    draw = random.Random(1)
    elapsed = 0.0
    runs = dict.fromkeys(seconds, 0)
    for step in range(1, steps + 1):
        elapsed += 1.0
        if step % every == 0:
            budget.add(seconds)
        if budget.queue and step % 10 == 0:  # a logged step
            for name in budget.fitting(elapsed):
                takes = seconds[name] * draw.uniform(0.8, 1.2)
                budget.ran(name, takes)
                elapsed += takes
                runs[name] += 1
    assert budget.spent / elapsed == pytest.approx(budget.share, rel=0.1)
    return runs


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_suites_take_their_share_of_the_time(share: float) -> None:
    # Due every ten steps, a suite of 20 seconds would take two thirds of it.
    course(Budget(share), {"code": 20.0}, steps=5_000, every=10)


def test_a_long_suite_runs_among_short_ones() -> None:
    runs = course(Budget(0.1), {"routing": 2.0, "code": 60.0}, steps=20_000, every=10)
    assert runs["code"] > 20
    assert abs(runs["routing"] - runs["code"]) <= 1


def test_a_suite_within_its_share_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(0.1)
    for step in range(100, 1_000, 100):
        budget.add(["routing"])
        assert budget.fitting(float(step)) == ["routing"]
        budget.ran("routing", 5.0)
    assert "waits" not in caplog.text


def test_a_wait_is_told_once_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    budget = Budget(0.1)
    budget.add(["code"])
    assert budget.fitting(100.0) == ["code"], "its time is not known yet"
    budget.ran("code", 30.0)
    for elapsed in (200.0, 300.0, 569.0):
        budget.add(["code"])
        assert budget.fitting(elapsed) == []
    assert caplog.messages == [
        "suite code is due and waits: suites have taken 30.0 s of 200.0 s, it took 30.0 s the last "
        "time, and evaluation.suites_share is 0.1; it fits at 570 s"
    ]
    assert budget.fitting(570.0) == ["code"]
    budget.ran("code", 30.0)
    budget.add(["code"])
    assert budget.fitting(600.0) == []
    assert len(caplog.messages) == 2, "another wait"
