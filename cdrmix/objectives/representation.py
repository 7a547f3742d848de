"""Objectives of representations: retrieval of segments, and recall by plastic adapters."""

# N pairs, S key dimensions; B sequences, T time, r rank of the adapter

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
        Scalar, nats; log N for uninformative vectors. Divide by N.
    Source: van den Oord et al., 1807.03748, in both directions as in CLIP (2103.00020).
    """
    scores = queries.float() @ keys.float().transpose(0, 1) / temperature  # [N, N]
    partners = torch.arange(len(queries), device=queries.device)
    there = F.cross_entropy(scores, partners, reduction="sum")
    back = F.cross_entropy(scores.transpose(0, 1), partners, reduction="sum")
    return (there + back) / 2


def correlation_loss(
    post: Tensor,
    modulator: Tensor,
    recalled: Tensor,
    weights: Tensor,
    *,
    decay: float,
    decorrelation_weight: float,
) -> Tensor:
    """Correlation objective of one adapter, summed over sequences.

    Per sequence, with mu = 1 - decay:

        -(1/T) sum_t m_t <q_t, H_t e_t> + mu/2 ||H||^2 + nu ||offdiag(C_q)||^2 / r

    The first two terms are those whose gradient step in H, at rate 1, is the Hebb rule
    `H' = decay H + m q e^T`. The third keeps the features of q from becoming copies of each other;
    C_q is taken over the tokens of a sequence, so that the loss does not depend on how sequences
    are spread over ranks.

    Args:
        post: q, normalised features of the layer's output, [B, T, r].
        modulator: m, [B, T], in (0, 1).
        recalled: H_t e_t, output of the fast weights for the eligibility trace, [B, T, r].
        weights: H after the last token, [B, r, r].
        decay: of the fast weights, per token.
        decorrelation_weight: nu; 0.01 keeps the r features of a random projection apart, and is too
            small to affect the task.
    Returns:
        Scalar, float32. Divide by the sequences of the whole global batch.
    """
    agreement = (modulator * (post * recalled).sum(-1)).mean(1)  # [B]
    size = weights.square().sum((1, 2))  # [B]
    centred = post - post.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / post.shape[1]  # [B, r, r]
    diagonal = torch.diagonal(covariance, dim1=1, dim2=2)
    shared = covariance.square().sum((1, 2)) - diagonal.square().sum(1)
    per_sequence = (
        -agreement + (1 - decay) / 2 * size + decorrelation_weight / post.shape[2] * shared
    )
    return per_sequence.sum()
