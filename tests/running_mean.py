"""A block type that is not the product's: the mean of all tokens so far, between two matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.initialize import normal_
from cdrmix.models.mixer import Mixer
from cdrmix.planning.blocks.block_type import BlockType, PerToken, SequenceForm, Setting
from cdrmix.planning.parameter import Parameter


class RunningMeanBlock(BlockType):
    """Planning half."""

    module = "tests.running_mean:RunningMean"
    carries_state = True
    adapted = ("value",)

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        width = model.hidden_size
        yield Parameter("mixer.value.weight", (width, width), "time_mix", cut=0)
        yield Parameter("mixer.output.weight", (width, width), "time_mix", cut=1)

    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        return 2 * model.hidden_size

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        size = setting.element_bytes * setting.model.hidden_size
        return PerToken(size, size)  # inputs of both matrices; the number of each token is a vector

    def span_state(self, setting: Setting) -> PerToken:
        return PerToken(4, 4 * setting.model.hidden_size)


@dataclass
class RunningMeanState:
    """Sum of the values so far, [B, D], and their number, [B, 1], float32."""

    total: Tensor
    count: Tensor


class RunningMean(Mixer):
    """Torch half."""

    carries_state = True
    state_type = RunningMeanState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        return cls(config)

    def forward(
        self, x: Tensor, state: RunningMeanState | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, RunningMeanState]:
        assert segment_ids is None, "this one reads whole samples"
        values = self.value(x)
        past = 0 if state is None else state.total.unsqueeze(1)
        before = x.new_zeros(len(x), 1) if state is None else state.count
        totals = values.cumsum(1) + past
        counts = before + torch.arange(1, x.shape[1] + 1)  # [B, T]
        mixed = totals / counts.unsqueeze(-1)
        return self.output(mixed), RunningMeanState(totals[:, -1], counts[:, -1:])

    def initialize(self, *, seed: int, name: str, std: float) -> None:
        normal_(self.value.weight, std, seed=seed, name=f"{name}.value")
        normal_(self.output.weight, std, seed=seed, name=f"{name}.output")
