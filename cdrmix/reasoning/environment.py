"""What the memory agent acts in: what it sees, what a step gives, and the rules' interface."""

# N rollouts, D hidden, F features, A actions

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from cdrmix.config.reasoning import PolicyConfig


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


class Outcome(NamedTuple, Generic[State]):
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

    def settle(self, state: State) -> Outcome[State]:
        """Reward episodes that are over; before its end an episode earns nothing.

        What an answer is worth can be costly to find: many episodes are settled together.
        """
        ...
