"""Averages over data ranks that a loss is computed from."""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from cdrmix.parallel.topology import Topology


class _MeanOverRanks(torch.autograd.Function):
    """Sum over a group, divided; the gradient passes through unchanged.

    Every rank computes the same loss from the mean, so each holds the same gradient g of it.
    Through the mean its own share is g / W, and W ranks send it: g again. The averaging of
    parameter gradients over the data ranks then gives the derivative of the one global loss.
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
    """Mean over the data ranks of `x`, summed over tensor ranks, for a loss that all compute alike.

    Args:
        x: what this rank counted on its own tokens, same shape on every rank of the stage.
        topology: of this rank.
    Returns:
        The mean, same shape; differentiable.
    """
    return x if topology.stage_group is None else _MeanOverRanks.apply(x, topology)
