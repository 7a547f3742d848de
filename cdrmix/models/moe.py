"""Mixture-of-experts feed-forward on DeepSpeed's MoE layer and expert groups.

The only user of deepspeed.moe. DeepSpeed finds `MoE` modules, makes the expert groups, reduces
expert gradients over them and counts them once in the gradient norm. Router, dispatch and experts
are ours, because its gate has no z-loss and no statistics, counts only the first choice in its
balance loss, and pads dropless experts to the fullest one (0.19.8, moe/sharded_moe.py).
"""

# N tokens of this rank, D hidden, E experts, k experts per token, F inner width, P expert-parallel
# ranks, E/P experts held here

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MoEConfig, RoutingMambaConfig
from cdrmix.models.feed_forward import squared_relu, swiglu
from cdrmix.models.initialize import normal_
from cdrmix.planning.blocks.routers import (
    NUM_TOTALS,
    RouterPart,
    most_experts,
    router_places,
    routers_in,
)

runtime.import_deepspeed()  # first of all imports of it: chooses its accelerator and its ops

from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.sharded_moe import MOELayer  # noqa: E402


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Assignments one expert takes: ceil(factor * N * k / E), in exact arithmetic."""
    # floats round the product up for some factors: 1.1 * 400 would give 441 of 440
    exact = Fraction(str(factor)) * num_tokens * top_k / num_experts
    return math.ceil(exact)


def widened(statistics: Tensor, size: int) -> Tensor:
    """Fills router statistics [2E + 3] up to a row of `size`: zeros for further experts."""
    further = (size - len(statistics)) // 2
    if further == 0:
        return statistics
    experts = (len(statistics) - NUM_TOTALS) // 2
    parts = statistics.split([experts, experts, NUM_TOTALS])
    return torch.cat([*(F.pad(part, (0, further)) for part in parts[:2]), parts[2]])


def rows_of(statistics: Tensor, model: ModelConfig, part: RouterPart) -> Tensor:
    """Takes the statistics of one half of the blocks, [L, 2E + 3], out of the rows of a model."""
    sizes = routers_in(model, part)
    assert sizes is not None, "the model has such routers"
    if model.kind == "hf":  # all of its routers are of feed-forwards
        return statistics
    places = router_places(model)
    rows = [row for row, place in enumerate(places) if place.part == part]
    if len(rows) < len(places):
        statistics = statistics[rows]
    unused = most_experts(model) - sizes.num_experts
    if unused == 0:
        return statistics
    widths = [sizes.num_experts, unused, sizes.num_experts, unused, NUM_TOTALS]
    counts, _, probabilities, _, totals = statistics.split(widths, dim=1)
    return torch.cat([counts, probabilities, totals], 1)


class Router(nn.Module):
    """Top-k router in float32, with what its losses and monitors need."""

    def __init__(
        self,
        sizes: MoEConfig | RoutingMambaConfig,
        hidden_size: int,
        *,
        weights_sum_to_one: bool = True,
    ) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.weights_sum_to_one = weights_sum_to_one
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Chooses k experts per token, [N, D] of any float type.

        Gives expert of each choice, [N, k] int64; its weight, [N, k] float32, its probability or,
        if they sum to 1 per token, its share of those chosen; probabilities summed over the tokens,
        [E]; squared logsumexp summed, scalar.
        """
        logits = F.linear(x.float(), self.weight.float())  # [N, E]
        log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
        probabilities = torch.exp(logits - log_total)
        top, experts = probabilities.topk(self.top_k, dim=-1)
        weights = top / top.sum(-1, keepdim=True) if self.weights_sum_to_one else top
        return experts, weights, probabilities.sum(0), log_total.square().sum()


class _Gather(torch.autograd.Function):
    """Rows of x by index; the gradient comes back by the inverse index, never by scattering.

    x [N, D], index [M] into x, inverse [N, k] into the M rows (M itself where a row was dropped).
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        total = _rows_of_choice(grad, inverse, 0)
        for choice in range(1, inverse.shape[1]):
            total += _rows_of_choice(grad, inverse, choice)
        return total, None, None


class _Combine(torch.autograd.Function):
    """Each token's weighted sum over its choices.

    rows [M, D], weights [N, k], index [M] (token of each row), slot [M] (its choice), inverse
    [N, k] as in `_Gather`.
    """

    @staticmethod
    def forward(ctx, rows, weights, index, slot, inverse):
        ctx.save_for_backward(rows, weights, index, slot, inverse)
        scales = weights.to(rows.dtype)
        total = _rows_of_choice(rows, inverse, 0).mul_(scales[:, :1])
        for choice in range(1, inverse.shape[1]):
            each = _rows_of_choice(rows, inverse, choice)
            total.addcmul_(each, scales[:, choice : choice + 1])
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights, index, slot, inverse = ctx.saved_tensors
        spread = grad.index_select(0, index)  # [M, D]
        dots = (spread * rows).sum(-1, dtype=torch.float32)  # [M]
        padded = F.pad(dots, (0, 1))
        weight_grad = padded[inverse.clamp(max=rows.shape[0])].to(weights.dtype)
        scales = weights[index, slot].to(grad.dtype)
        return spread.mul_(scales.unsqueeze(-1)), weight_grad, None, None, None


# Rows of x, [N, D], by index, [M]; and each token's weighted sum over its choices, [N, D]. Other
# arguments are those that `sort_by_expert` gives.
gather_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = _Gather.apply
weighted_sum: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = _Combine.apply


def _rows_of_choice(x: Tensor, inverse: Tensor, choice: int) -> Tensor:
    """Selects each token's row of x; the index one past the last row, of a dropped one, gives 0."""
    index = inverse[:, choice]
    if inverse.numel() == x.shape[0]:  # nothing was dropped, which saves the mask
        return x.index_select(0, index)
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], x.shape[1])
    rows = x.index_select(0, index.clamp(max=x.shape[0] - 1))
    return rows.masked_fill_((index >= x.shape[0]).unsqueeze(-1), 0)


class _AllToAllRows(torch.autograd.Function):
    """Rows to their ranks in `group`; splits are row counts per rank."""

    @staticmethod
    def forward(ctx, x, send_splits, receive_splits, group):
        ctx.splits = (send_splits, receive_splits)
        ctx.group = group
        return _exchange_rows(x, send_splits, receive_splits, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        send_splits, receive_splits = ctx.splits
        returned = _exchange_rows(grad.contiguous(), receive_splits, send_splits, ctx.group)
        return returned, None, None, None


def _exchange_rows(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(receive), x.shape[1])
    torch.distributed.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class GroupedExperts(nn.Module):
    """The experts of one rank, two matrices each or three with SwiGLU, in grouped matmuls."""

    def __init__(
        self, num_local: int, inner: int, hidden: int, *, is_gated: bool = False, group_name: str
    ) -> None:
        super().__init__()
        self.gate: nn.Parameter | None = None
        if is_gated:
            self.gate = nn.Parameter(torch.empty(num_local, inner, hidden))
        self.up = nn.Parameter(torch.empty(num_local, inner, hidden))
        self.down = nn.Parameter(torch.empty(num_local, hidden, inner))
        for parameter in self.parameters():  # marks by which DeepSpeed finds experts
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Applies each expert to its rows of [M, D], which end before `ends`, [E/P], int32."""
        if len(rows) == 0:
            # torch 2.13 fails in the backward pass of a grouped product of no rows, and DeepSpeed
            # counts on a gradient of every parameter
            return rows + 0 * sum(parameter.sum() for parameter in self.parameters())
        inner = F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends)  # [M, F]
        if self.gate is None:
            inner = squared_relu(inner)
        else:
            inner = swiglu(F.grouped_mm(rows, self.gate.transpose(1, 2), offs=ends), inner)
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)


class ExpertLayer(MOELayer):
    """Routes tokens to the experts of the expert group and back."""

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, *, group_name: str, expert_parallel_size: int
    ) -> None:
        hidden = config.hidden_size
        local = moe.num_experts // expert_parallel_size
        experts = GroupedExperts(
            local,
            moe.expert_hidden_size,
            hidden,
            is_gated=config.ffn_activation == "swiglu",
            group_name=group_name,
        )
        super().__init__(Router(moe, hidden), experts, group_name, expert_parallel_size, local)
        self.moe = moe
        # `parallel.exchange.share_tokens`, where tensor ranks share out the tokens that they hold
        self.share_tokens: Callable[..., Tensor] | None = None

    def join(self, group: Any) -> None:
        """Takes the process group over which the experts are spread."""
        self.ep_group = group

    # as DeepSpeed's engine calls it
    _set_ep_group = join

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes [B, T, D] -> [B, T, D], with statistics [2E + 3]; see `MoEFeedForward`."""
        moe = self.moe
        all_tokens = x.reshape(-1, x.shape[-1])
        tokens = all_tokens  # [N, D]
        if self.share_tokens:
            tokens = self.share_tokens(all_tokens, len(all_tokens), to_share=True)
        experts, weights, probability_sum, z_sum = self.gate(tokens)
        every = torch.arange(moe.num_experts, device=x.device)
        counts = (experts.reshape(-1, 1) == every).sum(0)  # [E], before anything is dropped
        capacity = expert_capacity(len(tokens), moe.top_k, moe.num_experts, moe.capacity_factor)
        excess = (counts - capacity).clamp(min=0).sum()
        dropping = moe.drop_tokens and self.training
        index, slot, inverse, row_counts = sort_by_expert(
            experts, counts, capacity if dropping else None
        )
        rows = _Gather.apply(tokens, index, inverse)  # [M, D]
        rows = self._apply_experts(rows, row_counts)
        out = _Combine.apply(rows, weights, index, slot, inverse)
        dropped = excess if dropping else torch.zeros_like(excess)
        totals = torch.stack([z_sum, excess.float(), dropped.float()])
        statistics = torch.cat([counts.float(), probability_sum, totals])
        if self.share_tokens:
            out = self.share_tokens(out, len(all_tokens), to_share=False)
        return out.view_as(x), statistics

    def _apply_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes the experts' outputs of rows sorted by global expert, in the same order."""
        if self.ep_size == 1:
            return self.experts(rows, counts.cumsum(0).to(torch.int32))
        sent = counts.view(self.ep_size, self.num_local_experts)  # [P, E/P]
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent.contiguous(), group=self.ep_group)
        # waits for the device, as an all-to-all of unequal splits takes its sizes from the host
        send_splits, receive_splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        arrived = _AllToAllRows.apply(rows, send_splits, receive_splits, self.ep_group)
        # rows arrive by source, then by expert; the grouped matmul takes them by expert alone
        expert_of_block = torch.arange(self.num_local_experts, device=rows.device)
        expert_of_row = expert_of_block.repeat(self.ep_size).repeat_interleave(received.flatten())
        order = expert_of_row.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        ours = _Gather.apply(arrived, order, back.unsqueeze(1))
        ours = self.experts(ours, received.sum(0).cumsum(0).to(torch.int32))
        leaving = _Gather.apply(ours, back, order.unsqueeze(1))
        return _AllToAllRows.apply(leaving, receive_splits, send_splits, self.ep_group)


def sort_by_expert(
    experts: Tensor, counts: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Orders assignments [N, k] by expert, first choices first, and cuts each expert at capacity.

    `counts` are assignments per expert, [E]. Gives token of each kept row [M], its choice [M], row
    of each (token, choice) [N, k] with M for a dropped one, rows per expert [E].
    """
    num_tokens, top_k = experts.shape
    flat = experts.t().reshape(-1)  # choice-major: second choices queue behind first ones
    by_expert, order = flat.sort(stable=True)  # [k*N]
    row_counts = counts
    if capacity is not None:
        place = torch.arange(order.numel(), device=order.device)
        place -= (counts.cumsum(0) - counts)[by_expert]  # place within its expert
        order = order[place < capacity]
        row_counts = counts.clamp(max=capacity)
    inverse = torch.full((num_tokens * top_k,), order.numel(), device=order.device)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order % num_tokens, order // num_tokens, inverse.view(top_k, -1).t(), row_counts


class MoEFeedForward(MoE):
    """Mixture-of-experts feed-forward of one block; `expert_parallel_size` divides its experts."""

    def __init__(self, config: ModelConfig, *, expert_parallel_size: int = 1) -> None:
        assert config.moe is not None, "a dense model has no experts"
        super().__init__(
            config.hidden_size,
            nn.Identity(),  # DeepSpeed copies it once per expert; replaced below
            num_experts=config.moe.num_experts,
            ep_size=expert_parallel_size,
            k=config.moe.top_k,
        )
        self.deepspeed_moe = ExpertLayer(
            config,
            config.moe,
            group_name=self.expert_group_name,
            expert_parallel_size=expert_parallel_size,
        )

    def _create_process_groups(self, **kwargs: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints a line from every rank
            super()._create_process_groups(**kwargs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sends each token to its experts, [B, T, D] -> [B, T, D].

        Beside it gives router statistics [2E + 3], float32, each a sum over this rank's tokens:
        assignments per expert before dropping [E], router probabilities [E], squared logsumexp,
        assignments beyond the capacity, assignments dropped.
        """
        return self.deepspeed_moe(x)

    @torch.no_grad()
    def initialize(
        self, *, seed: int, name: str, std: float, expert_parallel_rank: int = 0
    ) -> None:
        """Sets normal router and projections up, and zero down projections."""
        layer = self.deepspeed_moe
        normal_(layer.gate.weight, std, seed=seed, name=f"{name}.router")
        # by global number, so that every layout starts from the same experts
        first = expert_parallel_rank * self.num_local_experts
        entering = {"gate": layer.experts.gate, "up": layer.experts.up}
        for matrix, stacked in entering.items():
            for i, each in enumerate(stacked if stacked is not None else ()):
                normal_(each, std, seed=seed, name=f"{name}.experts.{first + i}.{matrix}")
        layer.experts.down.zero_()
