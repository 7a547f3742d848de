"""What learns in which phase of Stage B: rates, groups and clips of the parts of a reader."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cdrmix.checkpoint.fragments import PARTS, reader_logical_name
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.stage_b.optimizer import (
    Clip,
    PhasePlace,
    TrainedParameters,
    learning_rates,
    place_of,
    stage_b_adamw,
)
from tests.unit.stage_b.short_phases import config, section


def test_the_phase_of_a_step_follows_from_its_number() -> None:
    training = section(config()).training
    places = [place_of(step, training) for step in range(6)]
    phases = ["memory"] * 3 + ["joint"] * 2 + ["policy"]
    assert [place.phase for place in places] == phases
    assert [place.step for place in places] == [0, 1, 2, 0, 1, 0]


def test_parts_that_do_not_learn_have_no_rate() -> None:
    rates = learning_rates(PhasePlace("memory", 0, 3), {"memory"}, config("warmup_steps=2"))
    assert rates["memory"] == 0.5 * section(config()).training.memory_learning_rate
    assert [rates[part] for part in PARTS if part != "memory"] == [0.0, 0.0, 0.0]


def test_a_rate_falls_to_its_share_at_the_end_of_each_phase() -> None:
    given = config("warmup_steps=1", "min_learning_rate_ratio=0.2", "backbone_lr_scale=0.1")
    peak = learning_rates(PhasePlace("joint", 0, 5), PARTS, given)
    lowest = learning_rates(PhasePlace("joint", 4, 5), PARTS, given)
    assert peak["backbone"] == pytest.approx(0.1 * given.training.learning_rate)
    for part in PARTS:
        assert lowest[part] == pytest.approx(0.2 * peak[part])


def reader() -> nn.Module:
    parts = {name: nn.Linear(2, 2, bias=False) for name in ("adapters", "memory", "policy")}
    return nn.ModuleDict({**parts, "retrieval": nn.Linear(2, 2), "backbone": nn.Linear(2, 2)})


def test_every_part_has_a_group_and_a_frozen_backbone_has_none() -> None:
    given = config()
    build = partial(stage_b_adamw, training=given.training, clip=Clip(given))
    of_reader = build(TrainedParameters(reader())).param_groups
    groups = {group["part"]: len(group["params"]) for group in of_reader}
    assert groups == {"memory": 3, "adapters": 1, "policy": 1}
    whole = [group["part"] for group in build(reader()).param_groups]
    assert whole == ["memory", "adapters", "policy", "backbone", "backbone"]


@pytest.mark.usefixtures("one_rank")
def test_the_value_head_is_clipped_apart_from_the_policy() -> None:
    given = config()
    assert given.stage_b is not None
    policy = given.stage_b.policy.model_copy(update={"value_gradient_clipping": 0.5})
    given = given.model_copy(
        update={"stage_b": given.stage_b.model_copy(update={"policy": policy})}
    )
    heads = MemoryPolicy(2, 3)
    model = nn.ModuleDict({"policy": heads})
    clip = Clip(given)
    optimizer = stage_b_adamw(TrainedParameters(model), given.training, clip=clip)
    assert [group["part"] for group in optimizer.param_groups] == ["policy", "policy"]
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    for name, parameter in heads.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if name in ("policy.weight", "value.weight"):
            parameter.grad[0, 0] = 0.8 if name == "policy.weight" else 50.0
    optimizer.step()
    assert heads.policy.weight.grad is not None and heads.value.weight.grad is not None
    # within its norm of 1 it stays, whatever the value head's is
    assert heads.policy.weight.grad[0, 0].item() == pytest.approx(0.8)
    assert heads.value.weight.grad[0, 0].item() == pytest.approx(0.5)
    assert clip.norms == pytest.approx({"policy": 0.8, "value": 50.0})


def test_parameters_that_deepspeed_sees_are_those_of_the_reader() -> None:
    model = reader()
    seen = {reader_logical_name(name): p for name, p in TrainedParameters(model).named_parameters()}
    for name, parameter in model.named_parameters():
        if not name.startswith("backbone"):
            assert seen.pop(reader_logical_name(name)) is parameter
    assert not seen


def test_a_backbone_keeps_the_names_of_stage_a() -> None:
    assert (
        reader_logical_name("plastic.backbone.blocks.0.mixer.key.weight")
        == "blocks.0.mixer.key.weight"
    )
    assert reader_logical_name("plastic/adapters/blocks/0/key/up").startswith(
        "stage_b.plastic.adapters"
    )


def stepped(clip: Clip, gradients: dict[str, list[float]], rates: dict[str, float]) -> dict:
    """Gradients of each part after the clip."""
    groups = []
    for part, gradient in gradients.items():
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        rate = rates.get(part, 1.0)
        groups.append({"params": [parameter], "part": part, "clip": part, "lr": rate})
    optimizer = torch.optim.SGD(groups, lr=1.0)
    optimizer.register_step_pre_hook(clip)
    optimizer.step()
    return {group["part"]: group["params"][0].grad.tolist() for group in optimizer.param_groups}


@pytest.mark.usefixtures("one_rank")
def test_parts_are_clipped_apart() -> None:
    clip = Clip(config())  # adapters 2, the others 1
    found = stepped(clip, {"adapters": [30.0, 40.0], "memory": [3.0, 4.0], "policy": [0.3]}, {})
    assert found["adapters"] == pytest.approx([1.2, 1.6])
    assert found["memory"] == pytest.approx([0.6, 0.8])
    assert found["policy"] == pytest.approx([0.3])
    assert clip.norms == pytest.approx({"adapters": 50.0, "memory": 5.0, "policy": 0.3})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_zero", [False, True])
def test_the_groups_of_a_part_are_clipped_by_their_common_norm(is_zero: bool) -> None:
    groups: list[dict[str, Any]] = []
    for gradient in (30.0, 40.0):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([gradient])
        group = {"params": [parameter], "part": "backbone", "clip": "backbone", "lr": 1.0}
        groups.append(group)
    clip, optimizer = Clip(config()), torch.optim.SGD(groups, lr=1.0)
    optimizer.register_step_pre_hook(clip)
    if is_zero:
        step_as_zero(clip, optimizer)
    else:
        optimizer.step()
    assert [g["params"][0].grad.item() for g in groups] == pytest.approx([0.6, 0.8])
    assert clip.norms == pytest.approx({"backbone": 50.0})


def step_as_zero(clip: Clip, optimizer: torch.optim.Optimizer) -> None:
    """Steps of one group at a time, whose gradients were raised by a loss scale before."""
    groups = optimizer.param_groups
    raised = {number: [4 * p.grad for p in g["params"]] for number, g in enumerate(groups)}
    clip.prepare(SimpleNamespace(param_groups=groups, averaged_gradients=raised, loss_scale=4.0))
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_what_does_not_learn_is_not_measured() -> None:
    clip = Clip(config())
    assert stepped(clip, {"memory": [3.0]}, {"memory": 0.0}) == {"memory": [3.0]}
    assert clip.norms == {}
