"""Predictor loss and monitors of Mixture of Depths, from the statistics of its routed blocks.

Statistics are sums over tokens, in the order of `planning.depth.DEPTH_STATISTICS`.
"""

# L routed blocks, S statistics

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DepthMonitors(NamedTuple):
    """Per routed block, [L], float64."""

    fraction: Tensor  # of the tokens, chosen
    predictor_accuracy: Tensor  # share of tokens whose membership is predicted; topk only
    predictor_nats: Tensor  # cross-entropy of the membership, per token; topk only
    threshold: Tensor  # threshold mode only
    score_deviation: Tensor  # standard deviation of the router's scores
    # between being chosen and the place in the row: from -1, the first tokens, to 1, the last; 0
    # where all are chosen, or none
    position_correlation: Tensor


def predictor_loss(statistics: Tensor) -> Tensor:
    """Cross-entropy of the predictors per token, mean over blocks, [L, S] -> scalar."""
    tokens, *_, predictor_nats, _, _, _, _ = statistics.unbind(1)
    return (predictor_nats / tokens).mean()


@torch.no_grad()
def depth_monitors(statistics: Tensor) -> DepthMonitors:
    """Means and spread of sums over all data ranks, [L, S]."""
    sums = statistics.double().unbind(1)
    tokens, chosen, score, score_square, nats, predicted, place, place_square, threshold = sums
    fraction = chosen / tokens
    variance = (score_square / tokens - (score / tokens).square()).clamp(min=0)
    # places have a mean of 0, so that their covariance with membership is the mean of the product
    spread = fraction * (1 - fraction) * place_square / tokens
    correlation = place / tokens / spread.sqrt()
    return DepthMonitors(
        fraction=fraction,
        predictor_accuracy=predicted / tokens,
        predictor_nats=nats / tokens,
        threshold=threshold / tokens,
        score_deviation=variance.sqrt(),
        position_correlation=torch.where(spread > 0, correlation, torch.zeros_like(spread)),
    )
