"""The memory agent: which memory operation comes next, and what the present state is worth."""

# N rollouts, D hidden, F features of the memory, A actions

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.models.initialize import normal_


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
