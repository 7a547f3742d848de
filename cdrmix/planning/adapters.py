"""Low-rank adapters of a Hugging Face model: their parameters, and the frozen ones; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.hugging_face import TESTED_FAMILIES
from cdrmix.config.lora_targets import ALL_LINEAR, LoraTargets, default_targets, rank_of
from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import LoraConfig
from cdrmix.errors import PlanError
from cdrmix.planning.folder_model import folder_model, folder_parameters
from cdrmix.planning.parameter import Parameter


def trained_parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Parameters of a Hugging Face model with adapters, if it has any, in the order of the module.

    With adapters all others are frozen. Those of a linear layer follow its weight; those of
    experts, packed as [experts * rank, in] and [out, experts * rank], follow all of the experts.

    Raises:
        PlanError: as `folder_parameters`, or if the adapters have no place in the model.
    """
    base = folder_parameters(model)
    if model.lora is None:
        yield from base
        return
    targets = targets_of(model, model.lora)
    waiting: list[Parameter] = []  # adapters of experts
    has_any = False
    for parameter in base:
        if waiting and parameter.part != "experts":
            yield from waiting
            waiting = []
        yield parameter._replace(is_trained=False)
        adapters = list(_adapters(parameter, targets, model.lora.rank))
        has_any = has_any or bool(adapters)
        if parameter.part == "experts":
            waiting += adapters
        else:
            yield from adapters
    yield from waiting
    if not has_any:
        names = ", ".join(targets.modules + targets.parameters)
        raise PlanError(
            f"model.lora: the model has no linear layers of the names {names}. Give others as "
            "model.lora.target_modules, or leave it out"
        )


def targets_of(model: ModelConfig, lora: LoraConfig) -> LoraTargets:
    """Adapted parts of a model: those that are given, or else those of its family."""
    family = folder_model(model).family
    if lora.target_modules not in (None, (ALL_LINEAR,)):
        parameters: tuple[str, ...] = ()
        if lora.experts and model.moe is not None:
            if family not in TESTED_FAMILIES:
                raise PlanError(
                    f"model.lora.experts = true: nothing is known of the experts of model_type "
                    f"{family!r}. Try false, which leaves them as they are"
                )
            parameters = default_targets(family).parameters
        return LoraTargets(lora.target_modules, parameters)
    targets = default_targets(family)
    return targets if lora.experts else targets._replace(parameters=())


def _adapters(parameter: Parameter, targets: LoraTargets, rank: int) -> Iterator[Parameter]:
    """Both factors of the adapter of a parameter; none if it has no adapter."""
    module, _, kind = parameter.name.rpartition(".")
    if len(parameter.shape) == 3 and parameter.part == "experts":
        if not parameter.name.endswith(tuple(f".{name}" for name in targets.parameters)):
            return
        experts, leaving, entering = parameter.shape
        rank = experts * rank_of(parameter.name, rank)
        module = parameter.name
    elif kind == "weight" and len(parameter.shape) == 2 and parameter.layer is not None:
        if not f".{module}".endswith(tuple(f".{name}" for name in targets.modules)):
            return
        leaving, entering = parameter.shape
    else:
        return
    shapes = {"A": (rank, entering), "B": (leaving, rank)}
    for factor, shape in shapes.items():
        name = f"{module}.lora_{factor}.weight"
        yield Parameter(name, shape, "adapters", layer=parameter.layer)
