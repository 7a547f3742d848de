"""Low-rank adapters (peft) around a causal language model of transformers.

The model has been made and may be partitioned by ZeRO-3 already; adapters are made whole, and
DeepSpeed partitions them with the engine. Only adapters have gradients from then on.

peft wraps a linear layer as it is. Of stacked experts, [E, out, in], it wraps the module that holds
them, once for each weight, one wrapper inside the other: their adapters are `experts.base_layer.
lora_A` and `experts.lora_A`. There A is [E * r, in] with the expert slowest, and B is [out, E * r]
with the expert fastest.
"""

# E experts, r rank

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.lora_targets import (
    ALL_LINEAR,
    LoraTargets,
    default_targets,
    dropout_refused,
    rank_of,
)
from cdrmix.config.model_parts import LoraConfig
from cdrmix.errors import ConfigError
from cdrmix.log import get_logger
from cdrmix.models.initialize import uniform_

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = get_logger(__name__)

_PREFIX = "base_model.model."
_KINDS = ("attention", "mlp", "experts", "mamba")
# Words in the class names of modules, and the kind of what is in them.
_KIND_OF_CLASS = {"attention": "attention", "mamba": "mamba", "mlp": "mlp", "router": "router"}
_ROUTERS = ("gate", "router", "shared_expert_gate")
_NEAR_NAMES = 3


class Adapter(NamedTuple):
    """Adapter of one weight: what it adds is scale * B A, for each expert its own.

    Attributes:
        a, b: logical names of the factors.
        scale: alpha over rank.
        num_experts: of a stack, A [E * r, in] and B [out, E * r]; None: A [r, in], B [out, r].
        is_transposed: the weight is [E, in, out] instead of [E, out, in].
    """

    a: str
    b: str
    scale: float
    num_experts: int | None
    is_transposed: bool


class _Part(NamedTuple):
    """Module of the model by its full name."""

    kind: str
    refusal: str | None  # reason for which it is never adapted


class _Chosen(NamedTuple):
    """Names that peft is given, and the full names of what they stand for."""

    modules: list[str]
    parameters: list[str]
    layers: frozenset[str]  # of linear layers
    weights: frozenset[str]  # of experts


def add_adapters(causal: nn.Module, lora: LoraConfig, *, seed: int) -> PeftModel:
    """Wraps a model, whose own parameters are frozen by that; the same on every rank.

    A is uniform within 1 / sqrt(inputs), by the seed and the adapter's name alone, and B zero, so
    that the model computes what it did before.

    Args:
        causal: a ...ForCausalLM of transformers, without adapters.
        lora: `model.lora`.
        seed: of the run.
    Returns:
        peft's model; `causal` is inside and has been changed in place.
    Raises:
        ConfigError: if peft is missing, or the settings do not fit the model.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora: needs peft, which cannot be imported here ({error}). Try "
            "pip install 'cdrmix[lora]'"
        ) from error
    parts = _parts(causal)
    chosen = _choose(causal, lora, parts)
    shares = _shares(causal, parts, chosen)
    covered, held = shares["experts"]
    if lora.experts and held and not covered:
        raise ConfigError(
            f"model.lora: 0 % of the {held:,} parameters of experts would be adapted. Name their "
            "linear layers in model.lora.target_modules, or say model.lora.experts = false"
        )
    if lora.dropout and chosen.parameters:
        raise ConfigError(f"model.{dropout_refused(lora.dropout)}")
    with warnings.catch_warnings():
        # peft compares patterns with names of linear layers alone, and these are of parameters
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
        # and asks transformers for a property by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
        # DeepSpeed keeps the float32 masters of all that trains
        model = peft.get_peft_model(causal, _settings(lora, chosen), autocast_adapter_dtype=False)
    _check_wrapped(model, chosen)
    _set_initial_values(model, seed)
    _fit_to_zero3(model, causal)
    # a model on the meta device is made for its names alone
    if runtime.rank() == 0 and not next(model.parameters()).is_meta:
        _report(shares, model)
    return model


def _settings(lora: LoraConfig, chosen: _Chosen) -> PeftConfig:
    """Settings in peft's words, as they are written beside saved adapters."""
    import peft

    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    ranks = {name: rank_of(name, lora.rank) for name in chosen.parameters}
    doubled = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=chosen.modules,
        target_parameters=chosen.parameters or None,
        rank_pattern=doubled,
        # so that all adapters have the scale alpha / rank
        alpha_pattern={name: alpha * rank / lora.rank for name, rank in doubled.items()},
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def _set_initial_values(model: PeftModel, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            stem = name.removeprefix(_PREFIX).replace(".default.", ".")
            # in float32, so that they are the same numbers, rounded, in any type of the model
            values = torch.empty(parameter.shape, device=parameter.device)
            uniform_(values, 1 / math.sqrt(parameter.shape[-1]), seed=seed, name=stem)
            parameter.copy_(values)


def _parts(causal: nn.Module) -> dict[str, _Part]:
    """Kind of each module, and whether it may be adapted."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    ends = [getattr(causal, getter)() for getter in getters]
    parts: dict[str, _Part] = {"": _Part("other", "it is the whole model")}
    for name, module in causal.named_modules():
        if not name:
            continue
        above, _, leaf = name.rpartition(".")
        kind = parts[above].kind
        kind_here = _kind_of(module, leaf)
        # experts are made of MLPs, and a mixer may be inside of another module
        if kind_here is not None and kind != "experts":
            kind = kind_here
        refusal = None
        if any(module is end for end in ends):
            refusal = "the head and the embeddings are not adapted"
        elif kind == "router":
            refusal = "routers are not adapted: their choices of experts would move at every step"
        elif kind == "mamba" and leaf in ("out_proj", "conv1d"):
            refusal = "a fused kernel of Mamba reads its weight directly and would miss the adapter"
        elif not isinstance(module, nn.Linear):
            refusal = f"it is a {type(module).__name__}, and linear layers alone are adapted here"
        parts[name] = _Part(kind, refusal)
    return parts


def _kind_of(module: nn.Module, leaf: str) -> str | None:
    """Kind of a module and of what is inside of it; None: that of the module around it."""
    if leaf == "experts":
        return "experts"
    if leaf in _ROUTERS:
        return "router"
    name = type(module).__name__.lower()
    return next((kind for word, kind in _KIND_OF_CLASS.items() if word in name), None)


def _choose(causal: nn.Module, lora: LoraConfig, parts: Mapping[str, _Part]) -> _Chosen:
    """Finds what is adapted, by the user's names or else by the family's."""
    family = str(causal.config.model_type)  # type: ignore[union-attr]
    adaptable = [name for name, part in parts.items() if part.refusal is None]
    given = lora.target_modules
    try:
        defaults = default_targets(family)
    except ConfigError:
        if given is None:
            raise
        defaults = LoraTargets((), ())
    if given == (ALL_LINEAR,):
        # the linear layers of experts by the setting for experts
        named = {name for name in adaptable if lora.experts or parts[name].kind != "experts"}
        modules = sorted({name.rpartition(".")[2] for name in named})
    elif given is None:
        named = {name for name in adaptable if _ends_with(name, defaults.modules)}
        modules = [end for end in defaults.modules if any(_ends_with(n, [end]) for n in named)]
    else:
        named = {name for end in given for name in _named_by(end, parts)}
        modules = list(given)
    if not named:
        raise ConfigError(
            f"model.lora: the model has none of the layers {', '.join(defaults.modules)}. Name "
            f"linear layers in model.lora.target_modules: {_leaves(adaptable)}"
        )
    # An end of a name may be that of other layers, too, which are to stay as they are.
    if {name for name in parts if _ends_with(name, modules)} != named:
        modules = sorted(named)
    weights = {
        name
        for name, _ in causal.named_parameters()
        if lora.experts and _ends_with(name, defaults.parameters)
    }
    parameters = [end for end in defaults.parameters if any(_ends_with(n, [end]) for n in weights)]
    return _Chosen(modules, parameters, frozenset(named), frozenset(weights))


def _ends_with(name: str, ends: Iterable[str]) -> bool:
    """As peft compares names: whole words between dots."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _named_by(end: str, parts: Mapping[str, _Part]) -> list[str]:
    """Full names of the layers that one of `model.lora.target_modules` stands for."""
    adaptable = [name for name, part in parts.items() if part.refusal is None]
    found = [name for name in parts if name and _ends_with(name, [end])]
    for name in found:
        if refusal := parts[name].refusal:
            raise ConfigError(
                f"model.lora.target_modules: {end} names {name}: {refusal}. Leave it out; the "
                f"linear layers are {_leaves(adaptable)}"
            )
    if not found:
        leaves = sorted({name.rpartition(".")[2] for name in adaptable})
        near = difflib.get_close_matches(end, [*leaves, *adaptable], n=_NEAR_NAMES, cutoff=0.5)
        nearest = f"Near names are {', '.join(near)}" if near else "There is no near name"
        raise ConfigError(
            f"model.lora.target_modules: {end} is no layer of the model. {nearest}; the linear "
            f"layers are {_leaves(adaptable)}"
        )
    return found


def _leaves(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _shares(
    causal: nn.Module, parts: Mapping[str, _Part], chosen: _Chosen
) -> dict[str, tuple[int, int]]:
    """Numbers of parameters of each kind: with an adapter beside them, and all."""
    shares = dict.fromkeys(_KINDS, (0, 0))
    for name, parameter in causal.named_parameters():
        above = name.rpartition(".")[0]
        kind = parts[above].kind
        if kind in shares:
            # ZeRO-3 leaves an empty tensor of a parameter
            size = int(getattr(parameter, "ds_numel", parameter.numel()))
            is_covered = above in chosen.layers or name in chosen.weights
            covered, held = shares[kind]
            shares[kind] = (covered + size * is_covered, held + size)
    return shares


def adapters_in(model: PeftModel) -> dict[str, Adapter]:
    """Adapters of a wrapped model by the logical names of the weights that they change."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    found = {}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]
    name: str
    module: Any  # LoraLayer, whose kinds have further attributes
    for name, module in layers:
        stem = name.removeprefix(_PREFIX)
        # wrappers of experts are one inside of the other
        layer = stem.replace(".base_layer", "")
        is_experts = isinstance(module, ParamWrapper)
        weight = module.parameter_name if is_experts else "weight"
        found[f"{layer}.{weight}"] = Adapter(
            a=f"{stem}.lora_A.weight",
            b=f"{stem}.lora_B.weight",
            scale=float(module.scaling["default"]),
            num_experts=int(module.num_experts) if is_experts else None,
            is_transposed=is_experts and not module._did_swap_in_out_features,
        )
    return found


def _check_wrapped(model: PeftModel, chosen: _Chosen) -> None:
    """Raises ConfigError unless peft adapts what was chosen: it translates names of old models."""
    found = set(adapters_in(model))
    expected = {f"{layer}.weight" for layer in chosen.layers} | chosen.weights
    if found != expected:
        raise ConfigError(
            f"model.lora: peft would adapt {_some(found - expected) or 'nothing more'} and leave "
            f"out {_some(expected - found) or 'nothing'}. Try other model.lora.target_modules"
        )


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:_NEAR_NAMES])


def _fit_to_zero3(model: PeftModel, causal: Any) -> None:
    """Tells ZeRO-3 what it cannot see where a base is frozen and experts are wrapped."""
    from peft.tuners.lora.layer import ParamWrapper

    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    # DeepSpeed partitions a module's weights again as soon as the gradients of its inputs are
    # there. With inputs that need none, of the first layer, that would be before its own backward
    # pass (0.19.8).
    causal.enable_input_require_grads()
    # A wrapper reads parameters of other modules, which DeepSpeed notices in an engine's forward
    # pass alone, and an evaluation may come before that.
    zero = runtime.import_deepspeed().zero
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            inner: Any = module
            factors = (*inner.lora_A.values(), *inner.lora_B.values())
            for parameter in (inner.get_param(), *(factor.weight for factor in factors)):
                zero.register_external_parameter(module, parameter)


def _report(shares: Mapping[str, tuple[int, int]], model: PeftModel) -> None:
    """Logs the share of parameters adapted by kind, and how many train."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    of_kinds = [
        f"{100 * covered / held:.4g} % of {kind}"
        for kind, (covered, held) in shares.items()
        if held
    ]
    logger.info("LoRA adapts %s: %s trainable parameters", ", ".join(of_kinds), f"{trained:,}")
