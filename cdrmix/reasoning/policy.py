"""What the memory agent acts in: what it sees, what a step gives, and the rules' interface.

The memory agent: which memory operation comes next, and what the present state is worth.
"""

# N rollouts, D hidden, F features, A actions

# N rollouts, D hidden, F features of the memory, A actions

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.models.initialize import normal_


class Observation(NamedTuple):
    """What the agent sees.

    Attributes:
        hidden: of the window, [N, D].
        features: of memory and budget, [N, F], between 0 and 1.
        legal: actions that may be taken, [N, A].
    """

    hidden: Tensor
    features: Tensor
    legal: Tensor


class Episodes(Protocol):
    """State of a batch of episodes: a dataclass of tensors with a row per episode."""

    @property
    def time(self) -> Tensor:
        """Steps taken, [N]."""
        ...

    @property
    def score(self) -> Tensor:
        """Any number of each episode, [N] float32."""
        ...


State = TypeVar("State", bound=Episodes)


class Transition(NamedTuple, Generic[State]):
    """What a step gives: the next state, and whether the episode is over [N]."""

    state: State
    done: Tensor


class EpisodeOutcome(NamedTuple, Generic[State]):
    """What episodes that are over come to: their last state, and reward [N]."""

    state: State
    reward: Tensor


class Environment(Protocol[State]):
    """Rules of episodes."""

    config: PolicyConfig

    def observe(self, state: State) -> Observation:
        """What the agent sees in a state."""
        ...

    def step(self, state: State, actions: Tensor) -> Transition[State]:
        """Take one action per episode, [N] int64, legal ones."""
        ...

    def settle(self, state: State) -> EpisodeOutcome[State]:
        """Reward episodes that are over; before its end an episode earns nothing.

        What an answer is worth can be costly to find: many episodes are settled together.
        """
        ...


class Action(IntEnum):
    """Memory operations, in the order of the policy's outputs.

    SUMMARIZE folds the window into working memory and moves on; RETRIEVE reads episodic memory into
    a buffer; SPLICE_WINDOW puts the buffer into the window, or moves on where it is empty;
    CACHE_WRITE proposes the window for episodic memory and moves on.
    """

    SUMMARIZE = 0
    RETRIEVE = 1
    SPLICE_WINDOW = 2
    CACHE_WRITE = 3


NUM_ACTIONS = len(Action)
VALUE_WIDTH = 64  # inner features of the value head


class Decision(NamedTuple):
    """What the heads say of a batch of states.

    Attributes:
        logprobs: of every action, [N, A] (nats); minus infinity where one is illegal.
        entropy: of the choice, [N] (nats).
        value: expected return, [N].
    """

    logprobs: Tensor
    entropy: Tensor
    value: Tensor


class MemoryPolicy(nn.Module):
    """Policy and value heads over the backbone's last hidden state and the memory's state.

    The policy starts uniform over what is legal.

    Args:
        hidden_size: D.
        num_features: F; see `cdrmix.reasoning.episodes`.
    """

    def __init__(self, hidden_size: int, num_features: int) -> None:
        super().__init__()
        self.policy = nn.Linear(hidden_size, NUM_ACTIONS, bias=False)
        self.feature_policy = nn.Linear(num_features, NUM_ACTIONS)
        self.value = nn.Linear(hidden_size, 1, bias=False)
        # what a memory is worth is no sum: a good match counts once the question is asked
        self.feature_value_in = nn.Linear(num_features, VALUE_WIDTH)
        self.feature_value_out = nn.Linear(VALUE_WIDTH, 1)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """A uniform policy, and a value of zero whose inner features are random."""
        for parameter in self.parameters():
            parameter.zero_()
        scale = self.feature_value_in.weight.shape[1] ** -0.5
        normal_(self.feature_value_in.weight, 3 * scale, seed=seed, name="policy.feature_value_in")

    def forward(self, hidden: Tensor, features: Tensor, legal: Tensor) -> Decision:
        """Decide.

        Args:
            hidden: normalised hidden state, [N, D].
            features: state of memory and budget, [N, F], of the order of 1.
            legal: whether each action may be taken, [N, A]; at least one of each row.
        """
        hidden = hidden.to(self.policy.weight.dtype)  # means over segments are float32
        logits = self.policy(hidden) + self.feature_policy(features.to(hidden.dtype))
        logits = logits.float().masked_fill(~legal, -torch.inf)
        logprobs = torch.log_softmax(logits, dim=-1)
        # an illegal action has no share in the entropy: 0 log 0 is 0
        known = logprobs.masked_fill(~legal, 0)
        entropy = -(known.exp() * known * legal).sum(-1)
        inner = torch.tanh(self.feature_value_in(features.to(hidden.dtype)))
        value = self.value(hidden) + self.feature_value_out(inner)
        return Decision(logprobs, entropy, value.squeeze(-1).float())
