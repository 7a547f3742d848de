"""WKV-7 on CPUs: the C++ recurrence of wkv7_cpu.cpp, compiled at first use.

Without a compiler the op runs in its chunked form.
"""

# B batch, T time, H heads, K key dim, V value dim

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.models.cpu_library import load_library
from cdrmix.models.wkv7_op import Computation, Gradients, Results, recurrence_op
from cdrmix.models.wkv7_reference import is_differentiated

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "The WKV-7 op runs in its chunked form, at about half the speed."


def wkv7_cpu(
    inputs: Sequence[Tensor], s0: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs WKV-7 as `wkv7_reference`, through the recurrence of `load_kernel`, in float32."""
    converted = [x.float().contiguous() for x in inputs]
    start = None if s0 is None else s0.float().contiguous()
    # 0: the kernel's own tile
    saves = is_differentiated(converted, start)
    y, s, *_ = _recurrence(*converted, start, segment_ids, 0, saves)
    return y.to(inputs[3].dtype), s


def _pointers(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def _struct(*tensors: Tensor | None) -> ctypes.Array:
    """Packs pointers as the struct Inputs or Gradients of wkv7_cpu.cpp has them."""
    return (ctypes.c_void_p * len(tensors))(*_pointers(tensors))


def _starts(segment_ids: Tensor | None) -> Tensor | None:
    """Marks the tokens that begin a segment behind the first of their row, [B, T], uint8."""
    if segment_ids is None:
        return None
    starts = torch.zeros(segment_ids.shape, dtype=torch.uint8)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return starts


def _shape(inputs: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_int64 * 5)(*inputs[0].shape, inputs[3].shape[3])


def _forward(
    inputs: Sequence[Tensor],
    s0: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    saves: bool,
) -> Results:
    kernel = _built_kernel()
    inputs = [x.contiguous() for x in inputs]
    s0 = None if s0 is None else s0.contiguous()
    starts = _starts(segment_ids)
    r, _, _, v, _, _ = inputs
    y = torch.empty_like(v)
    s = v.new_empty(v.shape[0], *v.shape[2:], r.shape[3])
    sa, states = (v.new_empty(x) for x in (_kept_shapes(inputs) if saves else ((0,), (0,))))
    kept = [sa, states] if saves else [None, None]
    buffers = _pointers([s0, y, s, *kept])
    threads = torch.get_num_threads()
    kernel.wkv7_forward(_shape(inputs), _struct(*inputs, starts), *buffers, threads)
    return y, s, sa, states


def _kept_shapes(
    inputs: Sequence[Tensor], chunk_tokens: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of S_{t-1} a_t, [B, T, H, V], and of the states that enter tiles of tokens."""
    r, _, _, v, _, _ = inputs
    batch, time, heads, value = v.shape
    tiles = -(-time // _built_kernel().wkv7_tile())
    return (batch, time, heads, value), (batch, heads, tiles, value, r.shape[3])


def _backward(
    inputs: Sequence[Tensor],
    s0: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    kept: tuple[Tensor, Tensor],
    dy: Tensor,
    ds: Tensor,
) -> Gradients:
    inputs = [x.contiguous() for x in inputs]
    starts = _starts(segment_ids)
    dy = dy.contiguous()
    ds = ds.contiguous()
    gradients = [torch.empty_like(x) for x in inputs]
    ds0 = None if s0 is None else torch.empty_like(ds)
    _built_kernel().wkv7_backward(
        _shape(inputs),
        _struct(*inputs, starts),
        *_pointers([*kept, dy, ds]),
        _struct(*gradients, ds0),
        torch.get_num_threads(),
    )
    return *gradients, ds.new_empty(0) if ds0 is None else ds0  # type: ignore[return-value]


_recurrence = recurrence_op("wkv7_cpp", Computation(_forward, _backward, _kept_shapes))


def _built_kernel() -> ctypes.CDLL:
    kernel = load_kernel()
    assert isinstance(kernel, ctypes.CDLL), f"the C++ recurrence was not built: {kernel}"
    return kernel


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
