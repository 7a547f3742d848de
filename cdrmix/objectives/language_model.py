"""Cross-entropy of the next token, straight from hidden states.

N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED_LABEL = -100
_CHUNK_POSITIONS = 1024


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of hidden @ weight.T, chunk by chunk over the positions.

    The gradient of a chunk is formed while its logits are at hand, so that one chunk of logits
    exists at a time instead of all N x V twice, at no extra matmul.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        if needs_weight:
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], _CHUNK_POSITIONS):
            stop = start + _CHUNK_POSITIONS
            rows, targets = hidden[start:stop], labels[start:stop]
            logits = F.linear(rows, weight).float()  # [n, V]
            valid = targets != IGNORED_LABEL
            picked = targets.clamp(min=0).unsqueeze(1)
            log_total = torch.logsumexp(logits, dim=-1, keepdim=True)  # [n, 1]
            nats += ((log_total - logits.gather(1, picked)).squeeze(1) * valid).sum()
            if not (needs_hidden or needs_weight):
                continue
            error = torch.exp_(logits.sub_(log_total))  # softmax
            error.scatter_add_(1, picked, error.new_full(picked.shape, -1.0))
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
        return hidden_grad, weight_grad, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Nats of the labels under softmax(hidden @ weight.T), summed over valid positions.

    Args:
        hidden: [..., D], any float type.
        weight: the head, [V, D], same type.
        labels: next token of each position, [...], int64; -100 is ignored.
    Returns:
        Scalar, float32. Divide by the valid positions of the whole global batch.
    """
    if not torch.is_grad_enabled():  # which a Function's needs_input_grad does not look at
        hidden, weight = hidden.detach(), weight.detach()
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _LinearCrossEntropy.apply(flat, weight, labels.reshape(-1))


def count_valid(labels: Tensor) -> Tensor:
    """Positions that are predicted, scalar int64."""
    return (labels != IGNORED_LABEL).sum()
