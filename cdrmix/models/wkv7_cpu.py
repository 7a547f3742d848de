"""WKV-7 on CPUs: the C++ recurrence of wkv7_cpu.cpp, compiled at first use.

Without a compiler the op runs in its chunked form.
"""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdrmix.models.cpu_library import load_library
from cdrmix.models.wkv7_reference import is_differentiated

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "The WKV-7 op runs in its chunked form, at about half the speed."


def wkv7_cpu(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 as `wkv7_reference`, through the recurrence of `load_kernel`, in float32."""
    converted = [x.float().contiguous() for x in inputs]
    start = None if s0 is None else s0.float().contiguous()
    starts = None
    if segment_ids is not None:
        starts = torch.zeros(segment_ids.shape, dtype=torch.uint8)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    saves = is_differentiated(converted, start)
    y, s = _Recurrence.apply(starts, saves, start, *converted)
    return y.to(inputs[3].dtype), s


def _pointers(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def _struct(*tensors: Tensor | None) -> ctypes.Array:
    """Packs pointers as the struct Inputs or Gradients of wkv7_cpu.cpp has them."""
    return (ctypes.c_void_p * len(tensors))(*_pointers(tensors))


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, starts: Tensor | None, saves: bool, s0: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        kernel = load_kernel()
        assert isinstance(kernel, ctypes.CDLL), f"the C++ recurrence was not built: {kernel}"
        ctx.kernel = kernel
        r, _, _, v, _, _ = inputs
        batch, time, heads, key = r.shape
        value = v.shape[3]
        y = torch.empty_like(v)
        s = v.new_empty(batch, heads, value, key)
        sa = states = None
        if saves:
            sa = torch.empty_like(v)  # S_{t-1} a_t
            tiles = -(-time // kernel.wkv7_tile())
            states = v.new_empty(batch, heads, tiles, value, key)  # that enter tiles of tokens
            ctx.save_for_backward(*inputs, starts, sa, states)
        ctx.has_start = s0 is not None
        ctx.shape = (ctypes.c_int64 * 5)(batch, time, heads, key, value)
        buffers = _pointers([s0, y, s, sa, states])
        threads = torch.get_num_threads()
        kernel.wkv7_forward(ctx.shape, _struct(*inputs, starts), *buffers, threads)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts, sa, states = ctx.saved_tensors
        dy = dy.contiguous()
        ds = ds.contiguous()
        gradients = [torch.empty_like(x) for x in inputs]
        ds0 = torch.empty_like(ds) if ctx.has_start else None
        ctx.kernel.wkv7_backward(
            ctx.shape,
            _struct(*inputs, starts),
            *_pointers([sa, states, dy, ds]),
            _struct(*gradients, ds0),
            torch.get_num_threads(),
        )
        return (None, None, ds0, *gradients)


@functools.cache
def load_kernel() -> ctypes.CDLL | str:
    """Returns the kernel, built on first use, or the reason why there is none, logged once."""
    kernel = load_library(_SOURCE, name="WKV-7 kernel", cost=_COST)
    if isinstance(kernel, str):
        return kernel
    for function in (kernel.wkv7_forward, kernel.wkv7_backward):
        function.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int]  # addresses, and the threads
        function.restype = None
    return kernel
