"""Exchanges between ranks of one layout, as differentiable functions.

* Sums over tensor ranks, where a region that is cut over them begins and ends, and over the stages
  of a pipeline that compute alike. Tensors outside a region are whole and equal on all its ranks.
* Shares of the tokens that all tensor ranks hold, each routed by one rank. Rank p takes rows
  [p n, (p + 1) n) with n = ceil(N / P); the last ranks take fewer, or none where a batch has fewer
  tokens than there are ranks, as in generation.
* Means over data ranks that a loss is computed from.
* All tensors that cross a stage boundary, packed into a flat one.
"""

# N tokens, D hidden, P tensor ranks

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from cdrmix.parallel.topology import Topology


class _SumGradients(torch.autograd.Function):
    """Identity; the gradients are summed over a group, those of several tensors in one message."""

    @staticmethod
    def forward(ctx, group: Any, *tensors: Tensor):
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        # one message: the gradients are small, and each collective costs a latency
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        torch.distributed.all_reduce(flat, group=ctx.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        # In place: nothing reads the part again, and no second tensor of activations is needed.
        # Autograd is told, so that it fails where an operation before has saved the part.
        ctx.mark_dirty(x)
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        # no collective: all ranks compute the same from the sum, so each has the whole gradient
        return grad, None


def enter_region(x: Tensor, topology: Topology) -> Tensor:
    """Marks where a cut region begins: identity, whose gradient is summed over the tensor ranks."""
    return sum_gradients([x], topology)[0]


# Sums the ranks' parts, in the memory of the own part, which nothing else may read then. Each part
# takes the whole gradient, so every rank must compute the same from the sum. Over the tensor ranks,
# this ends a cut region.
sum_over_ranks: Callable[[Tensor, ProcessGroup | None], Tensor] = _SumOverRanks.apply


def sum_gradients(tensors: Sequence[Tensor], topology: Topology) -> Sequence[Tensor]:
    """Returns aliases of tensors equal on all tensor ranks, whose partial gradients are summed."""
    return _SumGradients.apply(topology.tensor_group, *tensors)


def gather_rows(part: Tensor, topology: Topology) -> Tensor:
    """Gathers every tensor rank's rows in order, [n, ...] -> [P n, ...]. Not differentiable."""
    # one result for all ranks: tensors of a list would have to be joined after the collective
    rows = part.new_empty(topology.degrees.tensor * len(part), *part.shape[1:])
    # contiguous, because a collective sends memory as it lies, and a part may be a transposed view
    torch.distributed.all_gather_into_tensor(rows, part.contiguous(), group=topology.tensor_group)
    return rows


def share_tokens(rows: Tensor, num_tokens: int, topology: Topology, *, to_share: bool) -> Tensor:
    """Cuts `num_tokens` tokens to route to this tensor rank's share, or gathers all shares again.

    [N, D] -> [n, D], or back. The backward pass does the other with the gradient.
    """
    return _Share.apply(rows, num_tokens, topology, to_share)


class _Share(torch.autograd.Function):
    """Cut to this rank's rows, [N, D] -> [n, D], or gathering of all; the backward does the other.

    Each row is routed by one rank alone, which has the whole gradient of it, so gathering the
    shares is enough, without a sum.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, num_tokens: int, topology: Topology, to_share: bool) -> Tensor:
        ctx.num_tokens = num_tokens
        ctx.topology = topology
        ctx.to_share = to_share
        return _redistributed(rows, num_tokens, topology, to_share=to_share)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows = _redistributed(grad, ctx.num_tokens, ctx.topology, to_share=not ctx.to_share)
        return rows, None, None, None


def _redistributed(rows: Tensor, num_tokens: int, topology: Topology, *, to_share: bool) -> Tensor:
    length = -(-num_tokens // topology.degrees.tensor)
    if to_share:
        first = topology.tensor_rank * length
        # a copy: a view would keep the rows of all ranks alive until the backward pass
        return rows[first : first + length].clone()
    # the collective takes equal shares: the last ones are padded, and the padding is at the end
    filled = F.pad(rows, (0, 0, 0, length - len(rows)))
    return gather_rows(filled, topology)[:num_tokens]


class _MeanOverRanks(torch.autograd.Function):
    """Sum over a group, divided; the gradient passes through unchanged.

    Every rank computes the same loss from the mean, so each holds the same gradient g of it.
    Through the mean, that of its share is g / W, and W ranks send it: g again. The averaging of
    parameter gradients over the data ranks then gives the derivative of the one global loss.
    """

    @staticmethod
    def forward(ctx, x: Tensor, topology: Topology) -> Tensor:
        total = x.clone()  # the reduction is in place, and the caller's statistics stay
        torch.distributed.all_reduce(total, group=topology.stage_group)
        # by the data ranks, though the group has tensor ranks too: those have routed shares of the
        # same batch, which add up to the statistics of one data rank
        return total.div_(topology.degrees.data)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def mean_over_ranks(x: Tensor, topology: Topology) -> Tensor:
    """Averages over data ranks, for a loss that all compute alike, and sums over tensor ranks."""
    return x if topology.stage_group is None else _MeanOverRanks.apply(x, topology)


# shape and type of a tensor
Part = tuple[tuple[int, ...], torch.dtype]


def num_elements(parts: list[Part], dtype: torch.dtype) -> int:
    """Counts the elements of the flat tensor in `dtype`."""
    # exact, as no part is narrower: the first is of the run's type, statistics are float32
    return sum(math.prod(shape) * each.itemsize for shape, each in parts) // dtype.itemsize


def _join(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    # `view`, not a cast: float32 statistics keep their bits inside a bf16 tensor
    return torch.cat([tensor.reshape(-1).view(dtype) for tensor in tensors])


def _split(packed: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
    sizes = [num_elements([part], packed.dtype) for part in parts]
    pieces = zip(packed.split(sizes), parts, strict=True)
    return tuple(piece.view(dtype).view(shape) for piece, (shape, dtype) in pieces)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.parts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        return _join(tensors, tensors[0].dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _split(grad, ctx.parts)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
        ctx.dtype = packed.dtype
        return _split(packed, parts)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _join(grads, ctx.dtype), None


# Joins tensors end to end in the type of the first. One tensor, as DeepSpeed starts a backward pass
# for each tensor with a gradient that a stage hands on, and each would go through the whole stage
# again (0.19.8, runtime/pipe/engine.py).
pack: Callable[..., Tensor] = _Pack.apply
# Returns views of the tensors that `pack` joined, from the flat one and their parts.
unpack: Callable[[Tensor, list[Part]], tuple[Tensor, ...]] = _Unpack.apply
