"""Memory agent, which chooses the next memory operation, and its episodes in an `Environment`.

`roll_out` samples actions, for training and its loss; `roll_out_branches` tries the likeliest
actions side by side and takes the first that is good enough, for acting only.
"""

# N episodes, T steps, K branches, D hidden, F features of memory and budget, A actions

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.errors import DataError
from cdrmix.models.initialize import normal_
from cdrmix.models.state_rows import branch, merge, select
from cdrmix.objectives.grpo import (
    PolicyMetrics,
    are_alike,
    gae,
    group_advantages,
    grpo_loss,
    lambda_returns,
    leave_one_out_advantages,
)


class Observation(NamedTuple):
    """View of the agent."""

    hidden: Tensor  # of the window, [N, D]
    features: Tensor  # of memory and budget, [N, F], between 0 and 1
    legal: Tensor  # True for actions that may be taken, [N, A]


class Episodes(Protocol):
    """State of a batch of episodes: a dataclass of tensors with a row per episode."""

    @property
    def time(self) -> Tensor:
        """Steps taken, [N]."""


State = TypeVar("State", bound=Episodes)


class Transition(NamedTuple, Generic[State]):
    """Result of a step: the next state, and True where the episode is over, [N]."""

    state: State
    done: Tensor


class EpisodeOutcome(NamedTuple, Generic[State]):
    """Last state and reward of episodes that are over, [N]."""

    state: State
    reward: Tensor


class Environment(Protocol[State]):
    """Rules of episodes."""

    config: PolicyConfig

    def observe(self, state: State) -> Observation:
        """Returns the agent's view of a state."""

    def step(self, state: State, actions: Tensor) -> Transition[State]:
        """Takes one legal action per episode, [N] int64."""

    def settle(self, state: State) -> EpisodeOutcome[State]:
        """Rewards episodes that are over, all at once, as an answer may be costly to find."""


class Action(IntEnum):
    """Memory operations, in the order of the policy's outputs.

    SUMMARIZE folds the window into working memory and moves on; RETRIEVE reads episodic memory into
    a buffer; SPLICE_WINDOW puts the buffer into the window, or moves on where it is empty;
    CACHE_WRITE writes the window to episodic memory and moves on.
    """

    SUMMARIZE = 0
    RETRIEVE = 1
    SPLICE_WINDOW = 2
    CACHE_WRITE = 3


NUM_ACTIONS = len(Action)


def is_operation(actions: Tensor) -> Tensor:
    """True for the actions that the budget limits: retrievals and writes."""
    return (actions == Action.RETRIEVE) | (actions == Action.CACHE_WRITE)


class Decision(NamedTuple):
    """Outputs of the heads for a batch of states."""

    logprobs: Tensor  # of every action, [N, A] (nats); minus infinity where one is illegal
    entropy: Tensor  # of the choice, [N] (nats)
    value: Tensor  # expected return, [N]


class MemoryPolicy(nn.Module):
    """Policy and value heads over the backbone's last hidden state and the memory's state.

    The policy starts uniform over the legal actions, unless whoever acts by it says otherwise.
    """

    of_features: Tensor  # factors on features, [F]

    def __init__(
        self,
        hidden_size: int,
        num_features: int,
        *,
        value_width: int = 64,
        weights: Mapping[int, float] | None = None,
    ) -> None:
        """`weights` are factors on features, by their place, with which the policy sees them.

        An optimizer such as Adam moves all weights alike, so that what is learned first is what the
        features that are large together tell, which are those of the hidden state.
        """
        super().__init__()
        of_features = torch.ones(num_features)
        for place, weight in (weights or {}).items():
            of_features[place] = weight
        self.register_buffer("of_features", of_features, persistent=False)
        self.policy = nn.Linear(hidden_size, NUM_ACTIONS, bias=False)
        self.feature_policy = nn.Linear(num_features, NUM_ACTIONS)
        self.value = nn.Linear(hidden_size, 1, bias=False)
        # the value is no sum over features: a good match counts only once the question is asked
        self.feature_value_in = nn.Linear(num_features, value_width)
        self.feature_value_out = nn.Linear(value_width, 1)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Sets a uniform policy, and a value of zero with random inner features."""
        for parameter in self.parameters():
            parameter.zero_()
        # random, as equal inner features would get equal gradients and stay equal
        scale = self.feature_value_in.weight.shape[1] ** -0.5
        normal_(self.feature_value_in.weight, 3 * scale, seed=seed, name="policy.feature_value_in")

    def forward(self, hidden: Tensor, features: Tensor, legal: Tensor) -> Decision:
        """Decides on an `Observation`, with at least one legal action in each row."""
        # means over segments are float32, while the heads may be bf16
        dtype = self.policy.weight.dtype
        hidden = hidden.to(dtype)
        features = features.to(dtype)
        weighted = features * self.of_features.to(dtype)
        logits = self.policy(hidden) + self.feature_policy(weighted)
        logits = logits.float().masked_fill(~legal, -torch.inf)
        logprobs = torch.log_softmax(logits, dim=-1)
        # an illegal action has no share in the entropy: 0 log 0 is 0, but 0 * -inf is not a number
        finite = logprobs.masked_fill(~legal, 0)
        entropy = -(finite.exp() * finite * legal).sum(-1)
        inner = torch.tanh(self.feature_value_in(features))
        value = self.value(hidden) + self.feature_value_out(inner)
        return Decision(logprobs, entropy, value.squeeze(-1).float())


class Idle(NamedTuple):
    """Steps that cannot have changed the outcome of their episode, whatever was done there."""

    steps: Tensor  # True for them, [N, T]
    prices: Tensor  # return that each operation cost the episode, [N]


@dataclass(frozen=True)
class Rollouts(Generic[State]):
    """Record of a batch of episodes; steps after an episode's end hold arbitrary legal ones."""

    hidden: Tensor  # observations, [N, T, D]
    features: Tensor  # [N, T, F]
    legal: Tensor  # [N, T, A]
    actions: Tensor  # [N, T] int64
    logprobs: Tensor  # of the actions, under the policy that took them, [N, T] (nats)
    values: Tensor  # of the value head before each step, [N, T + 1]; 0 after the end
    rewards: Tensor  # [N, T]
    taken: Tensor  # True for steps before the end, [N, T]
    returns: Tensor  # sum of the rewards of whole episodes, [N]
    final: State  # in which they ended
    idle: Idle | None = None  # None: any step may have changed the outcome

    def last(self, count: int | None) -> Rollouts[State]:
        """Cuts each episode to its last `count` steps; `returns` stay those of the whole.

        None keeps all.
        """
        length = self.taken.shape[1]
        if count is None or length <= count:
            return self
        # a shorter episode begins at its first step, so that all rows stay `count` steps long
        first = (self.taken.sum(1) - count).clamp(min=0).unsqueeze(1)
        places = first + torch.arange(count, device=first.device)
        rows = torch.arange(len(first), device=first.device).unsqueeze(1)
        values = torch.cat([places, first + count], dim=1)  # one more: the state after the last
        names = ("hidden", "features", "legal", "actions", "logprobs", "rewards", "taken")
        steps = {name: getattr(self, name)[rows, places] for name in names}
        idle = self.idle and Idle(self.idle.steps[rows, places], self.idle.prices)
        return replace(self, values=self.values[rows, values], idle=idle, **steps)

    def value_targets(self, config: PolicyConfig) -> Tensor:
        """Returns the targets of the value head, [N, T]."""
        return lambda_returns(
            self.rewards, self.values, self.taken, gamma=config.gamma, gae_lambda=config.gae_lambda
        )


@torch.no_grad()
def roll_out(
    environment: Environment[State],
    policy: MemoryPolicy,
    state: State,
    *,
    generator: torch.Generator | None,
) -> Rollouts[State]:
    """Plays episodes to their end, which the rules guarantee within a bounded number of steps.

    There is no cut at a horizon: reading takes a step for each segment before the question, so that
    an episode cut short would never answer, and its target would be the value head's own guess.

    Args:
        environment, policy: rules, and who chooses the actions.
        state: of episodes that are not yet over.
        generator: samples the actions; None takes the likeliest.
    Raises:
        DataError: if a reward or a decision is not finite.
    """
    steps: list[list[Tensor]] = []
    running = torch.ones(len(state.time), dtype=torch.bool, device=state.time.device)
    while bool(running.any()):
        observation = environment.observe(state)
        decision = policy(*observation)
        check_decision(decision, observation.legal)
        if generator is None:
            actions = decision.logprobs.argmax(-1)
        else:
            probabilities = decision.logprobs.exp()
            actions = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        after = environment.step(state, actions)
        logprob = decision.logprobs.gather(1, actions.unsqueeze(1)).squeeze(1)
        value = torch.where(running, decision.value, 0.0)
        steps.append([*observation, actions, logprob, value, running])
        # all rows step together; those that are over stay at their last state
        state = merge(running, after.state, state)
        running = running & ~after.done
    hidden, features, legal, acted, logprobs, values, taken = (
        torch.stack(column, dim=1) for column in zip(*steps, strict=True)
    )
    # all episodes at once, as decoding an answer is costly; the reward belongs to the last step
    outcome = _settled(environment, state)
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


def check_decision(decision: Decision, legal: Tensor) -> None:
    """Raises DataError if a legal action's log-probability or a value is not finite."""
    # illegal actions are -inf by design
    bad = (legal & ~decision.logprobs.isfinite()).any(1) | ~decision.value.isfinite()
    if bool(bad.any()):
        raise DataError(
            f"the agent's numbers are not finite in episode {int(bad.nonzero()[0])}: the policy, "
            "or what the reader gives it to see, has diverged. Nothing was learned from this "
            "batch. Try an earlier checkpoint with lower rates in stage_b.training"
        )


def _settled(environment: Environment[State], state: State) -> EpisodeOutcome[State]:
    """Settles episodes that are over; raises DataError if a reward is not finite."""
    outcome = environment.settle(state)
    bad = torch.nonzero(~outcome.reward.isfinite()).flatten().tolist()
    if bad:
        raise DataError(
            f"the reward of episode {bad[0]} is {float(outcome.reward[bad[0]])}; a checker gives "
            "finite numbers. Nothing was learned from this batch"
        )
    return outcome


class Advantages(NamedTuple):
    """Worth of what was done beside the baseline."""

    values: Tensor  # of each rollout, shared by its steps, [N], or of each step, [N, T]
    is_learned: Tensor  # False for rollouts that are left out of the loss, [N]


def advantages_of(rollouts: Rollouts[Any], config: PolicyConfig, *, group_size: int) -> Advantages:
    """Compares rollouts with `config.baseline`, those of one prompt beside each other.

    A group whose returns are all the same says nothing about what was done, and is left out; the
    critic is no mean of a group, and learns from failures too. An idle step is worth the price of
    its operation, beside the share of its group that operated at that step.
    """
    returns = rollouts.returns.view(-1, group_size)
    is_learned = (~are_alike(returns)).repeat_interleave(group_size)
    if config.baseline == "group":
        values = group_advantages(returns).flatten()
    elif config.baseline == "leave_one_out":
        values = leave_one_out_advantages(returns).flatten()
    else:
        is_learned = torch.ones_like(is_learned)
        values = gae(
            rollouts.rewards,
            rollouts.values,
            rollouts.taken,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
    if rollouts.idle is None:
        return Advantages(values, is_learned)
    operates = is_operation(rollouts.actions).float()  # [N, T]
    usual = operates.view(-1, group_size, operates.shape[1]).mean(1)
    own = -rollouts.idle.prices.unsqueeze(1) * (operates - usual.repeat_interleave(group_size, 0))
    of_steps = values.unsqueeze(1) if values.dim() == 1 else values
    return Advantages(torch.where(rollouts.idle.steps, own, of_steps), is_learned)


def policy_loss(
    policy: MemoryPolicy, rollouts: Rollouts[Any], advantages: Advantages, config: PolicyConfig
) -> tuple[Tensor, PolicyMetrics]:
    """Computes the GRPO loss of rollouts with value loss and entropy, summed over steps.

    The policy gets the gradients; rollouts are of an earlier state of it.
    """
    observations = (rollouts.hidden, rollouts.features, rollouts.legal)
    decision = policy(*(part.flatten(0, 1) for part in observations))
    shape = rollouts.actions.shape
    logprobs = decision.logprobs.gather(1, rollouts.actions.flatten().unsqueeze(1))
    return grpo_loss(
        logprobs.view(shape),
        rollouts.logprobs,
        advantages.values,
        decision.entropy.view(shape),
        decision.value.view(shape),
        rollouts.value_targets(config),
        rollouts.values[:, :-1],
        rollouts.taken,
        advantages.is_learned,
        clip_ratio=config.clip_ratio,
        clip_ratio_high=config.clip_ratio_high,
        dual_clip=config.dual_clip,
        value_clip=config.value_clip,
        value_weight=config.value_weight,
        entropy_weight=config.entropy_weight,
    )


class BranchedStep(NamedTuple, Generic[State]):
    """Step by branches."""

    state: State  # next state
    done: Tensor  # True where the episode is over, [N]
    actions: Tensor  # of each episode, [N]
    accepted: Tensor  # False where no branch was good enough and SPLICE_WINDOW taken instead, [N]
    advantages: Tensor  # of every branch, [N, K], the likeliest action's first


@torch.no_grad()
def step_by_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> BranchedStep[State]:
    """Tries the likeliest actions of each state side by side, and takes one that is good enough.

    All branches of all states are independent rows of one batch. A branch's advantage is
    gamma V(s') - V(s), and 0 where it ends the episode: the reward of an end is known to the
    checker alone, not to an agent that acts. Of the branches with at least `accept_threshold` the
    likeliest is taken. The value head errs more often than a trained policy: see the success of
    branches in docs/reasoning.md.

    Raises:
        DataError: if a decision is not finite.
    """
    config = environment.config
    observation = environment.observe(state)
    decision = policy(*observation)
    check_decision(decision, observation.legal)
    count = min(config.max_branches, len(Action))
    # stable, so that equal probabilities (a fresh policy) give the same order everywhere
    likely = decision.logprobs.sort(dim=1, descending=True, stable=True)
    candidates = likely.indices[:, :count]  # [N, K]
    tried = environment.step(branch(state, count), candidates.flatten())
    before = decision.value.repeat_interleave(count)
    ahead = config.gamma * policy(*environment.observe(tried.state)).value
    advantages = torch.where(tried.done, 0.0, ahead - before).view(-1, count)
    # illegal actions were stepped too, to keep one shape, but can never be accepted
    advantages = advantages.masked_fill(likely.values[:, :count].isinf(), -torch.inf)
    good = advantages >= config.accept_threshold
    accepted = good.any(1)
    first = (good.cumsum(1) == 0).sum(1).clamp(max=count - 1)  # any place where none is good
    actions = candidates.gather(1, first.unsqueeze(1)).squeeze(1)
    after = select(tried, torch.arange(len(first), device=first.device) * count + first)
    if not bool(accepted.all()):
        # always legal, and free
        passes = torch.full_like(actions, Action.SPLICE_WINDOW)
        actions = torch.where(accepted, actions, passes)
        after = merge(accepted, after, environment.step(state, passes))
    return BranchedStep(after.state, after.done, actions, accepted, advantages)


class Branched(NamedTuple, Generic[State]):
    """Episodes played by branches: settled states, and the count of decisions that accepted one."""

    final: State
    num_accepted: int
    num_decisions: int


@torch.no_grad()
def roll_out_branches(
    environment: Environment[State], policy: MemoryPolicy, state: State
) -> Branched[State]:
    """Plays episodes that are not yet over to their end, by branches; raises as `roll_out` does."""
    running = torch.ones(len(state.time), dtype=torch.bool, device=state.time.device)
    num_accepted = 0
    num_decisions = 0
    while bool(running.any()):
        after = step_by_branches(environment, policy, state)
        num_accepted += int((after.accepted & running).sum())
        num_decisions += int(running.sum())
        state = merge(running, after.state, state)
        running = running & ~after.done
    return Branched(_settled(environment, state).state, num_accepted, num_decisions)
