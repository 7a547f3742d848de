"""Rows sorted by the expert they go to: order, gathering, grouped products, weighted sum.

All shapes follow from the number of tokens, never from where they go, so that nothing here waits
for the device, and a block of experts is one graph to torch.compile. Where experts are cut at a
capacity, the rows of dropped assignments stay, behind those of the last expert. A grouped product
neither reads nor writes there: what is in such rows is memory of other tensors, not-a-number
included, and masks keep it out of results and gradients, as a product with zero would not.
"""

# N tokens, D hidden, E experts, k experts per token, M rows, F columns of an expert's matrix

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models import expert_rows_triton, triton_launch


def exact_ratio(factor: float) -> tuple[int, int]:
    """Numerator and denominator of a factor as its decimal text gives it: 1.1 is 11 / 10."""
    return Fraction(str(factor)).as_integer_ratio()


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: tuple[int, int]) -> int:
    """Assignments one expert takes: ceil(factor * N * k / E), in exact arithmetic.

    `factor` is a numerator and a denominator, from `exact_ratio`: floats round the product up for
    some factors, 1.1 * 400 to more than 440.
    """
    numerator, denominator = factor
    return -(-num_tokens * top_k * numerator // (denominator * num_experts))


class ExpertOrder(NamedTuple):
    """Assignments of tokens to experts in the order of their rows.

    Attributes:
        token: token of each row, [M].
        choice: which of the token's choices the row is, [M].
        row: row of each choice, [N, k]; M for one that was dropped.
        demand: assignments per expert before any is dropped, [E].
        counts: rows per expert, [E].
        can_drop: whether some choices may have been dropped, known without looking.
    """

    token: Tensor
    choice: Tensor
    row: Tensor
    demand: Tensor
    counts: Tensor
    can_drop: bool

    @property
    def ends(self) -> Tensor:
        """Row before which each expert's end, [E], int32."""
        return self.counts.cumsum(0).to(torch.int32)

    def first(self, num_rows: int) -> ExpertOrder:
        """Leaves out the rows behind `num_rows`, all of dropped choices."""
        return self._replace(token=self.token[:num_rows], choice=self.choice[:num_rows])


def sort_by_expert(experts: Tensor, num_experts: int, capacity: int | None) -> ExpertOrder:
    """Orders assignments [N, k] by expert, first choices first, and cuts each expert at capacity.

    M is k N: rows of dropped assignments are the last ones.
    """
    num_tokens, top_k = experts.shape
    flat = experts.t().reshape(-1)  # choice-major: second choices queue behind first ones
    hits = flat == torch.arange(num_experts, device=flat.device).unsqueeze(1)  # [E, kN]
    demand = hits.sum(1)
    counts = demand if capacity is None else demand.clamp(max=capacity)
    # place within its expert, without the scatter that would invert the order: scattering sorts
    # once more where algorithms are to be deterministic
    place = hits.cumsum(1, dtype=torch.int32).gather(0, flat.unsqueeze(0)).squeeze(0) - 1
    row = (counts.cumsum(0) - counts)[flat] + place
    key = flat
    if capacity is not None:
        is_kept = place < capacity
        row = torch.where(is_kept, row, flat.numel())
        key = torch.where(is_kept, flat, num_experts)
    order = key.argsort(stable=True)
    token, choice = order % num_tokens, order // num_tokens
    return ExpertOrder(token, choice, row.view(top_k, -1).t(), demand, counts, capacity is not None)


class _Gather(torch.autograd.Function):
    """Rows of x by index; the gradient comes back by the inverse index, never by scattering."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, can_drop: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.can_drop = can_drop
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        total = _rows_of_choice(grad, inverse, 0, ctx.can_drop)
        for choice in range(1, inverse.shape[1]):
            total += _rows_of_choice(grad, inverse, choice, ctx.can_drop)
        return total, None, None, None


class _Combine(torch.autograd.Function):
    """Each token's weighted sum over its choices; arguments of the order as in `ExpertOrder`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        token: Tensor,
        choice: Tensor,
        row: Tensor,
        can_drop: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, token, choice, row)
        ctx.can_drop = can_drop
        scales = weights.to(rows.dtype)
        total = _rows_of_choice(rows, row, 0, can_drop).mul_(scales[:, :1])
        for number in range(1, row.shape[1]):
            each = _rows_of_choice(rows, row, number, can_drop)
            total.addcmul_(each, scales[:, number : number + 1])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, token, choice, row = ctx.saved_tensors
        spread = grad.index_select(0, token)  # [M, D]
        dots = (spread * rows).sum(-1, dtype=torch.float32)  # [M]
        if ctx.can_drop:
            dots = F.pad(dots, (0, 1))
            row = row.clamp(max=len(rows))
        scales = weights[token, choice].to(grad.dtype)
        spread = spread.mul_(scales.unsqueeze(-1))
        return spread, dots[row].to(weights.dtype), None, None, None, None


def _rows_of_choice(x: Tensor, inverse: Tensor, choice: int, can_drop: bool) -> Tensor:
    """Selects each token's row of x; an index behind the last row, of a dropped one, gives 0."""
    index = inverse[:, choice]
    if not can_drop:
        return x.index_select(0, index)
    if len(x) == 0:
        return x.new_zeros(len(index), x.shape[1])
    rows = x.index_select(0, index.clamp(max=len(x) - 1))
    return rows.masked_fill_((index >= len(x)).unsqueeze(-1), 0)


def gather_rows(x: Tensor, order: ExpertOrder) -> Tensor:
    """Takes the rows of tokens, [N, D], that their experts read: [M, D]."""
    if triton_launch.can_run("gather_rows", x, compiled_for=order.row.shape[1]):
        return expert_rows_triton.gather_rows(x, order.token, order.row)
    rows: Tensor = _Gather.apply(x, order.token, order.row, order.can_drop)
    return rows


def permute_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Takes rows of [M, D] in the order of a permutation, [M], whose inverse, [M], is known."""
    rows: Tensor = _Gather.apply(x, index, inverse.unsqueeze(1), False)
    return rows


def weighted_sum(rows: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """Sums rows of experts, [M, D], over each token's choices: [N, D]. `weights` are [N, k]."""
    if triton_launch.can_run("weighted_sum", rows, compiled_for=weights.shape[1]):
        places = (order.token, order.choice, order.row)
        return expert_rows_triton.weighted_sum(rows, weights, *places)
    total: Tensor = _Combine.apply(
        rows, weights, order.token, order.choice, order.row, order.can_drop
    )
    return total


@torch.library.custom_op("cdrmix::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)


@_grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[1])


@torch.library.custom_op("cdrmix::grouped_product_backward", mutates_args=())
def _grouped_product_backward(
    grad: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    return F.grouped_mm(grad, matrices, offs=ends), F.grouped_mm(grad.t(), rows, offs=ends)


@_grouped_product_backward.register_fake
def _(grad: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(matrices)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grads = _grouped_product_backward(grad.contiguous(), *ctx.saved_tensors)
    return grads[0], grads[1], None


_grouped_product.register_autograd(_backward, setup_context=_keep_for_backward)


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each expert's rows of [M, D] with its matrix of [E, F, D]: [M, F].

    The rows of an expert end before `ends`, [E], int32. What is behind the last end is not read;
    in the result, and in the gradient of `rows`, it is not written.
    """
    # torch 2.13's fake kernel of it takes bf16 alone, so that other types are hidden from graphs
    # (torch/_meta_registrations.py, _meta_grouped_mm_common)
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        product: Tensor = _grouped_product(rows, matrices, ends)
        return product
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
