"""Sums of bf16 gradients in float32, without a copy of each gradient in float32.

DeepSpeed 0.19.8 converts a gradient before it adds it (runtime/bf16_optimizer.py,
`_update_hp_grad`): 18 bytes a parameter are moved in a micro-step where 10 will do. A sum of all
vectors' gradients in one `_foreach_add_` would not help: its fast path wants one type, so that they
would be converted again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def add_without_copies(engine: Any) -> bool:
    """Has the bf16 optimizer add each gradient to its float32 sum as it is; the bits are the same.

    Returns:
        False, and nothing is changed, where DeepSpeed's engine has another optimizer, or one that
        adds gradients behind the backward pass.
    """
    zero = engine.optimizer
    if not getattr(zero, "immediate_grad_update", False):
        return False
    # its hooks look the method up when a gradient is there
    zero.accumulate_hp_grads_and_remove_lp = partial(_add, zero)
    return True


@torch.no_grad()
def _add(zero: Any, parameter: nn.Parameter, group: int, number: int) -> None:
    """Adds a parameter's gradient, `number` of its group, to its sum, and frees it."""
    if parameter.grad is None:
        return
    total = zero.fp32_groups_gradients[group][number]
    total.add_(parameter.grad.reshape(total.shape))
    parameter._hp_grad = total  # type: ignore[attr-defined]  # where DeepSpeed looks for it
    zero.fp32_groups_has_gradients[group][number] = True
    parameter.grad = None
