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
# Bytes of what exists of a chunk's logits at a time. On CPUs larger chunks are no faster (a thread
# of an EPYC 7003, V 8,192 and 32,768, 512 to 1,024 and 256 to 512 positions); on GPUs, where it
# was not measured, each chunk reads and writes the head's gradient, whatever its size.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_ELSEWHERE = 512 * 2**20
# Of one logit: itself, its softmax in float32, and the gradient.
_LOGIT_BYTES = 8


def chunk_positions(vocab_size: int, device_type: str) -> int:
    """Returns the positions whose logits exist at a time, for rows of a head on one rank."""
    budget = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE)
    return max(1, budget // (_LOGIT_BYTES * vocab_size))


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


# Scores the labels [n] of logits [n, V], float32 or float64, which are its own to overwrite. Takes
# the factors on the nats and on the square of `log_total` of each label, [n], float32, 0 where one
# is ignored: without the first no gradient is made, without the second it has no squares; and the
# type of the gradient. Gives nats [n], of no use where a label is ignored, `log_total` [n], the
# logarithm of the softmax's denominator, and the gradient of the logits [n, V].
LabelScorer = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype],
    tuple[Tensor, Tensor, Tensor | None],
]


def score_labels(
    logits: Tensor,
    labels: Tensor,
    worth: Tensor | None,
    squares: Tensor | None,
    dtype: torch.dtype,
    part: VocabularyPart = WHOLE_VOCABULARY,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores labels as a `LabelScorer` does: softmax, largest logit, and a pass for the gradient.

    With a part of the vocabulary `logits` are those of its rows, and all parts are scored at once.
    """
    local = labels.clamp(min=0).unsqueeze(1) - part.first_id
    is_here = (local >= 0) & (local < logits.shape[1])
    local = local.clamp(0, logits.shape[1] - 1)
    score = logits.gather(1, local) * is_here
    largest, place = logits.max(1, keepdim=True)
    softmax = torch.softmax(logits, 1)
    # the largest is at least 1 / V, so that its logarithm is exact
    log_part = largest - softmax.gather(1, place).log()
    log_parts, scores = part.of_all_parts(torch.stack([log_part, score])).unbind(1)
    log_total = torch.logsumexp(log_parts, dim=0)  # [n, 1]
    nats = (log_total - scores.sum(0)).squeeze(1)
    if worth is None:
        return nats, log_total.squeeze(1), None
    factor = worth.unsqueeze(1)
    if squares is not None:  # of the square: twice the logarithm, times the softmax
        factor = factor + 2 * log_total * squares.unsqueeze(1)
    factor = factor * torch.exp(log_part - log_total)  # 1 for the whole vocabulary
    # in float32 before the cast: bf16 would round a softmax near 1, and the weights
    at_label = softmax.gather(1, local) * factor - is_here * worth.unsqueeze(1)
    del logits  # of which the caller has kept nothing
    if softmax.dtype == dtype:
        error = softmax.mul_(factor)
    else:
        error = torch.mul(softmax, factor, out=torch.empty_like(softmax, dtype=dtype))
    error.scatter_(1, local, at_label.to(dtype))
    return nats, log_total.squeeze(1), error


def _sums(values: Tensor, worth: Tensor) -> Tensor:
    """Sums values [n] by their worth [n, S]; one that is infinite counts where it has a worth."""
    by_sum = worth.t().contiguous()  # rows, each summed in the order in which `nats` are
    return (values * by_sum).masked_fill_(by_sum == 0, 0.0).sum(1)


def _chunks(num_positions: int, heads: int, most: int) -> Iterator[tuple[int, slice]]:
    """Slices of at most so many positions, each of one head, whose number comes with it."""
    of_head = num_positions // heads
    for head in range(heads):
        end = (head + 1) * of_head
        for start in range(head * of_head, end, most):
            yield head, slice(start, min(start + most, end))


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """Computes rows @ weight.T, [n, V], in float32, or float64 from such."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    if weight.dtype == exact or weight.device.type == "cpu":
        return F.linear(rows, weight).to(exact)
    return torch.mm(rows, weight.t(), out_dtype=exact)  # not rounded between product and softmax


def _add_product(total: Tensor, error: Tensor, rows: Tensor) -> None:
    """Adds error.T @ rows to `total`, [V, D], float32 or the type of both, within the product."""
    if error.dtype == total.dtype:
        torch.addmm(total, error.t(), rows, out=total)
    elif error.device.type == "cpu":  # torch has no product of float32 from others there
        torch.addmm(total, error.t().to(total.dtype), rows.to(total.dtype), out=total)
    else:
        torch.addmm(total, error.t(), rows, out_dtype=total.dtype, out=total)


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
        score: LabelScorer,
        weights: LabelWeights,
    ) -> tuple[Tensor, ...]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        exact = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        of_heads = torch.zeros(weights.heads, dtype=torch.float32, device=hidden.device)
        nats = of_heads.new_zeros(0)
        if weights.sums is not None:
            nats = weights.sums.new_zeros(weights.sums.shape[-1])
        squares = torch.zeros_like(nats)
        most = chunk_positions(weight.shape[0], weight.device.type)
        for head, here in _chunks(hidden.shape[0], weights.heads, most):
            rows = hidden[here]
            valid = labels[here] != IGNORED_LABEL
            worth = valid.float() if weights.nats is None else valid * weights.nats[here]
            strength = None if weights.squares is None else valid * weights.squares[here]
            learned = worth if needs_hidden or needs_weight else None
            each, log_total, error = score(
                _logits(rows, weight), labels[here], learned, strength, hidden.dtype
            )
            of_heads[head] += (each * worth).sum()
            if strength is not None:
                of_heads[head] += (log_total.square() * strength).sum()
            if weights.sums is not None:
                measured = valid.unsqueeze(1) * weights.sums[here]
                nats += _sums(each, measured)
                if strength is not None:
                    squares += _sums(log_total.square(), measured)
            if error is not None and hidden_grad is not None:
                torch.mm(error, weight, out=hidden_grad[here])
            if error is not None and weight_grad is not None:
                _add_product(weight_grad, error, rows)
            del error  # before the logits of the next chunk
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
            scaled = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            weight_grad = torch.mul(weight_grad, grad, out=scaled)  # one pass, rounded once
        return hidden_grad, weight_grad, None, None, None


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: LabelWeights = ALL_ALIKE,
    score: LabelScorer = score_labels,
) -> HeadLoss:
    """Loss of the labels under softmax(hidden @ weight.T), and sums of its parts, in one pass.

    The loss is the sum over valid positions of nats and of squared logarithms of the denominator,
    as `weights` say. Source of the squares: Chowdhery et al., PaLM, 2022, section 5.

    Args:
        hidden: [..., D], any float type.
        weight: the head, [V, D], same type; with a part of the vocabulary only its rows.
        labels: next token of each position, [...], int64; -100 is ignored.
        weights: of the labels.
        score: scores the labels of a chunk. With a part of the vocabulary it is `score_labels`,
            told of it, and the caller sums the gradient of `hidden` over the parts.
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
    return HeadLoss(*_LinearCrossEntropy.apply(rows, weight, labels.reshape(-1), score, flat))


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
