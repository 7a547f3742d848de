"""Losses against their definitions."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cdrmix.objectives import language_model
from cdrmix.objectives.language_model import (
    HeadLoss,
    LabelWeights,
    VocabularyPart,
    linear_cross_entropy,
    linear_losses,
    score_labels,
    sum_weights,
)
from cdrmix.objectives.router import router_losses, router_monitors


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "chunk_positions", lambda *_: 1000)


def test_linear_cross_entropy_equals_plain_cross_entropy_with_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 700, 16, requires_grad=True)  # more positions than one chunk
    weight = torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (3, 700))
    labels[0, :30] = -100
    ours = linear_cross_entropy(hidden, weight, labels)
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-3)
    for a, b in zip(
        torch.autograd.grad(ours * 0.3, [hidden, weight]),
        torch.autograd.grad(plain * 0.3, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert sum_weights(labels) == 3 * 700 - 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_scale_the_nats_and_gradients_of_their_labels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 700, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (3, 700))
    labels[0, :30] = -100
    weights = torch.rand(3, 700) * 2
    weights[1] = 0
    ours = linear_cross_entropy(hidden, weight, labels, label_weights=weights)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    each = F.cross_entropy((exact[0] @ exact[1].T).mT, labels, reduction="none")
    plain = (each * weights).sum()
    assert abs(ours.item() / plain.item() - 1) < (1e-6 if dtype == torch.float32 else 2e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # relative to the largest
    for a, b in zip(
        torch.autograd.grad(ours, [hidden, weight]), torch.autograd.grad(plain, exact), strict=True
    ):
        assert (a - b).abs().max() < tolerance * b.abs().max()
    assert not torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, label_weights=weights), hidden
    )[0][1].any()


def test_weights_of_one_change_no_bit() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(100, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (100,))
    labels[:7] = -100
    results = []
    for label_weights in (None, torch.ones(100)):
        nats = linear_cross_entropy(hidden, weight, labels, label_weights=label_weights)
        results.append((nats, *torch.autograd.grad(nats, [hidden, weight])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert sum_weights(labels, None) == sum_weights(labels, torch.ones(100)) == 93


def test_several_sums_at_once_are_those_of_their_labels_alone() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 700, 16), torch.randn(50, 16)
    labels = torch.randint(0, 50, (3, 700))
    labels[0, :30] = -100
    kinds = torch.randint(0, 3, (3, 700))
    weights = LabelWeights(sums=F.one_hot(kinds, 4).float())  # nothing is of the last kind
    with torch.no_grad():
        ours = linear_losses(hidden, weight, labels, weights).nats
        alone = [
            linear_cross_entropy(hidden, weight, labels.masked_fill(kinds != kind, -100))
            for kind in range(4)
        ]
    torch.testing.assert_close(ours, torch.stack(alone), rtol=1e-6, atol=0.0)
    assert ours[3] == 0
    hidden[0, 31] = torch.inf
    with torch.no_grad():
        ours = linear_losses(hidden, weight, labels, weights).nats
    assert ours.isfinite().sum() == 3, "a bad token is one of its own sum"


def plain_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: LabelWeights
) -> HeadLoss:
    """Losses and sums by their definition, from all logits at once."""
    logits = hidden @ weight.T
    valid = labels != -100
    nats = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")  # 0 if ignored
    squares = logits.exp().sum(-1).log().square() * valid
    assert weights.nats is not None and weights.squares is not None and weights.sums is not None
    loss = (weights.nats * nats + weights.squares * squares).sum()
    return HeadLoss(
        loss,
        torch.einsum("bt,bts->s", nats, weights.sums.double()),
        torch.einsum("bt,bts->s", squares, weights.sums.double()),
        loss.reshape(1),
    )


def losses_over_parts(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: LabelWeights
) -> list[HeadLoss]:
    """Losses of two parts of the vocabulary, each of which is told the other's scores."""
    halves = weight.chunk(2)
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    told: list[torch.Tensor] = []
    for first, half in ((0, halves[0]), (len(halves[0]), halves[1])):
        logits = rows @ half.detach().T
        local = labels.reshape(-1, 1).clamp(min=0) - first
        is_here = (local >= 0) & (local < len(half))
        score = logits.gather(1, local.clamp(0, len(half) - 1)) * is_here
        told.append(torch.stack([logits.logsumexp(-1, keepdim=True), score]))
    chunks = torch.stack(told).split(1000, dim=2)
    results = []
    for first, half in ((0, halves[0]), (len(halves[0]), halves[1])):
        coming = iter(chunks)
        part = VocabularyPart(first, lambda _, coming=coming: next(coming))
        score = partial(score_labels, part=part)
        results.append(linear_losses(hidden, half, labels, weights, score))
    return results


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)]
)
def test_nats_and_squares_weigh_as_asked_in_one_pass(dtype: torch.dtype, parts: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 700, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (3, 700))
    labels[0, :30] = -100
    weights = LabelWeights(torch.rand(3, 700) * 2, torch.rand(3, 700), torch.rand(3, 700, 4))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = plain_losses(*exact, labels, weights)
    if parts == 1:
        ours = linear_losses(hidden, weight, labels, weights)
        gradients = torch.autograd.grad(ours.loss, [hidden, weight])
    else:
        of_parts = losses_over_parts(hidden, weight, labels, weights)
        ours = of_parts[0]
        assert torch.equal(ours.loss, of_parts[1].loss)
        # The caller sums gradients of the hidden states, and each part has those of its rows.
        gradients = torch.autograd.grad(sum(each.loss for each in of_parts), [hidden, weight])
    rough = dtype == torch.bfloat16
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-3 if rough else 2e-6, atol=0.0)
    for a, b in zip(gradients, torch.autograd.grad(expected.loss, exact), strict=True):
        assert (a - b).abs().max() < (2e-2 if rough else 1e-5) * b.abs().max()


def test_sums_need_no_further_pass_and_change_no_bit() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(0, 50, (64,))
    nats = torch.rand(64)
    found = []
    for weights in (LabelWeights(nats), LabelWeights(nats, None, torch.rand(64, 6))):
        with FlopCounterMode(display=False) as counter:
            loss = linear_losses(hidden, weight, labels, weights).loss
        found.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
        assert counter.get_total_flops() == 3 * 2 * 64 * 8 * 50
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_labels_that_are_ignored_weigh_nothing() -> None:
    labels = torch.tensor([[5, -100, 3], [-100, -100, 1]])
    weights = torch.tensor([[0.5, 9.0, 0.25], [9.0, 9.0, 0.0]])
    assert sum_weights(labels, weights).item() == 0.75


def test_linear_cross_entropy_keeps_no_logits() -> None:
    kept = []
    hidden = torch.randn(2048, 8, requires_grad=True)
    weight = torch.randn(999, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        linear_cross_entropy(hidden, weight, torch.zeros(2048, dtype=torch.int64))
    assert sum(kept) == hidden.numel() + weight.numel()


def test_linear_cross_entropy_without_gradients_computes_the_logits_only() -> None:
    hidden, weight = torch.randn(64, 8), torch.randn(50, 8, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, labels)
    assert counter.get_total_flops() == 2 * 64 * 8 * 50


def statistics(fractions: list[float], *, z: float = 0.0) -> torch.Tensor:
    """Per-token statistics of one layer whose probabilities equal its assignments."""
    f = torch.tensor(fractions)
    return torch.cat([2 * f, f, torch.tensor([z, 0.1, 0.0])]).unsqueeze(0)


def test_balance_loss_is_one_when_experts_are_used_alike() -> None:
    even = router_losses(statistics([0.25] * 4, z=3.0), num_experts=4, top_k=2)
    assert even.load_balance.item() == 1.0
    assert even.z.item() == 3.0
    skewed = router_losses(statistics([0.7, 0.1, 0.1, 0.1]), num_experts=4, top_k=2)
    assert abs(skewed.load_balance.item() - 4 * (0.49 + 0.03)) < 1e-6


def test_balance_gradient_flows_through_probabilities_only() -> None:
    given = statistics([0.4, 0.3, 0.2, 0.1]).requires_grad_()
    router_losses(given, num_experts=4, top_k=2).load_balance.backward()
    assert not given.grad[0, :4].any()
    torch.testing.assert_close(given.grad[0, 4:8], 4 * torch.tensor([0.4, 0.3, 0.2, 0.1]))


def test_entropy_is_in_bits_and_overflow_a_share_of_assignments() -> None:
    even = router_monitors(statistics([0.125] * 8), num_experts=8, top_k=2)
    assert abs(even.entropy_bits.item() - 3.0) < 1e-6
    assert abs(even.overflow_fraction.item() - 0.05) < 1e-6
    # above the 2.5-bit mark and still overloaded: both monitors are needed
    skewed = router_monitors(statistics([0.3] + [0.1] * 7), num_experts=8, top_k=2)
    expected = -0.3 * math.log2(0.3) - 0.7 * math.log2(0.1)
    assert abs(skewed.entropy_bits.item() - expected) < 1e-5
    assert skewed.entropy_bits.item() > 2.5
