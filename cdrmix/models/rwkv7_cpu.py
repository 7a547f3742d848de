"""RWKV-7's pointwise maths on CPUs: the passes of rwkv7_cpu.cpp, compiled at first use.

The functions are those of rwkv7_pointwise.py by name, arguments and results, for float32 alone.
Each saves its inputs as they are and nothing else: what lies between is cheaper to compute again
than to read.
"""

# B batch, T time, D hidden, M mixes, H heads, K key dim per head

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdrmix.models.cpu_library import can_take, load_library
from cdrmix.models.wkv7_reference import DECAY_BOUND

_SOURCE = Path(__file__).with_suffix(".cpp")
_COST = "The maths between RWKV-7's products runs in PyTorch: a step takes about a fifth longer."

_Int = ctypes.c_int64
_Address = ctypes.c_void_p


@functools.cache
def load_kernels() -> ctypes.CDLL | str:
    """Returns the kernels, built on first use, or the reason why there are none, logged once."""
    kernels = load_library(_SOURCE, name="kernels of RWKV-7", cost=_COST)
    if isinstance(kernels, str):
        return kernels
    # addresses by function; the number of threads comes last
    for name, addresses in {
        "shift_mix_forward": 2,
        "shift_mix_backward": 5,
        "blend_values_forward": 2,
        "blend_values_backward": 6,
        "recurrence_inputs_forward": 5,
        "recurrence_inputs_backward": 9,
        "gated_output_forward": 2,
        "gated_output_backward": 3,
    }.items():
        function = getattr(kernels, name)
        function.argtypes = [_Address] * addresses + [ctypes.c_int]
        function.restype = None
    return kernels


def can_run(*tensors: Tensor | None) -> bool:
    """Returns True where the kernels compute with these, as `cpu_library.can_take` says."""
    return can_take(*tensors) and not isinstance(load_kernels(), str)


def _kernel(name: str) -> Any:
    kernels = load_kernels()
    assert isinstance(kernels, ctypes.CDLL), f"the kernels of RWKV-7 were not built: {kernels}"
    return getattr(kernels, name)


def _run(name: str, struct: ctypes.Structure, *buffers: Any) -> None:
    """Calls a kernel with a struct, and tensors or structs of them."""
    addresses = [
        x.data_ptr() if isinstance(x, Tensor) else None if x is None else ctypes.addressof(x)
        for x in buffers
    ]
    _kernel(name)(ctypes.addressof(struct), *addresses, torch.get_num_threads())


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (_Address * len(tensors))(*(x.data_ptr() for x in tensors))


def _dense(*tensors: Any) -> tuple[Any, ...]:
    """Returns tensors, or None, as the kernels read them."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in tensors]


class _Tokens(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("B", "T", "D", "M")),
        *((name, _Address) for name in ("x", "last", "starts", "mu")),
    ]


def _tokens(x: Tensor, last: Tensor | None, starts: Tensor | None, mu: Tensor) -> _Tokens:
    last_at, starts_at = (None if each is None else each.data_ptr() for each in (last, starts))
    return _Tokens(*x.shape, len(mu), x.data_ptr(), last_at, starts_at, mu.data_ptr())


class _ShiftMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, last: Tensor | None, starts: Tensor | None, mu: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, last, starts, mu)
        x, last, mu = _dense(x, last, mu)
        mixed = [torch.empty_like(x) for _ in mu]
        _run("shift_mix_forward", _tokens(x, last, starts, mu), _addresses(mixed))
        return tuple(mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, last, starts, mu = ctx.saved_tensors
        x, last, mu, *contiguous = _dense(x, last, mu, *grads)
        dx, dmu = torch.empty_like(x), torch.empty_like(mu)
        dlast = None if last is None else torch.empty_like(last)
        tokens = _tokens(x, last, starts, mu)
        _run("shift_mix_backward", tokens, _addresses(contiguous), dx, dlast, dmu)
        return dx, dlast, None, dmu


def shift_mix(
    x: Tensor, last: Tensor | None, segment_ids: Tensor | None, mu: Tensor
) -> tuple[Tensor, ...]:
    """Mixes each position with its predecessor."""
    starts = None
    if segment_ids is not None:
        starts = torch.zeros(segment_ids.shape, dtype=torch.uint8)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return _ShiftMix.apply(x, last, starts, mu)


class _Values(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("N", "D")),
        *((name, _Address) for name in ("v", "first", "amount", "bias")),
    ]


def _values(inputs: Sequence[Tensor]) -> _Values:
    width = inputs[0].shape[-1]
    return _Values(inputs[0].numel() // width, width, *(x.data_ptr() for x in inputs))


class _BlendValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        inputs = _dense(*inputs)
        out = torch.empty_like(inputs[0])
        _run("blend_values_forward", _values(inputs), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        inputs = _dense(*ctx.saved_tensors)
        gradients = _like(inputs)
        _run("blend_values_backward", _values(inputs), grad.contiguous(), *gradients)
        return tuple(gradients)


def blend_values(v: Tensor, v_first: Tensor, amount: Tensor, bias: Tensor) -> Tensor:
    """Goes from v to v_first by sigmoid(bias + amount)."""
    return _BlendValues.apply(v, v_first, amount, bias)


class _Keys(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("N", "H", "K")),
        *((name, _Address) for name in ("k", "decay", "iclr")),
        *((name, _Address) for name in ("decay_bias", "iclr_bias", "k_k", "k_a")),
        ("fastest", ctypes.c_float),
    ]


def _keys(inputs: Sequence[Tensor]) -> _Keys:
    rows = inputs[0].shape[:2].numel()
    return _Keys(rows, *inputs[3].shape, *(x.data_ptr() for x in inputs), -DECAY_BOUND)


class _RecurrenceInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        inputs = _dense(*inputs)
        outputs = [torch.empty_like(inputs[0]) for _ in range(4)]
        _run("recurrence_inputs_forward", _keys(inputs), *outputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs = _dense(*ctx.saved_tensors)
        grads = _dense(*grads)
        gradients = _like(inputs[:3])
        vectors = inputs[3].new_empty(4, *inputs[3].shape)
        _run("recurrence_inputs_backward", _keys(inputs), *grads, *gradients, vectors)
        return (*gradients, *vectors)


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
    """Makes lw, k, a and b of the recurrence."""
    return _RecurrenceInputs.apply(k, decay, iclr, decay_bias, iclr_bias, k_k, k_a)


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("N", "H", "K")),
        *((name, _Address) for name in ("y", "r", "k", "v", "gate", "r_k", "weight", "bias")),
        ("eps", ctypes.c_float),
    ]


def _heads(inputs: Sequence[Tensor], eps: float) -> _Heads:
    rows = inputs[0].shape[:2].numel()
    return _Heads(rows, *inputs[5].shape, *(x.data_ptr() for x in inputs), eps)


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        inputs = _dense(*inputs)
        ctx.eps = eps
        out = torch.empty_like(inputs[0])
        _run("gated_output_forward", _heads(inputs, eps), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _dense(*ctx.saved_tensors)
        gradients = _like(inputs[:5])
        vectors = inputs[5].new_empty(3, *inputs[5].shape)
        grad = grad.contiguous()
        written = _addresses([*gradients, vectors])
        _run("gated_output_backward", _heads(inputs, ctx.eps), grad, written)
        return (None, *gradients, *vectors)


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
    """Normalises the recurrence's output by heads, adds the bonus, and gates."""
    return _GatedOutput.apply(eps, y, r, k, v, gate, r_k, weight, bias)
