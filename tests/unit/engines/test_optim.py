"""Parameter groups and schedule."""

import math

import pytest

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import TrainingConfig
from cdrmix.engines.optim import learning_rate, parameter_groups
from cdrmix.models.backbone import Backbone


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
