"""Activations, and the dense feed-forward of layers without experts.

B batch, T time, D hidden, F inner width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models import block_cpu, expert_rows_triton, triton_launch
from cdrmix.models.initialize import normal_
from cdrmix.models.rebuild import cheaply


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2, keeping relu(x) only, or x where kernels of ours compute it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.in_kernel = block_cpu.can_run(x)
        if ctx.in_kernel:
            ctx.save_for_backward(x)
            return block_cpu.squared_relu(x)
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        if ctx.in_kernel:
            return block_cpu.squared_relu_gradient(saved, grad)
        return grad.mul(saved).mul_(2)


def squared_relu(x: Tensor) -> Tensor:
    """Computes relu(x)^2 of any shape; on GPUs in one kernel, where that is right."""
    if triton_launch.can_run("squared_relu", x):
        return expert_rows_triton.squared_relu(x)
    out: Tensor = _SquaredReLU.apply(x)
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping both inputs only; autograd would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        silu = gate * share
        # silu' = share + silu (1 - share)
        return grad * up * torch.addcmul(share, silu, 1 - share), grad * silu


swiglu: Callable[[Tensor, Tensor], Tensor] = _SwiGLU.apply


class FeedForward(nn.Module):
    """Dense feed-forward; with squared ReLU and behind its shift, channel mixing."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.ffn_hidden_size
        self.gate: nn.Linear | None = None
        if config.ffn_activation == "swiglu":
            self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [B, T, D] -> [B, T, D]."""
        if self.gate is None:
            return self.down(cheaply(squared_relu, self.up(x)))
        return self.down(cheaply(swiglu, self.gate(x), self.up(x)))

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets normal projections up, and a zero down projection."""
        if self.gate is not None:
            normal_(self.gate.weight, std, seed=seed, name=f"{name}.gate")
        normal_(self.up.weight, std, seed=seed, name=f"{name}.up")
        self.down.weight.zero_()
