"""Exponential moving average of the weights (EMA), float32, in any layout.

The average of a flat master partition is one more entry of the optimizer's state of that partition,
beside Adam's moments: where they are partitioned, offloaded, saved, moved to another layout or
copied beside a step, so is the average, and no rank gathers anything. Optimizers read their own
entries by name and pass over others (torch 2.13 AdamW, `optimizers.muon`), but make them where
there is no entry at all: the average is added behind a step.

In bf16 an average of a decay near 1 would never move, as a step's share of it is less than half of
its last bit.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cdrmix.hooks import Hook, RunView

AVERAGE = "ema"
AVERAGED = "ema_count"
AVERAGE_KINDS = (AVERAGE, AVERAGED)
"""Entries of the optimizer's state, and kinds in checkpoints: the average, of its master's shape
and type, and the number of weights that it is of, with those that it began with."""
_SWAPPED = 2**22  # elements of a master and its average that are exchanged at a time


def decay(averaged: int, most: float) -> float:
    """Decay of an average of `averaged` weights when the next ones enter.

    Smaller at first, so that the weights that it began with are soon forgotten: min(d, (1 + n) /
    (10 + n)), as of TensorFlow's ExponentialMovingAverage with `num_updates`.
    """
    return min(most, (1 + averaged) / (10 + averaged))


class KeepAverage(Hook):
    """Has pretraining keep an average; Stage B keeps none."""

    def __init__(self, most: float) -> None:
        self._most = most

    def on_start(self, run: RunView) -> None:
        """Begins with the next step, or goes on with the average of the checkpoint."""
        if run.stage == "a":
            keep_average(run.engine, self._most)


def keep_average(engine: Any, most: float) -> None:
    """Has an engine keep an average of its weights from its next optimizer step on.

    A step that DeepSpeed skips does not reach the optimizer, and leaves the average as it is.

    Args:
        engine: of DeepSpeed, ZeRO-1, 2 or 3, whose parts of the model all ranks step together.
        most: decay of the average when it is no longer new, below 1.
    """
    # Of the inner optimizer: every engine steps it, some of them a group or sub-group at a time.
    inner: torch.optim.Optimizer = engine.optimizer.optimizer
    inner.register_step_post_hook(partial(_update, most=most))


def begin_average(state: MutableMapping[str, Any], master: Tensor) -> None:
    """Begins the average of one partition anew, at the weights in its master, float32."""
    if AVERAGE in state:  # in place, as there may be no room for another
        state[AVERAGE].copy_(master.detach())
    else:
        state[AVERAGE] = master.detach().clone()
    state[AVERAGED] = 1


def has_average(engine: Any) -> bool:
    """True if an engine has an average by now; alike on all ranks."""
    states = engine.optimizer.optimizer.state.values()
    return bool(states) and all(AVERAGE in state for state in states)


@torch.no_grad()
def swap_average(engine: Any) -> None:
    """Exchanges the values of masters and average on this rank."""
    for master, state in engine.optimizer.optimizer.state.items():
        # In parts, so that no second copy of a large partition is made, and in place: DeepSpeed
        # holds views of the masters.
        parts = (each.split(_SWAPPED) for each in (master, state[AVERAGE]))
        for weights, average in zip(*parts, strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)


@torch.no_grad()
def _update(optimizer: torch.optim.Optimizer, *_: Any, most: float) -> None:
    """Hook of `torch.optim.Optimizer.register_step_post_hook`: lets the new weights enter."""
    for group in optimizer.param_groups:  # those alone that this call has stepped
        for master in group["params"]:
            state = optimizer.state[master]
            if AVERAGE not in state:
                begin_average(state, master)
                continue
            state[AVERAGE].lerp_(master, 1 - decay(state[AVERAGED], most))
            state[AVERAGED] += 1
