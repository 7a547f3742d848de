"""Parameter groups and schedule."""

import math

import pytest

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import TrainingConfig
from cdrmix.models.backbone import Backbone
from cdrmix.optimizers.adamw import parameter_groups
from cdrmix.optimizers.schedule import learning_rate


def training(**changes: object) -> TrainingConfig:
    settings = {
        "max_steps": 100,
        "global_batch_size": 8,
        "sequence_length": 16,
        "learning_rate": 1.0,
        "min_learning_rate": 0.1,
        "warmup_steps": 10,
    }
    return TrainingConfig(**{**settings, **changes})


def test_schedule_warms_up_linearly_then_falls_along_a_cosine_to_the_minimum() -> None:
    rates = [learning_rate(step, training()) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    middle = 0.1 + 0.45 * (1 + math.cos(math.pi * (54 - 10) / (99 - 10)))
    assert rates[54] == pytest.approx(middle)
    assert rates[99] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_schedule_without_warm_up_or_of_one_step_starts_at_the_peak() -> None:
    assert learning_rate(0, training(warmup_steps=0)) == 1.0
    assert learning_rate(0, training(warmup_steps=0, max_steps=1)) == 1.0


INFINITE = {"schedule": "infinite", "hold_learning_rate": 0.5, "settle_steps": 20}
SCHEDULES = [
    {"schedule": "cosine"},
    {"schedule": "linear"},
    {"schedule": "wsd", "cooldown_fraction": 0.3},
    INFINITE,
]


def rates(**changes: object) -> list[float]:
    given = training(**changes)
    return [learning_rate(step, given) for step in range(given.num_steps)]


@pytest.mark.parametrize("changes", SCHEDULES, ids=lambda changes: changes["schedule"])
def test_every_schedule_reaches_the_peak_never_jumps_and_ends_at_the_minimum(
    changes: dict[str, object],
) -> None:
    course = rates(**changes, max_steps=100_000)
    assert course[9] == 1.0
    assert course[-1] == pytest.approx(0.1, abs=1e-12)
    assert all(a >= b for a, b in zip(course[9:], course[10:], strict=False))
    # the steepest place is the first step of a cooldown by a root: sqrt(1 / 20,000) of .9
    falls = [a - b for a, b in zip(course[40:], course[41:], strict=False)]
    assert max(falls) < 0.9 / math.sqrt(19_000)


@pytest.mark.parametrize("changes", SCHEDULES, ids=lambda changes: changes["schedule"])
def test_the_pieces_of_a_schedule_meet(changes: dict[str, object]) -> None:
    course = rates(**changes)
    given = training(**changes)
    warmup, last = given.warmup_steps, given.num_steps - 1
    high = given.hold_learning_rate or 1.0
    joints = {warmup - 1: 1.0, warmup: 1.0, last: 0.1}
    if changes["schedule"] in ("wsd", "infinite"):
        settled = warmup + (given.settle_steps or 0)
        joints |= {settled: high, last - given.cooldown_steps: high}
    assert {step: course[step] for step in joints} == pytest.approx(joints, rel=0, abs=1e-12)


def test_a_constant_rate_stays() -> None:
    assert set(rates(schedule="constant")[9:]) == {1.0}


def test_the_values_of_each_schedule() -> None:
    linear = rates(schedule="linear")
    assert linear[69] == pytest.approx(1 - 0.9 * 59 / 89)
    wsd = rates(schedule="wsd", cooldown_fraction=0.25)
    assert set(wsd[9:75]) == {1.0}
    assert wsd[75:] == pytest.approx([0.1 + 0.9 * (1 - math.sqrt(k / 25)) for k in range(1, 26)])
    infinite = rates(**INFINITE)
    assert infinite[20] == pytest.approx(0.75)  # half of the way from 1 to 0.5
    assert set(infinite[30:80]) == {0.5}
    assert infinite[80:] == pytest.approx(
        [0.1 + 0.4 * (1 - math.sqrt(k / 20)) for k in range(1, 21)]
    )


@pytest.mark.parametrize("changes", SCHEDULES, ids=lambda changes: changes["schedule"])
def test_only_what_has_a_cooldown_can_be_extended_before_it(changes: dict[str, object]) -> None:
    short, long = rates(**changes), rates(**changes, max_steps=150)
    has_cooldown = changes["schedule"] in ("wsd", "infinite")
    assert (short[:70] == long[:70]) == has_cooldown
    assert short[70:] != long[70:100]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": "wsd", "cooldown_fraction": 0.95}, "schedule = wsd is longer than the run"),
        ({**INFINITE, "settle_steps": 75}, "settle_steps = 75 [+] cooldown of 20 are more than"),
        ({"schedule": "infinite"}, "hold_learning_rate is needed by schedule = infinite"),
        ({"hold_learning_rate": 0.5}, "= 0.5 has no meaning without schedule = infinite"),
        ({**INFINITE, "hold_learning_rate": 2.0}, "is not between min_learning_rate"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        training(**changes)


def test_length_in_tokens_is_rounded_up_to_steps() -> None:
    assert training(max_steps=None, total_tokens=1281).num_steps == 11


def test_every_parameter_is_in_one_group_and_no_vector_decays() -> None:
    model = Backbone(
        ModelConfig(
            hidden_size=64,
            num_layers=4,
            num_heads=2,
            vocab_size=256,
            moe={"num_experts": 4, "expert_hidden_size": 32},
        )
    )
    groups = parameter_groups(model, weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    for group in groups:
        for parameter in group["params"]:
            assert (parameter.dim() >= 2) == (group["weight_decay"] > 0)
    (experts,) = [group for group in groups if group.get("moe")]
    assert {tuple(p.shape) for p in experts["params"]} == {(4, 32, 64), (4, 64, 32)}
