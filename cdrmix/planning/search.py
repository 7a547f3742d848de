"""All layouts of a configuration on a cluster, each with its memory and its time, and the best.

Legal combinations of degrees and profile follow from the configuration and the number of ranks
alone (`combinations`); what they take is estimated afterwards (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.planning import rules, zero
from cdrmix.planning.cluster import Cluster, Memory
from cdrmix.planning.cost import Cost, CostModel
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Combination, Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan

# Bounds of what is enumerated, so that a plan takes well under two seconds.
LARGEST_TENSOR = 8
LARGEST_PIPELINE = 32
LARGEST_SEQUENCE = 8
LARGEST_MICRO_BATCH = 16
# Layouts whose estimated speed differs by less are ordered by simplicity, then by memory.
SPEED_STEP = 1.03


class Legal(NamedTuple):
    """A combination that no rule about correctness refuses.

    Attributes:
        profile: DeepSpeed profile: shipped name, or path of the user's file.
        combination: degrees and the settings of the profile.
        missing: what this version cannot carry out yet; empty if it can.
    """

    profile: str
    combination: Combination
    missing: tuple[str, ...]


def search(config: Config, cluster: Cluster, *, profile: str | None = None) -> list[Plan]:
    """Every legal layout, in order of preference: those that this version carries out first, of
    these those that fit, of these those with room for checkpoints in the background, of these the
    usual ones for the model's size, of these those that offload nothing, of these the fastest.

    What the configuration gives is kept.

    Args:
        config: of the run.
        cluster: where it runs; its world is the run's.
        profile: name or path; all that are shipped when left out.
    """
    memory_model = MemoryModel(config, cluster.device)
    cost_model = CostModel(memory_model, cluster)
    total = count(config.model, config.training.sequence_length).total_params
    share = config.training.memory_share
    usual: dict[tuple[Degrees, int, bool], bool] = {}
    ranked = []
    legal = combinations(
        config,
        world_size=cluster.world_size,
        gpus_per_node=cluster.gpus_per_node,
        profile=profile,
    )
    for name, combination, missing in legal:
        for layout in _layouts(combination, total):
            memory = _memory(memory_model, layout, cluster)
            key = (layout.degrees, layout.zero_stage, layout.offloads_optimizer)
            if key not in usual:
                usual[key] = _is_usual(config, layout, total)
            plan = Plan(
                profile=name,
                layout=layout,
                memory=memory,
                cost=cost_model.estimate(layout),
                saves_in_background=memory.saves_in_background,
                deepspeed=combination.deepspeed | _of_the_run(combination, layout),
                fits=memory.fits(cluster, share=share),
                missing=missing,
                is_usual=usual[key],
            )
            ranked.append((_standing(plan), plan))
    return [plan for _, plan in sorted(ranked, key=lambda each: each[0])]


def _memory(model: MemoryModel, layout: Layout, cluster: Cluster) -> Memory:
    """Memory of a layout, without the copy of a checkpoint where hosts have no room for it and the
    configuration leaves that open."""
    memory = model.estimate(layout)
    # on CPUs the hosts hold everything
    fits = memory.fits if cluster.device == "cpu" else memory.fits_host
    has_room = fits(cluster, share=model.config.training.memory_share)
    if has_room or model.config.checkpoint.background is not None:
        return memory
    return model.estimate(layout, has_copy=False)


def _standing(plan: Plan) -> tuple[Any, ...]:
    """Sorts better plans first."""
    memory, cost = plan.estimates()
    # what does not fit is ordered by how little it is too large
    excess = 0 if plan.fits else memory.total
    # how fast a host steps is assumed: nothing is offloaded where it need not be
    on_host = plan.layout.offloads_optimizer
    standing = (bool(plan.missing), not plan.fits, excess, not plan.saves_in_background)
    return *standing, not plan.is_usual, on_host, _preference(plan.layout, memory, cost)


def _preference(layout: Layout, memory: Memory, cost: Cost) -> tuple[int, int, int]:
    """Sorts better layouts of equal standing first."""
    degrees = layout.degrees
    speed = round(math.log(cost.tokens_per_second) / math.log(SPEED_STEP))
    axes = (degrees.tensor, degrees.pipeline, degrees.sequence, degrees.expert)
    parts = sum(degree > 1 for degree in axes) + layout.zero_stage
    parts += layout.activation_checkpointing + layout.offloads_optimizer
    return -speed, parts, memory.total


def _is_usual(config: Config, layout: Layout, total_params: int) -> bool:
    degrees = layout.degrees
    dense = config.model.moe is None
    stage, _ = zero.zero_stage(total_params, data=degrees.data, pipeline=degrees.pipeline)
    # what ZeRO-2 cannot hold of a dense model, ZeRO-3 does before its matrices are cut
    stages = {stage, 3} if dense and degrees.data > 1 else {stage}
    if layout.zero_stage not in stages or layout.offloads_optimizer:
        return False
    if not zero.has_axes_of_its_size(config, degrees, total_params):
        return False
    if total_params >= zero.STAGED_PARAMS:
        return True
    expert, _ = zero.expert_degree(config, degrees)
    return degrees.expert == expert


def combinations(
    config: Config, *, world_size: int, gpus_per_node: int, profile: str | None = None
) -> Iterator[Legal]:
    """Legal combinations of degrees and profile; neither memory nor time is looked at.

    Args:
        config: of the run; degrees that it gives are kept.
        world_size: number of ranks.
        gpus_per_node: ranks of a node, which tensor ranks do not leave.
        profile: name or path; all that are shipped when left out.
    Raises:
        PlanError: if a profile cannot be read.
    """
    read = cache(lambda name: read_profile(profile_path(name)))  # anew in each search
    for degrees in _degrees(config, world_size, gpus_per_node):
        for name in _profiles(config, degrees) if profile is None else [profile]:
            combination = Combination(config, degrees, read(name), name, world_size)
            broken = [rule for rule in rules.RULES if rule.applies(combination)]
            if all(rule.is_about_this_version for rule in broken):
                missing = tuple(rule.id.removesuffix("-unavailable") for rule in broken)
                yield Legal(name, combination, missing)


def _profiles(config: Config, degrees: Degrees) -> list[str]:
    """Those of the shipped profiles that suit."""
    if degrees.pipeline > 1:
        return ["pipeline"]
    names = ["zero1", zero.profile_name(2, degrees), "zero2_offload"]
    return names if config.model.moe else [*names, "zero3", "zero3_offload"]


def _layouts(combination: Combination, total_params: int) -> Iterator[Layout]:
    """A combination with every micro batch, kept and recomputed."""
    config = combination.config
    degrees = combination.degrees
    section = combination.deepspeed.get("zero_optimization", {})
    for micro, steps in _batches(config, degrees):
        for recompute in _checkpointing(config):
            span, _ = zero.sequence_checkpoint_tokens(
                config,
                sequence=degrees.sequence,
                recompute=recompute,
                total_params=total_params,
            )
            yield Layout(
                degrees,
                combination.zero_stage,
                micro,
                steps,
                recompute,
                span,
                offloads_optimizer=combination.offloads("offload_optimizer"),
                offloads_parameters=combination.offloads("offload_param"),
                bucket_elements=int(section.get("reduce_bucket_size", Layout.bucket_elements)),
            )


def _of_the_run(combination: Combination, layout: Layout) -> dict[str, Any]:
    """DeepSpeed settings that belong to the run and follow from the configuration."""
    training = combination.training
    micro = layout.micro_batch_size
    steps = layout.gradient_accumulation_steps
    settings: dict[str, Any] = {
        # Sequence ranks are data ranks to DeepSpeed, so its batch counts a shared sample by rank.
        "train_batch_size": micro * steps * layout.degrees.data,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": training.gradient_clipping,
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        # hundreds of micro-steps summed in bf16 would lose the small ones
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if training.precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: scaled dynamically
    if combination.offloads("offload_optimizer"):
        # the loop's own AdamW steps on the host, with torch's kernel for it
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def _degrees(config: Config, world: int, gpus_per_node: int) -> Iterator[Degrees]:
    given = config.parallel
    model = config.model
    is_set = given.model_fields_set
    heads = math.gcd(model.num_heads, model.num_kv_heads)
    within = math.gcd(heads, model.vocab_size, gpus_per_node)
    tensors = [given.tensor] if "tensor" in is_set else _divisors(within, LARGEST_TENSOR)
    deepest = min(model.num_layers, LARGEST_PIPELINE)
    experts = _divisors(model.moe.num_experts, world) if model.moe else [1]
    for tensor in tensors:
        stages = _divisors(world // tensor, deepest)
        for pipeline in [given.pipeline] if "pipeline" in is_set else stages:
            data = world // (tensor * pipeline)
            if data * tensor * pipeline != world or given.data not in (None, data):
                continue
            # sequence ranks exchange the heads that tensor ranks have left them
            shared = math.gcd(heads // tensor, data, config.training.sequence_length)
            sequences = _divisors(shared, LARGEST_SEQUENCE)
            for sequence in [given.sequence] if "sequence" in is_set else sequences:
                for expert in [given.expert] if given.expert else experts:
                    if data * tensor % expert == 0:
                        yield Degrees(data, tensor, pipeline, sequence, expert)


def _batches(config: Config, degrees: Degrees) -> Iterator[tuple[int, int]]:
    """Micro batches that divide a rank's share, with the accumulation that follows."""
    training = config.training
    share = training.global_batch_size // degrees.sample_ranks
    given = training.micro_batch_size
    may_split = given or "sequence" in config.parallel.model_fields_set
    for micro in [given] if given else _divisors(share, LARGEST_MICRO_BATCH):
        # tokens of a sample are split unasked only where a rank cannot take fewer samples
        if degrees.sequence == 1 or micro == 1 or may_split:
            yield micro, share // micro


def _checkpointing(config: Config) -> tuple[bool, ...]:
    """As given; where it was not given, both."""
    training = config.training
    if "activation_checkpointing" in training.model_fields_set:
        return (training.activation_checkpointing,)
    return False, True


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
