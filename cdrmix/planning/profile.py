"""Config and cluster -> DeepSpeed profile, degrees, batch sizes, and why.

What the configuration gives is kept; the rest is what a search over all layouts prefers (`search`),
by the rules of the model's size (`scale`) among those that fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules, zero
from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import (
    Combination,
    Degrees,
    Layout,
    recurrence_bytes,
    sequence_form,
    state_bytes,
)
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.search import combinations, search
from cdrmix.planning.stage_b_memory import check_stage_b, stage_b_layout, stage_b_reason


def choose(config: Config, cluster: Cluster, *, profile: str | None = None) -> Plan:
    """The best plan of a run on a cluster; what the configuration gives is kept.

    Args:
        config: of the run.
        cluster: where it runs.
        profile: name of a shipped profile or path of a JSON file; chosen when left out.

    Raises:
        PlanError: if the combination cannot run, naming everything that is wrong with it.
    """
    best = all_plans(config, cluster, profile)[0]
    rules.check(combination_of(best, config, cluster))
    return explained(best, config, cluster, profile)


def check_legal(
    config: Config, *, world_size: int, profile: str | None = None, device: str | None = None
) -> None:
    """Refuse what cannot run on so many ranks, before it is known how large their devices are.

    Only the rules are asked: neither memory nor time is estimated.

    Args:
        config: of the run.
        world_size: number of ranks.
        profile: name or path of a DeepSpeed profile; null: whatever suits.
        device: "cpu" or "cuda"; None where it is not known.
    Raises:
        PlanError: naming everything that is wrong with it.
    """
    plainest = _plainest(config, world_size, profile, device)
    legal = list(
        combinations(config, world_size=world_size, gpus_per_node=world_size, profile=profile)
    )
    _check_some_are_legal(legal, plainest)
    if all(each.missing for each in legal):
        nearest = min(legal, key=lambda each: each.combination.degrees != plainest.degrees)
        rules.check(
            _combination(config, nearest.combination.degrees, nearest.profile, world_size, device)
        )
    if device is not None:  # all combinations break a rule of the device, or none does
        rules.check(replace(legal[0].combination, device=device), of_this_version=False)
    check_stage_b(config, world_size)


def all_plans(config: Config, cluster: Cluster, profile: str | None = None) -> list[Plan]:
    """Every legal plan on a cluster, best first; at least one.

    Raises:
        PlanError: if there is none, naming what is wrong with the plainest one.
    """
    plans = search(config, cluster, profile=profile)
    _check_some_are_legal(plans, _plainest(config, cluster.world_size, profile, cluster.device))
    return plans


def _check_some_are_legal(legal: Sequence[object], plainest: Combination) -> None:
    config = plainest.config
    world_size = plainest.world_size
    # data ranks that do not divide the batch are no reason to cut a model that needs no cutting
    is_free = not config.parallel.model_fields_set
    if not legal or (is_free and world_size <= config.training.global_batch_size):
        rules.check(plainest, of_this_version=False)
    if not legal:
        raise PlanError(f"{config.name}: no layout of {world_size} ranks is legal")


def _plainest(
    config: Config, world_size: int, profile: str | None, device: str | None
) -> Combination:
    """Degrees as given, and otherwise nothing but data ranks, and experts spread as usual."""
    parallel = config.parallel
    degrees = Degrees(
        tensor=parallel.tensor, pipeline=parallel.pipeline, sequence=parallel.sequence
    )
    degrees = replace(degrees, data=parallel.data or max(1, world_size // degrees.model_ranks))
    degrees = replace(degrees, expert=zero.expert_degree(config, degrees)[0])
    total = count(config.model, config.training.sequence_length).total_params
    stage, _ = zero.zero_stage(total, data=degrees.data, pipeline=degrees.pipeline)
    name = profile or zero.profile_name(stage, degrees)
    return _combination(config, degrees, name, world_size, device)


def explained(plan: Plan, config: Config, cluster: Cluster, profile: str | None = None) -> Plan:
    """A plan of the search with its reasons, its warnings, and the layout of Stage B."""
    warnings = rules.advise(combination_of(plan, config, cluster))
    if not plan.fits:
        warnings.append(memory_reason(plan, config, cluster))
    reasons = _reasons(plan, config, cluster, profile)
    stage_b = stage_b_layout(config, cluster, zero_stage=plan.zero_stage)
    if stage_b is not None:
        reasons.append(stage_b_reason(config, cluster, stage_b))
        if not stage_b.fits:  # better told before Stage A than after it
            warnings.append(reasons[-1])
    return replace(plan, reasons=tuple(reasons), warnings=tuple(warnings), stage_b=stage_b)


def combination_of(plan: Plan, config: Config, cluster: Cluster) -> Combination:
    """The combination that rules look at for a plan."""
    return _combination(config, plan.degrees, plan.profile, cluster.world_size, cluster.device)


def _combination(
    config: Config, degrees: Degrees, profile: str, world_size: int, device: str | None
) -> Combination:
    path = profile_path(profile)
    label = f"ds_configs/{path.name}" if profile == path.stem else profile
    return Combination(config, degrees, read_profile(path), label, world_size, device)


def _reasons(plan: Plan, config: Config, cluster: Cluster, profile: str | None) -> list[str]:
    """Why each part of a layout is what it is."""
    layout = plan.layout
    degrees = plan.degrees
    batch = config.training.global_batch_size
    shared = f" / sequence {degrees.sequence}" if degrees.sequence > 1 else ""
    reasons = [
        f"profile {plan.name}: {_profile_reason(plan, config, profile)}",
        f"degrees: data {degrees.data} = {cluster.world_size} ranks / (tensor {degrees.tensor} * "
        f"pipeline {degrees.pipeline}), sequence {degrees.sequence}",
        f"expert {degrees.expert}: {_expert_reason(config, degrees)}",
        f"micro batch {layout.micro_batch_size}: {_micro_batch_reason(plan, config)}",
        memory_reason(plan, config, cluster),
    ]
    if layout.activation_checkpointing:
        reasons.append("activation checkpointing: " + _checkpointing_reason(config))
    if config.checkpoint.background is None and not plan.saves_in_background:
        reasons.append("checkpoints: " + _saving_reason(layout, config, cluster))
    return [
        *reasons,
        *_sequence_reasons(config, layout),
        f"accumulation {layout.gradient_accumulation_steps} = global batch {batch} / "
        f"(micro batch {layout.micro_batch_size} * {degrees.data} data ranks{shared})",
    ]


def _profile_reason(plan: Plan, config: Config, profile: str | None) -> str:
    if profile is not None:
        return "--profile as given"
    layout = plan.layout
    degrees = plan.degrees
    total = count(config.model, config.training.sequence_length).total_params
    stage, reason = zero.zero_stage(total, data=degrees.data, pipeline=degrees.pipeline)
    usual = layout.zero_stage == stage and not layout.offloads_optimizer
    return reason if usual else "takes less memory"


def _expert_reason(config: Config, degrees: Degrees) -> str:
    expert, reason = zero.expert_degree(config, degrees)
    return reason if degrees.expert == expert else "takes less memory"


def _micro_batch_reason(plan: Plan, config: Config) -> str:
    if config.training.micro_batch_size is not None:
        return "training.micro_batch_size as given"
    return "the fastest that fits" if plan.fits else "what takes least"


def memory_reason(plan: Plan, config: Config, cluster: Cluster) -> str:
    """Tells how much of a device, and of a host where something is offloaded, a plan fills."""
    memory = plan.estimates()[0]
    there = cluster.memory_bytes
    used = memory.total
    share = config.training.memory_share
    verdict = "within" if used <= share * there else "NOT within"
    told = (
        f"memory: {used / GIB:.1f} GiB of {there / GIB:.1f} GiB a device, {verdict} the "
        f"{100 * share:g} % that a plan may fill"
    )
    if not memory.host and memory.fits_host(cluster, share=share):
        return told
    used_by_all = memory.on_host * cluster.gpus_per_node
    verdict = "within" if memory.fits_host(cluster, share=share) else "NOT within"
    there_gib = cluster.host_memory_gib
    return f"{told}; {used_by_all / GIB:.1f} GiB of {there_gib:g} GiB a host, {verdict} it"


def _saving_reason(layout: Layout, config: Config, cluster: Cluster) -> str:
    """Why training waits for the disk in each save."""
    model = MemoryModel(config, cluster.device)
    share = 100 * config.training.memory_share
    copied = model.estimate(layout, has_copy=True)
    if cluster.device == "cpu":
        used = copied.total
        there_gib = cluster.memory_gib
        where = "a rank"
    else:
        used = copied.on_host * cluster.gpus_per_node
        there_gib = cluster.host_memory_gib
        where = "a host"
    return (
        "training waits for each save: with a copy to write in the background "
        f"{used / GIB:.1f} GiB of {there_gib:g} GiB {where} would be filled, NOT within "
        f"{share:g} %; checkpoint.background = true has it copied all the same"
    )


def _checkpointing_reason(config: Config) -> str:
    if config.training.activation_checkpointing:
        return "training.activation_checkpointing as given"
    return "what it saves lets a larger micro batch fit, which is faster"


def _sequence_reasons(config: Config, layout: Layout) -> list[str]:
    """Reasons for the way that a recurrence is recomputed and meets the tokens of other ranks."""
    reasons = []
    degrees = layout.degrees
    training = config.training
    if layout.sequence_checkpoint_tokens is not None:
        span, why = zero.sequence_checkpoint_tokens(
            config,
            sequence=degrees.sequence,
            recompute=layout.activation_checkpointing,
            total_params=count(config.model, training.sequence_length).total_params,
        )
        reasons.append(f"sequence checkpointing by {span:,} tokens: {why}")
    if degrees.sequence == 1:
        return reasons
    model = config.model
    length = training.sequence_length
    size = ELEMENT_BYTES[training.precision]
    form = sequence_form(
        model, sequence_length=length, sequence=degrees.sequence, element_bytes=size
    )
    state = state_bytes(model, 1, degrees.sequence) / 2**20
    heads = recurrence_bytes(model, length // degrees.sequence, size) / 2**20
    compared = f"{state:.3g} MiB of states a layer and sample, {heads:.3g} MiB of heads"
    how = "recurrences pass their state" if form == "state" else "recurrences exchange heads"
    return [*reasons, f"sequence {degrees.sequence}: {how}: {compared}"]


def smaller_micro_batch(plan: Plan, micro: int) -> int:
    """The largest micro batch that is at most half of `micro` and divides a rank's samples of a
    step; 1 where there is none."""
    samples = plan.micro_batch_size * plan.gradient_accumulation_steps
    return max((n for n in range(1, micro // 2 + 1) if samples % n == 0), default=1)


def with_micro_batch(plan: Plan, config: Config, micro: int, *, device: str, reason: str) -> Plan:
    """The same layout in other micro batches; the global batch and the order of samples stay.

    Args:
        plan: as planned.
        config: of the run.
        micro: samples per data rank and forward pass; divides what a rank takes of a step.
        device: "cpu" or "cuda".
        reason: why.
    """
    steps, rest = divmod(plan.micro_batch_size * plan.gradient_accumulation_steps, micro)
    assert rest == 0, f"micro batch {micro} does not divide a rank's samples"
    batches = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    layout = replace(plan.layout, micro_batch_size=micro, gradient_accumulation_steps=steps)
    return replace(
        plan,
        layout=layout,
        memory=MemoryModel(config, "cpu" if device == "cpu" else "cuda").estimate(
            layout, has_copy=plan.saves_in_background
        ),
        deepspeed=plan.deepspeed | batches,
        reasons=(*plan.reasons, f"micro batch {micro} instead, accumulation {steps}: {reason}"),
        cost=None,  # of the batches that were planned
    )
