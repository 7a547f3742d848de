"""Router losses and monitors from router statistics.

Statistics are those of `MoEFeedForward.forward`, per token and averaged over all data ranks of a
micro-step, so that losses do not depend on how the batch is spread. `models.moe.rows_of` takes
those of the routers in one half of the blocks out of the rows of a model.
"""

# L layers with such a router, E experts, k experts per token

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RouterLosses(NamedTuple):
    """Means over layers; load balance is 1 and z-loss is 0 at best."""

    load_balance: Tensor
    z: Tensor


class RouterMonitors(NamedTuple):
    """Per layer, [L] or [L, E]."""

    utilisation: Tensor
    overflow_fraction: Tensor
    dropped_fraction: Tensor
    entropy_bits: Tensor


@torch.no_grad()
def tokens_routed(statistics: Tensor, *, num_experts: int, top_k: int) -> Tensor:
    """Tokens that reached each layer, from sums over tokens, [L, 2E + 3] -> [L, 1]; 1 for none.

    Those of a batch, but where a layer is in a block of Mixture of Depths.
    """
    tokens = statistics[:, :num_experts].sum(-1, keepdim=True) / top_k
    return torch.where(tokens > 0, tokens, torch.ones_like(tokens))


def router_losses(per_token: Tensor, *, num_experts: int, top_k: int) -> RouterLosses:
    """Load-balance loss E * sum_e f_e P_e and z-loss mean(logsumexp^2), averaged over layers.

    Of statistics per token, [L, 2E + 3], P and z carry the gradient; f is constant.

    Source: Switch Transformer (2101.03961) with all k choices counted; ST-MoE (2202.08906).
    """
    fraction = per_token[:, :num_experts].detach() / top_k  # f, [L, E]
    probability = per_token[:, num_experts : 2 * num_experts]  # P, [L, E]
    balance = num_experts * (fraction * probability).sum(-1)
    return RouterLosses(load_balance=balance.mean(), z=per_token[:, 2 * num_experts].mean())


@torch.no_grad()
def router_monitors(per_token: Tensor, *, num_experts: int, top_k: int) -> RouterMonitors:
    """Signs of a collapsing router: use of each expert, overflow, entropy.

    Overflow is measured against the capacity factor before anything is dropped. Entropy is that
    of the mean assignment, in bits: log2(E) when all experts are used alike.
    """
    fraction = per_token[:, :num_experts] / top_k
    bits = torch.special.entr(fraction).sum(-1) / torch.log(torch.tensor(2.0))
    return RouterMonitors(
        utilisation=fraction,
        overflow_fraction=per_token[:, 2 * num_experts + 1] / top_k,
        dropped_fraction=per_token[:, 2 * num_experts + 2] / top_k,
        entropy_bits=bits,
    )
