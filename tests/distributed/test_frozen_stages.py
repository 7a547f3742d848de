"""A frozen backbone over pipeline stages: every stage computes what one process does."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.checkpoint.fragments import part_of
from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.parallel.frozen_stages import FrozenStages, chained, mean_over_layers
from cdrmix.planning import lesson_sizes, stage_b
from cdrmix.planning.cluster import processes
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.stage_b.phases import Course
from tests.harness import run_ranks
from tests.unit.reasoning.small_reader import (
    WINDOW_TOKENS,
    small_config,
    small_lessons,
    small_reader,
)

PHASES: tuple[Phase, ...] = ("memory", "adapters", "joint")


def config_of_four_blocks() -> Config:
    """R T R T: v_first crosses every border."""
    config = small_config(backbone_lr_scale=0.0, texts_per_lesson=2)
    model = config.model.model_copy(update={"num_layers": 4})
    return config.model_copy(update={"model": model})


def lessons_with_text(config: Config) -> Lessons:
    """Lessons with rows of text of two windows."""

    def rows(numbers: np.ndarray) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 512, (len(numbers), 2 * WINDOW_TOKENS + 1))

    return dataclasses.replace(small_lessons(config), rows=rows, num_rows=1)


def reader_of_stage(config: Config, whole: MemoryReader, pipeline: int) -> MemoryReader:
    """What a stage has of a whole reader."""
    from cdrmix import runtime
    from cdrmix.parallel.topology import make_topology
    from cdrmix.planning.layout import Degrees
    from cdrmix.planning.stage_b import stage_b_layers

    topology = make_topology(Degrees(data=1, tensor=1, pipeline=pipeline, sequence=1, expert=1))
    layers = stage_b_layers(config, pipeline)[runtime.rank()]
    backbone = FrozenStages(config.model, topology, layers)
    assert config.stage_b is not None
    reader = MemoryReader(
        backbone, config.stage_b, window_tokens=WINDOW_TOKENS, marks=whole.marks
    ).eval()
    values = whole.state_dict()
    with torch.no_grad():
        for name, parameter in reader.named_parameters():
            parameter.copy_(values[name])
    return reader


def learned(reader: MemoryReader, config: Config, phase: Phase) -> tuple[Any, ...]:
    """Loss of a lesson, what it measured, and the gradient of every parameter that learns."""
    course = Course(reader, lessons_with_text(config), config)
    parts = course.learning(phase)
    for name, parameter in reader.named_parameters():
        parameter.requires_grad_(part_of(name) in parts)
    loss, metrics = course.loss(phase, course.lesson(phase, 0))
    learning = {name: p for name, p in reader.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        loss, list(learning.values()), allow_unused=True, materialize_grads=True
    )
    return loss.detach(), metrics, dict(zip(learning, found, strict=True))


def learn_on_stages(phase: Phase) -> list[str]:
    """Parameters that learned on this stage, each as in one process."""
    from cdrmix import runtime

    runtime.initialize_distributed()
    config = config_of_four_blocks()
    whole = small_reader(config)
    wanted_loss, wanted_metrics, wanted = learned(whole, config, phase)
    # Rows all at once, then one by one; there, single numbers are sums in another order.
    for fewest_tokens, tolerance in ((10**9, 1e-5), (1, 1e-4)):
        lesson_sizes._PIECE_TOKENS = fewest_tokens
        reader = reader_of_stage(config, whole, runtime.world_size())
        rows: set[int] = set()
        for block in reader.backbone.blocks:
            block.register_forward_pre_hook(lambda _, inputs, seen=rows: seen.add(len(inputs[0])))
        loss, metrics, gradients = learned(reader, config, phase)
        assert (rows == {1}) is (fewest_tokens == 1)
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(metrics, wanted_metrics, rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            bound = tolerance * float(wanted[name].abs().max())
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=bound, msg=name)
    runtime.destroy_distributed()
    return [name for name, gradient in gradients.items() if gradient.any()]


@pytest.mark.parametrize("phase", PHASES)
def test_losses_and_gradients_on_three_stages_are_those_of_one_process(phase: Phase) -> None:
    stages = run_ranks(learn_on_stages, 3, phase)
    layers = [{name.split("/")[1] for name in names if "adapters" in name} for names in stages]
    if phase == "memory":
        assert layers == [set(), set(), set()]
    else:
        assert set.union(*layers) == {"0", "1", "2", "3"} and all(layers)
        assert sum(map(len, layers)) == 4, "every adapter learns on one stage"
    beside = [{name for name in names if "adapters" not in name} for names in stages]
    assert beside[0] == beside[1] == beside[2]
    assert bool(beside[0]) is (phase != "adapters")


def write_on_stages() -> list[float]:
    """How far gradients of what two calls wrote, rows one by one, are from those of one process,
    by adapter."""
    from cdrmix import runtime

    runtime.initialize_distributed()
    config = config_of_four_blocks()
    lesson_sizes._PIECE_TOKENS = 1
    whole = small_reader(config)
    tokens = torch.arange(2 * 24).view(2, 24)

    def gradients(reader: MemoryReader) -> dict[str, torch.Tensor]:
        plastic = reader.plastic
        reader.backbone.requires_grad_(False)

        def compute() -> tuple[torch.Tensor, None]:
            found = plastic(tokens, state=plastic.start(2))
            found = plastic(tokens, state=found.state)
            sizes = [each.weights.square().sum() for each in found.state.layers.values()]
            return mean_over_layers(torch.stack(sizes), reader.backbone), None

        adapters = dict(plastic.adapters.named_parameters())
        loss, _ = chained(
            reader.backbone, compute, learning=iter(adapters.values()), learns_inside=True
        )
        found = torch.autograd.grad(loss, list(adapters.values()), materialize_grads=True)
        return dict(zip(adapters, found, strict=True))

    wanted, found = (
        gradients(whole),
        gradients(reader_of_stage(config, whole, runtime.world_size())),
    )
    runtime.destroy_distributed()
    return [
        float((gradient - wanted[name]).norm() / wanted[name].norm())
        for name, gradient in found.items()
        if wanted[name].any()
    ]


def test_calls_are_gone_through_backward_whatever_of_them_the_loss_depends_on() -> None:
    for apart in run_ranks(write_on_stages, 3):
        assert apart and max(apart) < 1e-5


def play_on_stages() -> bool:
    """Whether an agent plays on this stage as in one process."""
    from cdrmix import runtime

    runtime.initialize_distributed()
    config = config_of_four_blocks()
    lesson_sizes._PIECE_TOKENS = 1
    whole = small_reader(config)
    readers = [whole, reader_of_stage(config, whole, runtime.world_size())]
    played = []
    for reader in readers:
        course = Course(reader, lessons_with_text(config), config)
        played.append(course.collect(course.lesson("policy", 0)).rollouts)
    runtime.destroy_distributed()
    assert len(set(played[0].actions.flatten().tolist())) > 1
    return all(
        torch.equal(getattr(played[0], name), getattr(played[1], name))
        for name in ("actions", "returns", "taken", "hidden")
    )


def test_an_agent_plays_alike_on_all_stages() -> None:
    assert run_ranks(play_on_stages, 2) == [True, True]


def test_the_plan_knows_the_calls_of_a_lesson() -> None:
    config = config_of_four_blocks()
    assert config.stage_b is not None
    reader = small_reader(config)
    course = Course(reader, lessons_with_text(config), config)
    calls: list[tuple[int, int]] = []
    reader.backbone.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape))
    course.loss("joint", course.lesson("joint", 0))
    # rows of plain text are of two windows
    training = config.training.model_copy(update={"sequence_length": 2 * WINDOW_TOKENS})
    of_stage_b = config.stage_b.training.model_copy(update={"window_tokens": WINDOW_TOKENS})
    section = config.stage_b.model_copy(update={"training": of_stage_b})
    planned = config.model_copy(update={"training": training, "stage_b": section})
    known = stage_b._Model(planned, processes(1), 1)._calls
    assert [call.rows for call in known] == [rows for rows, _ in calls]
    for (_, most, _), (_, tokens) in zip(known, calls, strict=True):
        assert 0.75 * most <= tokens <= most
