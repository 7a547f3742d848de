"""Averages over data ranks that a loss is computed from."""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from cdrmix import runtime


class _MeanOverRanks(torch.autograd.Function):
    """Mean over all ranks; the gradient passes through unchanged.

    Every rank computes the same loss from the mean, so each holds the same gradient g of it.
    Through the mean its own share is g / W, and W ranks send it: g again. The averaging of
    parameter gradients over the ranks then gives the derivative of the one global loss.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total.div_(torch.distributed.get_world_size())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def mean_over_ranks(x: Tensor) -> Tensor:
    """Mean of `x` over all data ranks, for a loss that every rank computes alike.

    Args:
        x: same shape on every rank.
    Returns:
        The mean, same shape; differentiable.
    """
    return x if runtime.world_size() == 1 else _MeanOverRanks.apply(x)
