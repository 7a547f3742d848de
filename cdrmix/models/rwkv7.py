"""RWKV-7 time mixing, and the token shift that time and channel mixing share.

Equations and initial values: RWKV-7 paper and RWKV-LM (x070). In the letters of the paper:

    lw = -exp(-0.5) * sigmoid(w0 + tanh(x_w w1) w2)            log decay
    v  = lerp(v, v_first, sigmoid(v0 + x_v v1 v2))             after the first RWKV layer
    a  = sigmoid(a0 + x_a a1 a2);  g = sigmoid(x_g g1) g2
    kk = normalize(k * k_k);  k = k * (1 + (a - 1) * k_a)
    S' = S diag(exp lw) - (S kk)(kk * a)^T + v k^T;  y = S' r
    out = Wo ((group_norm(y) + (r . (k * r_k)) v) * g)
"""

# B batch, T time, D hidden, H heads, K key dim per head, V value dim per head (K = V = head_dim)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.initialize import orthogonal_, uniform_
from cdrmix.models.mixer import Gathered, Mixer
from cdrmix.models.rebuild import cheaply
from cdrmix.models.rwkv7_pointwise import (
    blend_values,
    gated_output,
    recurrence_inputs,
    shift_mix,
)
from cdrmix.models.wkv7 import wkv7
from cdrmix.planning.blocks.block_type import is_v_first_made

# the arguments and results of `wkv7`
Recurrence = Callable[..., tuple[Tensor, Tensor]]

_MIXES = ("r", "w", "k", "v", "a", "g")


class TokenShift(nn.Module):
    """Mixes positions with their predecessors; replaced where a sequence is spread over ranks."""

    def begin(
        self, last: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the token before the first one here, or None for zero; segment_ids of those here.

        `last` is the last token here, [B, D], which precedes those of another rank, `segment_ids`
        are of the whole sequence, wherever its tokens are, [B, T].
        """
        return None, segment_ids

    def forward(
        self, x: Tensor, last: Tensor | None, segment_ids: Tensor | None, mu: Tensor
    ) -> tuple[Tensor, ...]:
        """Mixes as `shift_mix`; `last` is None at the start of a sequence."""
        if last is None:
            last, segment_ids = self.begin(x[:, -1], segment_ids)
        mixed: tuple[Tensor, ...] = cheaply(shift_mix, x, last, segment_ids, mu)
        return mixed


@dataclass
class TimeMixState:
    """State of a time mix between calls."""

    last: Tensor  # last normalised input, [B, D]
    wkv: Tensor  # recurrent state, [B, H, V, K], float32


class TimeMix(Mixer):
    """RWKV-7 time mixing of one layer; the first one of all creates v_first."""

    carries_state = True  # so that a sequence can be run piece by piece
    state_type = TimeMixState
    across_tokens = {"shift": "shift", "recurrence": "wkv7"}
    read_inside = ("group_norm",)  # its norm is computed by F.group_norm

    mu_r: Tensor  # [D], as are all mu, biases and k_k, k_a, r_k
    decay_bias: Tensor
    decay_down: Tensor  # [D, R], as are all downs
    decay_up: Tensor  # [R, D], as are all ups
    iclr_bias: Tensor
    iclr_down: Tensor
    iclr_up: Tensor
    value_bias: Tensor
    value_down: Tensor
    value_up: Tensor
    gate_down: Tensor
    gate_up: Tensor

    def __init__(self, config: ModelConfig, *, layer: int, creates_v_first: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        ranks = config.low_rank_sizes()
        self.head_dim = config.head_dim
        self.depth = layer / max(1, config.num_layers - 1)  # 0 at the input, 1 at the top
        self.share_above = 1 - layer / config.num_layers  # of the blocks, this one included
        self.creates_v_first = creates_v_first
        # what meets other tokens; replaced where a sequence is spread over ranks
        self.shift = TokenShift()
        self.recurrence: Recurrence = wkv7
        for mix in _MIXES:
            self.register_parameter(f"mu_{mix}", nn.Parameter(torch.empty(hidden)))
        self.receptance = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        paths = ["decay", "iclr", "gate"] if creates_v_first else ["decay", "iclr", "value", "gate"]
        for name in paths:
            rank = getattr(ranks, name)
            if name != "gate":
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(hidden)))
            self.register_parameter(f"{name}_down", nn.Parameter(torch.empty(hidden, rank)))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.empty(rank, hidden)))
        self.k_k = nn.Parameter(torch.empty(hidden))
        self.k_a = nn.Parameter(torch.empty(hidden))
        self.r_k = nn.Parameter(torch.empty(hidden))
        self.group_norm = nn.GroupNorm(config.num_heads, hidden, eps=self.head_dim * 1e-5)

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        """Makes the time mix of a layer."""
        return cls(config, layer=layer, creates_v_first=not is_v_first_made(config, layer))

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: Any,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, TimeMixState, None]:
        """Mixes as `forward`, wherever the tokens are in their rows; without a router."""
        out, v_first, after = self(x, v_first, state, segment_ids)
        return out, v_first, after, None

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: TimeMixState | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, TimeMixState]:
        """Mixes along time.

        Args:
            x: normalised input, [B, T, D], any float type.
            v_first: value of the first RWKV layer, [B, T, D]; None only in that layer.
            state: state after the token before x, or None at the start of a sequence.
            segment_ids: document of each token, [B, T]; nothing crosses from one to the next.
        Returns:
            Output [B, T, D], v_first, and the state after token T.
        """
        if (v_first is None) != self.creates_v_first:
            raise ValueError("v_first is missing, or there already: the first RWKV layer makes it")
        mu = torch.stack([getattr(self, f"mu_{mix}") for mix in _MIXES])
        mixed = self.shift(x, state.last if state else None, segment_ids, mu)
        x_r, x_w, x_k, x_v, x_a, x_g = mixed

        # All that reads the mixes comes first: they are made again when the backward pass has done
        # with what is made of the products.
        r = self._heads(self.receptance(x_r))
        v = self.value(x_v)  # [B, T, D]
        amount = None if v_first is None else x_v @ self.value_down
        key = self._heads(self.key(x_k))
        decay = torch.tanh(x_w @ self.decay_down)
        iclr = x_a @ self.iclr_down
        gate = torch.sigmoid(x_g @ self.gate_down)

        if v_first is None:
            v_first = v
        else:
            v = cheaply(_blend, v, v_first, amount, self.value_up, self.value_bias)
        v = self._heads(v)
        vectors = (self._heads(x) for x in (self.decay_bias, self.iclr_bias, self.k_k, self.k_a))
        paths = (decay, self.decay_up, iclr, self.iclr_up)
        lw, k, a, b = cheaply(_make_inputs, key, *paths, *vectors)
        past = state.wkv if state else None
        y, wkv = self.recurrence(r, lw, k, v, a, b, past, segment_ids=segment_ids)
        norm = self.group_norm
        out = cheaply(
            _gate,
            *(y, r, k, v, gate, self.gate_up),
            *(self._heads(x) for x in (self.r_k, norm.weight, norm.bias)),
            norm.eps,
        )
        return self.output(out.flatten(2)), v_first, TimeMixState(last=x[:, -1], wkv=wkv)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # -1: a tensor rank has a part of the heads

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float | None = None) -> None:
        """Sets the initial values of RWKV-LM for this depth; random ones by the module's path.

        `std` is not used: RWKV-LM's values have deviations of their own.
        """
        hidden = self.mu_r.numel()
        place = torch.arange(hidden, device=self.mu_r.device, dtype=torch.float32) / hidden
        for mix, power in zip(_MIXES, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            getattr(self, f"mu_{mix}").copy_(1 - place ** (power * self.share_above))
        linear = torch.arange(hidden, device=place.device) / (hidden - 1) - 0.5
        middle = (self.head_dim - 1) / 2
        zigzag = (torch.arange(hidden, device=place.device) % self.head_dim - middle) / middle
        zigzag = zigzag * zigzag.abs()
        curve = 6 * (linear + 0.5) ** (1 + self.depth**0.3) - 6
        self.decay_bias.copy_(curve + 0.5 + 2.5 * zigzag)
        self.iclr_bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * linear)
        self.k_k.copy_(0.71 - 0.1 * linear)
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        paths = ["decay", "iclr", "gate"]
        if not self.creates_v_first:
            self.value_bias.copy_(0.73 - 0.4 * linear)
            paths.append("value")
        for path in paths:
            getattr(self, f"{path}_down").zero_()
            orthogonal_(getattr(self, f"{path}_up"), 0.1, seed=seed, name=f"{name}.{path}_up")
        bound = 0.5 / math.sqrt(hidden)
        for path, scale in (("receptance", 1.0), ("key", 0.1), ("value", 1.0)):
            weight = getattr(self, path).weight
            uniform_(weight, scale * bound, seed=seed, name=f"{name}.{path}")
        self.output.weight.zero_()


# Low-rank products into D are within what may be computed again: they cost little, and the maths
# around them reads what they give.


def _blend(v: Tensor, v_first: Tensor, hidden: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return blend_values(v, v_first, hidden @ up, bias)


def _make_inputs(
    key: Tensor,
    decay: Tensor,
    decay_up: Tensor,
    iclr: Tensor,
    iclr_up: Tensor,
    *vectors: Tensor,
) -> tuple[Tensor, ...]:
    """Makes lw, k, a and b; see `recurrence_inputs`."""
    names = ("decay_bias", "iclr_bias", "k_k", "k_a")
    paths = ((hidden @ up).view_as(key) for hidden, up in ((decay, decay_up), (iclr, iclr_up)))
    return recurrence_inputs(key, *paths, **dict(zip(names, vectors, strict=True)))


def _gate(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    up: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    gate = (hidden @ up).view_as(y)
    return gated_output(y, r, k, v, gate, r_k=r_k, weight=weight, bias=bias, eps=eps)


class ChannelShift(nn.Module):
    """Token shift before the feed-forward of an RWKV block, which makes it channel mixing."""

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        self.depth = layer / config.num_layers
        self.shift = TokenShift()
        self.mu = nn.Parameter(torch.empty(config.hidden_size))

    def forward(
        self, x: Tensor, last: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Shifts x by mu, [B, T, D]; `last` is the token before the first, [B, D]."""
        return self.shift(x, last, segment_ids, self.mu.unsqueeze(0))[0]

    @torch.no_grad()
    def initialize(self) -> None:
        """Sets RWKV-LM's initial value for this depth."""
        hidden = self.mu.numel()
        place = torch.arange(hidden, device=self.mu.device, dtype=torch.float32) / hidden
        self.mu.copy_(1 - place ** ((1 - self.depth) ** 4))
