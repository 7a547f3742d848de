"""Layouts of evaluations: what cuts a model least and fits, without gradients and optimizer."""

from __future__ import annotations

import pytest

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, PlanError
from cdrmix.planning.cluster import GIB, make_cluster
from cdrmix.planning.evaluation_plan import choose_for_evaluation, config_of_judged
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose


def judged(variant: str, *overrides: str, samples: int = 8) -> Config:
    config = load_config(f"model_configs/cdrmix-core-{variant}.yaml")
    return config_of_judged(
        config.name,
        config.model.model_dump(),
        sequence_length=config.training.sequence_length,
        overrides=overrides,
        samples=samples,
        place=variant,
    )


def planned(config: Config, ranks: int, **options: str) -> Plan:
    nodes = max(1, ranks // 8)
    cluster = make_cluster(nodes=nodes, gpus_per_node=ranks // nodes, gpu="h100-80")
    return choose_for_evaluation(config, cluster, **options)


def test_a_model_that_fits_a_device_is_on_each_of_them() -> None:
    plan = planned(judged("1b"), 8)
    assert (plan.degrees.data, plan.degrees.world_size, plan.zero_stage) == (8, 8, 1)
    memory, _ = plan.estimates()
    assert memory.optimizer == memory.gradients == 0
    # 4.17 billion parameters in float32, and the forward pass of 8 samples
    assert 15 * GIB < memory.weights < 16 * GIB
    assert memory.weights < memory.total < 40 * GIB
    assert "data 8: cuts the model least" in plan.reasons[0]


def test_a_larger_one_is_cut_as_far_as_it_must_be() -> None:
    config = judged("40b", "training.precision=bf16")
    degrees = planned(config, 8).degrees
    assert (degrees.pipeline, degrees.expert) == (1, 8)
    assert degrees.tensor < 8
    # of float32, twice as large, and more samples, stages are needed as well
    assert planned(judged("40b", samples=16), 16).degrees.pipeline == 2


def test_a_smaller_batch_needs_less() -> None:
    with pytest.raises(PlanError, match="no layout of 8 ranks fits.*give --batch-size 1"):
        planned(judged("40b", samples=16), 8)
    assert planned(judged("40b", samples=1), 8).degrees.world_size == 8


def test_training_takes_more_than_evaluation() -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu="h100-80")
    config = load_config("model_configs/cdrmix-core-1b.yaml")
    assert not choose(config, cluster, profile="zero1").fits  # the control
    assert planned(judged("1b"), 1).fits


def test_degrees_and_profile_that_are_given_are_kept() -> None:
    plan = planned(judged("1b", "parallel.tensor=4"), 8)
    assert (plan.degrees.tensor, plan.degrees.data) == (4, 2)
    assert "parallel.tensor as given" in plan.reasons[0]
    dense = judged("1b").model_copy()
    model = dense.model.model_dump() | {"moe": None}
    config = config_of_judged("dense", model, sequence_length=4096, place="dense")
    plan = planned(config, 8, profile="zero3")
    assert (plan.zero_stage, plan.name) == (3, "zero3")
    assert "offload_optimizer" not in plan.deepspeed["zero_optimization"]
    with pytest.raises(PlanError, match=r"zero_optimization.stage = 3 cannot run with model.moe"):
        planned(judged("1b"), 8, profile="zero3")


@pytest.mark.parametrize("override", ["training.seed=3", "model.moe=null", "data.path=x"])
def test_what_is_no_layout_cannot_be_set(override: str) -> None:
    with pytest.raises(ConfigError, match="a trained model is evaluated as it is"):
        judged("1b", override)
