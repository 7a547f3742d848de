"""Causal attention inside the documents of packed rows: work goes by their squared lengths.

On GPUs the flash kernels of torch's varlen_attn take all documents at once. On CPUs they are
attended one by one, short neighbours together behind a mask. One operator to autograd and to
torch.compile, which saves its inputs, its output and one number a query.
"""

# B batch, T time, N tokens of all rows, H query heads, G key/value heads, K head dim

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.log import get_logger
from cdrmix.models.packing import Packing, packing_of

log = get_logger(__name__)

# Neighbours of together at most so many tokens are attended in one call. 1,024 tokens of 8 heads of
# 64, forward and backward on one core: documents of 1 token take 93 ms one by one and 10, 12, 19 ms
# by 32, 64, 128; documents of 16 take 13, 13, 13 and 20 ms.
GROUP_TOKENS = 32
_HALF_TYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256  # of flash attention's kernels

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_documents(query: Tensor, keys: Tensor, values: Tensor, segment_ids: Tensor) -> Tensor:
    """Mixes the values of this and earlier tokens of the same document.

    Args:
        query: rotated, [B, T, H, K]; so are keys, [B, T, G, K].
        values: [B, T, G, K].
        segment_ids: document of each token, [B, T], which never falls along T.
    Returns:
        [B, T, H, K]. `obstacle` has returned None.
    """
    mixed: Tensor = _attention(query, keys, values, segment_ids)[0]
    return mixed


def obstacle(query: Tensor) -> str | None:
    """Returns the reason why documents cannot be attended one by one here, or None."""
    if query.device.type == "cpu":
        return None
    why = None
    if query.dtype not in _HALF_TYPES:
        why = f"flash attention computes in 16 bits, and this is {query.dtype}"
    elif query.shape[-1] > _LARGEST_HEAD or query.shape[-1] % 8 != 0:
        why = f"flash attention takes heads of up to {_LARGEST_HEAD} in steps of 8"
    else:
        why = _device_obstacle(query.device)
    if why is not None:
        _warn(why)
    return why


@torch.compiler.assume_constant_result
def _device_obstacle(device: torch.device) -> str | None:
    return _obstacle_on(device)


@functools.cache
def _obstacle_on(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"varlen_attn computes on CUDA, and this is {device}"
    if torch.version.hip is not None:
        return "varlen_attn has not been run with ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"flash attention needs an Ampere GPU or newer, and {device} is older"
    try:
        from torch.nn.attention import varlen  # noqa: F401  registers the two operators below
    except ImportError as error:
        return f"this torch has no varlen_attn: {error}"
    if not hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        return "the operators behind varlen_attn have other names in this torch"
    return None


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "Each attention layer keeps documents apart by a mask of all pairs of tokens, "
        "[B, 1, T, T]: %s. Same results, slower, and more memory.",
        why,
    )


class _Group(NamedTuple):
    """Neighbouring tokens that one call attends."""

    tokens: slice  # of the flat batch
    mask: Tensor | None  # added to the scores, [n, n]; None: they are of one document


def groups_of(ends: Sequence[int], largest: int = GROUP_TOKENS) -> Iterator[tuple[int, int]]:
    """Yields first and last document of each group: one, or neighbours of up to `largest` tokens.

    `ends` are those of `Packing`.
    """
    first = 0
    for number in range(1, len(ends)):
        is_last = number == len(ends) - 1
        if is_last or ends[number + 1] - ends[first] > largest:
            yield first, number - 1
            first = number


def _groups(packing: Packing, dtype: torch.dtype) -> list[_Group]:
    """Groups of a packing, made once for all layers that attend in a type."""
    made: dict[torch.dtype, list[_Group]] = packing.__dict__.setdefault("groups", {})
    if dtype not in made:
        ends = packing.ends_list
        made[dtype] = [
            _Group(slice(ends[first], ends[last + 1]), _mask(ends[first : last + 2], dtype))
            for first, last in groups_of(ends)
        ]
    return made[dtype]


def _mask(ends: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    if len(ends) == 2:
        return None
    mask = torch.full((ends[-1] - ends[0],) * 2, -torch.inf, dtype=dtype)
    for start, end in zip(ends, ends[1:], strict=False):
        inside = slice(start - ends[0], end - ends[0])
        mask[inside, inside].triu_(1)
    return mask


@torch.library.custom_op("cdrmix::packed_attention", mutates_args=())
def _attention(
    query: Tensor, keys: Tensor, values: Tensor, segment_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Gives mixed values, [B, T, H, K], and the logarithm of each query's total, [H, N]."""
    packing = packing_of(segment_ids)
    flat = [x.flatten(0, 1) for x in (query, keys, values)]  # [N, H or G, K]
    if query.device.type == "cuda":
        mixed, totals, _ = torch.ops.torch_attn._varlen_attn(
            *flat, *_lengths(packing), is_causal=True, enable_gqa=keys.shape[2] != query.shape[2]
        )
        return mixed.contiguous().view(query.shape), totals
    mixed = query.new_empty(flat[0].shape)
    totals = query.new_empty(_totals(query), dtype=_wide(query))
    for tokens, mask in _groups(packing, query.dtype):
        parts = (x[tokens].transpose(0, 1).unsqueeze(0) for x in flat)  # [1, H, n, K]
        out, total = _flash(*parts, 0.0, mask is None, attn_mask=mask)
        mixed[tokens] = out[0].transpose(0, 1)
        totals[:, tokens] = total[0]
    return mixed.view(query.shape), totals


def _lengths(packing: Packing) -> tuple[Tensor, Tensor, int, int]:
    """Ends and most tokens of the documents, of queries and of keys, as varlen_attn takes them."""
    return packing.ends_int32, packing.ends_int32, packing.longest, packing.longest


def _totals(query: Tensor) -> tuple[int, int]:
    return query.shape[2], query.shape[0] * query.shape[1]


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(_totals(query), dtype=_wide(query))


@torch.library.custom_op("cdrmix::packed_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment_ids: Tensor,
    mixed: Tensor,
    totals: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    packing = packing_of(segment_ids)
    flat = [x.flatten(0, 1) for x in (grad, query, keys, values, mixed)]
    if query.device.type == "cuda":
        # without dropout no random numbers were drawn
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = torch.ops.torch_attn._varlen_attn_backward(
            *flat, totals, *_lengths(packing), True, state
        )
    else:
        grads = tuple(x.new_empty(x.shape) for x in flat[1:4])
        for tokens, mask in _groups(packing, query.dtype):
            parts = (x[tokens].transpose(0, 1).unsqueeze(0) for x in flat)
            rest = (totals[:, tokens].unsqueeze(0), 0.0, mask is None)
            found = _flash_backward(*parts, *rest, attn_mask=mask)
            for whole, part in zip(grads, found, strict=True):
                whole[tokens] = part[0].transpose(0, 1)
    dquery, dkeys, dvalues = (
        x.contiguous().view(like.shape)
        for x, like in zip(grads, (query, keys, values), strict=True)
    )
    return dquery, dkeys, dvalues


@_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dquery, dkeys, dvalues = (x.new_empty(x.shape) for x in (query, keys, values))
    return dquery, dkeys, dvalues


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad.contiguous(), *ctx.saved_tensors), None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)
