"""Projections of hidden states to the keys and queries of episodic memory."""

# B rows, T time, D hidden, S key dimensions

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.models.initialize import normal_


class RetrievalEncoder(nn.Module):
    """Keys of segments and queries for them, unit vectors of one space.

    Args:
        hidden_size: D, of the backbone.
        key_size: S.
    """

    def __init__(self, hidden_size: int, key_size: int) -> None:
        super().__init__()
        self.to_key = nn.Linear(hidden_size, key_size, bias=False)
        self.to_query = nn.Linear(hidden_size, key_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Set the initial values from the seed."""
        for part in ("to_key", "to_query"):
            weight = getattr(self, part).weight
            normal_(weight, weight.shape[1] ** -0.5, seed=seed, name=f"retrieval.{part}")

    def key(self, hidden: Tensor) -> Tensor:
        """Key of a segment from its hidden states, [B, T, D] -> [B, S], float32."""
        return F.normalize(self.to_key(hidden.mean(1)).float(), dim=-1)

    def query(self, hidden: Tensor) -> Tensor:
        """Query from the hidden state of one token, [B, D] -> [B, S], float32."""
        return F.normalize(self.to_query(hidden).float(), dim=-1)


@torch.no_grad()
def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of named weights, hex, in any order: keys of other weights mean nothing to these."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        values = tensor.detach().float().cpu().contiguous()
        found.update(f"{name} {tuple(values.shape)}".encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()
