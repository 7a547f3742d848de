"""Plan of an evaluation: a trained model laid out over ranks, without gradients and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cdrmix.config.load import resolve
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, PlanError
from cdrmix.planning import rules
from cdrmix.planning.cluster import Cluster, Memory
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, combination_of, shortfall
from cdrmix.planning.text_page import size_text

# Keys of --set that say where and in which numbers a trained model is computed.
_OF_LAYOUT = ("training.precision", "resources.memory_share", "training.memory_share")
# Buffers that a forward pass has, as a step of training does.
_OF_FORWARD = ("workspace", "logits", "segment_mask", "all_to_all", "gathered_weights")


def config_of_judged(
    name: str,
    model: dict[str, Any],
    *,
    sequence_length: int,
    overrides: Sequence[str] = (),
    samples: int = 1,
    place: str,
) -> Config:
    """Makes the configuration of a model that is judged and not trained.

    Args:
        model: section `model`, plain.
        sequence_length: most tokens of an input.
        overrides: --set of the user, of the layout alone.
        samples: of a forward pass on each rank.
        place: origin of the model, for messages.
    Raises:
        ConfigError: if the section is wrong, or an override is of something else.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith("parallel.") and key not in _OF_LAYOUT:
            raise ConfigError(
                f"--set {key}: a trained model is evaluated as it is. Its layout can be set: "
                f"parallel.*, {', '.join(_OF_LAYOUT)}"
            )
    training = {
        "sequence_length": sequence_length,
        "precision": "fp32",
        "global_batch_size": samples,
        "micro_batch_size": samples,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "min_learning_rate": 0.0,
        "warmup_steps": 0,
    }
    values = {"name": name, "model": model, "training": training, "data": {"path": "none"}}
    return resolve(values, overrides, place=place)


def choose_for_evaluation(config: Config, cluster: Cluster, *, profile: str | None = None) -> Plan:
    """Chooses the layout of an evaluation that cuts the model least and fits.

    Degrees that `config` sets are kept. Counted are weights, and of a forward pass at most what a
    training step keeps of its largest block; neither gradients nor an optimizer.

    Args:
        config: as of `config_of_judged`.
        profile: DeepSpeed profile, by name or path, such as zero3; None: chosen.
    Raises:
        PlanError: if the layout is impossible on these ranks, or none fits.
    """
    training = config.training
    values = config.model_dump()
    given = {key: getattr(config.parallel, key) for key in config.parallel.model_fields_set}
    # Whole samples go to each rank: there is nothing to split their tokens for.
    values["parallel"] = {"sequence": 1} | given
    values["training"] |= {
        "global_batch_size": (training.fixed_micro_batch_size or 1) * cluster.world_size,
        "activation_checkpointing": "block",
    }
    values["training"].pop("sequence_checkpoint_tokens")
    planned = resolve(values, place=config.name)
    model = MemoryModel(planned, cluster.device)
    plans = [_without_training(plan, model) for plan in all_plans(planned, cluster, profile)]
    # An optimizer on the host says nothing here; weights there are a last resort.
    runnable = [
        plan
        for plan in plans
        if not plan.missing
        and (profile is not None or plan.offloads_parameters or not plan.offloads_optimizer)
    ]
    if not runnable:  # names what this version lacks
        rules.check(combination_of(plans[0], planned, cluster))
    share = config.resources.share
    fitting = [plan for plan in runnable if plan.estimates()[0].fits(cluster, share=share)]
    if not fitting:
        smallest = min(runnable, key=lambda plan: plan.estimates()[0].of_device(cluster))
        takes = size_text(smallest.estimates()[0].of_device(cluster))
        raise PlanError(
            f"{config.name}: no layout of {cluster.world_size} ranks fits: the smallest, "
            f"{smallest.describe()}, takes {takes} a device, "
            f"{shortfall(smallest, planned, cluster)}. Start more ranks, or "
            "give --batch-size 1 or --set training.precision=bf16"
        )
    best = min(fitting, key=_cuts)
    return replace(best, reasons=_reasons(best, config, cluster, profile), fits=True)


def _without_training(plan: Plan, model: MemoryModel) -> Plan:
    """The same layout with the memory of a forward pass alone, on the fullest rank."""
    stages = range(plan.degrees.pipeline)
    activations = max(model.activations.of_forward(plan, stage) for stage in stages)
    memory = plan.estimates()[0]
    buffers = {name: size for name, size in memory.buffers.items() if name in _OF_FORWARD}
    moving = activations + sum(buffers.values())
    alone = Memory(memory.weights, 0, 0, activations, buffers | model.allowances(moving))
    if plan.offloads_parameters:  # most of what is on the host is the optimizer's
        alone = replace(alone, host=memory.host)
    settings = {key: value for key, value in plan.deepspeed.items() if key != "zero_optimization"}
    zero = plan.deepspeed.get("zero_optimization", {})
    settings["zero_optimization"] = {k: v for k, v in zero.items() if k != "offload_optimizer"}
    return replace(
        plan,
        memory=alone,
        deepspeed=settings,
        activation_checkpointing="none",
        sequence_checkpoint_tokens=None,
    )


def _cuts(plan: Plan) -> tuple[int, ...]:
    """Order of layouts: those first that send least, and keep all ranks busy.

    Stages of a pipeline wait for each other, ZeRO-3 gathers all weights for each batch, tensor
    ranks exchange activations, and expert ranks tokens.
    """
    degrees = plan.degrees
    offloads = plan.offloads_parameters + plan.offloads_optimizer
    zero3 = int(plan.zero_stage == 3 and degrees.data > 1)
    order = (degrees.sequence, degrees.pipeline, zero3, degrees.tensor, degrees.expert)
    return (offloads, *order, plan.zero_stage)


def _reasons(plan: Plan, config: Config, cluster: Cluster, profile: str | None) -> tuple[str, ...]:
    given = [f"parallel.{axis}" for axis in sorted(config.parallel.model_fields_set)]
    why = "cuts the model least of those that fit"
    if given:
        why = f"{', '.join(given)} as given; otherwise, what {why}"
    stored = f"profile {plan.name}: "
    if plan.zero_stage == 3:
        stored += "weights are partitioned over the data ranks, and gathered for each pass"
    else:
        stored += "each data rank holds all weights of its part of the model"
    memory = size_text(plan.estimates()[0].of_device(cluster))
    return (
        f"layout of {cluster.world_size} ranks: {plan.degrees.describe()}: {why}",
        stored + ("" if profile is None else "; as given"),
        f"memory: at most {memory} a device, of which {size_text(plan.estimates()[0].weights)} "
        f"weights in {config.training.precision}; {plan.micro_batch_size} samples a pass",
    )
