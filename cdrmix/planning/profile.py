"""Chooses the plan of a run on a cluster: DeepSpeed profile, degrees, batch sizes, and reasons.

Settings of the configuration are fixed; the others are the best of a search over all layouts that
fit the memory (`search`), with the rules by model size (`zero`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules, zero
from cdrmix.planning.blocks.block_type import block_types
from cdrmix.planning.cluster import GIB, Cluster
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.fine_tuning import training_reason, warnings_of
from cdrmix.planning.layout import ELEMENT_BYTES, Combination, Degrees
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.plugin_checks import check_plugins
from cdrmix.planning.plugins import optimizer_of
from cdrmix.planning.search import combinations, search
from cdrmix.planning.text_page import size_text


def choose(config: Config, cluster: Cluster, *, profile: str | None = None) -> Plan:
    """Chooses the best plan of a run on a cluster, with the settings that the configuration fixes.

    `profile` is the name of a shipped profile or the path of a JSON file; None: chosen. Raises
    PlanError if the combination cannot run, with all reasons.
    """
    best, *others = all_plans(config, cluster, profile)
    rules.check(combination_of(best, config, cluster))
    return explained(best, config, cluster, profile, others=others)


def check_legal(
    config: Config, *, world_size: int, profile: str | None = None, device: str | None = None
) -> None:
    """Checks a run against the rules, before the memory of the devices is known.

    Neither memory nor time is estimated. Without `profile` (name or path) any may be taken; without
    `device` ("cpu" or "cuda") rules about it are left out. Raises PlanError with all reasons if the
    run is impossible on these ranks.
    """
    check_plugins(config)
    # the shape of the cluster is unknown here, so that all ranks count as one node
    found = combinations(config, world_size=world_size, gpus_per_node=world_size, profile=profile)
    legal = list(found)
    plainest = _check_some_are_legal(legal, config, world_size, profile, device)
    if all(missing for _, missing in legal):
        nearest, _ = min(legal, key=lambda each: each[0].degrees != plainest.degrees)
        rules.check(replace(nearest, device=device))
    if device is not None:  # a rule about the device holds for all combinations alike
        rules.check(replace(legal[0][0], device=device), of_this_version=False)
    if config.stage_b is not None:  # a run without Stage B imports none of its modules
        from cdrmix.planning.stage_b import check_stage_b

        check_stage_b(config, world_size)


def all_plans(config: Config, cluster: Cluster, profile: str | None = None) -> list[Plan]:
    """Returns every legal plan on a cluster, best first; raises PlanError if there is none."""
    check_plugins(config)
    plans = search(config, cluster, profile=profile)
    _check_some_are_legal(plans, config, cluster.world_size, profile, cluster.device)
    return plans


def _check_some_are_legal(
    legal: Sequence[object],
    config: Config,
    world_size: int,
    profile: str | None,
    device: str | None,
) -> Combination:
    """Raises PlanError if no layout is legal, or if only a cut of a small model is.

    Returns the plainest combination: the configured degrees; without them, data ranks and usual
    experts.
    """
    parallel = config.parallel
    data = parallel.data or max(1, world_size // (parallel.tensor * parallel.pipeline))
    degrees = Degrees(data, parallel.tensor, parallel.pipeline, parallel.sequence)
    degrees = replace(degrees, expert=zero.expert_degree(config, degrees)[0])
    stage, _ = zero.zero_stage(config.model, degrees)
    name = profile or zero.profile_name(stage, degrees)
    settings = read_profile(profile_path(name))
    plainest = Combination(config, degrees, settings, name, world_size, device)
    # If nothing is fixed and data ranks alone do not divide the batch, the error about the batch is
    # more useful than a model split over more axes than it needs.
    is_free = not parallel.model_fields_set
    if not legal or (is_free and world_size <= config.training.global_batch_size):
        rules.check(plainest, of_this_version=False)
    if not legal:
        raise PlanError(f"{config.name}: no layout of {world_size} ranks is legal")
    return plainest


def explained(
    plan: Plan,
    config: Config,
    cluster: Cluster,
    profile: str | None = None,
    *,
    others: Sequence[Plan],
) -> Plan:
    """Completes a plan of the search with reasons, warnings and the layout of Stage B.

    `others` are all other plans of that search: speed is a reason only where none of them that fits
    is faster.
    """
    combination = combination_of(plan, config, cluster)
    stage_b = None
    if config.stage_b is not None:
        from cdrmix.planning.stage_b import stage_b_layout, stage_b_reason

        stage_b = stage_b_layout(config, cluster, zero_stage=plan.zero_stage)
    if plan.missing:
        reasons = [*rules.broken(combination), memory_reason(plan, config, cluster)]
        return replace(plan, reasons=tuple(reasons), stage_b=stage_b)
    warnings = rules.advise(combination)
    if config.model.kind == "hf":
        warnings += warnings_of(config)
    if not plan.fits:
        over = shortfall(plan, config, cluster)
        warnings.append(f"{memory_reason(plan, config, cluster)}: {over}")
    reasons = _reasons(plan, config, cluster, profile, others)
    if stage_b is not None:
        reasons.append(stage_b_reason(config, cluster, stage_b))
        if not stage_b.fits:  # a warning before Stage A saves the time of training it
            warnings.append(reasons[-1])
    return replace(plan, reasons=tuple(reasons), warnings=tuple(warnings), stage_b=stage_b)


def combination_of(plan: Plan, config: Config, cluster: Cluster) -> Combination:
    """Combination of a plan, for the rules."""
    settings = read_profile(profile_path(plan.profile))
    world_size = cluster.world_size
    return Combination(config, plan.degrees, settings, plan.profile, world_size, cluster.device)


def _reasons(
    plan: Plan, config: Config, cluster: Cluster, profile: str | None, others: Sequence[Plan]
) -> list[str]:
    """Explains each part of a layout, one line each."""
    degrees = plan.degrees
    training = config.training
    stage, by_size = zero.zero_stage(config.model, degrees)
    if profile is not None:
        by_size = "--profile as given"
    elif plan.zero_stage != stage or plan.offloads_optimizer:
        usual = [each for each in others if each.zero_stage == stage]
        by_size = _unusual_reason(plan, f"ZeRO-{stage}", usual)
    elif stage == 2 and plan.fits:
        best = _best_rate(plan, [each for each in others if each.zero_stage == 1])
        told = "does not fit" if best is None else f"has {best:,.0f} tokens per second at best"
        by_size += f"; ZeRO-1 {told}"
    expert, by_experts = zero.expert_degree(config, degrees)
    if degrees.expert != expert:
        usual = [each for each in others if each.degrees.expert == expert]
        by_experts = _unusual_reason(plan, f"expert {expert}", usual)
    faster = _faster(plan, others)
    reasons = [training_reason(config, plan, cluster)] if config.model.kind == "hf" else []
    reasons += [
        f"profile {plan.name}: {by_size}",
        f"degrees: data {degrees.data} = {cluster.world_size} ranks / (tensor {degrees.tensor} * "
        f"pipeline {degrees.pipeline}), sequence {degrees.sequence}",
        *([] if config.model.kind == "hf" else [f"expert {degrees.expert}: {by_experts}"]),
        f"micro batch {plan.micro_batch_size}: {_micro_batch_reason(plan, config, faster)}",
        memory_reason(plan, config, cluster),
    ]
    if not plan.fits:
        over = shortfall(plan, config, cluster)
        reasons.append(f"missing: no layout fits, and the smallest of all, this one, takes {over}")
    elif faster:
        reasons.append(f"speed: {_speed_reason(plan, faster[0], config, cluster)}")
    if plan.recomputes:
        reasons.append(_recomputation_reason(plan, config, others))
    if plan.fits and config.checkpoint.background is None and not plan.saves_in_background:
        reasons.append(f"checkpoints: {_saving_reason(plan, config, cluster)}")
    if plan.fits and not plan.has_memory_tier:
        reasons.append(f"checkpoints: {_memory_tier_reason(plan, config, cluster)}")
    if plan.sequence_checkpoint_tokens is not None:
        form = plan.activation_checkpointing
        span, why = zero.sequence_checkpoint_tokens(config, degrees, form)
        reasons.append(f"sequence checkpointing by {span:,} tokens: {why}")
    of_user = optimizer_of(config.optimizer)
    if of_user is not None:
        held = f"{of_user.state_bytes(1, 0)} bytes of state beside each master weight"
        reasons.append(f"optimizer {config.optimizer.kind}: {held}, as it declares")
    shared = ""
    if degrees.sequence > 1:
        shared = f" / sequence {degrees.sequence}"
        reasons.append(f"sequence {degrees.sequence}: {_sequence_reason(config, degrees)}")
    reasons.append(
        f"accumulation {plan.gradient_accumulation_steps} = global batch "
        f"{training.global_batch_size} / (micro batch {plan.micro_batch_size} * {degrees.data} "
        f"data ranks{shared})"
    )
    return reasons


def _recomputation_reason(plan: Plan, config: Config, others: Sequence[Plan]) -> str:
    """Says why activations are computed again: what would fit where all of them are kept."""
    kept = [
        other.micro_batch_size
        for other in others
        if (other.profile, other.degrees) == (plan.profile, plan.degrees)
        and other.fits
        and not other.recomputes
    ]
    if "activation_checkpointing" in config.training.model_fields_set:
        why = "training.activation_checkpointing as given"
    elif not plan.fits:
        why = "takes less memory than without"
    elif not kept:
        why = "without it no micro batch fits with this profile and these degrees"
    elif max(kept) < plan.micro_batch_size:
        why = f"what it saves lets a micro batch above {max(kept)} fit, which is faster"
    else:
        why = "leaves memory for the copy that a checkpoint is written from beside training"
    form = plan.activation_checkpointing
    if form == "selective":
        why += "; what is no large product and no mixer is run again"
    return f"activation checkpointing {form}: {why}"


def _unusual_reason(plan: Plan, usual: str, plans: Sequence[Plan]) -> str:
    """Says why a plan is not as usual for the size; `plans` are the others that are."""
    best = _best_rate(plan, plans)
    if not plan.fits or best is None:
        return "takes less memory"
    if best < plan.estimates()[1].tokens_per_second:
        return f"estimated faster than {usual}, whose best is {best:,.0f} tokens per second"
    return f"as fast as {usual}, and simpler or smaller"


def _best_rate(plan: Plan, others: Sequence[Plan]) -> float | None:
    """Estimated tokens per second of the fastest that fits, with the optimizer on the same side."""
    rates = [
        each.estimates()[1].tokens_per_second
        for each in others
        if each.fits and not each.missing and each.offloads_optimizer == plan.offloads_optimizer
    ]
    return max(rates, default=None)


def _faster(plan: Plan, others: Sequence[Plan]) -> list[Plan]:
    """Other plans that can run, fit, and are estimated faster; the fastest first."""

    def rate(each: Plan) -> float:
        return each.estimates()[1].tokens_per_second

    runnable = (other for other in others if other.fits and not other.missing)
    faster = (other for other in runnable if rate(other) > rate(plan))
    return sorted(faster, key=rate, reverse=True)


def _micro_batch_reason(plan: Plan, config: Config, faster: Sequence[Plan]) -> str:
    if config.training.fixed_micro_batch_size is not None:
        return "training.micro_batch_size as given"
    if config.training.micro_batch_size == "auto":
        return "by the plan's own estimate; the largest that fits is looked for at the start"
    if not plan.fits:
        return "a larger one takes more memory"
    if not faster:
        return "the fastest that fits"
    chosen = (plan.profile, plan.degrees)
    if any((other.profile, other.degrees) == chosen for other in faster):
        return "not chosen by speed alone: the line 'speed' below says why"
    return "no other is faster with this profile and these degrees"


def _speed_reason(plan: Plan, faster: Plan, config: Config, cluster: Cluster) -> str:
    """Names the rule of the search that puts a plan before one that is estimated faster."""
    rates = [each.estimates()[1].tokens_per_second for each in (plan, faster)]
    of_size = list(zero.unusual_axes(combination_of(faster, config, cluster)))
    usual = not list(zero.unusual_axes(combination_of(plan, config, cluster)))
    if plan.saves_in_background and not faster.saves_in_background:
        why = "there, training would wait for each save: memory has no room for a checkpoint's copy"
    elif of_size and usual:
        rules_of_size = "; ".join(of_size)
        why = f"what is usual for the size comes before an estimate of speed: {rules_of_size}"
    elif faster.offloads_optimizer and not plan.offloads_optimizer:
        why = "an optimizer on the host is a last resort, as its speed is assumed"
    else:
        why = "so small a difference counts as none, and the simpler or smaller layout is taken"
    return (
        f"{rates[0]:,.0f} tokens per second are estimated, and {rates[1]:,.0f} for "
        f"{faster.describe()}, which fits too; {why}"
    )


def _sequence_reason(config: Config, degrees: Degrees) -> str:
    """Compares the bytes of both exchanges of a recurrence, if the model has one."""
    length = config.training.sequence_length
    size = ELEMENT_BYTES[config.training.precision]
    for kind in block_types(config.model):
        state = kind.states_bytes(config.model, 1, degrees.sequence)
        heads = kind.heads_bytes(config.model, length // degrees.sequence, size)
        if state is None or heads is None:
            continue
        form = kind.sequence_form(
            config.model, sequence_length=length, sequence=degrees.sequence, element_bytes=size
        )
        passed = "pass their state" if form == "state" else "exchange heads"
        return (
            f"recurrences {passed}: {state / 2**20:.3g} MiB of states a layer and sample, "
            f"{heads / 2**20:.3g} MiB of heads"
        )
    return "attention exchanges heads"


def memory_reason(plan: Plan, config: Config, cluster: Cluster) -> str:
    """Compares the memory of a plan with that of a device, and of a host if it offloads."""
    memory = plan.estimates()[0]
    share = config.resources.share
    used = memory.of_device(cluster)
    verdict = "within" if used <= share * cluster.memory_bytes else "NOT within"
    of_device = (
        f"memory: {size_text(used)} of {size_text(cluster.memory_bytes)} a device, "
        f"{verdict} the {100 * share:g} % that a plan may fill"
    )
    fits_host = memory.fits_host(cluster, share=share)
    if fits_host and (cluster.device == "cpu" or not memory.host):
        return of_device
    used = memory.on_host * cluster.gpus_per_node
    verdict = "within" if fits_host else "NOT within"
    return (
        f"{of_device}; {size_text(used)} of {cluster.host_memory_gib:,g} GiB a host, {verdict} it"
    )


def shortfall(plan: Plan, config: Config, cluster: Cluster) -> str:
    """Describes by how much a plan exceeds a device and a host, and the part that takes most.

    Both are measured against the share of the memory that a plan may fill; empty if the plan fits.
    """
    memory = plan.estimates()[0]
    share = config.resources.share
    lacking = []
    over = memory.of_device(cluster) - share * cluster.memory_bytes
    if over > 0:
        parts = memory.to_json()
        del parts["total"]
        if memory.of_device(cluster) > memory.total:
            parts["offloaded states"] = memory.host
        lacking.append(f"{size_text(over)} too much for a device ({_largest(parts)})")
    if not memory.fits_host(cluster, share=share):
        ranks = cluster.gpus_per_node
        over = memory.on_host * ranks - share * cluster.host_memory_gib * GIB
        held = {"offloaded states": memory.host, "a checkpoint's copy": memory.checkpoint}
        held["checkpoints in memory"] = memory.memory_tier
        of_host = _largest({part: ranks * size for part, size in held.items()})
        lacking.append(f"{size_text(over)} too much for a host ({of_host})")
    return " and ".join(lacking)


def _largest(parts: Mapping[str, int]) -> str:
    """Names the largest part of a memory, in bytes."""
    total = sum(parts.values())
    largest = max(parts, key=parts.__getitem__)
    if parts[largest] == total:
        return f"all of the {size_text(total)} is {largest}"
    return f"the largest part of {size_text(total)} is {largest}, {size_text(parts[largest])}"


def _saving_reason(plan: Plan, config: Config, cluster: Cluster) -> str:
    """Explains that no copy of a checkpoint fits, so that training waits for each save."""
    model = MemoryModel(config, cluster.device)
    copied = model.estimate(plan, has_copy=True, has_memory_tier=False)
    used = copied.on_host * cluster.gpus_per_node
    limit = f"{cluster.host_memory_gib:,g} GiB a host"
    if cluster.device == "cpu":
        used = copied.total
        limit = f"{cluster.memory_gib:g} GiB a rank"
    return (
        "training waits for each save: with a copy to write in the background "
        f"{size_text(used)} of {limit} would be filled, NOT within "
        f"{100 * config.resources.share:g} %; checkpoint.background = true has it copied all "
        "the same"
    )


def _memory_tier_reason(plan: Plan, config: Config, cluster: Cluster) -> str:
    """Explains that hosts have no room for checkpoints in their memory."""
    memory = MemoryModel(config, cluster.device).estimate(plan)
    used, limit = memory.on_host * cluster.gpus_per_node, f"{cluster.host_memory_gib:,g} GiB a host"
    if cluster.device == "cpu":
        used, limit = memory.total, f"{cluster.memory_gib:g} GiB a rank"
    return (
        f"checkpoint.tiers.memory is left out: with it {size_text(used)} of {limit} would be "
        f"filled, NOT within {100 * config.resources.share:g} %"
    )


def smaller_micro_batch(plan: Plan, micro: int) -> int:
    """Largest micro batch up to half of `micro` that divides a rank's samples of a step."""
    samples = plan.micro_batch_size * plan.gradient_accumulation_steps
    return max((n for n in range(1, micro // 2 + 1) if samples % n == 0), default=1)


def with_micro_batch(plan: Plan, config: Config, micro: int, *, device: str, reason: str) -> Plan:
    """Changes the micro batch of a plan; the global batch and the order of samples stay.

    `micro` (samples per data rank and forward pass) divides a rank's samples of a step; `device` is
    "cpu" or "cuda"; `reason` joins those of the plan.
    """
    changed = " instead" if micro != plan.micro_batch_size else ""
    steps, rest = divmod(plan.micro_batch_size * plan.gradient_accumulation_steps, micro)
    assert rest == 0, f"micro batch {micro} does not divide a rank's samples"
    plan = replace(plan, micro_batch_size=micro, gradient_accumulation_steps=steps)
    model = MemoryModel(config, "cpu" if device == "cpu" else "cuda")
    batches = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return replace(
        plan,
        memory=model.estimate(
            plan, has_copy=plan.saves_in_background, has_memory_tier=plan.has_memory_tier
        ),
        deepspeed=plan.deepspeed | batches,
        reasons=(*plan.reasons, f"micro batch {micro}{changed}, accumulation {steps}: {reason}"),
        cost=None,  # its estimate was for the planned batches
    )
