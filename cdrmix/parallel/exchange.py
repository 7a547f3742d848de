"""Differentiable collectives of tensor ranks, and of pipeline stages that compute alike.

P tensor ranks. Whatever enters or leaves a region that is cut over them is whole and equal on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

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
    """Sum of the tensor ranks' parts, written over `part`; nothing else may read it afterwards."""
    return _SumOverRanks.apply(part, topology.tensor_group)


def sum_over_stages(part: Tensor, topology: Topology) -> Tensor:
    """Sum of the pipeline stages' parts, in the memory of this one's; each computes the same of it
    and takes the whole gradient."""
    return _SumOverRanks.apply(part, topology.pipeline_group)


def sum_gradients(tensors: Sequence[Tensor], topology: Topology) -> Sequence[Tensor]:
    """Aliases of tensors that all tensor ranks hold alike, whose partial gradients are summed."""
    return _SumGradients.apply(topology.tensor_group, *tensors)


def gather_rows(own: Tensor, topology: Topology) -> Tensor:
    """Every tensor rank's rows in order, [n, ...] -> [P n, ...]. Not differentiable."""
    rows = own.new_empty(topology.degrees.tensor * len(own), *own.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, own.contiguous(), group=topology.tensor_group)
    return rows
