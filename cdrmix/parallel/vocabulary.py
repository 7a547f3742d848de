"""Embedding, head and loss with the vocabulary's rows shared out over the tensor ranks.

V vocabulary, D hidden, P tensor ranks; this rank holds V / P rows, from `first_id` on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.models.backbone import TokenEmbedding
from cdrmix.objectives.language_model import VocabularyPart, linear_cross_entropy
from cdrmix.parallel.exchange import enter_region, gather_rows, leave_region
from cdrmix.parallel.tensor import cut
from cdrmix.parallel.topology import Topology


class VocabularyEmbedding(TokenEmbedding):
    """This rank's rows of the token embedding, which are its rows of the head too.

    Args:
        weight: its rows, [V / P, D].
        topology: of this rank.
    """

    def __init__(self, weight: nn.Parameter, topology: Topology) -> None:
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.weight = weight
        self.topology = topology
        self.first_id = topology.tensor_rank * weight.shape[0]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Rows of the tokens, [...] -> [..., D], whole on every rank."""
        local = input_ids - self.first_id
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.topology)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token over the whole vocabulary, [..., D] -> [..., V].

        For decoding: no gradient passes.
        """
        return torch.cat(self._of_all_ranks(super().logits(hidden).detach()).unbind(0), dim=-1)

    def cross_entropy(self, hidden: Tensor, labels: Tensor, label_weights: Tensor | None) -> Tensor:
        """As `head.next_token_nats`."""
        part = VocabularyPart(self.first_id, self._of_all_ranks)
        whole = enter_region(hidden, self.topology)
        return linear_cross_entropy(whole, self.weight, labels, part, label_weights)

    def _of_all_ranks(self, x: Tensor) -> Tensor:
        """Every tensor rank's `x`, in order, [...] -> [P, ...]."""
        return gather_rows(x.unsqueeze(0), self.topology)


def split_embedding(embedding: TokenEmbedding, topology: Topology) -> TokenEmbedding:
    """This rank's part of an initialised whole embedding; the whole one where a rank is alone."""
    if topology.tensor_group is None:
        return embedding
    return VocabularyEmbedding(cut(embedding.weight, topology, dim=0), topology)
