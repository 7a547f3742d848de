"""Blocks, schedules and optimizers with a fault each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import TrainingConfig
from cdrmix.planning.blocks.block_type import BlockType
from cdrmix.planning.parameter import Parameter
from cdrmix.planning.plugins import OptimizerType, Schedule
from tests.plugins import Length, Values, WholeWindow, Window, WindowMixer


class Uncounted(BlockType):
    module = "tests.plugins:WindowMixer"

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        yield Parameter("mixer.weight", (4,), "mixer")


class Homeless(WholeWindow):
    module = "WindowMixer"


class Elsewhere(WholeWindow):
    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        yield Parameter("value.weight", (4,), "mixer")


class Raises(WholeWindow):
    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        return 1 // 0


class Other(WholeWindow):
    module = "torch.nn:Linear"


class Renamed(WholeWindow):
    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        for each in super().parameters(model, layer):
            yield each._replace(name=each.name.replace("value", "key"))


class _Blind(WindowMixer):
    def forward(
        self, x: Tensor, state: Values | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Values]:
        return super().forward(x)


class _Foreseeing(WindowMixer):
    def forward(
        self, x: Tensor, state: Values | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Values]:
        out, after = super().forward(x.flip(1), state)
        return out.flip(1), after


class Stateless(Window):
    module = "tests.refused_plugins:_Blind"


class Foreseeing(Window):
    module = "tests.refused_plugins:_Foreseeing"


class Sinks(Schedule):
    def learning_rate(self, step: int, training: TrainingConfig) -> float:
        return 1.0 if step < training.num_steps - 1 else -1.0


class Forgets(Schedule):
    def learning_rate(self, step: int, training: TrainingConfig) -> float:
        return None  # type: ignore[return-value]


class Undeclared(OptimizerType):
    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups)


class Misnames(Undeclared):
    states = {"momentum": 4}

    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, momentum=0.9)


class Regroups(Undeclared):
    states = {}

    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for group in groups for each in group["params"]])


class _Faulty(torch.optim.Optimizer):
    def __init__(self, groups: Any, fault: str) -> None:
        super().__init__(groups, {})
        self._fault = fault
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                rate = group["lr"]
                if self._fault == "Remembers":
                    rate *= self._steps
                if self._fault == "Mixes":
                    rate /= each.grad.norm()
                if self._fault == "Widens":
                    self.state[each]["history"] = torch.zeros(3)
                if self._fault == "Fails":
                    rate *= group["no such key"]
                if self._fault != "Rests":
                    each.add_(each.grad, alpha=-float(rate))


class _Trying(OptimizerType):
    states = {}
    elementwise = True

    def make(self, groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
        return _Faulty(groups, type(self).__name__)


class Remembers(_Trying):
    pass


class Mixes(_Trying):
    pass


class Widens(_Trying):
    pass


class Fails(_Trying):
    pass


class Rests(_Trying):
    pass


class Owes(Length):
    def count(self, batch: Mapping[str, Tensor]) -> float:
        return -1.0


class Scatters(Length):
    def total(
        self, hidden: Tensor, logits: Callable[[], Tensor], batch: Mapping[str, Tensor]
    ) -> Tensor:
        return hidden.mean(-1)


class Miscounts(Length):
    """Counts what is no number once a test has broken it, on one rank alone."""

    is_broken = False

    def count(self, batch: Mapping[str, Tensor]) -> float:
        return float("nan") if self.is_broken else super().count(batch)


class Vector(Length):
    """Gives no scalar once a test has broken it, on one rank alone."""

    is_broken = False

    def total(
        self, hidden: Tensor, logits: Callable[[], Tensor], batch: Mapping[str, Tensor]
    ) -> Tensor:
        total = super().total(hidden, logits, batch)
        return total.expand(2) if self.is_broken else total
