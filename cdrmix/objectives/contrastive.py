"""The contrastive objective of retrieval: a query should find the key of its own segment.

N pairs, S key dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(queries: Tensor, keys: Tensor, *, temperature: float) -> Tensor:
    """Symmetric InfoNCE with the other pairs of the batch as negatives, summed over pairs.

    Args:
        queries: unit vectors, [N, S].
        keys: the unit vector that each query should find, [N, S].
        temperature: divides the cosines.
    Returns:
        Scalar, nats; log N for vectors that say nothing. Divide by N.
    Source: van den Oord et al., 1807.03748, in both directions as in CLIP (2103.00020).
    """
    scores = queries.float() @ keys.float().transpose(0, 1) / temperature  # [N, N]
    own = torch.arange(len(queries), device=queries.device)
    there = F.cross_entropy(scores, own, reduction="sum")
    back = F.cross_entropy(scores.transpose(0, 1), own, reduction="sum")
    return (there + back) / 2
