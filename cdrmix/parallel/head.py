"""The loss of the next token under a head that is whole, cut or partitioned."""

from __future__ import annotations

from torch import Tensor

from cdrmix.models.backbone import TokenEmbedding
from cdrmix.objectives.language_model import linear_cross_entropy
from cdrmix.parallel.partitioned import PartitionedEmbedding
from cdrmix.parallel.vocabulary import VocabularyEmbedding


def next_token_nats(
    embedding: TokenEmbedding,
    hidden: Tensor,
    labels: Tensor,
    label_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the next token, summed over the valid positions.

    Args:
        embedding: of this rank; tied with the head.
        hidden: normalised output of the last block, [..., D].
        labels: next token of each position, [...], int64; -100 is ignored.
        label_weights: factor on the nats of each, [...], float32; None: 1.
    Returns:
        Nats over the valid positions, scalar, float32; the same on every tensor rank.
    """
    if isinstance(embedding, VocabularyEmbedding | PartitionedEmbedding):
        return embedding.cross_entropy(hidden, labels, label_weights)
    return linear_cross_entropy(hidden, embedding.weight, labels, label_weights=label_weights)
