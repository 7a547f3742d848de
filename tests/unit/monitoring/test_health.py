"""Verdicts on the numbers of a run, and the record of what became of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cdrmix.config.faults import HealthConfig
from cdrmix.monitoring.health import Health, Verdict, spike_limit


def make(**sections: Any) -> Health:
    """Of a mixture of eight experts; losses are judged from the fourth on."""
    spikes = {"window_steps": 8, "deviations": 5.0} | sections.pop("loss_spike", {})
    config = HealthConfig(**({"warmup_steps": 0, "loss_spike": spikes} | sections))
    return Health(config, num_experts=8)


def feed(health: Health, losses: list[float], *, first: int = 1) -> list[Verdict | None]:
    return [health.loss_known(step, loss) for step, loss in enumerate(losses, first)]


USUAL = [2.0, 2.1, 1.9, 2.05, 1.95, 2.02]


def test_a_loss_far_above_the_median_is_a_spike_and_one_near_it_is_not() -> None:
    *healthy, verdict = feed(make(), [*USUAL, 2.3, 3.0])
    assert healthy == [None] * 7
    assert verdict is not None
    assert (verdict.watched, verdict.action, verdict.is_new) == ("loss_spike", "warn", True)
    assert "loss 3.0000 is above" in verdict.why


def test_a_few_losses_far_out_do_not_hide_the_next_one() -> None:
    verdicts = feed(make(), [*USUAL, 50.0, 60.0, 55.0])
    assert [verdict is None for verdict in verdicts] == [True] * 6 + [False] * 3


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    verdicts = feed(make(), [*USUAL, *[3.0] * 8, 4.5])
    assert [verdict is not None for verdict in verdicts[6:]] == [True] * 3 + [False] * 5 + [True]


def test_losses_that_hardly_differ_leave_room_of_one_percent_a_deviation() -> None:
    config = HealthConfig.model_validate({"loss_spike": {"window_steps": 8, "deviations": 5.0}})
    assert spike_limit([2.0] * 8, config) == pytest.approx(2.0 * 1.05)


def test_too_few_losses_and_the_first_steps_are_not_judged() -> None:
    assert feed(make(), [2.0, 2.0, 2.0, 9.0]) == [None] * 4
    assert feed(make(warmup_steps=7), [*USUAL, 9.0, 9.0])[-2:] != [None, None]
    assert feed(make(warmup_steps=7), [*USUAL, 9.0])[-1] is None


def test_steps_that_are_not_finite_are_skipped_until_too_many_come_in_a_row() -> None:
    health = make(non_finite={"max_consecutive": 2})
    found = [health.step_done(step, is_skipped=step != 3) for step in range(1, 7)]
    assert [verdict and verdict.action for verdict in found] == [
        *("skip", "skip", None, "skip", "skip", "stop")
    ]
    assert found[-1] is not None
    assert "3 steps in a row" in found[-1].why
    assert health.skipped_steps == 5


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_counts_once_with_its_gradients(loss: float) -> None:
    health = make()
    assert health.step_done(1, is_skipped=True) is not None
    assert health.loss_known(1, loss) is None
    verdict = health.loss_known(2, loss)  # fp16 has lowered its scale instead of telling
    assert verdict is not None
    assert verdict.why == f"loss = {loss}"
    assert health.skipped_steps == 2
    assert health.state_dict()["timeline"]["losses"] == []


def test_routing_is_judged_by_entropy_and_by_overflow() -> None:
    health = make(routing={"times": 1})
    assert health.routing_known(1, entropy_bits=2.6, overflow=0.05) is None
    collapsed = health.routing_known(2, entropy_bits=2.4, overflow=0.0)
    full = health.routing_known(3, entropy_bits=2.6, overflow=0.06)
    assert collapsed is not None
    assert full is not None
    assert collapsed.why == "entropy 2.400 bits is below 2.500"
    assert full.why == "overflow 6.0% is above 5.0%"
    early = make(warmup_steps=2, routing={"times": 1})
    assert early.routing_known(2, entropy_bits=0, overflow=1) is None


def test_routing_is_uneven_where_it_stays_so() -> None:
    health = make()
    overflows = (0.2, 0.2, 0.01, 0.2, 0.2, 0.2, 0.2, 0.01)
    found = [
        health.routing_known(step, entropy_bits=3.0, overflow=overflow)
        for step, overflow in enumerate(overflows, 1)
    ]
    assert [verdict is not None for verdict in found] == [False] * 5 + [True] * 2 + [False]


def test_waiting_counts_from_a_share_and_from_a_second_on() -> None:
    health = make(loader={"action": "stop"})
    assert health.wait_known(1, seconds=0.9, share=0.9) is None
    assert health.wait_known(2, seconds=100.0, share=0.5) is None
    verdict = health.wait_known(3, seconds=100.0, share=0.51)
    assert verdict is not None
    assert verdict.action == "stop"


def test_what_lasts_is_told_once_and_is_one_event() -> None:
    health = make()
    found = [health.memory_known(step, share) for step, share in enumerate((0.95, 0.96, 0.5, 0.97))]
    assert [verdict and verdict.is_new for verdict in found] == [True, False, None, True]
    events = health.record()["events"]
    assert [(event["first_step"], event["last_step"], event["times"]) for event in events] == [
        (0, 1, 2),
        (3, 3, 1),
    ]
    assert (health.warnings, health.metrics()) == (3, {})


def test_a_healthy_run_has_no_metrics_of_its_health() -> None:
    health = make()
    feed(health, USUAL)
    health.step_done(7, is_skipped=False)
    assert health.metrics() == {}


def roll_back(health: Health, to_step: int, first: int, end: int, timeline: Any) -> None:
    verdict = health.loss_known(99, 50.0)
    assert verdict is not None
    assert verdict.action == "rollback"
    health.rolled_back(to_step=to_step, passed_over=(first, end), timeline=timeline)


def test_a_rollback_forgets_the_losses_and_keeps_the_record() -> None:
    health = make(loss_spike={"action": "rollback"})
    feed(health, USUAL[:5])
    saved = json.loads(json.dumps(health.state_dict()["timeline"]))
    feed(health, USUAL[5:])
    roll_back(health, 3, 24, 56, saved)
    assert health.state_dict()["timeline"] == saved
    assert health.metrics() == {"health/rollbacks": 1, "health/passed_over_samples": 32}
    assert health.record()["events"][0]["outcome"] == "back to step 3, past samples 24 to 55"


LOWERS = {"action": "lower_rate", "rate_factor": 0.5, "max_lowerings": 2}


def lower(health: Health, *, first: int) -> list[Verdict | None]:
    """Two spikes in a row behind usual losses, each carried out as recovery does."""
    verdicts = []
    for step, loss in enumerate([*USUAL, 9.0, 9.0], first):
        verdicts.append(verdict := health.loss_known(step, loss))
        if verdict is not None and verdict.action == "lower_rate":
            health.rate_lowered()
    return verdicts


def test_a_spike_lowers_the_rate_and_its_plateau_does_not_lower_it_again() -> None:
    health = make(loss_spike=LOWERS)
    verdicts = lower(health, first=1)
    assert [verdict and verdict.action for verdict in verdicts] == [*[None] * 6, "lower_rate", None]
    assert (health.rate_scale, health.lowerings) == (0.5, 1)
    outcome = "learning rate times 0.5 from the next step on, lowering 1 of 2"
    assert health.record()["events"][0]["outcome"] == outcome
    # control: judged by the window before the spike, the next loss would have been one too
    warned = make()
    assert feed(warned, [*USUAL, 9.0, 9.0])[-1] is not None
    assert warned.rate_scale == 1.0


def test_lowerings_are_bounded_and_the_next_spike_is_told_once() -> None:
    health = make(loss_spike=LOWERS)
    for first in (1, 9):
        lower(health, first=first)
    assert health.rate_scale == 0.25
    *_, verdict, lasting = lower(health, first=17)
    assert verdict is not None
    assert lasting is not None
    assert [(each.action, each.is_new) for each in (verdict, lasting)] == [
        ("warn", True),
        ("warn", False),
    ]
    assert "health.loss_spike.max_lowerings = 2 were done" in verdict.why
    assert (health.rate_scale, health.metrics()) == (0.25, {"health/lowerings": 2})


def test_a_lowered_rate_is_in_the_checkpoint_and_a_rollback_undoes_later_ones() -> None:
    health = make(loss_spike=LOWERS, non_finite={"action": "rollback"})
    lower(health, first=1)
    saved = json.loads(json.dumps(health.state_dict()))
    lower(health, first=9)
    resumed = make(loss_spike={**LOWERS, "rate_factor": 0.1})
    resumed.load_state_dict(saved)
    assert resumed.rate_scale == 0.5, "what was lowered keeps the factor of its time"
    lower(resumed, first=9)
    assert resumed.rate_scale == pytest.approx(0.05)
    assert health.step_done(17, is_skipped=True) is not None
    health.rolled_back(to_step=8, passed_over=(0, 8), timeline=saved["timeline"])
    assert (health.rate_scale, health.lowerings) == (0.5, 1)
    del saved["timeline"]["rate_scale"], saved["timeline"]["lowerings"]  # of an earlier version
    resumed.load_state_dict(saved)
    assert (resumed.rate_scale, resumed.lowerings) == (1.0, 0)


def test_windows_that_were_passed_over_are_counted_once() -> None:
    health = make(loss_spike={"action": "rollback"})
    feed(health, USUAL)
    timeline = health.state_dict()["timeline"]
    roll_back(health, 3, 24, 56, timeline)
    roll_back(health, 3, 24, 72, timeline)  # to the same checkpoint once more
    assert list(health.trained_windows(100)) == [(0, 24), (72, 100)]
    roll_back(health, 9, 88, 96, timeline)
    assert list(health.trained_windows(100)) == [(0, 24), (72, 88), (96, 100)]
    assert health.passed_over_samples == 56


def test_one_rollback_too_many_stops_the_run() -> None:
    health = make(loss_spike={"action": "rollback"}, max_rollbacks=1)
    feed(health, USUAL)
    roll_back(health, 3, 24, 56, health.state_dict()["timeline"])
    feed(health, USUAL)
    verdict = health.loss_known(8, 50.0)
    assert verdict is not None
    assert verdict.action == "stop"
    assert "health.max_rollbacks = 1" in verdict.why


def test_judging_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    health, resumed = (make(non_finite={"max_consecutive": 3}) for _ in range(2))
    feed(health, USUAL)
    health.step_done(7, is_skipped=True)
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    for judge in (health, resumed):
        judge.step_done(8, is_skipped=True)
        feed(judge, [2.0, 9.0, 9.0], first=9)
    assert resumed.state_dict() == health.state_dict()


def test_a_run_of_months_keeps_its_newest_events_and_all_counts() -> None:
    health = make()
    for step in range(1200):
        health.memory_known(step, 0.95 if step % 2 else 0.5)
    assert health.warnings == 600
    assert [event.first_step for event in health.events][-1] == 1199
    assert len(health.events) == 500
