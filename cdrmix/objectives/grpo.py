"""GRPO: policy gradients from groups of rollouts of one prompt, with value head and monitors.

P prompts, G rollouts of a prompt, N = P G rollouts, T steps of a rollout.

Returns are centred by their group and not divided by its standard deviation. Rewards consist of
small costs and a large outcome; in a group whose rollouts all fail, or all succeed, only the costs
differ, and the division makes them as large as an outcome: the policy then learns to do nothing
(tests/integration/test_learning.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyMetrics(NamedTuple):
    """Sums over the steps taken, scalars; divide by `steps` of the whole global batch."""

    steps: Tensor  # steps taken
    kl: Tensor  # KL divergence of the rollout policy from the present one, estimated (nats)
    clipped: Tensor  # steps whose probability ratio lies outside the clip
    entropy: Tensor  # of the policy (nats)
    value_loss: Tensor  # half the squared error of the value head


def group_advantages(returns: Tensor) -> Tensor:
    """Return of each rollout above the mean of its group, [P, G] -> [P, G]."""
    return returns - returns.mean(dim=1, keepdim=True)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    values: Tensor,
    value_targets: Tensor,
    is_taken: Tensor,
    *,
    clip_ratio: float,
    value_weight: float,
    entropy_weight: float,
) -> tuple[Tensor, PolicyMetrics]:
    """Clipped policy loss with value loss and entropy, summed over steps.

    Divide loss and metrics by the steps taken in the whole global batch.

    Args:
        logprobs: of the actions taken, under the present policy, [N, T] (nats).
        old_logprobs: under the policy that took them, [N, T].
        advantages: one per rollout, shared by its steps, [N].
        entropy, values: of the present policy and the value head at each step, [N, T].
        value_targets: of the value head, [N, T].
        is_taken: False for steps that do not count, [N, T].
        clip_ratio: largest distance of the probability ratio from 1 that is still rewarded.
        value_weight, entropy_weight: of half the squared error, and of the entropy, maximised.
    """
    change = logprobs - old_logprobs  # [N, T]
    ratio = torch.exp(change)
    gain = advantages.unsqueeze(1)
    clipped_ratio = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = -torch.minimum(ratio * gain, clipped_ratio * gain) - entropy_weight * entropy
    value_loss = 0.5 * (values - value_targets).square()
    loss = loss + value_weight * value_loss
    with torch.no_grad():
        metrics = PolicyMetrics(
            steps=is_taken.sum(),
            # Schulman's k3 estimator of KL(old || present): unbiased, and never negative
            kl=_total(torch.expm1(change) - change, is_taken),
            clipped=_total((ratio != clipped_ratio).to(loss.dtype), is_taken),
            entropy=_total(entropy, is_taken),
            value_loss=_total(value_loss, is_taken),
        )
    return _total(loss, is_taken), metrics


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
def explained_variance(values: Tensor, targets: Tensor, is_taken: Tensor) -> Tensor:
    """Share of the targets' variance that the value head explains: 1 at best, below 0 if harmful.

    NaN if the targets do not vary.
    """
    actual = targets[is_taken]
    return 1 - (actual - values[is_taken]).var(correction=0) / actual.var(correction=0)
