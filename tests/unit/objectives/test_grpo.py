"""GRPO's pieces against their definitions."""

import math

import pytest
import torch

from cdrmix.objectives.grpo import (
    are_alike,
    explained_variance,
    gae,
    group_advantages,
    grpo_loss,
    lambda_returns,
    leave_one_out_advantages,
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
        "old_values": zero,
        "is_taken": torch.ones_like(logprobs, dtype=torch.bool),
        "is_learned": torch.ones(len(logprobs), dtype=torch.bool),
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


def test_one_that_is_left_out_is_compared_with_the_mean_of_the_others() -> None:
    returns = torch.tensor([[1.0, 0.0, 0.5, 1.1], [0.0, 0.0, 0.0, 1.05]])
    found = leave_one_out_advantages(returns)
    for group in range(2):
        for one in range(4):
            others = [float(returns[group, other]) for other in range(4) if other != one]
            expected = float(returns[group, one]) - sum(others) / 3
            assert found[group, one].item() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(found, group_advantages(returns) * 4 / 3)


def test_the_critic_compares_each_step_with_what_it_expected() -> None:
    rewards, values = (
        torch.tensor([[0.0, 0.0, 1.0, 7.0]]),
        torch.tensor([[0.4, 0.1, 0.7, 0.0, 9.0]]),
    )
    taken = torch.tensor([[True, True, True, False]])
    found = gae(rewards, values, taken, gamma=0.9, gae_lambda=0.5)
    errors = [0.9 * 0.1 - 0.4, 0.9 * 0.7 - 0.1, 1.0 - 0.7]  # of each step; the episode ends there
    expected = [sum(0.45**k * errors[t + k] for k in range(3 - t)) for t in range(3)]
    torch.testing.assert_close(found, torch.tensor([[*expected, 0.0]]))


def test_groups_are_alike_where_all_their_returns_are_one_number() -> None:
    returns = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.01], [1.02, 1.02, 1.02]])
    assert are_alike(returns).tolist() == [True, False, True]


def test_a_rollout_that_is_left_out_has_no_gradient_and_no_share_in_the_mean() -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    taken = torch.tensor([[True, True, False], [True, True, True]])
    loss, metrics = loss_of(
        logprobs,
        torch.tensor([2.0, 5.0]),
        is_taken=taken,
        is_learned=torch.tensor([True, False]),
        entropy=-logprobs,
        values=torch.ones(2, 3),
        entropy_weight=0.1,
        value_weight=0.5,
    )
    assert loss.item() == pytest.approx(2 * (-2.0 - 0.1 + 0.5 * 0.5))
    assert (metrics.steps.item(), metrics.learned.item()) == (5, 2)
    assert metrics.entropy.item() == 5, "metrics are of all that was played"
    loss.backward()
    assert logprobs.grad is not None and not logprobs.grad[1].any() and not logprobs.grad[0, 2]


def test_advantages_may_differ_from_step_to_step() -> None:
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    loss, _ = loss_of(logprobs, torch.tensor([[2.0, -3.0]]))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 3.0]]))


def test_the_clip_may_be_wider_above_than_below() -> None:
    step = torch.log(torch.tensor([[1.25, 1.5, 0.75, 0.9]])) - 1
    step.requires_grad_()
    loss, metrics = loss_of(step, torch.tensor([1.0]), clip_ratio_high=0.3)
    assert loss.item() == pytest.approx(-(1.25 + 1.3 + 0.75 + 0.9))
    assert metrics.clipped.item() == 2  # 1.5 above, 0.75 below
    (gradient,) = torch.autograd.grad(loss, step)
    torch.testing.assert_close(gradient, torch.tensor([[-1.25, 0.0, -0.75, -0.9]]))
    loss, _ = loss_of(step, torch.tensor([-1.0]), clip_ratio_high=0.3)
    assert loss.item() == pytest.approx(1.25 + 1.5 + 0.8 + 0.9)


def test_a_dual_clip_bounds_what_a_bad_action_costs() -> None:
    step = torch.log(torch.tensor([[5.0, 1.5, 0.5]])) - 1
    step.requires_grad_()
    loss, _ = loss_of(step, torch.tensor([-2.0]), dual_clip=3.0)
    assert loss.item() == pytest.approx(2 * (3.0 + 1.5 + 0.8))
    (gradient,) = torch.autograd.grad(loss, step)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 3.0, 0.0]]))
    good = loss_of(step, torch.tensor([2.0]), dual_clip=3.0)[0]
    assert good.item() == pytest.approx(-2 * (1.2 + 1.2 + 0.5)), "of bad actions only"


def test_a_value_beyond_its_clip_earns_no_further_gradient() -> None:
    values = torch.tensor([[1.5, 1.1, 0.5]], requires_grad=True)
    loss, metrics = loss_of(
        torch.full((1, 3), -1.0),
        torch.zeros(1),
        values=values,
        value_targets=torch.full((1, 3), 2.0),
        old_values=torch.ones(1, 3),
        value_clip=0.2,
        value_weight=1.0,
    )
    # the worse of the value and the value within .2 of the one at play
    by_hand = 0.5 * (0.8**2 + 0.9**2 + 1.5**2)
    assert loss.item() == pytest.approx(by_hand)
    assert metrics.value_loss.item() == pytest.approx(by_hand)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.9, -1.5]]))


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
