"""Rollouts of the memory agent, and what is learned from them.

Rules of episodes are an `Environment`.

Branches: actions of the memory agent that are tried side by side before one is kept.
"""

# N rollouts, P prompts of G rollouts each, T steps, D hidden, F features, A actions

# N episodes, K branches

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.errors import DataError
from cdrmix.objectives.grpo import (
    PolicyMetrics,
    explained_variance,
    group_advantages,
    grpo_loss,
    lambda_returns,
    zero_variance_groups,
)
from cdrmix.reasoning.policy import Action, Decision, Environment, MemoryPolicy, State
from cdrmix.reasoning.speculation import branch, merge, select

REFERENCE_KL_WEIGHT = 1e-3


@dataclass(frozen=True)
class Rollouts(Generic[State]):
    """What a batch of episodes went through; steps not taken hold anything legal.

    Attributes:
        hidden, features, legal: what was seen, [N, T, D], [N, T, F], [N, T, A].
        actions: [N, T] int64.
        logprobs: of the actions, under the policy that took them, [N, T] (nats).
        values: of the value head before each step, [N, T + 1]; 0 after an end.
        rewards: [N, T].
        taken: whether a step was taken, [N, T].
        returns: sum of the rewards of whole episodes, [N].
        final: the states in which they ended.
    """

    hidden: Tensor
    features: Tensor
    legal: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    taken: Tensor
    returns: Tensor
    final: State

    def last(self, count: int) -> Rollouts[State]:
        """The last `count` steps that each episode took, up to its end."""
        length = self.taken.shape[1]
        if length <= count:
            return self
        first = (self.taken.sum(1) - count).clamp(min=0).unsqueeze(1)
        places = first + torch.arange(count, device=first.device)
        rows = torch.arange(len(first), device=first.device).unsqueeze(1)
        values = torch.cat([places, first + count], dim=1)
        return replace(
            self,
            hidden=self.hidden[rows, places],
            features=self.features[rows, places],
            legal=self.legal[rows, places],
            actions=self.actions[rows, places],
            logprobs=self.logprobs[rows, places],
            values=self.values[rows, values],
            rewards=self.rewards[rows, places],
            taken=self.taken[rows, places],
        )


@torch.no_grad()
def roll_out(
    environment: Environment[State],
    policy: MemoryPolicy,
    state: State,
    *,
    generator: torch.Generator | None,
) -> Rollouts[State]:
    """Play episodes to their end, which their rules bring about in a bounded number of steps.

    Reading takes a step for each segment before the question is asked: an episode that was cut
    short would never answer, and teach what the value head believes.

    Args:
        environment: rules.
        policy: decides.
        state: where the episodes start, not yet over.
        generator: source of the sampling; None takes the likeliest action.
    Raises:
        DataError: if a reward or a decision is not finite.
    """
    steps: list[list[Tensor]] = []
    running = torch.ones(len(state.time), dtype=torch.bool, device=state.time.device)
    while bool(running.any()):
        seen = environment.observe(state)
        decision = policy(*seen)
        check_decision(decision, seen.legal)
        actions = _choose(decision, generator)
        after = environment.step(state, actions)
        chosen = decision.logprobs.gather(1, actions.unsqueeze(1)).squeeze(1)
        value = torch.where(running, decision.value, 0.0)
        steps.append([*seen, actions, chosen, value, running])
        state = merge(running, after.state, state)
        running = running & ~after.done
    hidden, features, legal, acted, logprobs, values, taken = (
        torch.stack(column, dim=1) for column in zip(*steps, strict=True)
    )
    outcome = environment.settle(state)
    check_rewards(outcome.reward)
    last = F.one_hot(taken.sum(1) - 1, taken.shape[1])
    return Rollouts(
        hidden=hidden,
        features=features,
        legal=legal,
        actions=acted,
        logprobs=logprobs,
        values=torch.cat([values, torch.zeros_like(values[:, :1])], dim=1),
        rewards=outcome.reward.unsqueeze(1) * last,
        taken=taken,
        returns=outcome.reward,
        final=outcome.state,
    )


def _choose(decision: Decision, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return decision.logprobs.argmax(-1)
    return torch.multinomial(decision.logprobs.exp(), 1, generator=generator).squeeze(1)


def check_decision(decision: Decision, legal: Tensor) -> None:
    """Raises DataError if a number of the agent's is not finite."""
    bad = (legal & ~decision.logprobs.isfinite()).any(1) | ~decision.value.isfinite()
    if bool(bad.any()):
        raise DataError(
            f"the agent's numbers are not finite in episode {int(bad.nonzero()[0])}: the policy, "
            "or what the reader gives it to see, has diverged. Nothing was learned from this "
            "batch. Try an earlier checkpoint with lower rates in stage_b.training"
        )


def check_rewards(reward: Tensor) -> None:
    """Raises DataError if a reward is not finite."""
    bad = torch.nonzero(~reward.isfinite()).flatten().tolist()
    if bad:
        raise DataError(
            f"the reward of episode {bad[0]} is {float(reward[bad[0]])}; a checker gives finite "
            "numbers. Nothing was learned from this batch"
        )


class Update(NamedTuple):
    """What one batch of rollouts taught.

    Attributes:
        metrics: of the last epoch, sums over its steps.
        epochs: that were taken before the policy had moved far enough.
        explained_variance: of the value head on this batch, before it learned from it.
        zero_variance_groups: groups that taught nothing.
    """

    metrics: PolicyMetrics
    epochs: int
    explained_variance: Tensor
    zero_variance_groups: Tensor


def policy_loss(
    policy: MemoryPolicy,
    rollouts: Rollouts[Any],
    advantages: Tensor,
    config: PolicyConfig,
    *,
    reference: MemoryPolicy | None,
) -> tuple[Tensor, PolicyMetrics]:
    """GRPO loss of a batch of rollouts, summed over steps.

    Args:
        policy: learns.
        rollouts: of an earlier state of it.
        advantages: one per rollout, [N].
        config: clip, discount.
        reference: policy that this one is kept near to; None for a policy that starts at random.
    """
    seen = (rollouts.hidden, rollouts.features, rollouts.legal)
    decision = policy(*(part.flatten(0, 1) for part in seen))
    shape = rollouts.actions.shape
    index = rollouts.actions.flatten().unsqueeze(1)
    reference_logprobs = None
    if reference is not None:
        with torch.no_grad():
            found = reference(*(part.flatten(0, 1) for part in seen)).logprobs
        reference_logprobs = found.gather(1, index).view(shape)
    targets = lambda_returns(
        rollouts.rewards,
        rollouts.values,
        rollouts.taken,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    return grpo_loss(
        decision.logprobs.gather(1, index).view(shape),
        rollouts.logprobs,
        advantages,
        decision.entropy.view(shape),
        decision.value.view(shape),
        targets,
        rollouts.taken,
        reference_logprobs=reference_logprobs,
        clip_ratio=config.clip_ratio,
        kl_weight=REFERENCE_KL_WEIGHT,
        value_weight=config.value_weight,
        entropy_weight=config.entropy_weight,
    )


def learn_from(
    policy: MemoryPolicy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts[Any],
    config: PolicyConfig,
    *,
    group_size: int,
    gradient_clipping: float = 1.0,
    reference: MemoryPolicy | None = None,
) -> Update:
    """Up to `config.epochs` epochs on one batch of rollouts, on one process.

    Args:
        policy: learns.
        optimizer: of its parameters.
        rollouts: those of one prompt beside each other.
        config: clip, discount, horizon and KL target.
        group_size: G.
        gradient_clipping: largest gradient norm.
        reference: as in `policy_loss`.
    """
    grouped = rollouts.returns.view(-1, group_size)
    advantages = group_advantages(grouped).flatten()
    rollouts = rollouts.last(config.horizon)
    epochs = 0
    for _ in range(config.epochs):
        loss, metrics = policy_loss(policy, rollouts, advantages, config, reference=reference)
        if epochs and float(metrics.kl / metrics.steps) > config.kl_margin * config.kl_target:
            break
        optimizer.zero_grad()
        (loss / metrics.steps).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), gradient_clipping)
        optimizer.step()
        epochs += 1
    targets = lambda_returns(
        rollouts.rewards,
        rollouts.values,
        rollouts.taken,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    explained = explained_variance(rollouts.values[:, :-1], targets, rollouts.taken)
    return Update(metrics, epochs, explained, zero_variance_groups(grouped))


class Branching(NamedTuple, Generic[State]):
    """What became of the branches of each state.

    Attributes:
        state: after the branch that was accepted, or as it was.
        actions: that was taken, [N]; -1 where none was accepted.
        advantages: of every branch, [N, K], the likeliest action's first.
        done: whether the accepted branch ends the episode, [N]; False where there is none.
    """

    state: State
    actions: Tensor
    advantages: Tensor
    done: Tensor


@torch.no_grad()
def try_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> Branching[State]:
    """Try the likeliest actions of each state side by side; keep the first that is good enough.

    All branches of all states are rows of one batch and share nothing. A branch's advantage is
    gamma V(s') - V(s), and 0 where it ends the episode: what an end earns its checker alone can
    say, and whoever acts does not know it. Of those with at least `accept_threshold` the likeliest
    action is kept, and where there is none the state stays as it was. A value head errs more often
    than a trained policy: see the branches' success in docs/reasoning.md before acting on this.

    Raises:
        DataError: if a decision is not finite.
    """
    config = environment.config
    seen = environment.observe(state)
    decision = policy(*seen)
    check_decision(decision, seen.legal)
    count = min(config.max_branches, len(Action))
    likely = decision.logprobs.sort(dim=1, descending=True, stable=True)
    actions = likely.indices[:, :count]  # [N, K]
    tried = environment.step(branch(state, count), actions.flatten())
    before = decision.value.repeat_interleave(count)
    ahead = config.gamma * policy(*environment.observe(tried.state)).value
    advantages = torch.where(tried.done, 0.0, ahead - before).view(-1, count)
    advantages = advantages.masked_fill(likely.values[:, :count].isinf(), -torch.inf)
    good = advantages >= config.accept_threshold
    place = (good.cumsum(1) == 0).sum(1).clamp(max=count - 1)  # of the first good one
    accepted = good.any(1)
    rows = torch.arange(len(place), device=place.device) * count + place
    chosen = actions.gather(1, place.unsqueeze(1)).squeeze(1)
    return Branching(
        state=merge(accepted, select(tried.state, rows), state),
        actions=torch.where(accepted, chosen, -1),
        advantages=advantages,
        done=accepted & tried.done[rows],
    )


class BranchedStep(NamedTuple, Generic[State]):
    """A step by branches: the next state, and of each episode the action taken, whether it was
    accepted rather than fallen back on, and whether the episode is over; [N] each."""

    state: State
    actions: Tensor
    accepted: Tensor
    done: Tensor


@torch.no_grad()
def step_by_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> BranchedStep[State]:
    """As `try_branches`; where no branch is accepted, SPLICE_WINDOW moves on: always legal, free.

    Raises:
        DataError: if a decision is not finite.
    """
    tried = try_branches(environment, policy, state)
    accepted = tried.actions >= 0
    if bool(accepted.all()):
        return BranchedStep(tried.state, tried.actions, accepted, tried.done)
    passes = torch.full_like(tried.actions, Action.SPLICE_WINDOW)
    passed = environment.step(state, passes)
    return BranchedStep(
        state=merge(accepted, tried.state, passed.state),
        actions=torch.where(accepted, tried.actions, passes),
        accepted=accepted,
        done=torch.where(accepted, tried.done, passed.done),
    )


class Branched(NamedTuple, Generic[State]):
    """Episodes played by branches: their settled states, and how many decisions accepted one."""

    final: State
    num_accepted: int
    num_decisions: int


@torch.no_grad()
def roll_out_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> Branched[State]:
    """Play episodes to their end by branches, in a bounded number of steps.

    Args:
        environment: rules; its `max_branches` and `accept_threshold` decide.
        policy: whose likeliest actions are tried.
        state: where the episodes start, not yet over.
    Raises:
        DataError: if a reward or a decision is not finite.
    """
    running = torch.ones(len(state.time), dtype=torch.bool, device=state.time.device)
    num_accepted = num_decisions = 0
    while bool(running.any()):
        after = step_by_branches(environment, policy, state)
        num_accepted += int((after.accepted & running).sum())
        num_decisions += int(running.sum())
        state = merge(running, after.state, state)
        running = running & ~after.done
    outcome = environment.settle(state)
    check_rewards(outcome.reward)
    return Branched(outcome.state, num_accepted, num_decisions)
