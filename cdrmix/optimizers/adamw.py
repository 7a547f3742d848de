"""Parameter groups, and AdamW."""

from __future__ import annotations

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
