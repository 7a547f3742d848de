"""Enumerates the layouts of a configuration on a cluster, and orders them by memory and time.

Legal combinations of degrees and profile follow from the configuration and the number of ranks
(`combinations`); their memory and time are estimated afterwards (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.planning import rules, zero
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.cost import CostModel
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Combination, Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan

# Bounds of the enumeration, so that a plan takes well under two seconds.
LARGEST_TENSOR = 8
LARGEST_PIPELINE = 32
LARGEST_SEQUENCE = 8
LARGEST_MICRO_BATCH = 16
# Layouts whose speeds differ by a smaller factor are ordered by simplicity, then by memory.
SPEED_STEP = 1.03


class Legal(NamedTuple):
    """Combination that breaks no rule but those about this version.

    Attributes:
        profile: DeepSpeed profile: shipped name, or path of the user's file.
        combination: degrees and the settings of the profile.
        missing: features that this version lacks for it; empty if it can run.
    """

    profile: str
    combination: Combination
    missing: tuple[str, ...]


def search(config: Config, cluster: Cluster, *, profile: str | None = None) -> list[Plan]:
    """Returns every legal layout with its memory and time, best first.

    Args:
        config: of the run; its settings are fixed.
        cluster: devices and links; its number of ranks is the run's.
        profile: name or path; None: all shipped profiles.
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
            memory = memory_model.estimate(layout)
            # on CPUs, the ranks' memory is the host's
            fits = memory.fits if cluster.device == "cpu" else memory.fits_host
            if not fits(cluster, share=share) and config.checkpoint.background is None:
                memory = memory_model.estimate(layout, has_copy=False)
            key = (layout.degrees, layout.zero_stage, layout.offloads_optimizer)
            if key not in usual:
                usual[key] = _is_usual(config, layout, total)
            cost = cost_model.estimate(layout)
            plan = Plan(
                profile=name,
                layout=layout,
                memory=memory,
                cost=cost,
                saves_in_background=memory.saves_in_background,
                deepspeed=combination.deepspeed | _run_settings(combination, layout),
                fits=memory.fits(cluster, share=share),
                missing=missing,
                is_usual=usual[key],
            )
            # Nearly equal speeds are equal here, and the simpler layout wins.
            speed = round(math.log(cost.tokens_per_second) / math.log(SPEED_STEP))
            complexity = layout.degrees.num_model_axes + layout.zero_stage
            complexity += layout.activation_checkpointing + layout.offloads_optimizer
            rank = (
                bool(missing),
                not plan.fits,
                0 if plan.fits else memory.total,  # among those that do not fit, the smallest
                not plan.saves_in_background,  # there is room for a copy to write from
                not plan.is_usual,
                # the speed of a host's optimizer is assumed, so offloading is a last resort
                layout.offloads_optimizer,
                (-speed, complexity, memory.total),
            )
            ranked.append((rank, plan))
    # stable: among equal plans the first of the enumeration wins, which cuts least
    return [plan for _, plan in sorted(ranked, key=lambda each: each[0])]


def _is_usual(config: Config, layout: Layout, total_params: int) -> bool:
    """True if ZeRO stage and degrees follow the rules by model size."""
    degrees = layout.degrees
    is_dense = config.model.moe is None
    stage, _ = zero.zero_stage(total_params, data=degrees.data, pipeline=degrees.pipeline)
    # a dense model that does not fit with ZeRO-2 takes ZeRO-3 before tensor parallelism
    stages = {stage, 3} if is_dense and degrees.data > 1 else {stage}
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
    """Enumerates legal combinations of degrees and profile, without memory and time.

    Args:
        config: of the run; the degrees that it sets are fixed.
        world_size: number of ranks.
        gpus_per_node: ranks of a node, which tensor groups do not leave.
        profile: name or path; None: all shipped profiles.
    Raises:
        PlanError: if a profile cannot be read.
    """
    read = cache(lambda name: read_profile(profile_path(name)))  # files may change between searches
    for degrees in _degrees(config, world_size, gpus_per_node):
        names = ["zero1", zero.profile_name(2, degrees), "zero2_offload"]
        if config.model.moe is None:
            names += ["zero3", "zero3_offload"]
        if degrees.pipeline > 1:
            names = ["pipeline"]
        for name in names if profile is None else [profile]:
            combination = Combination(config, degrees, read(name), name, world_size)
            broken = [rule for rule in rules.RULES if rule.applies(combination)]
            if all(rule.is_about_this_version for rule in broken):
                missing = tuple(rule.id.removesuffix("-unavailable") for rule in broken)
                yield Legal(name, combination, missing)


def _layouts(combination: Combination, total_params: int) -> Iterator[Layout]:
    """Layouts of a combination: every micro batch, with and without recomputation."""
    config = combination.config
    training = config.training
    degrees = combination.degrees
    share = training.global_batch_size // degrees.sample_ranks
    micros = _divisors(share, LARGEST_MICRO_BATCH)
    # The tokens of a sample are split unasked only where a rank cannot take fewer samples.
    if degrees.sequence > 1 and "sequence" not in config.parallel.model_fields_set:
        micros = [1]
    if training.micro_batch_size is not None:
        micros = [training.micro_batch_size]
    checkpointing = [False, True]
    if "activation_checkpointing" in training.model_fields_set:
        checkpointing = [training.activation_checkpointing]
    section = combination.deepspeed.get("zero_optimization", {})
    for micro in micros:
        for recompute in checkpointing:
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
                share // micro,
                recompute,
                span,
                offloads_optimizer=combination.offloads("offload_optimizer"),
                offloads_parameters=combination.offloads("offload_param"),
                bucket_elements=int(section.get("reduce_bucket_size", Layout.bucket_elements)),
            )


def _run_settings(combination: Combination, layout: Layout) -> dict[str, Any]:
    """DeepSpeed settings that follow from the configuration rather than the profile."""
    training = combination.training
    micro = layout.micro_batch_size
    steps = layout.gradient_accumulation_steps
    settings: dict[str, Any] = {
        # Sequence ranks are data ranks to DeepSpeed, which counts a shared sample once a rank.
        "train_batch_size": micro * steps * layout.degrees.data,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": training.gradient_clipping,
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        # a bf16 sum over hundreds of micro-steps would lose small gradients
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if training.precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: dynamic
    if combination.offloads("offload_optimizer"):
        # the training loop passes its own AdamW, which runs torch's kernel on the host
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def _degrees(config: Config, world: int, gpus_per_node: int) -> Iterator[Degrees]:
    parallel = config.parallel
    model = config.model
    is_set = parallel.model_fields_set
    heads = math.gcd(model.num_heads, model.num_kv_heads)
    within = math.gcd(heads, model.vocab_size, gpus_per_node)
    tensors = [parallel.tensor] if "tensor" in is_set else _divisors(within, LARGEST_TENSOR)
    deepest = min(model.num_layers, LARGEST_PIPELINE)
    experts = _divisors(model.moe.num_experts, world) if model.moe else [1]
    for tensor in tensors:
        stages = _divisors(world // tensor, deepest)
        for pipeline in [parallel.pipeline] if "pipeline" in is_set else stages:
            data = world // (tensor * pipeline)
            if data * tensor * pipeline != world or parallel.data not in (None, data):
                continue
            # sequence ranks exchange the heads of one tensor rank
            shared = math.gcd(heads // tensor, data, config.training.sequence_length)
            sequences = _divisors(shared, LARGEST_SEQUENCE)
            for sequence in [parallel.sequence] if "sequence" in is_set else sequences:
                for expert in [parallel.expert] if parallel.expert else experts:
                    if data * tensor % expert == 0:
                        yield Degrees(data, tensor, pipeline, sequence, expert)


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
