"""Mamba, and Routing Mamba, whose three large projections are mixtures of experts.

    u = silu(conv(W_input x));  z = W_gate x
    dt, B, C = split(W_x u);  y = scan(u, W_dt dt + dt_bias, -exp(a_log), B, C, d, z)
    out = W_output y

Source: Gu and Dao, arXiv 2312.00752 (Mamba-1), and state-spaces/mamba for initial values. Its
in_proj is `input` above `gate` here: two matrices, as Routing Mamba and optimizers see them.
"""

# B batch, T time, D hidden, I inner features, N states of a feature, R rank of the time step,
# K taps of the convolution, E experts, n tokens, k experts of a token

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MambaConfig
from cdrmix.models.expert_rows import (
    ExpertOrder,
    gather_rows,
    grouped_product,
    sort_by_expert,
    weighted_sum,
)
from cdrmix.models.initialize import generator, normal_, uniform_
from cdrmix.models.mixer import Gathered, Mixer, placed, taken
from cdrmix.models.moe import Router
from cdrmix.models.rebuild import cheaply
from cdrmix.models.selective_scan import ScanInputs, selective_scan

# Range from which state-spaces/mamba draws the first time steps, and their smallest value.
_FIRST_STEPS = (1e-3, 1e-1)
_SMALLEST_STEP = 1e-4


@dataclass
class MambaState:
    """State of a Mamba mixer between calls."""

    window: Tensor  # last inputs of the convolution, zero before a document, [B, K - 1, I]
    states: Tensor  # states of the scan, [B, N, I], float32


class Mamba(Mixer):
    """Mamba mixer of one layer."""

    carries_state = True  # so that a sequence can be run piece by piece
    state_type = MambaState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.mamba
        assert sizes is not None, "a model with Mamba layers has their sizes"
        self.sizes: MambaConfig = sizes
        self.rank = sizes.rank(config.hidden_size)
        self.inner = sizes.expand * config.hidden_size
        # What is no matrix is stored flat, for optimizers go by the shape: of I features each.
        self.conv_weight = nn.Parameter(torch.empty(self.inner * sizes.conv_size))  # [I, K]
        self.conv_bias = nn.Parameter(torch.empty(self.inner))
        self.dt_bias = nn.Parameter(torch.empty(self.inner))
        self.a_log = nn.Parameter(torch.empty(self.inner * sizes.state_size))  # [I, N]
        self.d = nn.Parameter(torch.empty(self.inner))
        self.make_projections(config)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * sizes.state_size, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner, bias=False)

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        """Makes the mixer of a layer, the same in all."""
        return cls(config)

    def make_projections(self, config: ModelConfig) -> None:
        """Makes the projections into and out of the inner features."""
        self.input = nn.Linear(config.hidden_size, self.inner, bias=False)
        self.gate = nn.Linear(config.hidden_size, self.inner, bias=False)
        self.output = nn.Linear(self.inner, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, state: MambaState | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, MambaState]:
        """Mixes along time.

        Args:
            x: normalised input, [B, T, D], any float type.
            state: state after the token before x, or None at the start of a sequence.
            segment_ids: document of each token, [B, T]; nothing crosses from one to the next. The
                state belongs to the first one of its row.
        Returns:
            Output [B, T, D], and the state after token T.
        """
        y, after = self.scan(self.input(x), self.gate(x), state, segment_ids)
        return self.output(y), after

    def scan(
        self, entering: Tensor, gate: Tensor, state: MambaState | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        """Convolves and scans inner features, [B, T, I], and applies their gate, before its silu.

        Gives [B, T, I], and the state after token T.
        """
        taps, size = self.sizes.conv_size, self.sizes.state_size
        window = None if state is None else state.window.to(entering.dtype)
        weight = self.conv_weight.view(-1, taps)
        u = cheaply(convolve, entering, window, weight, self.conv_bias, segment_ids)
        low, b, c = self.x_proj(u).split([self.rank, size, size], dim=-1)
        rates = -torch.exp(self.a_log.float()).view(-1, size)
        inputs = ScanInputs(u, self.dt_proj(low), self.dt_bias, rates, b, c, self.d, gate)
        past = None if state is None else state.states
        y, states = selective_scan(inputs, past, segment_ids=segment_ids)
        recent = _behind(entering[:, 1 - taps :], window, taps)[:, 1 - taps :]
        if segment_ids is not None:
            is_other = _padded_ids(segment_ids, taps)[:, 1 - taps :] != segment_ids[:, -1:]
            recent = recent.masked_fill(is_other.unsqueeze(-1), 0)
        return y, MambaState(recent, states)

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets the initial values, random ones by the module's path.

        Convolution, time steps, rates and d are those of state-spaces/mamba (modules/
        mamba_simple.py); matrices are normal, and the output projection is zero, as in other
        mixers.
        """
        self.initialize_projections(seed=seed, name=name, std=std)
        normal_(self.x_proj.weight, std, seed=seed, name=f"{name}.x_proj")
        bound = 1 / math.sqrt(self.sizes.conv_size)  # torch's of a depthwise Conv1d
        uniform_(self.conv_weight, bound, seed=seed, name=f"{name}.conv_weight")
        uniform_(self.conv_bias, bound, seed=seed, name=f"{name}.conv_bias")
        uniform_(self.dt_proj.weight, self.rank**-0.5, seed=seed, name=f"{name}.dt_proj")
        if not self.dt_bias.is_meta:
            source = generator(seed, f"{name}.dt_bias", device=self.dt_bias.device)
            low, high = (math.log(step) for step in _FIRST_STEPS)
            steps = torch.empty_like(self.dt_bias, dtype=torch.float32)
            steps.uniform_(low, high, generator=source).exp_().clamp_(min=_SMALLEST_STEP)
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is steps
        numbers = torch.arange(1, self.sizes.state_size + 1, device=self.a_log.device)
        self.a_log.copy_(numbers.float().log().repeat(self.inner))
        self.d.fill_(1)

    def initialize_projections(self, *, seed: int, name: str, std: float) -> None:
        """Sets normal input and gate projections, and a zero output projection."""
        for part in ("input", "gate"):
            normal_(getattr(self, part).weight, std, seed=seed, name=f"{name}.{part}")
        self.output.weight.zero_()


class RoutingMamba(Mamba):
    """Mamba whose input, gate and output projections are those of k of E experts.

    One router chooses for all three. What enters and the gate are sums over the chosen experts;
    their weights, the router's probabilities, multiply at the output alone. Convolution, time step,
    rates and state are shared, so that there is one state whatever experts are chosen.

    Source: Routing Mamba, arXiv 2506.18145.
    """

    def make_projections(self, config: ModelConfig) -> None:
        """Makes the router and the experts' projections."""
        sizes = config.routing_mamba
        assert sizes is not None, "a model with Routing Mamba layers has their experts"
        experts = sizes.num_experts
        self.num_experts = experts
        # Weights of a single choice that sum to 1 would be 1, and the router without a gradient.
        self.router = Router(sizes, config.hidden_size, weights_sum_to_one=False)
        self.inputs = nn.Parameter(torch.empty(experts, self.inner, config.hidden_size))
        self.gates = nn.Parameter(torch.empty(experts, self.inner, config.hidden_size))
        self.outputs = nn.Parameter(torch.empty(experts, config.hidden_size, self.inner))

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: Any,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, MambaState, Tensor]:
        """Mixes as `forward`."""
        tokens = None if gathered is None else gathered.tokens
        out, after, statistics = self(x, state, segment_ids, tokens)
        return out, v_first, after, statistics

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: MambaState | None = None,
        segment_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, MambaState, Tensor]:
        """Mixes along time as `Mamba.forward`, and gives router statistics [2E + 3] as third.

        `places` are those of `Gathered.tokens`: what fills up rows at their end meets no expert,
        and is counted nowhere.
        They are those of `MoEFeedForward.forward`; nothing is dropped, and there is no capacity
        that could overflow.
        """
        tokens = taken(x, places)  # [n, D]
        experts, weights, probability_sum, z_sum = self.router(tokens)
        order = sort_by_expert(experts, self.num_experts, None)
        ends = order.ends
        rows = cheaply(gather_rows, tokens, order)  # [n k, D], by expert
        entering, gate = (
            _sum_choices(grouped_product(rows, stack, ends), order)
            for stack in (self.inputs, self.gates)
        )
        entering, gate = (placed(each, x, places) for each in (entering, gate))
        y, after = self.scan(entering, gate, state, segment_ids)
        rows = cheaply(gather_rows, taken(y, places), order)
        rows = grouped_product(rows, self.outputs, ends)  # [n k, D]
        out = weighted_sum(rows, weights, order)
        no_capacity = torch.zeros_like(z_sum)
        totals = torch.stack([z_sum, no_capacity, no_capacity])
        statistics = torch.cat([order.demand.float(), probability_sum, totals])
        return placed(out, x, places), after, statistics

    @torch.no_grad()
    def initialize_projections(self, *, seed: int, name: str, std: float) -> None:
        """Sets a normal router, normal inputs and gates by their experts' numbers, zero outputs."""
        normal_(self.router.weight, std, seed=seed, name=f"{name}.router")
        for part in ("inputs", "gates"):
            for number, each in enumerate(getattr(self, part)):
                normal_(each, std, seed=seed, name=f"{name}.{part}.{number}")
        self.outputs.zero_()


class _SumChoices(torch.autograd.Function):
    """Each token's sum over its choices; `gather_rows` the other way round, saving the index."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        total = rows.index_select(0, inverse[:, 0])
        for choice in range(1, inverse.shape[1]):
            total += rows.index_select(0, inverse[:, choice])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def _sum_choices(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Sums rows by expert, [n k, I], over each token's choices: [n, I]."""
    total: Tensor = _SumChoices.apply(rows, order.token, order.row)
    return total


def convolve(
    x: Tensor, window: Tensor | None, weight: Tensor, bias: Tensor, segment_ids: Tensor | None
) -> Tensor:
    """Convolves each feature along time, causally, and applies silu.

    Args:
        x: [B, T, I].
        window: the K - 1 inputs before the first, [B, K - 1, I], of x's type; None for zero.
        weight: [I, K], the last tap for the token itself.
        bias: [I].
        segment_ids: document of each token, [B, T]; nothing crosses from one to the next. The
            window belongs to the first one of its row.
    Returns:
        [B, T, I] in x's type.
    """
    out: Tensor = _Convolution.apply(x, window, weight, bias, segment_ids)
    return out


class _Convolution(torch.autograd.Function):
    """silu(conv(x)), depthwise and causal; computes what is before the silu again for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        window: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        segment_ids: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, window, weight, bias, segment_ids)
        return F.silu(_convolved(x, window, weight, bias, segment_ids)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, window, weight, bias, segment_ids = ctx.saved_tensors
        before = _convolved(x, window, weight, bias, segment_ids)
        gate = torch.sigmoid(before)
        grad = grad * gate * (1 + before * (1 - gate))  # [B, T, I]
        time, taps = x.shape[1], weight.shape[1]
        padded = _behind(x, window, taps)
        dpadded = torch.zeros_like(padded, dtype=grad.dtype)
        dweight = torch.empty_like(weight, dtype=grad.dtype)
        for tap in range(taps):
            same = _is_same(segment_ids, tap, taps)
            reached = grad if same is None else grad * same
            dpadded[:, tap : tap + time].addcmul_(reached, weight[:, tap])
            dweight[:, tap] = (reached * padded[:, tap : tap + time]).sum((0, 1))
        dwindow, dx = dpadded.to(x.dtype).split([taps - 1, time], 1)
        dbias = grad.sum((0, 1)).to(bias.dtype)
        return dx, None if window is None else dwindow, dweight.to(weight.dtype), dbias, None


def _convolved(
    x: Tensor, window: Tensor | None, weight: Tensor, bias: Tensor, segment_ids: Tensor | None
) -> Tensor:
    """Convolves without the silu, [B, T, I], in float32, or in float64 if x is."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    time, taps = x.shape[1], weight.shape[1]
    padded = _behind(x, window, taps)
    total = bias.to(dtype).expand(x.shape).clone()
    for tap in range(taps):
        read = padded[:, tap : tap + time]
        same = _is_same(segment_ids, tap, taps)
        if same is not None:
            read = read * same
        total.addcmul_(read.to(dtype), weight[:, tap].to(dtype))
    return total


def _behind(x: Tensor, window: Tensor | None, taps: int) -> Tensor:
    """Puts x, [B, T, I], behind the window, or behind zeros: [B, K - 1 + T, I]."""
    if window is None:
        return F.pad(x, (0, 0, taps - 1, 0))
    return torch.cat([window, x], 1)


def _padded_ids(segment_ids: Tensor, taps: int) -> Tensor:
    """Documents of the window and of the tokens, [B, K - 1 + T]."""
    return torch.cat([segment_ids[:, :1].expand(-1, taps - 1), segment_ids], 1)


def _is_same(segment_ids: Tensor | None, tap: int, taps: int) -> Tensor | None:
    """Tells which tokens are of the document of the one that a tap of theirs reads, [B, T, 1]."""
    if segment_ids is None:
        return None
    read = _padded_ids(segment_ids, taps)[:, tap : tap + segment_ids.shape[1]]
    return (read == segment_ids).unsqueeze(-1)
