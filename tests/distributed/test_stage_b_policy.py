"""GRPO on ranks: equal to one process, with one decision of all ranks when epochs end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdrmix.checkpoint.fragments import Part
from cdrmix.config.load import load_config, shipped
from cdrmix.config.reasoning import Phase
from cdrmix.config.schema import Config
from cdrmix.models.state_rows import branch
from cdrmix.planning.cluster import processes
from cdrmix.reasoning.policy import (
    Advantages,
    MemoryPolicy,
    Rollouts,
    advantages_of,
    policy_loss,
    roll_out,
)
from cdrmix.stage_b.phases import StepMean
from tests.harness import run_ranks
from tools.benchmark.learn_policy import HIDDEN, environment, make_streams
from tools.benchmark.segment_stream import NUM_FEATURES

TINY = shipped("model_configs") / "cdrmix-reason-tiny.yaml"
LESSONS, TEXTS, GROUP, STEPS = 3, 4, 8, 3


@dataclass
class Collected:
    """Episodes of one lesson."""

    rollouts: Rollouts[Any]
    advantages: Advantages
    metrics: dict[str, Tensor]

    @property
    def num_learned(self) -> int:
        return int((self.rollouts.taken & self.advantages.is_learned.unsqueeze(1)).sum())


class StreamCourse:
    """The stream of tools/benchmark/learn_policy.py, in which a random agent earns now and then."""

    def __init__(self, config: Config) -> None:
        self.model = nn.ModuleDict({"policy": MemoryPolicy(HIDDEN, NUM_FEATURES)})
        self._policy.initialize(seed=0)
        self._environment = environment()
        assert config.stage_b is not None
        self._config = config.stage_b.policy

    @property
    def _policy(self) -> MemoryPolicy:
        policy = self.model["policy"]
        assert isinstance(policy, MemoryPolicy)
        return policy

    def learning(self, phase: Phase) -> frozenset[Part]:
        return frozenset({"policy"})

    def lesson(self, phase: Phase, number: int, *, lengths: Any) -> int:
        return number

    def loss(self, phase: Phase, lesson: int) -> tuple[Tensor, dict[str, Tensor]]:
        raise AssertionError("there is one phase")

    def collect(self, lesson: int) -> Collected:
        generator = torch.Generator().manual_seed(lesson)
        start = self._environment.start(branch(make_streams(TEXTS, generator), GROUP))
        rollouts = roll_out(self._environment, self._policy, start, generator=generator)
        advantages = advantages_of(rollouts, self._config, group_size=GROUP)
        return Collected(rollouts, advantages, {"return": rollouts.returns.mean()})

    def rollout_loss(self, collected: Collected) -> tuple[Tensor, dict[str, StepMean]]:
        rollouts = collected.rollouts
        loss, sums = policy_loss(self._policy, rollouts, collected.advantages, self._config)
        metrics = {
            "loss": StepMean(loss.detach(), sums.learned),
            "kl": StepMean(sums.kl, sums.steps),
        }
        return loss, metrics


# Of stage_b.training: the agent alone learns.
SETTINGS = {
    **dict.fromkeys(("memory_steps", "adapter_steps", "joint_steps"), 0),
    "policy_steps": STEPS,
    "backbone_lr_scale": 0,
    "lessons_per_step": LESSONS,
    "group_size": GROUP,
    "warmup_steps": 0,
}


def learn(
    profile: str, kl_target: float, pipeline: int = 1, more: tuple[str, ...] = ()
) -> tuple[list[int], list[float], dict[str, Tensor]]:
    """Epochs on this rank, returns, losses and divergences of each step, and the parameters after
    the last."""
    from cdrmix import runtime
    from cdrmix.engines.loop import start_engine
    from cdrmix.parallel.topology import make_topology
    from cdrmix.planning.profile import choose
    from cdrmix.planning.stage_b import stage_b_plan
    from cdrmix.stage_b.engine import LessonLoader, StageB
    from cdrmix.stage_b.optimizer import Clip, TrainedParameters, stage_b_adamw

    overrides = [f"stage_b.training.{name}={value}" for name, value in SETTINGS.items()]
    overrides += [f"stage_b.policy.kl_target={kl_target}", f"stage_b.pipeline={pipeline}"]
    config = load_config(TINY, [*overrides, *more])
    assert config.stage_b is not None
    runtime.initialize_distributed()
    world = runtime.world_size()
    plan = choose(config, processes(world), profile=profile)
    plan = stage_b_plan(config, plan, world_size=world)
    topology = make_topology(plan.degrees)
    course: Any = StreamCourse(config)
    clip = Clip(config, topology)
    engine = start_engine(
        TrainedParameters(course.model),
        config,
        plan,
        topology,
        optimizer=partial(stage_b_adamw, clip=clip),
    )
    lessons = LessonLoader(
        course,
        config.stage_b.training,
        rank=topology.data_rank,
        world_size=plan.degrees.data,
        manifest_digest="",
        seed=0,
        is_shared=pipeline > 1,
    )
    run: Any = SimpleNamespace(
        engine=engine,
        config=config,
        topology=topology,
        heartbeat=SimpleNamespace(forget_step=lambda are_uneven: None),
        step=0,
    )
    stage = StageB(course, config.stage_b, clip, lessons, None, 0, num_steps=STEPS, origin="")
    results = []
    for run.step in range(STEPS):
        results.append(stage.train_step(run, stage.next_batch(run), weights=[LESSONS]))
    names = ("policy/return", "policy/loss", "policy/kl")
    measured = [stage.measure(run, result) for result in results]
    returns = [metrics[name] for name in names for metrics in measured]
    parameters = {name: p.detach().clone() for name, p in course.model.named_parameters()}
    runtime.destroy_distributed()
    return [result.epochs for result in results], returns, parameters


@pytest.mark.parametrize(
    ("profile", "ranks", "pipeline"),
    [("zero1", 2, 1), ("zero2", 2, 1), ("zero1", 2, 2), ("zero2", 4, 2)],
)
def test_ranks_learn_as_one(profile: str, ranks: int, pipeline: int) -> None:
    ((epochs, returns, parameters),) = run_ranks(learn, 1, "zero1", 1.0)
    assert epochs == [4, 4, 4]
    assert min(returns[:STEPS]) > 0, "a policy that earns nothing learns from rounding alone"
    assert min(returns[-STEPS:]) > 0, "it has moved"
    everywhere = run_ranks(learn, ranks, profile, 1.0, pipeline)
    for found in everywhere:
        assert found[0] == epochs
        assert found[1] == pytest.approx(returns, rel=1e-4, abs=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[2][name], parameter, rtol=1e-4, atol=1e-6)
            assert torch.equal(found[2][name], everywhere[0][2][name]), "copies are equal"


def test_epochs_end_alike_on_all_ranks_where_the_policy_has_moved_far_enough() -> None:
    ((epochs, _, _),) = run_ranks(learn, 1, "zero1", 1e-3)
    assert 1 <= min(epochs) < 4
    assert [found[0] for found in run_ranks(learn, 2, "zero1", 1e-3)] == [epochs, epochs]


def test_a_step_has_no_more_epochs_than_the_limit_and_the_margin_allow() -> None:
    # The same small target that ends epochs early: here the margin is what lets them go on.
    more = ("stage_b.policy.kl_margin=1e6", "stage_b.policy.epochs=2")
    ((epochs, _, _),) = run_ranks(learn, 1, "zero1", 1e-3, 1, more)
    assert epochs == [2, 2, 2]
