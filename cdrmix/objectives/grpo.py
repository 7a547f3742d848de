"""GRPO: policy gradients from groups of rollouts of one prompt, with value head and monitors.

P prompts, G rollouts of a prompt, N = P G rollouts, T steps of a rollout.

Returns are taken above a baseline and not divided by the standard deviation of their group. Rewards
consist of small costs and a large outcome. Where failures bear costs too, a group of failures
differs in its costs alone, the division makes them as large as an outcome, and the policy learns to
do nothing; either alone, the division or costs for failures, does no harm
(tests/integration/test_learning.py has all four).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyMetrics(NamedTuple):
    """Sums over the steps taken, scalars; divide by `steps` of the whole global batch."""

    steps: Tensor  # steps taken
    learned: Tensor  # steps taken that the loss is a sum over
    kl: Tensor  # KL divergence of the rollout policy from the present one, estimated (nats)
    clipped: Tensor  # steps whose probability ratio lies outside the clip
    entropy: Tensor  # of the policy (nats)
    value_loss: Tensor  # half the squared error of the value head


def group_advantages(returns: Tensor) -> Tensor:
    """Return of each rollout above the mean of its group, [P, G] -> [P, G]."""
    return returns - returns.mean(dim=1, keepdim=True)


def leave_one_out_advantages(returns: Tensor) -> Tensor:
    """Return of each rollout above the mean of the others of its group, [P, G] -> [P, G]; G > 1.

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples"; G / (G - 1) times `group_advantages`.
    """
    others = (returns.sum(dim=1, keepdim=True) - returns) / (returns.shape[1] - 1)
    return returns - others


def are_alike(returns: Tensor) -> Tensor:
    """True for groups whose rollouts all have the same return, [P, G] -> [P]."""
    return (returns == returns[:, :1]).all(dim=1)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    values: Tensor,
    value_targets: Tensor,
    old_values: Tensor,
    is_taken: Tensor,
    is_learned: Tensor,
    *,
    clip_ratio: float,
    clip_ratio_high: float | None = None,
    dual_clip: float | None = None,
    value_clip: float | None = None,
    value_weight: float,
    entropy_weight: float,
) -> tuple[Tensor, PolicyMetrics]:
    """Clipped policy loss with value loss and entropy, summed over the steps learned from.

    Divide the loss by the steps learned from, and the metrics by the steps taken, of the whole
    global batch: steps weigh the same whichever lesson or rank they are of.

    Args:
        logprobs: of the actions taken, under the present policy, [N, T] (nats).
        old_logprobs: under the policy that took them, [N, T].
        advantages: one per rollout, shared by its steps, [N], or one per step, [N, T].
        entropy, values: of the present policy and the value head at each step, [N, T].
        value_targets, old_values: targets of the value head, and its values at play, [N, T].
        is_taken: False for steps behind the end of a rollout, [N, T].
        is_learned: False for rollouts that are left out of the loss, [N].
        clip_ratio, clip_ratio_high: largest distance of the probability ratio from 1, below and
            above, that is still rewarded; None is the same above as below.
        dual_clip: probability ratio up to which a negative advantage counts; None is any.
        value_clip: largest distance from `old_values` that is still rewarded; None is any.
        value_weight, entropy_weight: of half the squared error, and of the entropy, maximised.
    Source: clip Schulman et al. 1707.06347; apart above and below DAPO 2503.14476; dual clip
        Ye et al. 1912.09729; value clip Schulman et al. 1506.02438 as in PPO's first code.
    """
    change = logprobs - old_logprobs  # [N, T]
    ratio = torch.exp(change)
    gain = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    highest = clip_ratio if clip_ratio_high is None else clip_ratio_high
    clipped_ratio = ratio.clamp(1 - clip_ratio, 1 + highest)
    earned = torch.minimum(ratio * gain, clipped_ratio * gain)
    if dual_clip is not None:
        earned = torch.where(gain < 0, torch.maximum(earned, dual_clip * gain), earned)
    loss = -earned - entropy_weight * entropy
    value_loss = 0.5 * (values - value_targets).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        value_loss = torch.maximum(value_loss, 0.5 * (near - value_targets).square())
    loss = loss + value_weight * value_loss
    learned = is_taken & is_learned.unsqueeze(1)
    with torch.no_grad():
        metrics = PolicyMetrics(
            steps=is_taken.sum(),
            learned=learned.sum(),
            # Schulman's k3 estimator of KL(old || present): unbiased, and never negative
            kl=_total(torch.expm1(change) - change, is_taken),
            clipped=_total((ratio != clipped_ratio).to(loss.dtype), is_taken),
            entropy=_total(entropy, is_taken),
            value_loss=_total(value_loss, is_taken),
        )
    return _total(loss, learned), metrics


def _total(per_step: Tensor, is_taken: Tensor) -> Tensor:
    # A product would spread the values of steps not taken, which need not be finite.
    return torch.where(is_taken, per_step, torch.zeros_like(per_step)).sum()


@torch.no_grad()
def lambda_returns(
    rewards: Tensor, values: Tensor, is_taken: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Targets of the value head: TD(lambda) returns of each step.

    Args:
        rewards: of each step, [N, T].
        values: of the state before each step, and after the last, [N, T + 1]. The last one is the
            expected return of a rollout cut at its horizon; zero for an episode that has ended.
        is_taken: True for the steps of a rollout, which come first, [N, T]; others get 0.
        gamma: discount per step.
        gae_lambda: 0 looks one step ahead, 1 to the end.
    Source: Schulman et al., 1506.02438: advantage estimate plus value.
    """
    targets = torch.zeros_like(rewards)
    ahead = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        ahead = torch.where(is_taken[:, t], error + gamma * gae_lambda * ahead, 0)
        targets[:, t] = torch.where(is_taken[:, t], ahead + values[:, t], 0)
    return targets


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, is_taken: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimates, [N, T]; arguments as `lambda_returns`, 0 where not taken."""
    targets = lambda_returns(rewards, values, is_taken, gamma=gamma, gae_lambda=gae_lambda)
    return torch.where(is_taken, targets - values[:, :-1], 0)


@torch.no_grad()
def explained_variance(values: Tensor, targets: Tensor, is_taken: Tensor) -> Tensor:
    """Share of the targets' variance that the value head explains: 1 at best, below 0 if harmful.

    NaN if the targets do not vary.
    """
    actual = targets[is_taken]
    return 1 - (actual - values[is_taken]).var(correction=0) / actual.var(correction=0)
