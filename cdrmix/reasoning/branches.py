"""Branches: actions of the memory agent that are tried side by side before one is kept."""

# N episodes, K branches

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from cdrmix.reasoning.environment import Environment, Outcome, State
from cdrmix.reasoning.policy import Action, MemoryPolicy
from cdrmix.reasoning.speculation import branch, merge, select


class Branching(NamedTuple, Generic[State]):
    """What became of the branches of each state.

    Attributes:
        state: after the branch that was accepted, or as it was.
        actions: that was taken, [N]; -1 where none was accepted.
        advantages: of every branch, [N, K], the likeliest action's first.
        reward, done: of the accepted branch, [N]; 0 and False where there is none.
    """

    state: State
    actions: Tensor
    advantages: Tensor
    reward: Tensor
    done: Tensor


@torch.no_grad()
def try_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> Branching[State]:
    """Try the likeliest actions of each state side by side; keep the first that is good enough.

    All branches of all states are rows of one batch and share nothing. A branch's advantage is
    r + gamma V(s') - V(s); of those with at least `accept_threshold` the likeliest action is kept,
    and where there is none the state stays as it was. A value head errs more often than a trained
    policy: see the branches' success in docs/reasoning.md before acting on this.
    """
    config, decision = environment.config, policy(*environment.observe(state))
    count = min(config.max_branches, len(Action))
    likely = decision.logprobs.sort(dim=1, descending=True, stable=True)
    actions = likely.indices[:, :count]  # [N, K]
    tried = environment.step(branch(state, count), actions.flatten())
    value = policy(*environment.observe(tried.state)).value
    state_after, reward = _settled(environment, tried.state, tried.done)
    worth = reward + config.gamma * torch.where(tried.done, 0.0, value)
    advantages = worth.view(-1, count) - decision.value.unsqueeze(1)
    advantages = advantages.masked_fill(likely.values[:, :count].isinf(), -torch.inf)
    good = advantages >= config.accept_threshold
    place = (good.cumsum(1) == 0).sum(1).clamp(max=count - 1)  # of the first good one
    accepted = good.any(1)
    rows = torch.arange(len(place), device=place.device) * count + place
    chosen = actions.gather(1, place.unsqueeze(1)).squeeze(1)
    return Branching(
        state=merge(accepted, select(state_after, rows), state),
        actions=torch.where(accepted, chosen, -1),
        advantages=advantages,
        reward=torch.where(accepted, reward[rows], 0.0),
        done=accepted & tried.done[rows],
    )


def _settled(environment: Environment[State], state: State, done: Tensor) -> Outcome[State]:
    """The outcome of episodes that are over; the others are as they were and earn nothing."""
    reward = torch.zeros_like(state.score)
    if not bool(done.any()):
        return Outcome(state, reward)
    outcome = environment.settle(select(state, torch.nonzero(done).flatten()))
    place = (done.cumsum(0) - 1).clamp(min=0)  # among those that are over
    settled = merge(done, select(outcome.state, place), state)
    return Outcome(settled, torch.where(done, outcome.reward[place], reward))
