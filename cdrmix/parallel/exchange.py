"""Exchanges between ranks of one layout, as differentiable functions.

* Sums over tensor ranks, where a region that is cut over them begins and ends, and over the stages
  of a pipeline that compute alike. Tensors outside a region are whole and equal on all its ranks.
* Shares of the tokens that all tensor ranks hold, each routed by one rank. Rank p takes rows
  [p n, (p + 1) n) with n = ceil(N / P); the last ranks take fewer, or none where a batch has fewer
  tokens than there are ranks, as in generation.
* Means over data ranks that a loss is computed from.
* All tensors that cross a stage boundary, packed into a flat one.

N tokens, D hidden, P tensor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models.moe import TokenShares
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
    """Sum over a group, in place; each rank's part gets the whole gradient of it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def enter_region(x: Tensor, topology: Topology) -> Tensor:
    """Marks where a cut region begins: identity, whose gradient is summed over the tensor ranks."""
    return sum_gradients([x], topology)[0]


def leave_region(part: Tensor, topology: Topology) -> Tensor:
    """Sums the tensor ranks' parts, in the memory of `part`, which nothing else may read then."""
    return _SumOverRanks.apply(part, topology.tensor_group)


def sum_over_stages(part: Tensor, topology: Topology) -> Tensor:
    """Sums the pipeline stages' parts, in the memory of `part`; each takes the whole gradient.

    So every stage must compute the same from the sum.
    """
    return _SumOverRanks.apply(part, topology.pipeline_group)


def sum_gradients(tensors: Sequence[Tensor], topology: Topology) -> Sequence[Tensor]:
    """Returns aliases of tensors equal on all tensor ranks, whose partial gradients are summed."""
    return _SumGradients.apply(topology.tensor_group, *tensors)


def gather_rows(part: Tensor, topology: Topology) -> Tensor:
    """Gathers every tensor rank's rows in order, [n, ...] -> [P n, ...]. Not differentiable."""
    rows = part.new_empty(topology.degrees.tensor * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part.contiguous(), group=topology.tensor_group)
    return rows


class TensorShares(TokenShares):
    """Division of the tokens to route among the tensor ranks.

    Args:
        topology: of this rank.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def take(self, tokens: Tensor) -> Tensor:
        """Returns this rank's share, [N, D] -> [n, D]; the gradient's shares are gathered."""
        return _Take.apply(tokens, self.topology)

    def give_back(self, routed: Tensor, num_tokens: int) -> Tensor:
        """Gathers all shares, [n, D] -> [N, D]; its backward takes this rank's of the gradient."""
        return _GiveBack.apply(routed, num_tokens, self.topology)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, topology: Topology) -> Tensor:
        ctx.num_tokens = len(tokens)
        ctx.topology = topology
        return _share(tokens, topology)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather(grad, ctx.num_tokens, ctx.topology), None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, routed: Tensor, num_tokens: int, topology: Topology) -> Tensor:
        ctx.topology = topology
        return _gather(routed, num_tokens, topology)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _share(grad, ctx.topology), None, None


def _rows_per_rank(num_tokens: int, topology: Topology) -> int:
    return -(-num_tokens // topology.degrees.tensor)


def _share(rows: Tensor, topology: Topology) -> Tensor:
    """Copies this rank's rows, [N, D] -> [n, D]."""
    first = topology.tensor_rank * _rows_per_rank(len(rows), topology)
    return rows[first : first + _rows_per_rank(len(rows), topology)].clone()


def _gather(share: Tensor, num_tokens: int, topology: Topology) -> Tensor:
    """Gathers every rank's rows in order, [n, D] -> [N, D]."""
    # the collective takes equal shares: the last ones are padded, and the padding is at the end
    length = _rows_per_rank(num_tokens, topology)
    filled = F.pad(share, (0, 0, 0, length - len(share)))
    return gather_rows(filled, topology)[:num_tokens]


class _MeanOverRanks(torch.autograd.Function):
    """Sum over a group, divided; the gradient passes through unchanged.

    Every rank computes the same loss from the mean, so each holds the same gradient g of it.
    Through the mean, the gradient of its share is g / W, and W ranks send it: g again. The
    averaging of parameter gradients over the data ranks then gives the derivative of the one
    global loss.
    """

    @staticmethod
    def forward(ctx, x: Tensor, topology: Topology) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total, group=topology.stage_group)
        return total.div_(topology.degrees.data)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def mean_over_ranks(x: Tensor, topology: Topology) -> Tensor:
    """Averages `x` over data ranks, summed over tensor ranks, for a loss that all compute alike.

    Args:
        x: statistics of this rank's tokens, of one shape on every rank of the stage.
        topology: of this rank.
    """
    return x if topology.stage_group is None else _MeanOverRanks.apply(x, topology)


# shape and type of a tensor
Part = tuple[tuple[int, ...], torch.dtype]


def pack(tensors: list[Tensor]) -> Tensor:
    """Joins tensors end to end in the type of the first; differentiable.

    One tensor, as DeepSpeed starts a backward pass for each tensor with a gradient that a stage
    hands on, and each would go through the whole stage again (0.19.8, runtime/pipe/engine.py).
    """
    return _Pack.apply(*tensors)


def unpack(packed: Tensor, parts: list[Part]) -> list[Tensor]:
    """Returns views of the tensors that `pack` joined; differentiable."""
    return list(_Unpack.apply(packed, parts))


def num_elements(parts: list[Part], dtype: torch.dtype) -> int:
    """Counts the elements of the flat tensor in `dtype`."""
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
