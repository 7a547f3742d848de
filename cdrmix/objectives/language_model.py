"""Cross-entropy of the next token, computed from hidden states without all logits at once."""

# N positions, n positions of a chunk, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LabelWeights:
    """Part of each label in a loss, and the sums that are reported of the same logits.

    Attributes:
        nats: factor on the nats of each label, [...], float32; None: 1. Of the order of 1: in fp16
            gradients would vanish, so that a scale common to all labels comes after the loss.
        squares: factor on the square of the logarithm of the softmax's denominator at each label,
            [...], float32; None: no such loss.
        sums: part of each label in each of S reported sums, [..., S], float32, or float64 for sums
            in that type; None: no sums.
        heads: equal shares of the labels, one behind another, of different heads: no chunk holds
            labels of two, so that the loss of one does not depend on others.
    """

    nats: Tensor | None = None
    squares: Tensor | None = None
    sums: Tensor | None = None
    heads: int = 1


ALL_ALIKE = LabelWeights()


class HeadLoss(NamedTuple):
    """Loss of some labels under a head, float32; the same for every part of the vocabulary."""

    loss: Tensor  # as `LabelWeights` weighs nats and squares, scalar, with gradients
    nats: Tensor  # of each reported sum, [S], in the type of `sums`, without gradients
    squares: Tensor  # of each reported sum, [S], as `nats`; zeros where none weigh
    of_heads: Tensor  # share of each head in the loss, [heads], without gradients


class _Scores(NamedTuple):
    """Logits of n positions, and what follows from them."""

    logits: Tensor  # [n, V]
    log_total: Tensor  # logarithm of the softmax's denominator over all parts, [n, 1]
    nats: Tensor  # of the labels, [n]; of no use where a label is ignored
    local: Tensor  # row of each label in this part of the head, [n, 1]
    is_here: Tensor  # label is in this part, [n, 1]


def _score(rows: Tensor, weight: Tensor, targets: Tensor, part: VocabularyPart) -> _Scores:
    logits = F.linear(rows, weight).float()
    local = targets.clamp(min=0).unsqueeze(1) - part.first_id
    is_here = (local >= 0) & (local < weight.shape[0])
    local = local.clamp(0, weight.shape[0] - 1)
    score = logits.gather(1, local) * is_here
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    log_totals, scores = part.of_all_parts(torch.stack([log_total, score])).unbind(1)
    log_total = torch.logsumexp(log_totals, dim=0)
    return _Scores(logits, log_total, (log_total - scores.sum(0)).squeeze(1), local, is_here)


def _sums(values: Tensor, worth: Tensor) -> Tensor:
    """Sums values [n] by their worth [n, S]; one that is infinite counts where it has a worth."""
    return (values.unsqueeze(1) * worth).masked_fill_(worth == 0, 0.0).sum(0)


def _chunks(num_positions: int, heads: int) -> Iterator[tuple[int, slice]]:
    """Slices of the positions, each of one head, whose number comes with it."""
    of_head = num_positions // heads
    for head in range(heads):
        end = (head + 1) * of_head
        for start in range(head * of_head, end, _CHUNK_POSITIONS):
            yield head, slice(start, min(start + _CHUNK_POSITIONS, end))


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
        weights: LabelWeights,
    ) -> tuple[Tensor, ...]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        if needs_weight:
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        of_heads = torch.zeros(weights.heads, dtype=torch.float32, device=hidden.device)
        nats = of_heads.new_zeros(0)
        if weights.sums is not None:
            nats = weights.sums.new_zeros(weights.sums.shape[-1])
        squares = torch.zeros_like(nats)
        for head, here in _chunks(hidden.shape[0], weights.heads):
            rows = hidden[here]
            valid = labels[here] != IGNORED_LABEL
            scores = _score(rows, weight, labels[here], part)
            worth = valid if weights.nats is None else valid * weights.nats[here]
            of_heads[head] += (scores.nats * worth).sum()
            log_total = scores.log_total.squeeze(1)
            strength = None
            if weights.squares is not None:
                strength = valid * weights.squares[here]
                of_heads[head] += (log_total.square() * strength).sum()
            if weights.sums is not None:
                measured = valid.unsqueeze(1) * weights.sums[here]
                nats += _sums(scores.nats, measured)
                if strength is not None:
                    squares += _sums(log_total.square(), measured)
            if not (needs_hidden or needs_weight):
                continue
            error = torch.exp_(scores.logits.sub_(scores.log_total))  # softmax
            at_label = -scores.is_here.to(error.dtype)
            if strength is not None:
                # of the square: twice the logarithm, times the softmax
                error.mul_((worth + 2 * log_total * strength).unsqueeze(1))
                at_label = at_label * worth.unsqueeze(1)
            error.scatter_add_(1, scores.local, at_label)
            # before the cast: bf16 would round the weights
            if strength is None and weights.nats is not None:
                error.mul_(worth.unsqueeze(1))
            error = error.to(hidden.dtype)
            counted = valid.unsqueeze(1).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[here] = (error @ weight).mul_(counted)
            if weight_grad is not None:
                weight_grad += (error.t() @ (rows * counted)).float()
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nats, squares, of_heads)
        return of_heads.sum(), nats, squares, of_heads

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = hidden_grad * grad.to(hidden_grad.dtype)
        if weight_grad is not None:
            weight_grad = (weight_grad * grad).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: LabelWeights = ALL_ALIKE,
    part: VocabularyPart = WHOLE_VOCABULARY,
) -> HeadLoss:
    """Loss of the labels under softmax(hidden @ weight.T), and sums of its parts, in one pass.

    The loss is the sum over valid positions of nats and of squared logarithms of the denominator,
    as `weights` say. Source of the squares: Chowdhery et al., PaLM, 2022, section 5.

    Args:
        hidden: [..., D], any float type.
        weight: the head, [V, D], same type; with a part of the vocabulary only its rows.
        labels: next token of each position, [...], int64; -100 is ignored.
        weights: of the labels.
        part: of the vocabulary that `weight` has. The caller sums the gradient of `hidden` over
            the parts.
    """
    if not torch.is_grad_enabled():  # a Function's needs_input_grad ignores this
        hidden = hidden.detach()
        weight = weight.detach()
    nats, squares, sums = weights.nats, weights.squares, weights.sums
    flat = LabelWeights(
        nats=None if nats is None else nats.reshape(-1),
        squares=None if squares is None else squares.reshape(-1),
        sums=None if sums is None else sums.reshape(-1, sums.shape[-1]),
        heads=weights.heads,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    return HeadLoss(*_LinearCrossEntropy.apply(rows, weight, labels.reshape(-1), part, flat))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, label_weights: Tensor | None = None
) -> Tensor:
    """Nats of the labels under softmax(hidden @ weight.T), summed over valid positions.

    As `linear_losses`, with `label_weights`, the factor on the nats of each label, [...], float32;
    None: 1. Returns a scalar, float32. Divide by `sum_weights` of the whole global batch.
    """
    return linear_losses(hidden, weight, labels, LabelWeights(label_weights)).loss


def sum_weights(labels: Tensor, label_weights: Tensor | None = None) -> Tensor:
    """Divisor of the nats of `labels`: the sum of their weights, or their number; float64."""
    valid = labels != IGNORED_LABEL
    return valid.sum().double() if label_weights is None else (label_weights.double() * valid).sum()
