"""Parameter groups, AdamW, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from cdrmix.config.schema import TrainingConfig


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW of what trains: matrices decayed, vectors not, experts by themselves.

    DeepSpeed reduces and clips a group marked `moe` over its expert group, which its name gives;
    a group may hold either experts or dense parameters (0.19.8, moe/utils.py). Experts, parameters
    with `allreduce = False` and their group's name, are never split into several groups, so that
    every pipeline stage has the same number of them.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    experts: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if not getattr(parameter, "allreduce", True):
            experts.setdefault(parameter.group_name, []).append(parameter)  # type: ignore[attr-defined]
        # `shape` of a parameter that ZeRO-3 has partitioned is that of an empty tensor.
        elif len(getattr(parameter, "ds_shape", parameter.shape)) >= 2:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "matrices", "params": decayed, "weight_decay": weight_decay},
        {"name": "vectors", "params": plain, "weight_decay": 0.0},
        *(
            {"name": name, "params": parameters, "weight_decay": weight_decay, "moe": True}
            for name, parameters in experts.items()
        ),
    ]
    # Low-rank adapters are matrices, all of them, and DeepSpeed takes no empty group.
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with bias correction and decoupled decay; each step sets its learning rate."""
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay=training.weight_decay),
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        # One kernel reads and writes each element once; the default takes one for each operation.
        fused=True,
    )


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Learning rate of a step, numbered from 0: linear warm-up, then `training.schedule`.

    A function of the step alone: a resumed run needs no state of it. Until the cooldown, `wsd` and
    `infinite` do not depend on the length of the run, which may be extended. The cooldown falls by
    1 - sqrt of its share that is over (Hägele et al., arXiv 2405.18392); `infinite` is that of
    Ibrahim et al., arXiv 2403.08763, whose first fall is a cosine.
    """
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


def _cosine(progress: float) -> float:
    """Half a cosine from 1 at progress 0 to 0 at 1 and beyond."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
