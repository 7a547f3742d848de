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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MoEConfig, RoutingMambaConfig
from cdrmix.models.expert_rows import (
    ExpertOrder,
    exact_ratio,
    expert_capacity,
    gather_rows,
    grouped_product,
    permute_rows,
    sort_by_expert,
    weighted_sum,
)
from cdrmix.models.feed_forward import squared_relu, swiglu
from cdrmix.models.initialize import normal_
from cdrmix.models.rebuild import cheaply
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


class _FloatLinear(torch.autograd.Function):
    """x @ weight.T in float32, [N, D] and [E, D] of a shorter type, which it saves as they are.

    CUDA's product gives float32 of them without copies in float32; products of bf16 numbers are
    exact there. The gradient in float32 needs copies for the time of its products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cpu":  # which has no such product
            return F.linear(x.float(), weight.float())
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            (grad @ weight.float()).to(x.dtype) if needs_x else None,
            (grad.t() @ x.float()).to(weight.dtype) if needs_weight else None,
        )


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, [N, D] and [E, D] of any float type, summed in float32 too."""
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return F.linear(x.float(), weight.float())
    logits: Tensor = _FloatLinear.apply(x, weight)
    return logits


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
        logits = float_linear(x, self.weight)  # [N, E]
        log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
        probabilities = torch.exp(logits - log_total)
        top, experts = probabilities.topk(self.top_k, dim=-1)
        weights = top / top.sum(-1, keepdim=True) if self.weights_sum_to_one else top
        return experts, weights, probabilities.sum(0), log_total.square().sum()


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
        """Applies each expert to its rows of [M, D], which end before `ends`, [E/P], int32.

        What is behind the last end comes out as `grouped_product` leaves it.
        """
        if len(rows) == 0:
            # torch 2.13 fails in the backward pass of a grouped product of no rows. With a row of
            # no expert the pass is that of other ranks: ZeRO-2 reduces gradients in the order in
            # which each rank makes them, and takes those of equal sizes for one another
            return self.forward(F.pad(rows, (0, 0, 0, 1)), ends)[:0]
        inner = grouped_product(rows, self.up, ends)  # [M, F]
        if self.gate is None:
            inner = cheaply(squared_relu, inner)
        else:
            inner = cheaply(swiglu, grouped_product(rows, self.gate, ends), inner)
        return grouped_product(inner, self.down, ends)


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
        self.capacity_ratio = exact_ratio(moe.capacity_factor)
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
        capacity = expert_capacity(len(tokens), moe.top_k, moe.num_experts, self.capacity_ratio)
        dropping = moe.drop_tokens and self.training
        order = sort_by_expert(experts, moe.num_experts, capacity if dropping else None)
        if self.ep_size == 1:
            rows = self.experts(cheaply(gather_rows, tokens, order), order.ends)
        else:
            rows, order = self._apply_spread_experts(tokens, order)
        out = weighted_sum(rows, weights, order)
        excess = (order.demand - capacity).clamp(min=0).sum()
        dropped = excess if dropping else torch.zeros_like(excess)
        totals = torch.stack([z_sum, excess.float(), dropped.float()])
        statistics = torch.cat([order.demand.float(), probability_sum, totals])
        if self.share_tokens:
            out = self.share_tokens(out, len(all_tokens), to_share=False)
        return out.view_as(x), statistics

    def _apply_spread_experts(
        self, tokens: Tensor, order: ExpertOrder
    ) -> tuple[Tensor, ExpertOrder]:
        """Has the experts of all ranks compute this rank's rows; without those of dropped ones."""
        sent = order.counts.view(self.ep_size, self.num_local_experts)  # [P, E/P]
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent.contiguous(), group=self.ep_group)
        # waits for the device, as an all-to-all of unequal splits takes its sizes from the host
        send_splits, receive_splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        order = order.first(sum(send_splits))
        rows = gather_rows(tokens, order)
        arrived = _AllToAllRows.apply(rows, send_splits, receive_splits, self.ep_group)
        # rows arrive by source, then by expert; the grouped matmul takes them by expert alone
        expert_of_block = torch.arange(self.num_local_experts, device=rows.device)
        expert_of_row = expert_of_block.repeat(self.ep_size).repeat_interleave(
            received.flatten(), output_size=sum(receive_splits)
        )
        by_expert = expert_of_row.argsort(stable=True)
        by_source = by_expert.argsort()
        ours = permute_rows(arrived, by_expert, by_source)
        ours = self.experts(ours, received.sum(0).cumsum(0).to(torch.int32))
        leaving = permute_rows(ours, by_source, by_expert)
        returned = _AllToAllRows.apply(leaving, receive_splits, send_splits, self.ep_group)
        return returned, order


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
