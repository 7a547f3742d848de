"""A block type, a schedule, an optimizer and terms of the loss that are not the product's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import TrainingConfig
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Mixer
from cdrmix.planning.blocks.block_type import (
    BlockType,
    PerToken,
    SequenceForm,
    Setting,
    layer_type,
)
from cdrmix.planning.parameter import Parameter
from cdrmix.planning.plugins import LossTerm, OptimizerType, Schedule


class Window(BlockType):
    """Mean of the last tokens, between two matrices."""

    module = "tests.plugins:WindowMixer"
    carries_state = True
    refused_axes = {"expert": "a test says so"}

    class Options(BaseModel):
        tokens: int = 2

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        width = model.hidden_size
        yield Parameter("mixer.value.weight", (width, width), "mixer", cut=0)
        yield Parameter("mixer.output.weight", (width, width), "mixer", cut=1)

    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        return self.options.tokens * model.hidden_size

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        size = setting.element_bytes * setting.model.hidden_size
        return PerToken(size, size)

    def span_state(self, setting: Setting) -> PerToken:
        size = setting.element_bytes * setting.model.hidden_size
        return PerToken(0, (self.options.tokens - 1) * size)


class WholeWindow(Window):
    """One that does not say where it is cut."""

    refused_axes = {}

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        for each in super().parameters(model, layer):
            yield each._replace(cut=None)


@dataclass
class Values:
    """Values of the last tokens but one, [B, tokens - 1, D]."""

    last: Tensor


class WindowMixer(Mixer):
    """Torch half."""

    carries_state = True
    state_type = Values

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        return cls(config.hidden_size, layer_type(config, layer).options.tokens)

    def forward(
        self, x: Tensor, state: Values | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Values]:
        values = self.value(x)
        past = values.new_zeros(len(x), self.tokens - 1, values.shape[-1])
        values = torch.cat([past if state is None else state.last, values], dim=1)
        after = Values(values[:, values.shape[1] - self.tokens + 1 :])
        return self.output(values.unfold(1, self.tokens, 1).mean(-1)), after

    def initialize(self, *, seed: int, name: str, std: float) -> None:
        normal_(self.value.weight, std, seed=seed, name=f"{name}.value")
        normal_(self.output.weight, std, seed=seed, name=f"{name}.output")


class Waves(Schedule):
    """Cosine waves between the two rates."""

    class Options(BaseModel):
        period_steps: int

    def learning_rate(self, step: int, training: TrainingConfig) -> float:
        share = 0.5 + 0.5 * math.cos(2 * math.pi * step / self.options.period_steps)
        low = training.min_learning_rate
        return low + (training.learning_rate - low) * share


class HeavyBall(OptimizerType):
    """Gradient descent with momentum."""

    states = {"velocity": 4}
    numbers = ("step",)
    elementwise = True

    class Options(BaseModel):
        momentum: float = 0.9

    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
        return _HeavyBall(groups, {"momentum": self.options.momentum})


class Whole(HeavyBall):
    """One that does not say that elements are apart."""

    elementwise = False


class _HeavyBall(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                    state["step"] = 0
                state["step"] += 1
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["velocity"], alpha=-group["lr"])


class Length(LossTerm):
    """Mean square of the hidden states of tokens with even ids."""

    each_token = True

    def count(self, batch: Mapping[str, Tensor]) -> float:
        return float((batch["input_ids"] % 2 == 0).sum())

    def total(
        self, hidden: Tensor, logits: Callable[[], Tensor], batch: Mapping[str, Tensor]
    ) -> Tensor:
        is_even = (batch["input_ids"] % 2 == 0).unsqueeze(-1)
        return (hidden.float().square() * is_even).mean(-1).sum()

    def flops_per_token(self, model: ModelConfig) -> float:
        return 2 * model.hidden_size

    def saved_bytes_per_token(self, model: ModelConfig, element_bytes: int) -> float:
        return 8 * model.hidden_size


class Confidence(LossTerm):
    """Squared logits of the labels: reads the logits."""

    class Options(BaseModel):
        power: float = 2.0

    def count(self, batch: Mapping[str, Tensor]) -> float:
        return float((batch["labels"] >= 0).sum())

    def total(
        self, hidden: Tensor, logits: Callable[[], Tensor], batch: Mapping[str, Tensor]
    ) -> Tensor:
        labels = batch["labels"]
        scores = logits().float().gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (scores.abs() ** self.options.power * (labels >= 0)).sum()

    def flops_per_token(self, model: ModelConfig) -> float:
        return 2 * model.hidden_size * model.vocab_size

    def saved_bytes_per_token(self, model: ModelConfig, element_bytes: int) -> float:
        return 3 * element_bytes * model.vocab_size
