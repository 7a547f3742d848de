"""SwiGLU of dense feed-forwards and experts against plain expressions, forward and gradients."""

import torch
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.feed_forward import FeedForward, swiglu
from cdrmix.models.moe import GroupedExperts

SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "vocab_size": 256}


def test_gradients_are_those_of_the_expression() -> None:
    gate, up = (torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)


def test_only_both_inputs_are_saved() -> None:
    gate, up = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        swiglu(gate, up)
    assert sum(each.numel() for each in saved) == gate.numel() + up.numel()


def test_dense_and_expert_feed_forwards_compute_alike() -> None:
    config = ModelConfig(**SIZES, ffn_hidden_size=24, ffn_activation="swiglu")
    dense = FeedForward(config)
    assert dense.gate is not None
    experts = GroupedExperts(2, 24, 32, is_gated=True, group_name="ep_size_1")
    assert experts.gate is not None
    with torch.no_grad():
        for stacked, linear in (
            (experts.gate, dense.gate),
            (experts.up, dense.up),
            (experts.down, dense.down),
        ):
            stacked[0] = torch.randn_like(stacked[0])  # another expert
            stacked[1] = linear.weight
    rows = torch.randn(7, 32)
    ends = torch.tensor([3, 7], dtype=torch.int32)
    expected = F.linear(
        F.silu(F.linear(rows, dense.gate.weight)) * F.linear(rows, dense.up.weight),
        dense.down.weight,
    )
    torch.testing.assert_close(dense(rows), expected)
    torch.testing.assert_close(experts(rows, ends)[3:], expected[3:])
    assert not torch.allclose(experts(rows, ends)[:3], expected[:3])
