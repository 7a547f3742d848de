"""Tokens that all tensor ranks hold, shared out among them for routing.

N tokens, D hidden, P tensor ranks. Rank p takes rows [p n, (p + 1) n) with n = ceil(N / P); the
last ranks take fewer, or none where a batch has fewer tokens than there are ranks, as in
generation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models.moe import TokenShares
from cdrmix.parallel.exchange import gather_rows
from cdrmix.parallel.topology import Topology


class TensorShares(TokenShares):
    """Each tensor rank routes its share of the tokens.

    Args:
        topology: of this rank.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def take(self, tokens: Tensor) -> Tensor:
        """This rank's share, [N, D] -> [n, D]; backward, all ranks' shares of the gradient."""
        return _Take.apply(tokens, self.topology)

    def give_back(self, routed: Tensor, num_tokens: int) -> Tensor:
        """All ranks' shares, [n, D] -> [N, D]; backward, this rank's share of the gradient."""
        return _GiveBack.apply(routed, num_tokens, self.topology)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, topology: Topology) -> Tensor:
        ctx.num_tokens, ctx.topology = len(tokens), topology
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
    """This rank's rows, [N, D] -> [n, D]."""
    first = topology.tensor_rank * _rows_per_rank(len(rows), topology)
    return rows[first : first + _rows_per_rank(len(rows), topology)].clone()


def _gather(share: Tensor, num_tokens: int, topology: Topology) -> Tensor:
    """Every rank's rows in order, [n, D] -> [N, D]; shares are filled up to equal length."""
    length = _rows_per_rank(num_tokens, topology)
    filled = F.pad(share, (0, 0, 0, length - len(share)))
    return gather_rows(filled, topology)[:num_tokens]
