"""RWKV-7's pointwise maths on GPUs: the kernels of rwkv7_triton_kernels.py with their gradients.

The functions are those of rwkv7_pointwise.py by name, arguments and results. Each saves its inputs
as they are and nothing else: what lies between is cheaper to compute again than to read.
"""

# B batch, T time, D hidden, M mixes, N rows (B T), H heads, K key dim per head

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdrmix.models import triton_launch
from cdrmix.models.wkv7_reference import DECAY_BOUND

MOST_MIXES = 6
# Elements of a tile: 16 for each thread of a program of 128.
_TILE = {"ROWS": 32, "COLUMNS": 64}
_TILE_OF_HEADS = 2_048
# Norm below which a key counts as one of zeros, as in rwkv7_pointwise.py.
_SMALLEST_NORM = 1e-12


def _launch(kernel: str, grid: tuple[int, int], *arguments: Any, **sizes: Any) -> None:
    triton_launch.launch("rwkv7_triton_kernels", kernel, grid, *arguments, **sizes)


def _tiles(rows: int, width: int) -> tuple[int, int]:
    return -(-rows // _TILE["ROWS"]), -(-width // _TILE["COLUMNS"])


def _rows_of_heads(head_dim: int) -> int:
    return max(1, _TILE_OF_HEADS // head_dim)


def _dense(*tensors: Any) -> tuple[Any, ...]:
    """Returns tensors, or None, as the kernels read them."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in tensors]


class _ShiftMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, last: Tensor | None, segment_ids: Tensor | None, mu: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, last, segment_ids, mu)
        inputs = _dense(x, last, segment_ids, mu)
        mixed = tuple(torch.empty_like(inputs[0]) for _ in mu)
        _ShiftMix.launch("shift_mix_forward", inputs, mixed)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _dense(*ctx.saved_tensors)
        x, last, _, mu = inputs
        dx = torch.empty_like(x)
        dlast = None if last is None else torch.empty_like(last)
        tiles, _ = _tiles(x.shape[:2].numel(), x.shape[2])
        dmu = torch.empty(tiles, *mu.shape, dtype=torch.float32, device=x.device)
        _ShiftMix.launch("shift_mix_backward", inputs, _dense(*grads), dx, dlast, dmu)
        return dx, dlast, None, triton_launch.sum_tiles(dmu, mu)

    @staticmethod
    def launch(kernel: str, inputs: tuple[Any, ...], *buffers: Any) -> None:
        x, last, segment_ids, mu = inputs
        rows, width = x.shape[:2].numel(), x.shape[2]
        given = {"HAS_LAST": last is not None, "HAS_SEGMENTS": segment_ids is not None}
        sizes = (rows, x.shape[1], width)
        grid = _tiles(rows, width)
        _launch(kernel, grid, *inputs, *buffers, *sizes, M=len(mu), **given, **_TILE)


def shift_mix(
    x: Tensor, last: Tensor | None, segment_ids: Tensor | None, mu: Tensor
) -> tuple[Tensor, ...]:
    """Mixes each position with its predecessor."""
    return _ShiftMix.apply(x, last, segment_ids, mu)


class _BlendValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        inputs = _dense(*inputs)
        out = torch.empty_like(inputs[0])
        rows, width = out.shape[:2].numel(), out.shape[2]
        grid = _tiles(rows, width)
        _launch("blend_values_forward", grid, *inputs, out, rows, width, **_TILE)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        inputs = _dense(*ctx.saved_tensors)
        rows, width = grad.shape[:2].numel(), grad.shape[2]
        grid = _tiles(rows, width)
        gradients = _like(inputs[:3])
        dbias = torch.empty(grid[0], width, dtype=torch.float32, device=grad.device)
        written = (*gradients, dbias, rows, width)
        _launch("blend_values_backward", grid, *inputs, grad.contiguous(), *written, **_TILE)
        return (*gradients, triton_launch.sum_tiles(dbias, inputs[3]))


def blend_values(v: Tensor, v_first: Tensor, amount: Tensor, bias: Tensor) -> Tensor:
    """Goes from v to v_first by sigmoid(bias + amount)."""
    return _BlendValues.apply(v, v_first, amount, bias)


def _grid_of_heads(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Returns tiles of rows and heads for [B, T, H, K], and what the kernels are compiled for."""
    heads, head_dim = x.shape[2:]
    rows = _rows_of_heads(head_dim)
    return -(-x.shape[:2].numel() // rows), heads, {"K": head_dim, "ROWS": rows}


class _RecurrenceInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        inputs = _dense(*inputs)
        k = inputs[0]
        outputs = [torch.empty_like(k, dtype=torch.float32), *_like([k] * 3)]
        _RecurrenceInputs.launch("recurrence_inputs_forward", *inputs, *outputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs = _dense(*ctx.saved_tensors)
        gradients = _like(inputs[:3])
        k, vectors = inputs[0], inputs[3:]
        tiles, _, _ = _grid_of_heads(k)
        parts = torch.empty(tiles, 4, *k.shape[2:], dtype=torch.float32, device=k.device)
        buffers = (*_dense(*grads), *gradients, parts)
        _RecurrenceInputs.launch("recurrence_inputs_backward", *inputs, *buffers)
        return (*gradients, *triton_launch.sum_tiles(parts, vectors[0]))

    @staticmethod
    def launch(kernel: str, *buffers: Tensor) -> None:
        k = buffers[0]
        tiles, heads, sizes = _grid_of_heads(k)
        bounds = (k.shape[:2].numel(), -DECAY_BOUND, _SMALLEST_NORM)
        _launch(kernel, (tiles, heads), *buffers, *bounds, **sizes)


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


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.eps = eps
        inputs = _dense(*inputs)
        out = torch.empty_like(inputs[0])
        _GatedOutput.launch("gated_output_forward", eps, *inputs, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _dense(*ctx.saved_tensors)
        gradients = _like(inputs[:5])
        y, vectors = inputs[0], inputs[5:]
        tiles, _, _ = _grid_of_heads(y)
        parts = torch.empty(tiles, 3, *y.shape[2:], dtype=torch.float32, device=y.device)
        buffers = (*inputs, grad.contiguous(), *gradients, parts)
        _GatedOutput.launch("gated_output_backward", ctx.eps, *buffers)
        return (None, *gradients, *triton_launch.sum_tiles(parts, vectors[0]))

    @staticmethod
    def launch(kernel: str, eps: float, *buffers: Tensor) -> None:
        y = buffers[0]
        tiles, heads, sizes = _grid_of_heads(y)
        _launch(kernel, (tiles, heads), *buffers, y.shape[:2].numel(), eps, **sizes)


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
