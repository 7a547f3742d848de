"""Pointwise maths of RWKV-7: all between the matrix products and the recurrence.

Each function reads and writes tensors of [B, T, D] and holds next to no arithmetic, so that its
time is that of memory: this is where fused kernels of a device belong. On CPUs float32 takes those
of rwkv7_cpu.py, GPUs take those of rwkv7_triton.py where they are right; what is written here
computes anything, anywhere.
"""

# B batch, T time, D hidden, M mixes, H heads, K key dim per head (that of values is the same)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models import rwkv7_cpu, rwkv7_triton, triton_launch
from cdrmix.models.wkv7_reference import DECAY_BOUND


def shift_tokens(x: Tensor, last: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """Returns each position's predecessor in x, [B, T, D]; zero where a document begins.

    `last` is the token before the first, [B, D], None for zero; `segment_ids` are [B, T].
    """
    first = torch.zeros_like(x[:, 0]) if last is None else last.to(x.dtype)
    previous = torch.cat([first.unsqueeze(1), x[:, :-1]], dim=1)
    if segment_ids is None:
        return previous
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]  # [B, T-1]
    starts = F.pad(starts, (1, 0), value=False)
    return previous.masked_fill(starts.unsqueeze(-1), 0)


class _TokenShiftMix(torch.autograd.Function):
    """x + (shift(x) - x) * mu for several mu at once; saves x and its shift for backward.

    Autograd through the plain expression saves and re-reads one [B, T, D] tensor per mix.
    """

    @staticmethod
    def forward(ctx, x: Tensor, previous: Tensor, mu: Tensor) -> Tensor:
        ctx.save_for_backward(x, previous, mu)
        delta = previous - x  # [B, T, D]
        shape = (mu.shape[0], *(1,) * (x.dim() - 1), mu.shape[1])
        return torch.addcmul(x, delta, mu.view(shape))  # [M, B, T, D]

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, previous, mu = ctx.saved_tensors
        delta = (previous - x).reshape(-1, x.shape[-1])
        flat = grad.reshape(mu.shape[0], -1, x.shape[-1])  # [M, N, D]
        # one pass per mix: the gradient is read while it is in the cache
        total = flat[0].clone()
        shifted = flat[0] * mu[0]
        mu_grads = [(flat[0] * delta).sum(0)]
        for i in range(1, mu.shape[0]):
            total += flat[i]
            shifted.addcmul_(flat[i], mu[i])
            mu_grads.append((flat[i] * delta).sum(0))
        total -= shifted
        return total.view_as(x), shifted.view_as(x), torch.stack(mu_grads)


# Interpolates between tokens and their predecessors, both [B, T, D], to [M, B, T, D]: each row of
# mu, [M, D], gives the share of the predecessor.
token_shift_mix: Callable[[Tensor, Tensor, Tensor], Tensor] = _TokenShiftMix.apply


def shift_mix(
    x: Tensor, last: Tensor | None, segment_ids: Tensor | None, mu: Tensor
) -> tuple[Tensor, ...]:
    """Mixes each position with its predecessor, by each row of mu; see the two functions above.

    Args:
        x: normalised input, [B, T, D].
        last: the token before the first, [B, D]; None for zero.
        segment_ids: document of each token, [B, T]; the first of a document meets zero.
        mu: share of the predecessor, [M, D].
    Returns:
        M tensors of [B, T, D].
    """
    if rwkv7_cpu.can_run(x, last, mu):
        return rwkv7_cpu.shift_mix(x, last, segment_ids, mu)
    if len(mu) <= rwkv7_triton.MOST_MIXES and triton_launch.can_run("shift_mix", x, last, mu):
        return rwkv7_triton.shift_mix(x, last, segment_ids, mu)
    return token_shift_mix(x, shift_tokens(x, last, segment_ids), mu).unbind(0)


def blend_values(v: Tensor, v_first: Tensor, amount: Tensor, bias: Tensor) -> Tensor:
    """Goes from v to v_first by sigmoid(bias + amount): all [B, T, D], but for the bias, [D]."""
    if rwkv7_cpu.can_run(v, v_first, amount, bias):
        return rwkv7_cpu.blend_values(v, v_first, amount, bias)
    if triton_launch.can_run("blend_values", v, v_first, amount, bias):
        return rwkv7_triton.blend_values(v, v_first, amount, bias)
    return torch.lerp(v, v_first, torch.sigmoid(bias + amount))


def recurrence_inputs(
    k: Tensor,
    decay: Tensor,
    iclr: Tensor,
    *,
    decay_bias: Tensor,
    iclr_bias: Tensor,
    k_k: Tensor,
    k_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes lw, k, a and b of the recurrence, each [B, T, H, K].

    Args:
        k: key, [B, T, H, K].
        decay, iclr: what the low-rank paths add to their biases, [B, T, H, K].
        decay_bias, iclr_bias, k_k, k_a: [H, K].
    Returns:
        log decay in float32 in (-exp(-0.5), 0), as `wkv7` requires; key, -kk and kk * iclr in k's
        type, where kk is the normalised key.
    """
    vectors = {"decay_bias": decay_bias, "iclr_bias": iclr_bias, "k_k": k_k, "k_a": k_a}
    if rwkv7_cpu.can_run(k, decay, iclr, *vectors.values()):
        return rwkv7_cpu.recurrence_inputs(k, decay, iclr, **vectors)
    size = k.shape[3]
    every = (k, decay, iclr, *vectors.values())
    if triton_launch.is_whole_head(size) and triton_launch.can_run(
        "recurrence_inputs", *every, compiled_for=size
    ):
        return rwkv7_triton.recurrence_inputs(k, decay, iclr, **vectors)
    lw = torch.sigmoid((decay_bias + decay).float()) * -DECAY_BOUND
    rate = torch.sigmoid(iclr_bias + iclr)
    # in float32: the eps is zero in fp16, and a key of zeros would become not a number
    kk = F.normalize((k * k_k).float(), dim=-1, eps=1e-12).to(k.dtype)
    return lw, torch.addcmul(k, k * k_a, rate - 1), -kk, kk * rate


def gated_output(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """Normalises the recurrence's output by heads, adds the bonus of the current token, and gates.

    Args:
        y, r, k, v, gate: [B, T, H, K].
        r_k, weight, bias: of the bonus and of the norm, [H, K].
        eps: added to the variance of a head.
    Returns:
        [B, T, H, K].
    """
    vectors = {"r_k": r_k, "weight": weight, "bias": bias}
    if rwkv7_cpu.can_run(y, r, k, v, gate, *vectors.values()):
        return rwkv7_cpu.gated_output(y, r, k, v, gate, **vectors, eps=eps)
    size = y.shape[3]
    every = (y, r, k, v, gate, *vectors.values())
    if triton_launch.is_whole_head(size) and triton_launch.can_run(
        "gated_output", *every, compiled_for=size
    ):
        return rwkv7_triton.gated_output(y, r, k, v, gate, **vectors, eps=eps)
    heads = y.shape[2]
    flat = y.flatten(0, 1).flatten(1)  # [B*T, D]
    normed = F.group_norm(flat, heads, weight.flatten(), bias.flatten(), eps)
    bonus = (r * k * r_k).sum(-1, keepdim=True)  # [B, T, H, 1]
    return torch.addcmul(normed.view_as(y), bonus, v) * gate
