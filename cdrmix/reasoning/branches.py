"""Branches: actions of the memory agent that are tried side by side before one is kept."""

# N episodes, K branches

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from cdrmix.reasoning.environment import Environment, State
from cdrmix.reasoning.episodes import check_decision, check_rewards
from cdrmix.reasoning.policy import Action, MemoryPolicy
from cdrmix.reasoning.speculation import branch, merge, select


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
    config, seen = environment.config, environment.observe(state)
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
        state, running = merge(running, after.state, state), running & ~after.done
    outcome = environment.settle(state)
    check_rewards(outcome.reward)
    return Branched(outcome.state, num_accepted, num_decisions)
