"""Causal grouped-query attention with rotary positions.

B batch, T time, D hidden, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Mixer


@dataclass
class AttentionState:
    """Keys (rotated) and values of all earlier tokens, each [B, G, T_past, K]."""

    keys: Tensor
    values: Tensor


# the arguments and results of `attend`
Attend = Callable[..., tuple[Tensor, AttentionState]]


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, head_dim], of the rotary angles at global positions [T]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)  # [K/2]
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)  # [T, K]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: AttentionState | None,
    segment_ids: Tensor | None,
    theta: float,
) -> tuple[Tensor, AttentionState]:
    """Rotates by position, then mixes the values of this and earlier tokens of the same document.

    Args:
        query: not rotated, [B, T, H, K]; so are keys and values, [B, T, G, K].
        state: keys and values before these, or None at the start of a sequence.
        segment_ids: document of each token, [B, T].
        theta: base of the rotary frequencies.
    Returns:
        Mixed values [B, T, H, K], and the state after token T.
    Raises:
        ValueError: if both state and segment_ids are given.
    """
    if state is not None and segment_ids is not None:
        raise ValueError("segment_ids cannot be combined with a carried attention state")
    past = state.keys.shape[2] if state else 0
    positions = torch.arange(past, past + query.shape[1], device=query.device)
    cos, sin = rotary_angles(positions, query.shape[-1], theta, query.dtype)
    rotated = []
    for x in (query.transpose(1, 2), keys.transpose(1, 2)):
        first, second = x.chunk(2, dim=-1)  # pairs are (i, i + K/2)
        rotated.append(x * cos + torch.cat([-second, first], dim=-1) * sin)
    query, keys = rotated
    values = values.transpose(1, 2)
    if state is not None:
        keys = torch.cat([state.keys, keys], dim=2)
        values = torch.cat([state.values, values], dim=2)
    mask = None  # the fast kernels need none: causal, or over all keys for a single query
    if segment_ids is not None:
        same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [B, T, T]
        mask = same.tril().unsqueeze(1)  # [B, 1, T, T]
    elif len(positions) not in (1, keys.shape[2]):
        all_positions = torch.arange(keys.shape[2], device=positions.device)
        mask = all_positions.unsqueeze(0) <= positions.unsqueeze(1)  # [T, T_past + T]
    mixed = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and len(positions) > 1,
        enable_gqa=keys.shape[1] != query.shape[1],
    )  # [B, H, T, K]
    return mixed.transpose(1, 2), AttentionState(keys, values)


class Attention(Mixer):
    """Causal self-attention of one block; heads may share keys and values (`num_kv_heads`)."""

    across_tokens = {"attend": "attention"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.attend: Attend = attend  # replaced where a sequence is spread over ranks
        kv_size = config.num_kv_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        """Makes the attention of a layer, the same in all."""
        return cls(config)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Attends from normalised input x, [B, T, D], as `attend`: output [B, T, D], and state."""
        # -1: a tensor rank has a part of the heads
        query, keys, values = (
            linear(x).unflatten(-1, (-1, self.head_dim))
            for linear in (self.query, self.key, self.value)
        )
        mixed, state = self.attend(query, keys, values, state, segment_ids, self.rope_theta)
        return self.output(mixed.flatten(2)), state

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets normal query, key and value, and a zero output projection."""
        for part in ("query", "key", "value"):
            normal_(getattr(self, part).weight, std, seed=seed, name=f"{name}.{part}")
        self.output.weight.zero_()
