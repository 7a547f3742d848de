"""Squared ReLU and the dense feed-forward that a model without experts uses.

B batch, T time, D hidden, F inner width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.initialize import normal_


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2, keeping relu(x) only."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return grad.mul(positive).mul_(2)


# the activation of dense feed-forwards and experts
squared_relu: Callable[[Tensor], Tensor] = _SquaredReLU.apply


class FeedForward(nn.Module):
    """Dense feed-forward of two matrices with squared ReLU; channel mixing after its shift."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [B, T, D] -> [B, T, D]."""
        return self.down(squared_relu(self.up(x)))

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets a normal up projection and a zero down projection."""
        normal_(self.up.weight, std, seed=seed, name=f"{name}.up")
        self.down.weight.zero_()
