from __future__ import annotations

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.errors import ConfigError, PlanError
from cdrmix.sessions.preflight import _check_profile

TINY = shipped("model_configs") / "cdrmix-core-tiny.yaml"


def test_there_is_no_profile_unless_asked_for() -> None:
    assert load_config(TINY).profile is None
    profile = load_config(TINY, ["profile={steps: [10, 13]}"]).profile
    assert profile is not None
    assert (profile.steps, profile.ranks) == ((10, 13), (0,))
    assert (profile.trace, profile.memory, profile.flops) == (True, True, True)
    assert (profile.shapes, profile.stacks) == (False, False)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{}", "steps"),
        ("{steps: [13, 10]}", "is no window: give the first step, from 1 on"),
        ("{steps: [0, 3]}", "is no window"),
        ("{steps: [3]}", "is no window"),
        ("{steps: [1, 2, 3]}", "is no window"),
        ("{steps: [1, 2], ranks: [0, 0]}", "give each once, counted from 0"),
        ("{steps: [1, 2], ranks: [-1]}", "give each once, counted from 0"),
        ("{steps: [1, 2], stack: true}", "Did you mean 'stacks'?"),
    ],
)
def test_a_window_that_is_none_is_refused(value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        load_config(TINY, [f"profile={value}"])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            "{steps: [1, 2], ranks: [1, 2, 5]}",
            "this run has 2 ranks, counted from 0. Leave out 2, 5",
        ),
        ("{steps: [99999, 99999]}", "the run ends after step"),
    ],
)
def test_what_the_run_does_not_have_is_refused_before_it_starts(value: str, told: str) -> None:
    config = load_config(TINY, [f"profile={value}", "training.stage=a"])
    with pytest.raises(PlanError, match=told):
        _check_profile(config, world_size=2)
    _check_profile(load_config(TINY, ["profile={steps: [1, 2], ranks: [1]}"]), world_size=2)
