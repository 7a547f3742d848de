"""Checks of what a user's blocks, schedules, optimizers and terms of the loss say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial

from cdrmix.config.optimizer import OptimizerConfig
from cdrmix.config.plugin import is_plugin
from cdrmix.config.schema import Config, TrainingConfig
from cdrmix.errors import ConfigError
from cdrmix.planning.blocks.block_type import Setting, block_type
from cdrmix.planning.layout import ELEMENT_BYTES
from cdrmix.planning.parameter import Parameter, Part
from cdrmix.planning.plugins import checked_rate, optimizer_of, schedule_of, terms_of

# Parts of a model that parameters of a mixer may count to; Muon takes matrices of some.
_PARTS: tuple[Part, ...] = ("mixer", "time_mix", "low_rank", "attention", "mamba", "norms")
_MOST_RATES = 10_000  # steps of a run whose learning rates are looked at before it


def check_plugins(config: Config) -> None:
    """Refuses blocks, schedules, optimizers and terms of a user's that cannot be planned or run.

    Raises:
        ConfigError: with all problems, one to a line.
    """
    problems = [str(error) for error in _problems(config)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _problems(config: Config) -> Iterator[ConfigError]:
    training, optimizer = config.training, config.optimizer
    checks: list[tuple[str, str, Callable[[], None]]] = [
        ("model.mixers", name, partial(_check_block, config, name, layer))
        for layer, name in enumerate(config.model.mixers or ())
        if is_plugin(name)
    ]
    if is_plugin(training.schedule):
        checks.append(("training.schedule", training.schedule, partial(_check_rates, training)))
    if is_plugin(optimizer.kind):
        checks.append(("optimizer.kind", optimizer.kind, partial(_check_states, optimizer)))
    for number, each in enumerate(config.objectives.plugins if config.objectives else ()):
        where = f"objectives.plugins[{number}]"
        checks.append((where, each.use, partial(_check_term, config, number)))
    for where, name, check in checks:
        try:
            check()
        except ConfigError as error:
            yield error
        except Exception as error:  # any that code of a user's may raise
            yield ConfigError(f"{where}: {name}: {type(error).__name__}: {error}")


def _check_block(config: Config, name: str, layer: int) -> None:
    model = config.model
    kind = block_type(name, model)
    if ":" not in getattr(kind, "module", ""):
        raise ConfigError(f"model.mixers: {name}: `module` names no class of a module")
    names: set[str] = set()
    for each in kind.parameters(model, layer):
        problem = _problem_of(each, names)
        if problem:
            raise ConfigError(f"model.mixers: {name}: parameter {each.name} {problem}")
        names.add(each.name)
    length = config.training.sequence_length
    setting = Setting(
        model=model,
        sequence_length=length,
        element_bytes=ELEMENT_BYTES[config.training.precision],
        device="cpu",
        wkv="cpp",
        segments_documents=config.data.segment_documents,
    )
    sizes = [kind.saved(setting, layer, "whole")]
    if kind.carries_state:
        sizes.append(kind.span_state(setting))
    costs: list[float] = [kind.mixing_flops(model, length)]
    costs += [cost for size in sizes for cost in (size.whole, size.split)]
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(f"model.mixers: {name}: FLOPs or saved bytes are no numbers from 0")


def _problem_of(parameter: Parameter, names: Container[str]) -> str | None:
    """Fault of a parameter that a block type lists behind those `names`; None: it has none."""
    if not parameter.name.startswith("mixer."):
        return "is not named from the block on, as `mixer.NAME`"
    if parameter.name in names:
        return "is listed twice"
    if parameter.part not in _PARTS:
        return f"is of the part {parameter.part!r}. Known: {', '.join(_PARTS)}"
    if parameter.cut is not None and not 0 <= parameter.cut < len(parameter.shape):
        return f"has no axis {parameter.cut} to cut"
    return None


def _check_rates(training: TrainingConfig) -> None:
    """Looks at the rates of a run, of a long one at steps evenly spread from its first to last."""
    schedule = schedule_of(training)
    last = training.num_steps - 1
    points = min(training.num_steps, _MOST_RATES)
    for point in range(points):
        checked_rate(schedule, last * point // max(1, points - 1), training)


def _check_states(optimizer: OptimizerConfig) -> None:
    states = getattr(optimizer_of(optimizer), "states", None)
    # Checkpoints hold float32, which would round what takes 8 bytes.
    if not isinstance(states, Mapping) or any(size not in (1, 2, 4) for size in states.values()):
        raise ConfigError(
            f"optimizer.kind: {optimizer.kind} must declare `states`: the tensors of its state "
            "that have a parameter's shape, each with the bytes of an element, 1, 2 or 4"
        )


def _check_term(config: Config, number: int) -> None:
    each, term = terms_of(config.objectives)[number]
    size = ELEMENT_BYTES[config.training.precision]
    costs = term.flops_per_token(config.model), term.saved_bytes_per_token(config.model, size)
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(
            f"objectives.plugins[{number}]: {each.use}: FLOPs or saved bytes are no numbers from 0"
        )
