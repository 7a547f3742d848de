"""Interfaces of schedules, optimizers and terms of the loss that a user writes.

The interface of a block type is `planning.blocks.block_type.BlockType`. No class here needs torch
to be imported or planned with; `make` and `total` run where torch is.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel

from cdrmix.config.model import ModelConfig
from cdrmix.config.objectives import ObjectivesConfig, TermConfig
from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.plugin import PluginConfig, is_plugin
from cdrmix.config.schema import TrainingConfig
from cdrmix.errors import ConfigError
from cdrmix.hooks.plugin import make_plugin


class Schedule(ABC):
    """Learning rates of a run, a function of the step alone: a resumed run needs no state of it."""

    Options: ClassVar[type[BaseModel] | None] = None

    def __init__(self, options: Any = None) -> None:
        self.options = options  # instance of `Options`, checked

    @abstractmethod
    def learning_rate(self, step: int, training: TrainingConfig) -> float:
        """Returns the rate of a step, numbered from 0, the warm-up included: 0 or more."""


class OptimizerType(ABC):
    """Optimizer of Stage A, and what planning and checkpoints must know of it.

    DeepSpeed hands it flat float32 vectors, parts of all parameters of a group one behind another,
    cut over the data ranks wherever their bounds fall.
    """

    Options: ClassVar[type[BaseModel] | None] = None
    # tensors of the state that have a parameter's shape: their names, and bytes of an element
    states: ClassVar[Mapping[str, int]]
    # single numbers of the state, such as a count of steps
    numbers: ClassVar[Sequence[str]] = ()
    # True if the update of an element depends on no other: only then may ranks share them out
    elementwise: ClassVar[bool] = False

    def __init__(self, options: Any = None) -> None:
        self.options = options  # instance of `Options`, checked

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> Any:
        """Makes the `torch.optim.Optimizer` of these parameter groups, each with `params`, `lr`,
        `weight_decay` and `name`: matrices, vectors without decay, and experts. `lr` is set before
        each step."""

    def state_bytes(self, elements: int, partitions: int) -> int:
        """Bytes of the state of so many elements in flat partitions, masters left out."""
        numbers = 4 * partitions * len(self.numbers)
        return elements * sum(self.states.values()) + numbers


class LossTerm(ABC):
    """Term of the loss: a sum over tokens, divided by what it counts in the global batch.

    A batch is a mapping of tensors [B, T]: `input_ids`, `labels` (-100: ignored), `kinds`, and
    `segment_ids` where documents are kept apart.
    """

    Options: ClassVar[type[BaseModel] | None] = None
    # True if the term of a token reads no other token: only then may sequence ranks share a sample
    each_token: ClassVar[bool] = False

    def __init__(self, options: Any = None) -> None:
        self.options = options  # instance of `Options`, checked

    @abstractmethod
    def count(self, batch: Mapping[str, Any]) -> float:
        """Counts what the term is a mean over, from the data of a micro-batch alone, on the host:
        the counts of all ranks and micro-batches are summed before the first one is run."""

    @abstractmethod
    def total(self, hidden: Any, logits: Callable[[], Any], batch: Mapping[str, Any]) -> Any:
        """Sums the term over a micro-batch, a scalar tensor, from the normalised output of the last
        block, [B, T, D], and the logits, [B, T, V], which are computed when they are asked for."""

    @abstractmethod
    def flops_per_token(self, model: ModelConfig) -> float:
        """Forward FLOPs per token."""

    @abstractmethod
    def saved_bytes_per_token(self, model: ModelConfig, element_bytes: int) -> float:
        """Bytes per token that are kept for the backward pass; logits are 2 to 3 times
        `element_bytes` * vocab_size."""


def schedule_of(training: TrainingConfig) -> Schedule:
    """Schedule of a user's that a configuration names; raises ConfigError."""
    keys = ("schedule", "schedule_options")
    made: Schedule = _made(Schedule, training.schedule, training.schedule_options, "training", keys)
    return made


def optimizer_of(optimizer: OptimizerConfig) -> OptimizerType | None:
    """Optimizer of a user's that a configuration names; None: one of ours. Raises ConfigError."""
    if not is_plugin(optimizer.kind):
        return None
    keys = ("kind", "options")
    made: OptimizerType = _made(OptimizerType, optimizer.kind, optimizer.options, "optimizer", keys)
    return made


def terms_of(objectives: ObjectivesConfig | None) -> list[tuple[TermConfig, LossTerm]]:
    """Terms of a user's that a configuration names, in order; raises ConfigError."""
    return [
        (each, _made(LossTerm, each.use, each.options, f"objectives.plugins[{number}]"))
        for number, each in enumerate(objectives.plugins if objectives else ())
    ]


def _made(
    kind: type,
    use: str,
    options: Mapping[str, Any],
    where: str,
    keys: tuple[str, str] = ("use", "options"),
) -> Any:
    return _made_once(kind, use, json.dumps(options, sort_keys=True), where, keys)


@cache
def _made_once(kind: type, use: str, options: str, where: str, keys: tuple[str, str]) -> Any:
    plugin = PluginConfig(use=use, options=json.loads(options))
    return make_plugin(plugin, kind, where=where, keys=keys)


def checked_rate(schedule: Schedule, step: int, training: TrainingConfig) -> float:
    """Learning rate of a step; raises ConfigError if it is below 0 or no number."""
    rate = schedule.learning_rate(step, training)
    is_number = isinstance(rate, int | float) and math.isfinite(rate)
    if not is_number or rate < 0:
        raise ConfigError(
            f"training.schedule: {training.schedule} gives {rate!r} as the learning rate of step "
            f"{step} (from 0 on): it must be a number from 0"
        )
    return float(rate)
