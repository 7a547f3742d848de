"""Learning-rate schedules: functions of the step alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cdrmix.config.plugin import is_plugin
from cdrmix.config.schema import TrainingConfig
from cdrmix.planning.plugins import checked_rate, schedule_of


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Learning rate of a step, numbered from 0: linear warm-up, then `training.schedule`, or all
    of it by a schedule of a user's.

    A function of the step alone: a resumed run needs no state of it. Until the cooldown, `wsd` and
    `infinite` do not depend on the length of the run, which may be extended. The cooldown falls by
    1 - sqrt of its share that is over (Hägele et al., arXiv 2405.18392); `infinite` is that of
    Ibrahim et al., arXiv 2403.08763, whose first fall is a cosine.
    """
    if is_plugin(training.schedule):
        return checked_rate(schedule_of(training), step, training)
    peak = training.learning_rate
    lowest = training.min_learning_rate
    warmup = training.warmup_steps
    last = training.num_steps - 1  # the step at the minimum
    if step < warmup:
        # Not `step`: a first step at a rate of 0 would be lost.
        return peak * (step + 1) / warmup
    high, low = peak, lowest
    match training.schedule:
        case "constant":
            return peak
        case "linear":
            share = 1 - min(1.0, (step - warmup) / max(1, last - warmup))
        case "cosine":
            share = _cosine((step - warmup) / max(1, last - warmup))
        case "wsd" | "infinite":
            settled = warmup
            if training.hold_learning_rate is not None and training.settle_steps is not None:
                high = training.hold_learning_rate
                settled += training.settle_steps
            begin = last - training.cooldown_steps  # last step before the cooldown
            if step < settled:
                low, high = high, peak
                share = _cosine((step - warmup) / (settled - warmup))
            elif step <= begin:
                return high
            else:
                share = 1 - math.sqrt(min(1.0, (step - begin) / (last - begin)))
    return low + (high - low) * share


def group_rate(step: int, training: TrainingConfig, group: Mapping[str, Any]) -> float:
    """Learning rate of a parameter group at a step: one schedule for all groups.

    A group's `rate_factor` is its peak over `training.learning_rate`; without one it is 1, and the
    rate is that of `learning_rate` to the bit.
    """
    return learning_rate(step, training) * float(group.get("rate_factor", 1.0))


def _cosine(progress: float) -> float:
    """Half a cosine from 1 at progress 0 to 0 at 1 and beyond."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
