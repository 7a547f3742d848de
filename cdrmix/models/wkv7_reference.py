"""The WKV-7 recurrence as it is written: the definition that every other form is compared with."""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

DECAY_BOUND = math.exp(-0.5)  # of -lw; RWKV-7's decay is lw = -exp(-0.5) sigmoid(.)


def compute_dtype(inputs: Iterable[Tensor]) -> torch.dtype:
    """Returns float64 if any input is, else float32."""
    return torch.float64 if torch.float64 in {x.dtype for x in inputs} else torch.float32


def wkv7_reference(
    r: Tensor,
    lw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    s0: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 token by token, differentiated by autograd: slow, and it saves every state.

    Arguments and results as of `cdrmix.models.wkv7.wkv7`, unchecked.
    """
    dtype = compute_dtype((r, lw, k, v, a, b))
    y_dtype = v.dtype
    r, lw, k, v, a, b = [x.to(dtype) for x in (r, lw, k, v, a, b)]
    w = lw.exp()
    s = v.new_zeros(v.shape[0], *v.shape[2:], r.shape[3]) if s0 is None else s0.to(dtype)
    y = []
    for t in range(r.shape[1]):
        if segment_ids is not None and t > 0:
            is_new = segment_ids[:, t] != segment_ids[:, t - 1]  # [B]
            s = s.masked_fill(is_new[:, None, None, None], 0)
        replaced = (s @ a[:, t, :, :, None]) @ b[:, t, :, None]  # [B,H,V,K]
        s = s * w[:, t, :, None] + replaced + v[:, t, :, :, None] @ k[:, t, :, None]
        y.append((s @ r[:, t, :, :, None])[..., 0])
    return torch.stack(y, 1).to(y_dtype), s
