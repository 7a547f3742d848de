"""GRPO's pieces against their definitions."""

import math

import pytest
import torch

from cdrmix.objectives.grpo import (
    explained_variance,
    group_advantages,
    grpo_loss,
    lambda_returns,
)

WEIGHTS = {"clip_ratio": 0.2, "value_weight": 0.0, "entropy_weight": 0.0}


def loss_of(logprobs: torch.Tensor, advantages: torch.Tensor, **changed: object):
    """grpo_loss of rollouts whose old log-probabilities are -1, every step of them taken."""
    zero = torch.zeros_like(logprobs)
    given = {
        "old_logprobs": zero - 1,
        "entropy": zero,
        "values": zero,
        "value_targets": zero,
        "is_taken": torch.ones_like(logprobs, dtype=torch.bool),
        **WEIGHTS,
        **changed,
    }
    return grpo_loss(logprobs, advantages=advantages, **given)


def test_advantages_keep_the_scale_of_the_rewards() -> None:
    returns = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.10, 0.09, 0.10, 0.07]])
    advantages = group_advantages(returns)
    torch.testing.assert_close(advantages[0], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    # costs stay a hundredth of an outcome, though nothing else differs in their group
    assert advantages[1].abs().max() < 0.03


def test_a_ratio_beyond_the_clip_earns_no_further_gradient() -> None:
    step = torch.tensor([[math.log(1.5) - 1, math.log(1.1) - 1]], requires_grad=True)
    loss, metrics = loss_of(step, torch.tensor([2.0]))
    assert loss.item() == pytest.approx(-2 * (1.2 + 1.1))
    (gradient,) = torch.autograd.grad(loss, step)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2.2]]))
    assert (metrics.clipped.item(), metrics.steps.item()) == (1, 2)
    # a bad action that became likelier is pushed down however far it went
    (gradient,) = torch.autograd.grad(loss_of(step, torch.tensor([-2.0]))[0], step)
    torch.testing.assert_close(gradient, torch.tensor([[3.0, 2.2]]))


def test_steps_not_taken_count_nothing() -> None:
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -math.inf]], requires_grad=True)
    taken = torch.tensor([[True, True], [True, False]])
    loss, metrics = loss_of(
        logprobs, torch.tensor([1.0, 3.0]), is_taken=taken, values=torch.full((2, 2), 2.0)
    )
    assert loss.item() == -(1 + 1 + 3)
    assert (metrics.steps.item(), metrics.value_loss.item()) == (3, 3 * 2.0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0], [-3.0, 0.0]]))


def test_low_variance_kl_is_unbiased_and_never_negative() -> None:
    policy, reference = (torch.log_softmax(torch.randn(6), 0) for _ in range(2))
    steps = zip(reference, policy, strict=True)
    metrics = [
        loss_of(new.view(1, 1), torch.zeros(1), old_logprobs=old.view(1, 1))[1]
        for new, old in steps
    ]
    estimate = torch.stack([each.kl for each in metrics])
    assert (estimate >= 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimate).sum(), exact)


def test_entropy_is_earned_and_value_error_is_paid() -> None:
    one = torch.ones(1, 1)
    loss, _ = loss_of(
        -one,
        torch.zeros(1),
        entropy=one,
        values=3 * one,
        entropy_weight=0.25,
        value_weight=0.5,
    )
    assert loss.item() == pytest.approx(0.5 * 4.5 - 0.25)


def test_lambda_returns_reach_from_one_step_to_the_end() -> None:
    rewards, taken = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    values = torch.tensor([[10.0, 20.0, 30.0, 40.0]])  # the last: what lies beyond the horizon
    to_the_end = lambda_returns(rewards, values, taken, gamma=0.5, gae_lambda=1.0)
    expected = torch.tensor([[1 + 0.5 * (2 + 0.5 * (4 + 20)), 2 + 0.5 * 24, 24.0]])
    torch.testing.assert_close(to_the_end, expected)
    one_step = lambda_returns(rewards, values, taken, gamma=0.5, gae_lambda=0.0)
    torch.testing.assert_close(one_step, torch.tensor([[11.0, 17.0, 24.0]]))


def test_a_rollout_that_ends_early_sees_nothing_behind_its_end() -> None:
    taken = torch.tensor([[True, False, False]])
    rewards, values = torch.tensor([[1.0, 9.0, 9.0]]), torch.tensor([[5.0, 0.0, 7.0, 7.0]])
    targets = lambda_returns(rewards, values, taken, gamma=1.0, gae_lambda=1.0)
    torch.testing.assert_close(targets, torch.tensor([[1.0, 0.0, 0.0]]))


def test_explained_variance_is_one_at_best_and_zero_for_a_constant() -> None:
    targets, taken = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    assert explained_variance(targets, targets, taken).item() == 1
    assert explained_variance(torch.full((1, 3), 5.0), targets, taken).item() == 0


def test_the_divergence_of_an_update_is_that_of_the_rollouts_policy_from_the_present_one() -> None:
    # old log-probabilities are -1; actions of the old policy, so the estimate is exp(d) - d - 1
    # with d = present - old, which is not symmetric
    present = torch.tensor([[-0.5, -1.75], [-3.0, 0.0]])
    taken = torch.tensor([[True, True], [True, False]])
    _, metrics = loss_of(present, torch.zeros(2), is_taken=taken)
    by_hand = [math.exp(d) - d - 1 for d in (0.5, -0.75, -2.0)]
    assert by_hand == pytest.approx([0.148721, 0.222367, 1.135335], abs=1e-6)
    assert metrics.kl.item() == pytest.approx(sum(by_hand), rel=1e-6)
    assert metrics.steps.item() == 3, "which the sum is to be divided by"
    assert metrics.clipped.item() == 3  # ratios 1.65, 0.47 and 0.14 of 0.8 to 1.2
