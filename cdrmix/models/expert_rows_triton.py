"""Rows of experts on GPUs: kernels around the grouped products, with their gradients.

`gather_rows` and `weighted_sum` are those of expert_rows.py, `squared_relu` that of
feed_forward.py. A row is read where it lies and its sum written once; squared ReLU saves its input
alone, which the product before it has written anyway.
"""

# N tokens, D hidden, k experts per token, M rows, F inner width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix.models import triton_launch

_BLOCK = 1_024
_TILE = {"ROWS": 16, "COLUMNS": 128}


def _launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    triton_launch.launch("expert_rows_triton_kernels", kernel, grid, *arguments, **sizes)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        grid = (-(-x.numel() // _BLOCK),)
        _launch("squared_relu_forward", grid, x, out, x.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x, grad = x.contiguous(), grad.contiguous()
        dx = torch.empty_like(x)
        grid = (-(-x.numel() // _BLOCK),)
        _launch("squared_relu_backward", grid, x, grad, dx, x.numel(), BLOCK=_BLOCK)
        return dx


def squared_relu(x: Tensor) -> Tensor:
    """Computes relu(x)^2 of any shape."""
    return _SquaredReLU.apply(x)


def _sum_choices(rows: Tensor, row: Tensor, weights: Tensor | None) -> Tensor:
    """Sums each token's rows of [M, D], by index [N, k], to [N, D]; weighted, if by [N, k]."""
    rows, row = rows.contiguous(), row.contiguous()
    weights = None if weights is None else weights.contiguous()
    tokens, choices = row.shape
    count, width = rows.shape
    out = rows.new_empty(tokens, width)
    grid = (-(-tokens // _TILE["ROWS"]), -(-width // _TILE["COLUMNS"]))
    given = {"CHOICES": choices, "HAS_WEIGHTS": weights is not None}
    sizes = (tokens, count, width)
    _launch("sum_choices", grid, rows, row, weights, out, *sizes, **given, **_TILE)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return _sum_choices(grad, row, None), None, None


def gather_rows(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """Takes rows of [N, D] by `token`, [M].

    `row`, [N, k], says where each went; M or more: nowhere. By it the gradient comes back.
    """
    return _Gather.apply(x, token, row)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, choice: Tensor, row: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, token, choice, row)
        return _sum_choices(rows, row, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, token, choice, row = (x.contiguous() for x in ctx.saved_tensors)
        count, width = rows.shape
        drows = torch.empty_like(rows)
        dots = rows.new_empty(count, dtype=torch.float32)
        grid = (-(-count // _TILE["ROWS"]),)
        read = (rows, weights, token, choice, grad.contiguous())
        sizes = {"CHOICES": weights.shape[1], **_TILE}
        _launch("weighted_sum_backward", grid, *read, drows, dots, count, width, **sizes)
        # a row behind the last is of a choice that was dropped
        of_choice = F.pad(dots, (0, 1))[row.clamp(max=count)]
        return drows, of_choice.to(weights.dtype), None, None, None


def weighted_sum(
    rows: Tensor, weights: Tensor, token: Tensor, choice: Tensor, row: Tensor
) -> Tensor:
    """Sums rows of [M, D] over each token's choices, [N, k], to [N, D]; as in `ExpertOrder`."""
    return _WeightedSum.apply(rows, weights, token, choice, row)
