"""The WKV-7 recurrence as it is written: the definition that every other form is compared with."""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DECAY_BOUND = math.exp(-0.5)  # of -lw; RWKV-7's decay is lw = -exp(-0.5) sigmoid(.)


def compute_dtype(inputs: Iterable[Tensor]) -> torch.dtype:
    """Returns float64 if any input is, else float32."""
    return torch.float64 if torch.float64 in {x.dtype for x in inputs} else torch.float32


def check_values(lw: Tensor, segment_ids: Tensor | None) -> None:
    """Refuses a log decay out of range, or ids that fall; see `cdrmix.models.wkv7.wkv7`."""
    if lw.device.type not in ("cuda", "cpu"):
        return
    lowest = -DECAY_BOUND * (1 + torch.finfo(lw.dtype).eps)
    low, high = torch.aminmax(lw.detach())
    is_outside = (low < lowest) | (high > 0)
    if lw.device.type == "cuda":  # asserted there, so that the host need not wait
        torch._assert_async(~is_outside, "wkv7: lw must lie from -exp(-0.5) to 0")
        return
    if is_outside:
        raise ValueError(
            f"lw must lie from -exp(-0.5) = {-DECAY_BOUND:.7f} to 0; given {low.item():.7f} to "
            f"{high.item():.7f}. RWKV-7's log decay is -exp(-0.5) * sigmoid(.)"
        )
    if segment_ids is not None and (segment_ids.diff(dim=1) < 0).any():
        raise ValueError("segment_ids must not fall along T: a segment is one run of tokens")


def is_differentiated(inputs: Sequence[Tensor], s0: Tensor | None) -> bool:
    """Returns True where autograd will want a gradient, if asked outside a Function."""
    # Inside one gradients are off, and needs_input_grad ignores no_grad.
    tensors = [x for x in (*inputs, s0) if x is not None]
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def wkv7_reference(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 token by token, differentiated by autograd: slow, and it saves every state.

    As for each form, arguments and results are those of `cdrmix.models.wkv7.wkv7`, unchecked, and
    `inputs` are r, lw, k, v, a, b.
    """
    dtype = compute_dtype(inputs)
    y_dtype = inputs[3].dtype
    r, lw, k, v, a, b = [x.to(dtype) for x in inputs]
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
