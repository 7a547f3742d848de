"""Optimizers of a user's: made for the parameter groups of a model, and tried before they are used.

A trial of three small steps tells in milliseconds what would otherwise be lost weeks later: a state
that no checkpoint holds, or an update that depends on how ranks share the parameters out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.errors import ConfigError
from cdrmix.optimizers.adamw import parameter_groups
from cdrmix.planning.plugins import OptimizerType

_ELEMENTS = 24
_CUT = 7  # elements of the first part of two
_STEPS = 3
# Sums of other lengths may round otherwise; an update that reads other elements is off by more.
_TOLERANCE = 1e-5


def users_optimizer(model: nn.Module, config: Config, kind: OptimizerType) -> torch.optim.Optimizer:
    """Makes a user's optimizer for what trains in a model; see `parameter_groups`.

    Raises:
        ConfigError: if it cannot be made, or a trial shows it to be other than it declares.
    """
    training = config.training
    of_user = _Named(kind, config.optimizer.kind, training)
    _try(of_user)
    return of_user.make(parameter_groups(model, weight_decay=training.weight_decay))


class _Named:
    """Optimizer type with its name in messages."""

    def __init__(self, kind: OptimizerType, name: str, training: TrainingConfig) -> None:
        self.kind = kind
        self.name = name
        self.training = training

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Makes the optimizer of some groups, and checks that it took them over."""
        groups = [{**group, "lr": self.training.learning_rate} for group in groups]
        made = self.does(lambda: self.kind.make([dict(group) for group in groups], self.training))
        if not isinstance(made, torch.optim.Optimizer):
            raise self.refused("makes no torch.optim.Optimizer")
        kept = [(group.get("name"), list(map(id, group["params"]))) for group in made.param_groups]
        if kept != [(group["name"], list(map(id, group["params"]))) for group in groups]:
            raise self.refused("has other parameter groups than it was given")
        return made

    def does(self, action: Callable[[], Any]) -> Any:
        """Runs code of the user's; raises ConfigError for whatever it raises."""
        try:
            return action()
        except Exception as error:
            raise self.refused(f"fails in a trial: {type(error).__name__}: {error}") from error

    def refused(self, why: str) -> ConfigError:
        """Error that names the optimizer."""
        return ConfigError(f"optimizer.kind: {self.name} {why}")


def _try(of_user: _Named) -> None:
    """Steps a vector of parameters in one piece, in two, and with a save and load between."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ELEMENTS, generator=generator)
    gradients = [torch.randn(_ELEMENTS, generator=generator) for _ in range(_STEPS)]
    whole = _Trial(of_user, start)
    for gradient in gradients[:-1]:
        whole.step(gradient)
    whole.check_state()
    resumed = _Trial(of_user, start)
    resumed.load(whole)
    whole.step(gradients[-1])
    resumed.step(gradients[-1])
    if not whole.values.isfinite().all():
        raise of_user.refused("gives weights that are not finite in a trial")
    if torch.equal(whole.values, start):
        raise of_user.refused("changes no weight in a trial: does it read the `lr` of its groups?")
    if not torch.equal(whole.values, resumed.values):
        raise of_user.refused(
            "steps otherwise when its state is saved and loaded between: it keeps some outside of "
            "`state`, which no checkpoint holds, or `state` begins otherwise with a gradient of 0"
        )
    if not of_user.kind.elementwise:
        return
    cut = [_Trial(of_user, part) for part in (start[:_CUT], start[_CUT:])]
    for gradient in gradients:
        for part, values in zip(cut, (gradient[:_CUT], gradient[_CUT:]), strict=True):
            part.step(values)
    difference = (torch.cat([part.values for part in cut]) - whole.values).abs().max().item()
    if difference > _TOLERANCE * (whole.values - start).abs().max().item():
        raise of_user.refused(
            "declares `elementwise`, and steps a vector otherwise when it is cut in two: by "
            f"{difference:.2g}"
        )


class _Trial:
    """One vector of parameters with an optimizer of the user's."""

    def __init__(self, of_user: _Named, start: Tensor) -> None:
        self.of_user = of_user
        self._weights = nn.Parameter(start.clone())
        decay = of_user.training.weight_decay
        group = {"name": "matrices", "params": [self._weights], "weight_decay": decay}
        self._optimizer = of_user.make([group])

    @property
    def values(self) -> Tensor:
        """Weights of now."""
        return self._weights.detach()

    def step(self, gradient: Tensor, rate: float | None = None) -> None:
        """Takes a step at a learning rate; None: the peak of the run."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.of_user.training.learning_rate if rate is None else rate
        self._weights.grad = gradient.clone()
        self.of_user.does(self._optimizer.step)

    def load(self, other: _Trial) -> None:
        """Takes over weights and state as `checkpoint.engine_state` does."""
        self.step(torch.zeros_like(self._weights), rate=0.0)
        with torch.no_grad():
            self._weights.copy_(other.values)
        state = self._optimizer.state[self._weights]
        for name, value in other._optimizer.state[other._weights].items():
            is_tensor = torch.is_tensor(value)
            if name not in state:
                raise self.of_user.refused(f"makes its state {name!r} after its first step alone")
            state[name] = value.clone() if is_tensor else value

    def check_state(self) -> None:
        """Refuses state other than declared."""
        state = self._optimizer.state[self._weights]
        kind = self.of_user.kind
        sizes = {}
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == self._weights.shape:
                if not value.is_floating_point() and value.element_size() > 2:
                    raise self.of_user.refused(
                        f"keeps {name!r} as {value.dtype}, and checkpoints hold float32"
                    )
                sizes[name] = value.element_size()
            elif not isinstance(value, int | float) and getattr(value, "numel", int)() != 1:
                raise self.of_user.refused(
                    f"keeps {name!r} in its state, neither a tensor of the parameter's shape nor a "
                    "number: checkpoints cannot hold it"
                )
        numbers = state.keys() - sizes.keys()
        if sizes != dict(kind.states) or numbers != set(kind.numbers):
            raise self.of_user.refused(
                f"keeps {sizes} (bytes of an element) and the numbers {sorted(numbers)} in its "
                f"state, and declares states = {dict(kind.states)}, numbers = {list(kind.numbers)}"
            )
