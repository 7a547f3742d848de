"""Cross-entropy of the next token, computed from hidden states without all logits at once."""

# N positions, n positions of a chunk, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED_LABEL = -100
# Bounds the float32 logits of a chunk: 128 MiB at a vocabulary of 32,768.
_CHUNK_POSITIONS = 1024


class VocabularyPart(NamedTuple):
    """Rows of the head on one rank, where ranks share out the vocabulary."""

    first_id: int  # token id of the weight's first row
    of_all_parts: Callable[[Tensor], Tensor]  # gathers a tensor of each part, [...] -> [parts, ...]


WHOLE_VOCABULARY = VocabularyPart(0, lambda x: x.unsqueeze(0))


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of hidden @ weight.T, chunk by chunk over the positions.

    The gradient of a chunk is computed from its logits at once, so that one chunk of logits exists
    at a time instead of all N x V twice, without an extra matmul. With a part of the vocabulary it
    is that part's summand of the gradient of `hidden`, and the full gradient of its rows.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        part: VocabularyPart,
        label_weights: Tensor | None,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        sums = () if label_weights is None else label_weights.shape[1:]
        assert not (sums and (needs_hidden or needs_weight)), "several sums have no gradients"
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        if needs_weight:
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        nats = torch.zeros(sums, dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], _CHUNK_POSITIONS):
            stop = start + _CHUNK_POSITIONS
            rows = hidden[start:stop]
            targets = labels[start:stop]
            logits = F.linear(rows, weight).float()  # [n, V]
            valid = targets != IGNORED_LABEL
            local = targets.clamp(min=0).unsqueeze(1) - part.first_id  # [n, 1]
            is_here = (local >= 0) & (local < weight.shape[0])
            local = local.clamp(0, weight.shape[0] - 1)
            score = logits.gather(1, local) * is_here
            log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
            log_totals, scores = part.of_all_parts(torch.stack([log_total, score])).unbind(1)
            log_total = torch.logsumexp(log_totals, dim=0)  # [n, 1]
            if label_weights is not None and sums:
                worth = valid.unsqueeze(1) * label_weights[start:stop]  # [n, S]
                # A loss that is infinite is one in the sums that it weighs in alone.
                of_sums = (log_total - scores.sum(0)) * worth
                nats += of_sums.masked_fill_(worth == 0, 0.0).sum(0)
                continue
            worth = valid if label_weights is None else valid * label_weights[start:stop]
            nats += ((log_total - scores.sum(0)).squeeze(1) * worth).sum()
            if not (needs_hidden or needs_weight):
                continue
            error = torch.exp_(logits.sub_(log_total))  # softmax
            error.scatter_add_(1, local, -is_here.to(error.dtype))
            if label_weights is not None:  # before the cast: bf16 would round the weights
                error.mul_(worth.unsqueeze(1))
            error = error.to(hidden.dtype)
            counted = valid.unsqueeze(1).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[start:stop] = (error @ weight).mul_(counted)
            if weight_grad is not None:
                weight_grad += (error.t() @ (rows * counted)).float()
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return nats

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = hidden_grad * grad.to(hidden_grad.dtype)
        if weight_grad is not None:
            weight_grad = (weight_grad * grad).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    part: VocabularyPart = WHOLE_VOCABULARY,
    label_weights: Tensor | None = None,
) -> Tensor:
    """Nats of the labels under softmax(hidden @ weight.T), summed over valid positions.

    Args:
        hidden: [..., D], any float type.
        weight: the head, [V, D], same type; with a part of the vocabulary only its rows.
        labels: next token of each position, [...], int64; -100 is ignored.
        part: of the vocabulary that `weight` has.
        label_weights: factor on the nats of each label, [...], float32; None: 1. Without gradients
            also [..., S], for S sums at once, such as one for each domain.
    Returns:
        Scalar, or [S], float32, the same for every part. Divide by `sum_weights` of the whole
        global batch. The caller sums the gradient of `hidden` over the parts.
    """
    if not torch.is_grad_enabled():  # a Function's needs_input_grad ignores this
        hidden = hidden.detach()
        weight = weight.detach()
    flat = hidden.reshape(-1, hidden.shape[-1])
    if label_weights is not None:
        label_weights = label_weights.reshape(labels.numel(), *label_weights.shape[labels.dim() :])
    return _LinearCrossEntropy.apply(flat, weight, labels.reshape(-1), part, label_weights)


def sum_weights(labels: Tensor, label_weights: Tensor | None = None) -> Tensor:
    """Divisor of the nats of `labels`: the sum of their weights, or their number; float64."""
    valid = labels != IGNORED_LABEL
    return valid.sum().double() if label_weights is None else (label_weights.double() * valid).sum()
