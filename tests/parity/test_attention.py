"""Attention against its definition, written a second time as plain loops in float64."""

import cmath

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.attention import (
    Attention,
    AttentionState,
    below_each_other,
    rotary_angles,
)

HEAD_DIM, THETA = 32, 10_000.0


def random_attention(num_heads: int, num_kv_heads: int) -> Attention:
    config = ModelConfig(
        hidden_size=num_heads * HEAD_DIM,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=256,
        rope_theta=THETA,
    )
    attention = Attention(config).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return attention


def turned(x: Tensor, position: int) -> Tensor:
    """One head's vector, its pairs (i, i + K/2) turned as complex numbers."""
    half = HEAD_DIM // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * THETA ** (-2 * i / HEAD_DIM)
        pair = complex(x[i], x[i + half]) * cmath.exp(1j * angle)
        out[i], out[i + half] = pair.real, pair.imag
    return out


def by_hand(attention: Attention, x: Tensor, segments: list[int]) -> Tensor:
    """One sequence, [T, D], query by query and head by head; head h reads kv head h // (H / G)."""
    shared = attention.query.out_features // attention.key.out_features
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(attention.query.out_features // HEAD_DIM):
            own, theirs = (slice(n * HEAD_DIM, (n + 1) * HEAD_DIM) for n in (h, h // shared))
            query = turned((attention.query.weight @ x[t])[own], t)
            seen = [u for u in range(t + 1) if segments[u] == segments[t]]
            keys = [turned((attention.key.weight @ x[u])[theirs], u) for u in seen]
            scores = torch.stack([query @ key for key in keys]) / HEAD_DIM**0.5
            values = torch.stack([(attention.value.weight @ x[u])[theirs] for u in seen])
            heads.append(torch.softmax(scores, 0) @ values)
        rows.append(attention.output.weight @ torch.cat(heads))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("segments", [[0] * 9, [0, 0, 0, 1, 1, 1, 1, 2, 2]], ids=["one", "three"])
def test_attention_equals_its_definition(num_kv_heads: int, segments: list[int]) -> None:
    attention = random_attention(4, num_kv_heads)
    x = torch.randn(1, len(segments), 4 * HEAD_DIM, dtype=torch.float64)
    ids = torch.tensor([segments]) if segments[-1] else None
    out, state = attention(x, segment_ids=ids)
    # the angles are computed in float32, in both precisions
    torch.testing.assert_close(out[0], by_hand(attention, x[0], segments), rtol=1e-5, atol=1e-6)
    assert state.keys.shape == state.values.shape == (1, num_kv_heads, len(segments), HEAD_DIM)


@torch.no_grad()
def test_rows_of_different_lengths_go_on_together_as_they_do_alone() -> None:
    attention = random_attention(4, 2)
    pasts = [torch.randn(rows, length, 4 * HEAD_DIM).double() for rows, length in ((2, 3), (1, 7))]
    states = [attention(past)[1] for past in pasts]
    after = below_each_other(states, room=2)
    assert after.lengths is not None and after.lengths.tolist() == [3, 3, 7]
    new = torch.randn(3, 2, 4 * HEAD_DIM, dtype=torch.float64)
    found = []
    for token in new.split(1, dim=1):
        out, after = attention(token, after)
        found.append(out)
    assert after.keys.shape[2] == 9, "the room was enough"
    rows = [row for past in pasts for row in past]
    for place, past in enumerate(rows):
        whole = torch.cat([past, new[place]]).unsqueeze(0)
        torch.testing.assert_close(torch.cat(found, 1)[place], attention(whole)[0][0, -2:])


def test_documents_and_a_carried_state_do_not_go_together() -> None:
    attention = random_attention(1, 1)
    x, past = torch.zeros(1, 1, 32, dtype=torch.float64), torch.zeros(1, 1, 3, 32).double()
    with pytest.raises(ValueError, match="segment_ids"):
        attention(x, AttentionState(past, past), torch.zeros(1, 1, dtype=torch.int64))


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_shared_heads_are_heads_repeated(num_kv_heads: int) -> None:
    grouped, multi = random_attention(4, num_kv_heads).float(), random_attention(4, 4).float()
    for name in ("query", "key", "value", "output"):
        weight = getattr(grouped, name).weight
        if name in ("key", "value"):
            heads = weight.unflatten(0, (num_kv_heads, HEAD_DIM))
            weight = heads.repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1)
        getattr(multi, name).weight.copy_(weight)
    x = torch.randn(2, 17, 4 * HEAD_DIM)
    found, expected = grouped(x)[0], multi(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if num_kv_heads == 4:  # and that is multi-head attention as torch has it
        assert torch.equal(found, expected)
        query, key, value = (
            getattr(multi, name)(x).unflatten(-1, (4, HEAD_DIM)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        cos, sin = rotary_angles(torch.arange(17), HEAD_DIM, THETA, x.dtype)
        query, key = (
            heads * cos + torch.cat([-heads[..., 16:], heads[..., :16]], -1) * sin
            for heads in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert torch.equal(found, multi.output(mixed.transpose(1, 2).flatten(2)))
