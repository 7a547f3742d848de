"""Causal grouped-query attention with rotary positions.

B batch, T time, D hidden, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Gathered, Mixer
from cdrmix.models.packed_attention import attend_documents, obstacle


@dataclass
class AttentionState:
    """Keys (rotated) and values of all earlier tokens, each [B, G, T_past, K].

    Where each row has a number of its own, those are the first `lengths`, [B], of a row.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor | None = None


def below_each_other(states: Sequence[AttentionState], *, room: int) -> AttentionState:
    """Puts the rows of states of equally long rows each, one length or several, into one state.

    Every row has room for `room` tokens more than the longest has, so that it need not grow.
    """
    numbers = [state.keys.shape[2] for state in states]
    longest = max(numbers) + room
    keys, values = (
        torch.cat([F.pad(x, (0, 0, 0, longest - x.shape[2])) for x in each])
        for each in zip(*((state.keys, state.values) for state in states), strict=True)
    )
    rows = torch.tensor([len(state.keys) for state in states], device=keys.device)
    lengths = torch.tensor(numbers, device=keys.device).repeat_interleave(rows)
    return AttentionState(keys, values, lengths)


# the arguments and results of `attend`
Attend = Callable[..., tuple[Tensor, AttentionState]]


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [..., T, head_dim], of the rotary angles at global positions [..., T]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)  # [K/2]
    angles = positions.float().unsqueeze(-1) * frequencies  # [..., T, K/2]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.lru_cache(maxsize=8)  # layers ask for the same; a token behind a state asks for others
def shared_angles(
    start: int, stop: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, head_dim], at positions from `start` to `stop`, made once."""
    with torch.inference_mode(False):  # for whoever asks next
        positions = torch.arange(start, stop, device=device)
        return rotary_angles(positions, head_dim, theta, dtype)


def _angles(start: int, like: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Angles of tokens like [B, T, H, K] from position `start` on."""
    *_, length, _, head_dim = like.shape
    where = (start, start + length, head_dim, theta, like.dtype, like.device)
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):
        return shared_angles.__wrapped__(*where)  # a part of the graph
    return shared_angles(*where)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns heads, [B, H, T, K], by angles that broadcast to them."""
    first, second = x.chunk(2, dim=-1)  # pairs are (i, i + K/2)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


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
    assert state is None or state.lengths is None, "rows of different lengths: `attend_some`"
    past = state.keys.shape[2] if state else 0
    length = query.shape[1]
    cos, sin = _angles(past, query, theta)
    query, keys = (_rotated(x.transpose(1, 2), cos, sin) for x in (query, keys))
    values = values.transpose(1, 2)
    if segment_ids is not None:
        return _apart(query, keys, values, segment_ids), AttentionState(keys, values)
    if state is not None:
        keys = torch.cat([state.keys, keys], dim=2)
        values = torch.cat([state.values, values], dim=2)
    mask = None  # the fast kernels need none: causal, or over all keys for a single query
    if length not in (1, keys.shape[2]):
        places = torch.arange(keys.shape[2], device=query.device)
        mask = places.unsqueeze(0) <= places[past:].unsqueeze(1)  # [T, T_past + T]
    mixed = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and length > 1,
        enable_gqa=keys.shape[1] != query.shape[1],
    )  # [B, H, T, K]
    return mixed.transpose(1, 2), AttentionState(keys, values)


def _apart(query: Tensor, keys: Tensor, values: Tensor, segment_ids: Tensor) -> Tensor:
    """Attends inside documents: [B, H, T, K] and twice [B, G, T, K] to [B, T, H, K]."""
    if obstacle(query) is None:
        rows = (query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
        return attend_documents(*rows, segment_ids)
    same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [B, T, T]
    mixed = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=same.tril().unsqueeze(1),
        enable_gqa=keys.shape[1] != query.shape[1],
    )  # [B, H, T, K]
    return mixed.transpose(1, 2)


def attend_some(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    state: AttentionState | None,
    segment_ids: Tensor | None,
    theta: float,
    positions: Tensor,
) -> tuple[Tensor, AttentionState]:
    """Attends as `attend` among tokens that are some of their rows, in order.

    `positions` are those in the whole row, [B, T]. Rows of a state may be of different lengths.
    """
    assert state is None or segment_ids is None, "a state is of one document"
    angles = rotary_angles(positions, query.shape[-1], theta, query.dtype)
    cos, sin = (x.unsqueeze(1) for x in angles)  # for all heads of a row
    query, keys = (_rotated(x.transpose(1, 2), cos, sin) for x in (query, keys))
    after, places = _appended(state, keys, values.transpose(1, 2))
    if segment_ids is not None:
        return _apart(query, after.keys, after.values, segment_ids), after
    mask = None
    if state is not None:
        mask = torch.arange(after.keys.shape[2], device=places.device) <= places.unsqueeze(-1)
    mixed = F.scaled_dot_product_attention(
        query,
        after.keys,
        after.values,
        attn_mask=None if mask is None else mask.unsqueeze(1),
        is_causal=mask is None,
        enable_gqa=keys.shape[1] != query.shape[1],
    )  # [B, H, T, K]
    return mixed.transpose(1, 2), after


def _appended(
    state: AttentionState | None, keys: Tensor, values: Tensor
) -> tuple[AttentionState, Tensor]:
    """Puts keys and values, [B, G, T, K], behind those that their row has.

    Gives the state after them, and their places in it, [B, T].
    """
    rows, _, length, _ = keys.shape
    within = torch.arange(length, device=keys.device).expand(rows, -1)
    if state is None:
        return AttentionState(keys, values, torch.full_like(within[:, 0], length)), within
    assert state.lengths is not None, "`attend` made this state"
    places = state.lengths.unsqueeze(1) + within  # [B, T]
    # as long as the fullest row: what lies behind a row's length is overwritten before it is read
    missing = max(0, int(state.lengths.max()) + length - state.keys.shape[2])
    row = torch.arange(rows, device=places.device).unsqueeze(1)
    joined = []
    for past, new in ((state.keys, keys), (state.values, values)):
        longer = F.pad(past, (0, 0, 0, missing)) if missing else past
        longer = longer.transpose(1, 2)
        joined.append(longer.index_put((row, places), new.transpose(1, 2)).transpose(1, 2))
    after = AttentionState(joined[0], joined[1], state.lengths + length)
    return after, places


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

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: Any,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, AttentionState, None]:
        """Mixes as `forward`."""
        positions = None if gathered is None else gathered.positions
        out, after = self(x, state, segment_ids, positions)
        return out, v_first, after, None

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Attends from normalised input x, [B, T, D], as `attend`; with positions, [B, T], or
        behind rows of different lengths, as `attend_some`: output [B, T, D], and state."""
        # -1: a tensor rank has a part of the heads
        query, keys, values = (
            linear(x).unflatten(-1, (-1, self.head_dim))
            for linear in (self.query, self.key, self.value)
        )
        context = (state, segment_ids, self.rope_theta)
        if positions is None and state is not None and state.lengths is not None:
            within = torch.arange(x.shape[1], device=x.device)
            positions = state.lengths.unsqueeze(1) + within
        if positions is None:
            mixed, state = self.attend(query, keys, values, *context)
        else:
            mixed, state = attend_some(query, keys, values, *context, positions)
        return self.output(mixed.flatten(2)), state

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets normal query, key and value, and a zero output projection."""
        for part in ("query", "key", "value"):
            normal_(getattr(self, part).weight, std, seed=seed, name=f"{name}.{part}")
        self.output.weight.zero_()
