"""ZeRO-3: parameters that are partitioned over the data ranks as soon as they have values.

DeepSpeed gathers a module's parameters around its calls. A parameter of another module must be
registered with the module that reads it: DeepSpeed would notice only in an engine's forward pass,
and an evaluation may come before that (0.19.8, runtime/zero/parameter_offload.py).
`next_token_losses` is the loss under a head that is whole, cut or partitioned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.hf.model import Head, head_losses
from cdrmix.models.backbone import Scorer, TokenEmbedding
from cdrmix.models.mixer import Mixer
from cdrmix.objectives.language_model import HeadLoss, LabelWeights
from cdrmix.parallel.tensor import VocabularyEmbedding

# (hidden states, weight of the head) -> logits or loss
Score = Callable[[Tensor, Tensor], Any]


class _Head(nn.Module):
    """Use of the embedding as the head, a module so that DeepSpeed gathers the weight for it."""

    def forward(self, hidden: Tensor, embedding: nn.Embedding, score: Score) -> Any:
        return score(hidden, embedding.weight)


class PartitionedEmbedding(TokenEmbedding):
    """Token embedding whose rows, partitioned already, lie over the data ranks."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        weight = embedding.weight
        assert isinstance(weight, nn.Parameter), "an embedding's weight is one"
        rows, width = weight.ds_shape  # type: ignore[attr-defined]
        # `ds_shape`, as the tensor itself is empty between two gatherings; on meta, because the
        # weight that the constructor makes is replaced at once
        super().__init__(rows, width, device="meta")
        self.weight = weight
        self.head = _Head()
        # a parameter of another module, which is gathered then whenever the head is called
        runtime.import_deepspeed().zero.register_external_parameter(self.head, weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the next token, [..., D] -> [..., V]."""
        logits: Tensor = self.head(hidden, self, F.linear)
        return logits

    def losses(self, hidden: Tensor, labels: Tensor, weights: LabelWeights) -> HeadLoss:
        """Computes `next_token_losses` with the weight gathered."""
        score = partial(head_losses, labels=labels, weights=weights)
        losses: HeadLoss = self.head(hidden, self, score)
        return losses


def partition(module: nn.Module, settings: dict[str, Any]) -> None:
    """Partitions a module's parameters over the data ranks, in the type of the run; collective.

    They have their values, which are cast as DeepSpeed casts a whole model under the other stages;
    those partitioned before stay as they are. `settings` are DeepSpeed's, complete.
    """
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(key, {}).get("enabled"):
            module.to(dtype)
            break
    zero = runtime.import_deepspeed().zero
    zero.Init(module=module, config_dict_or_path=settings)
    # The module that owns such parameters is never called, so nothing would gather them.
    for part in module.modules():
        for name in part.read_inside if isinstance(part, Mixer) else ():
            for parameter in part.get_submodule(name).parameters():
                zero.register_external_parameter(part, parameter)


def next_token_nats(
    embedding: Scorer, hidden: Tensor, labels: Tensor, label_weights: Tensor | None = None
) -> Tensor:
    """Sums the nats of the next token over the valid positions; the same on every tensor rank.

    Args:
        embedding: of this rank, tied with the head; or the head of a Hugging Face model.
        hidden: normalised output of the last block, [..., D].
        labels: next token of each position, [...], int64; -100 is ignored.
        label_weights: factor of each position, [...], float32; None: 1.
    """
    return next_token_losses(embedding, hidden, labels, LabelWeights(label_weights)).loss


def next_token_losses(
    embedding: Scorer, hidden: Tensor, labels: Tensor, weights: LabelWeights
) -> HeadLoss:
    """Computes `linear_losses` of hidden states under a head; the same on every tensor rank.

    `embedding`, `hidden` and `labels` are as of `next_token_nats`. Any hidden states that the head
    is to read will do, as those of further heads with labels further on.
    """
    if isinstance(embedding, VocabularyEmbedding | PartitionedEmbedding | Head):
        return embedding.losses(hidden, labels, weights)
    assert isinstance(embedding, TokenEmbedding), "a model has one or the other"
    return head_losses(hidden, embedding.weight, labels, weights)
