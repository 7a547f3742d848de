"""The correlation objective against the update that it stands for."""

import pytest
import torch

from cdrmix.objectives.representation import correlation_loss

RATES = {"decay": 0.9, "decorrelation_weight": 1e-2}


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_its_gradient_step_in_the_fast_weights_is_the_hebb_rule() -> None:
    post, trace, modulator = unit(3, 1, 4), unit(3, 1, 4), torch.rand(3, 1)
    weights = torch.randn(3, 4, 4, requires_grad=True)
    recalled = torch.einsum("bij,btj->bti", weights, trace)
    loss = correlation_loss(post, modulator, recalled, weights, **RATES)
    (gradient,) = torch.autograd.grad(loss, weights)
    written = modulator[:, :, None] * post.transpose(1, 2) @ trace  # m q e^T
    torch.testing.assert_close(weights - gradient, 0.9 * weights + written)


def test_features_that_are_copies_of_each_other_cost_more() -> None:
    apart = torch.eye(4).repeat(8, 1).unsqueeze(0)  # one feature at a time, [1, 32, 4]
    alike = torch.tensor([[1.0], [-1.0]]).repeat(16, 4).unsqueeze(0) / 2
    zero, modulator = torch.zeros(1, 4, 4), torch.ones(1, 32)
    cost_apart, cost_alike = (
        correlation_loss(post, modulator, torch.zeros_like(post), zero, **RATES)
        for post in (apart, alike)
    )
    # every pair of the copies has covariance 1/4, and there are 12 pairs of 4 features
    assert cost_alike.item() == pytest.approx(1e-2 / 4 * 12 / 16)
    assert cost_apart.item() < cost_alike.item() / 5


def test_it_is_a_sum_over_sequences() -> None:
    post, modulator, recalled = unit(5, 9, 4), torch.rand(5, 9), torch.randn(5, 9, 4)
    weights = torch.randn(5, 4, 4)
    inputs = (post, modulator, recalled, weights)
    whole = correlation_loss(*inputs, **RATES)
    parts = [
        correlation_loss(*(x[rows] for x in inputs), **RATES) for rows in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(whole, parts[0] + parts[1])
