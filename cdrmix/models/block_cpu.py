"""Norm and activation of blocks on CPUs: the passes of block_cpu.cpp, compiled at first use.

For float32 alone. Each saves its inputs as they are and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix.models.cpu_library import can_take, load_library
from cdrmix.models.rebuild import cheaply, is_rebuilding

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "Norms and activations run in PyTorch: a step takes about a tenth longer."


@functools.cache
def load_kernels() -> ctypes.CDLL | str:
    """Returns the kernels, built on first use, or the reason why there are none, logged once."""
    kernels = load_library(_SOURCE, name="kernels of norms and activations", cost=_COST)
    if isinstance(kernels, str):
        return kernels
    sizes = [ctypes.c_int64, ctypes.c_int64]
    # addresses by function, behind the sizes; the number of threads comes last
    for name, further, addresses in (
        ("rms_norm_forward", [ctypes.c_float], 3),
        ("rms_norm_backward", [ctypes.c_float], 5),
        ("squared_relu_forward", [], 2),
        ("squared_relu_backward", [], 3),
    ):
        function = getattr(kernels, name)
        function.argtypes = [*sizes, *further, *[ctypes.c_void_p] * addresses, ctypes.c_int]
        function.restype = None
    return kernels


def can_run(*tensors: Tensor) -> bool:
    """Returns True where the kernels compute with these, as `cpu_library.can_take` says."""
    return can_take(*tensors) and not isinstance(load_kernels(), str)


def _run(name: str, x: Tensor, *rest: Any) -> None:
    """Calls a kernel on rows of x with further numbers and tensors."""
    kernels = load_kernels()
    assert isinstance(kernels, ctypes.CDLL), f"the kernels were not built: {kernels}"
    width = x.shape[-1]
    addresses = [each.data_ptr() if isinstance(each, Tensor) else each for each in rest]
    rows = x.numel() // max(width, 1)
    getattr(kernels, name)(rows, width, *addresses, torch.get_num_threads())


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        _run("rms_norm_forward", x, eps, x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x, grad = x.contiguous(), grad.contiguous()
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        _run("rms_norm_backward", x, ctx.eps, x, weight, grad, dx, dweight)
        return dx, dweight, None


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension, [..., D] -> [..., D]; on CPUs one pass over the rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises in float32 and gives the type of x."""
        weight, eps = self.weight, self.eps
        if eps is not None and weight is not None and can_run(x, weight):
            normed: Tensor = cheaply(_RMSNorm.apply, x, weight, eps)
            return normed
        if not is_rebuilding() or weight is None:
            return super().forward(x)
        if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
            normed = cheaply(_composed_norm, x, x, weight, eps)
        else:
            normed = cheaply(F.rms_norm, x, self.normalized_shape, weight, eps)
        return normed


def _composed_norm(x: Tensor, same: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of what torch composes it of on CPUs. `same` is x once more, so that the gradients of
    both ways through x join that of the residual stream one by one, and to the same bits."""
    return x * torch.rsqrt(same.pow(2).mean(-1, keepdim=True) + eps) * weight


def squared_relu(x: Tensor) -> Tensor:
    """Computes max(x, 0)^2, [..., D] -> [..., D], contiguous, without autograd."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _run("squared_relu_forward", x, x, out)
    return out


def squared_relu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Computes the gradient of the input of `squared_relu` from that of its result."""
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    _run("squared_relu_backward", x, x, grad, dx)
    return dx
