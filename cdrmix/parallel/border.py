"""Packs what crosses a stage boundary into one flat tensor.

DeepSpeed starts a backward pass of its own for each tensor with a gradient that a stage handed on
(0.19.8, runtime/pipe/engine.py), and each would go through the whole stage again. Tensors of
another type than the first one's, float32 statistics beside bf16 activations, travel as bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# shape and type of a tensor
Part = tuple[tuple[int, ...], torch.dtype]


def pack(tensors: list[Tensor]) -> Tensor:
    """Tensors end to end, flat, in the type of the first; differentiable."""
    return _Pack.apply(*tensors)


def unpack(packed: Tensor, parts: list[Part]) -> list[Tensor]:
    """Views of the tensors that `pack` joined; differentiable."""
    return list(_Unpack.apply(packed, parts))


def num_elements(parts: list[Part], dtype: torch.dtype) -> int:
    """Number of elements of the flat tensor, counted in `dtype`."""
    return sum(math.prod(shape) * own.itemsize for shape, own in parts) // dtype.itemsize


def _join(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    # `view`, not a cast: float32 statistics keep their bits inside a bf16 tensor
    return torch.cat([tensor.reshape(-1).view(dtype) for tensor in tensors])


def _split(packed: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
    sizes = [num_elements([part], packed.dtype) for part in parts]
    pieces = zip(packed.split(sizes), parts, strict=True)
    return tuple(piece.view(dtype).view(shape) for piece, (shape, dtype) in pieces)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:
        ctx.parts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        return _join(tensors, tensors[0].dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _split(grad, ctx.parts)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, parts: list[Part]) -> tuple[Tensor, ...]:
        ctx.dtype = packed.dtype
        return _split(packed, parts)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _join(grads, ctx.dtype), None
