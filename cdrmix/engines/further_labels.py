"""Labels of the tokens beyond the next one, and their losses beside that of the next one."""

# B batch, T time, n tokens predicted at each position, the next one included

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.schema import Config
from cdrmix.models.backbone import TokenEmbedding
from cdrmix.models.mtp import FurtherTokens
from cdrmix.objectives.language_model import HeadLoss, LabelWeights
from cdrmix.parallel.zero3 import next_token_losses


def further_names(config: Config) -> tuple[str, ...]:
    """Names of the further tokens that a model predicts, from the second on."""
    mtp = config.model.mtp
    return () if mtp is None else tuple(f"mtp_{place}" for place in range(2, mtp.num_tokens + 1))


class Predicts(Protocol):
    """Model, or last pipeline stage, as a loss of further tokens needs it."""

    @property
    def embedding(self) -> TokenEmbedding: ...
    @property
    def mtp(self) -> FurtherTokens | None: ...


@dataclass(frozen=True)
class FurtherLabels:
    """Tokens beyond the next one that a micro-batch is to predict.

    Attributes:
        model: that predicts them.
        following: tokens at 1 to n - 1 after each position, [B, T, n - 1]; -100 where unknown.
        labels: of the tokens 2 to n, [B, T, n - 1]; -100 is not learned.
        factors: on the nats of the labels of each further token.
        segment_ids: document of each token; None: a sample is one.
    """

    model: Predicts
    following: Tensor
    labels: Tensor
    factors: Sequence[float]
    segment_ids: Tensor | None

    def losses(self, hidden: Tensor, labels: Tensor, weights: LabelWeights) -> HeadLoss:
        """Computes `next_token_losses` with the further tokens: in one call, so that the gradient
        of the head is formed once, and ZeRO-3 gathers it once.

        Of the heads the first is the model's own. Reported sums: those of `weights`, then one for
        each further token.
        """
        assert self.model.mtp is not None, "labels of a model that predicts them"
        embedding = self.model.embedding
        further = self.model.mtp(hidden, self.following, embedding, self.segment_ids)
        of_next = torch.ones_like(labels, dtype=torch.float32)
        nats = [of_next if weights.nats is None else weights.nats]
        nats += [torch.full_like(nats[0], factor) for factor in self.factors]
        squares = weights.squares
        if squares is not None:
            squares = F.pad(squares.unsqueeze(0), (*[0] * 2 * labels.dim(), 0, len(further)))
        own = 0 if weights.sums is None else weights.sums.shape[-1]
        sums = nats[0].new_zeros(len(nats), *labels.shape, own + len(further))
        if weights.sums is not None:
            sums[0, ..., :own] = weights.sums
        for number in range(len(further)):
            sums[1 + number, ..., own + number] = 1.0
        return next_token_losses(
            embedding,
            torch.stack([hidden, *further]),
            torch.cat([labels.unsqueeze(0), self.labels.movedim(-1, 0)]),
            LabelWeights(torch.stack(nats), squares, sums, heads=len(nats)),
        )
