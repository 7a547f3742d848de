"""The MoE feed-forward against a loop over tokens and experts."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.expert_rows import exact_ratio, expert_capacity, grouped_product
from cdrmix.models.moe import MoEFeedForward, float_linear


def make_layer(**moe: object) -> MoEFeedForward:
    config = ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=1,
        vocab_size=256,
        moe={"num_experts": 4, "expert_hidden_size": 24, **moe},
    )
    torch.manual_seed(5)
    layer = MoEFeedForward(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def parts(layer: MoEFeedForward) -> tuple[Tensor, Tensor, Tensor]:
    inner = layer.deepspeed_moe
    return inner.gate.weight, inner.experts.up, inner.experts.down


def by_hand(
    layer: MoEFeedForward, x: Tensor, *, top_k: int = 2, capacity: int | None = None
) -> tuple[Tensor, list[int]]:
    """Token by token; second choices queue behind all first ones."""
    router, up, down = parts(layer)
    rows = x.reshape(-1, x.shape[-1])
    probabilities = torch.softmax(rows @ router.T, dim=-1)
    chosen, experts = probabilities.topk(top_k, dim=-1)
    taken = [0] * len(router)
    out = [torch.zeros_like(row) for row in rows]
    for choice in range(top_k):
        for n, row in enumerate(rows):
            e = int(experts[n, choice])
            taken[e] += 1
            if capacity is not None and taken[e] > capacity:
                continue
            weight = chosen[n, choice] / chosen[n].sum()
            out[n] = out[n] + weight * (down[e] @ torch.relu(up[e] @ row) ** 2)
    return torch.stack(out).view_as(x), taken


def gradients(layer: MoEFeedForward, x: Tensor, out: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((out * weights).sum(), [x, *parts(layer)]))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_output_and_gradients_equal_a_loop_over_tokens(top_k: int) -> None:
    layer = make_layer(top_k=top_k)
    x = torch.randn(2, 9, 32, requires_grad=True)
    out, statistics = layer(x)
    expected, taken = by_hand(layer, x, top_k=top_k)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert statistics[:4].tolist() == taken
    for ours, theirs in zip(gradients(layer, x, out), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_dropping_keeps_the_first_assignments_up_to_the_capacity() -> None:
    layer = make_layer(drop_tokens=True, capacity_factor=1.0)
    x = torch.randn(3, 10, 32, requires_grad=True)
    out, statistics = layer(x)
    capacity = 30 * 2 // 4
    expected, taken = by_hand(layer, x, capacity=capacity)
    excess = sum(max(0, n - capacity) for n in taken)
    assert excess > 0, "this input must overflow or the test shows nothing"
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert statistics[:4].tolist() == taken, "counted before anything is dropped"
    assert statistics[-2:].tolist() == [excess, excess]
    for ours, theirs in zip(gradients(layer, x, out), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_evaluation_drops_nothing_and_still_measures_overflow() -> None:
    layer = make_layer(drop_tokens=True, capacity_factor=1.0).eval()
    x = torch.randn(3, 10, 32)
    out, statistics = layer(x)
    torch.testing.assert_close(out, by_hand(layer, x)[0], rtol=1e-5, atol=1e-5)
    overflow, dropped = statistics[-2:].tolist()
    assert overflow > 0
    assert dropped == 0


def test_experts_without_tokens_get_zero_gradients() -> None:
    layer = make_layer()
    router, up, _ = parts(layer)
    with torch.no_grad():
        router.copy_(torch.zeros_like(router))
        router[:2] = 1.0
    x = torch.rand(1, 6, 32)  # positive: experts 0 and 1 win every token
    out, statistics = layer(x)
    out.sum().backward()
    assert statistics[:4].tolist() == [6, 6, 0, 0]
    assert up.grad[2:].abs().max() == 0
    assert up.grad[:2].abs().max() > 0


def test_statistics_are_sums_of_the_routers_float32_quantities() -> None:
    layer = make_layer()
    x = torch.randn(2, 7, 32)
    _, statistics = layer(x)
    logits = x.reshape(-1, 32) @ parts(layer)[0].T
    torch.testing.assert_close(statistics[4:8], torch.softmax(logits, -1).sum(0))
    torch.testing.assert_close(statistics[8], torch.logsumexp(logits, -1).square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_routers_product_is_that_of_float32_copies_which_it_does_not_keep(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x, weight, worth = torch.randn(37, 24), torch.randn(8, 24), torch.randn(37, 8)
    leaves = [each.to(dtype).requires_grad_() for each in (x, weight)]
    copies = F.linear(*(leaf.float() for leaf in leaves))
    expected = [copies, *torch.autograd.grad(copies, leaves, worth)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours = float_linear(*leaves)
    found = [ours, *torch.autograd.grad(ours, leaves, worth)]
    assert [each.dtype for each in found] == [torch.float32, dtype, dtype]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(each.dtype == dtype for each in kept) and len(kept) == 2
    with torch.device("meta"):  # as a GPU is asked for it
        assert float_linear(x.to("meta", dtype), weight.to("meta", dtype)).dtype == torch.float32


def test_capacity_is_exact_where_floats_round_up() -> None:
    assert expert_capacity(400, 2, 8, exact_ratio(1.1)) == 110
    for tokens in (1, 7, 64, 400, 4095):
        for factor in (1.0, 1.1, 1.25, 1.3, 2.0):
            exact = Fraction(str(factor)) * tokens * 2 / 8
            capacity = expert_capacity(tokens, 2, 8, exact_ratio(factor))
            assert capacity - 1 < exact <= capacity


def test_what_is_behind_the_last_expert_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouped product does not write rows of dropped assignments: here they are not a number."""
    layer = make_layer(drop_tokens=True, capacity_factor=1.0)
    x = torch.randn(2, 9, 32, requires_grad=True)
    expected = layer(x)[0]
    expected_gradients = gradients(layer, x, expected)

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, end):
            ctx.end = end
            return torch.cat([rows[:end], rows[end:].fill_(torch.nan)])

        backward_rows = 0

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[ctx.end :] = torch.nan
            Spoilt.backward_rows += len(grad) - ctx.end
            return grad, None

    def spoilt(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        end = int(ends[-1])
        out = grouped_product(Spoilt.apply(rows, end), matrices, ends)
        return Spoilt.apply(out, end)

    monkeypatch.setattr("cdrmix.models.moe.grouped_product", spoilt)
    out = layer(x)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for found, exact in zip(gradients(layer, x, out), expected_gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=0)
    assert Spoilt.backward_rows > 0, "nothing was dropped"
