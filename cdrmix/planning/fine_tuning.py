"""Full training or low-rank adapters of a Hugging Face model: reasons, advice, states on a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cdrmix.config.model_parts import LoraConfig
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.adapters import targets_of
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.counts import params_by_part, trained_params
from cdrmix.planning.folder_model import folder_model
from cdrmix.planning.plan import Plan
from cdrmix.planning.search import search
from cdrmix.planning.text_page import size_text

# Tokens of continued pre-training from which adapters learn less than training of all parameters
# (Biderman et al., arXiv 2405.09673).
MOST_TOKENS_OF_ADAPTERS = 1_000_000_000


def training_reason(config: Config, plan: Plan, cluster: Cluster) -> str:
    """Says what is trained, and the bytes of its states over all ranks."""
    model = config.model
    total = params_by_part(model).total()
    states = size_text(_states(plan) * cluster.world_size)
    if model.lora is None:
        what = f"full: all {_count(total)} parameters"
    else:
        trained = trained_params(model)
        targets = targets_of(model, model.lora)
        what = (
            f"LoRA of rank {model.lora.rank}: {_count(trained)} of {_count(total)} parameters "
            f"({100 * trained / total:.2g} %), in adapters of {', '.join(targets.modules)}"
            + "".join(f", {name}" for name in targets.parameters)
        )
    return f"training {what}; {_named(config)} are {states} over all ranks"


def warnings_of(config: Config) -> list[str]:
    """Warns of what a user may not expect of a Hugging Face model, one line each."""
    model, training = config.model, config.training
    found = []
    tokens = training.num_steps * training.tokens_per_step
    if model.lora is not None and tokens > MOST_TOKENS_OF_ADAPTERS:
        found.append(
            f"{config.name}: model.lora with {tokens / 1e9:.3g}e9 tokens: beyond "
            f"{MOST_TOKENS_OF_ADAPTERS / 1e9:g}e9 tokens of continued pre-training, adapters learn "
            "less than training of all parameters. Try model.lora = null where the memory is there"
        )
    data = config.data
    if not data.segment_documents and "segment_documents" not in data.model_fields_set:
        found.append(
            f"{config.name}: data.segment_documents is false: tokens see other documents of their "
            "sample. Set it to true to keep them apart, or to false without this warning"
        )
    family = folder_model(model)
    if not family.is_known:
        found.append(
            f"{config.name}: activations of model_type {family.family!r} are estimated as those "
            "of llama. Try training.micro_batch_size = 1 first"
        )
    return found


def with_adapters(config: Config, cluster: Cluster, profile: str | None) -> str | None:
    """Advice to train adapters, where they would fit and all parameters do not; else None."""
    best = _best_with_adapters(config, cluster, profile)
    if best is None or not best.fits:
        return None
    memory = best.estimates()[0].of_device(cluster)
    return (
        f"would fit with model.lora = {{}}, adapters of rank {LoraConfig().rank} beside frozen "
        f"weights: {best.describe()}, {size_text(memory)} a rank"
    )


def _best_with_adapters(config: Config, cluster: Cluster, profile: str | None) -> Plan | None:
    """Best plan of a run that would train adapters in place of all parameters; None without one."""
    model = config.model
    if model.kind != "hf" or model.lora is not None or not folder_model(model).is_known:
        return None
    model = model.model_copy(update={"lora": LoraConfig()})
    plans = search(config.model_copy(update={"model": model}), cluster, profile=profile)
    return next((plan for plan in plans if not plan.missing), None)


def check_host(plan: Plan, config: Config, cluster: Cluster, *, available_gib: float) -> None:
    """Refuses states of a Hugging Face model that a host has no room for, before they are made.

    Args:
        plan: that will run, on `cluster`.
        available_gib: memory that processes of the host may still take.
    Raises:
        PlanError: if weights, gradients and states of the optimizer alone are more than that.
    """
    if config.model.kind != "hf":
        return
    memory = plan.estimates()[0]
    of_rank = _states(plan) if cluster.device == "cpu" else memory.host
    needed = of_rank * cluster.gpus_per_node
    if needed <= available_gib * GIB:
        return
    limited = replace(cluster, host_memory_gib=available_gib)
    if cluster.device == "cpu":
        limited = replace(limited, memory_gib=available_gib / cluster.gpus_per_node)
    raise PlanError(
        f"{config.name}: {plan.describe()}: {_named(config)} take "
        f"{size_text(needed)} of each host, and {available_gib:,.1f} GiB are available there "
        "(MemAvailable and the limits of control groups). What to try: "
        + "; or ".join(_ways_out(config, limited))
    )


def _ways_out(config: Config, cluster: Cluster) -> Iterator[str]:
    """Changes by which the states of a model would take less of a host."""
    best = _best_with_adapters(config, cluster, None)
    if best is not None:
        states = size_text(_states(best) * cluster.gpus_per_node)
        yield f"model.lora = {{}}: with adapters the states take {states} of a host"
    if cluster.device == "cpu":
        yield "more hosts, which share the states under ZeRO-3: --profile zero3"
    else:
        yield "more devices, which hold the states under ZeRO-3 without a host: --profile zero3"
        yield "more hosts, which share what --profile zero3_offload keeps on them"


def _named(config: Config) -> str:
    """Names what `_states` counts."""
    if config.training.ema_decay is None:
        return "weights, gradients, masters and moments"
    return "weights, gradients, masters, moments and the average of the weights"


def _states(plan: Plan) -> int:
    memory, _ = plan.estimates()
    return memory.weights + memory.gradients + memory.optimizer + memory.host


def _count(params: int) -> str:
    """Formats a number of parameters: 8.03B, 41.9M."""
    return f"{params / 1e9:.3g}B" if params >= 1e9 else f"{params / 1e6:.3g}M"
