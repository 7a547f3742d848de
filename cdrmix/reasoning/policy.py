"""Memory agent, which chooses the next memory operation, and interface of its environments."""

# N episodes, D hidden, F features of memory and budget, A actions

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.models.initialize import normal_


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
VALUE_WIDTH = 64  # inner features of the value head


class Decision(NamedTuple):
    """Outputs of the heads for a batch of states."""

    logprobs: Tensor  # of every action, [N, A] (nats); minus infinity where one is illegal
    entropy: Tensor  # of the choice, [N] (nats)
    value: Tensor  # expected return, [N]


class MemoryPolicy(nn.Module):
    """Policy and value heads over the backbone's last hidden state and the memory's state.

    The policy starts uniform over the legal actions.
    """

    def __init__(self, hidden_size: int, num_features: int) -> None:
        super().__init__()
        self.policy = nn.Linear(hidden_size, NUM_ACTIONS, bias=False)
        self.feature_policy = nn.Linear(num_features, NUM_ACTIONS)
        self.value = nn.Linear(hidden_size, 1, bias=False)
        # the value is no sum over features: a good match counts only once the question is asked
        self.feature_value_in = nn.Linear(num_features, VALUE_WIDTH)
        self.feature_value_out = nn.Linear(VALUE_WIDTH, 1)

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
        logits = self.policy(hidden) + self.feature_policy(features)
        logits = logits.float().masked_fill(~legal, -torch.inf)
        logprobs = torch.log_softmax(logits, dim=-1)
        # an illegal action has no share in the entropy: 0 log 0 is 0, but 0 * -inf is not a number
        finite = logprobs.masked_fill(~legal, 0)
        entropy = -(finite.exp() * finite * legal).sum(-1)
        inner = torch.tanh(self.feature_value_in(features))
        value = self.value(hidden) + self.feature_value_out(inner)
        return Decision(logprobs, entropy, value.squeeze(-1).float())
