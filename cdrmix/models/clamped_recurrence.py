"""Weights that fade, are added to and clamped, chunk after chunk: H' = clamp(decay H + added).

Element by element, and in turn, as the clamp is not linear. In PyTorch that is seven operations a
chunk and 26 with their gradients, which on a GPU take a launch each; a kernel does all chunks at
once. On CPUs clamped_recurrence.cpp, compiled at first use, in float32; on GPUs Triton.
"""

# B sequences, n chunks, M elements of H

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix.models import triton_launch
from cdrmix.models.cpu_library import can_take, load_library

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "Fast weights are carried from chunk to chunk in PyTorch, at several operations a chunk."
Run = Callable[..., None]
_BLOCK = 128  # elements of a Triton program: most weights are few, and their sequences many


def clamped(weights: Tensor, *, largest: float) -> Tensor:
    """Keeps magnitudes below `largest`; up to half of it, they stay as they are.

    A clamp that shrinks small weights too makes them fade, whatever their decay: c tanh(H / c)
    leaves .4 of a weight of 1 after 512 tokens at c = 2.
    """
    half = largest / 2
    over = F.softshrink(weights, half)  # what exceeds it, with its sign
    return weights - over + half * torch.tanh(over / half)


def clamped_recurrence(
    weights: Tensor, added: Tensor, decay: Tensor, *, largest: float
) -> tuple[Tensor, Tensor]:
    """Carries weights from chunk to chunk.

    Args:
        weights: H before the first chunk, [B, ...].
        added: what each chunk adds, [B, n, ...], n at least 1.
        decay: over each chunk, [B or 1, n or 1].
        largest: bound of `clamped`.
    Returns:
        H before each chunk, [B, n, ...], and after the last, [B, ...].
    """
    tensors = (weights, added, decay)
    if can_take(*tensors) and not isinstance(load_kernels(), str):
        return in_kernel(*tensors, largest=largest, run=run_cpp)
    if triton_launch.can_run("clamped_recurrence", *tensors):
        return in_kernel(*tensors, largest=largest, run=run_triton)
    return in_turn(*tensors, largest=largest)


def in_turn(
    weights: Tensor, added: Tensor, decay: Tensor, *, largest: float
) -> tuple[Tensor, Tensor]:
    """`clamped_recurrence` in PyTorch's operations."""
    befores = []
    decay = decay.view(*decay.shape, *[1] * (weights.dim() - 1))
    for number, new in enumerate(added.unbind(1)):
        befores.append(weights)
        faded = decay[:, number if decay.shape[1] > 1 else 0]
        weights = clamped(torch.addcmul(new, weights, faded), largest=largest)
    return torch.stack(befores, dim=1), weights


def in_kernel(
    weights: Tensor, added: Tensor, decay: Tensor, *, largest: float, run: Run
) -> tuple[Tensor, Tensor]:
    """`clamped_recurrence` by a kernel, which `run` calls."""
    befores, after = _Recurrence.apply(weights, added, decay, largest, run)
    return befores, after


def run_cpp(name: str, tensors: Sequence[Tensor], *, sizes: Sequence[int], half: float) -> None:
    """Calls a kernel of the CPU; `sizes` are B, n, M and the steps of the decay along B and n."""
    kernels = load_kernels()
    assert isinstance(kernels, ctypes.CDLL), f"the kernels were not built: {kernels}"
    addresses = [each.data_ptr() for each in tensors]
    getattr(kernels, name)(*sizes, half, *addresses, torch.get_num_threads())


def run_triton(name: str, tensors: Sequence[Tensor], *, sizes: Sequence[int], half: float) -> None:
    """Launches a kernel of Triton with the arguments of `run_cpp`."""
    module = "clamped_recurrence_triton_kernels"
    grid = (sizes[0], -(-sizes[2] // _BLOCK))
    triton_launch.launch(module, name, grid, *tensors, *sizes[1:], half, BLOCK=_BLOCK)


@functools.cache
def load_kernels() -> ctypes.CDLL | str:
    """Returns the CPU's kernels, built on first use, or the reason why there are none."""
    kernels = load_library(_SOURCE, name="kernels of fast weights", cost=_COST)
    if isinstance(kernels, str):
        return kernels
    for name, addresses in (("clamped_forward", 5), ("clamped_backward", 7)):
        function = getattr(kernels, name)
        numbers = [*[ctypes.c_int64] * 5, ctypes.c_float]
        function.argtypes = [*numbers, *[ctypes.c_void_p] * addresses, ctypes.c_int]
        function.restype = None
    return kernels


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, added: Tensor, decay: Tensor, largest: float, run: Run
    ) -> tuple[Tensor, Tensor]:
        weights, added, decay = weights.contiguous(), added.contiguous(), decay.contiguous()
        befores, after = torch.empty_like(added), torch.empty_like(weights)
        count = added.shape[1]
        # along an axis of one number the decay is the same for all
        along = (decay.shape[1] * (decay.shape[0] > 1), int(decay.shape[1] > 1))
        sizes = (len(added), count, weights[0].numel(), *along)
        ctx.run = partial(run, sizes=sizes, half=largest / 2)
        ctx.run("clamped_forward", (weights, added, decay, befores, after))
        ctx.save_for_backward(befores, after, decay)
        return befores, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        befores, after, decay = ctx.saved_tensors
        of_befores, of_after = (each.contiguous() for each in gradients)
        of_added, of_weights = torch.empty_like(befores), torch.empty_like(after)
        read = (befores, after, decay, of_befores, of_after)
        ctx.run("clamped_backward", (*read, of_added, of_weights))
        of_decay = None
        if ctx.needs_input_grad[2]:
            products = (of_added.float() * befores.float()).flatten(2).sum(2)
            of_decay = products.sum_to_size(decay.shape).to(decay.dtype)
        return of_weights, of_added, of_decay, None, None
