"""Enumerates the layouts of a configuration on a cluster, and orders them by memory and time.

Legal combinations of degrees and profile follow from the configuration and the number of ranks
(`combinations`); their memory and time are estimated afterwards (`search`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from cdrmix.config.schema import Config, Recomputation
from cdrmix.planning import rules, zero
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.cost import CostModel
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import AXES, ELEMENT_BYTES, Combination, Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan

# Bounds of the enumeration, so that a plan takes well under two seconds.
LARGEST_TENSOR = 8
LARGEST_PIPELINE = 32
LARGEST_SEQUENCE = 8
LARGEST_MICRO_BATCH = 16
# Speeds up to this factor below the best count as equal: simplicity decides, then memory.
EQUAL_SPEED = 1.01


def search(config: Config, cluster: Cluster, *, profile: str | None = None) -> list[Plan]:
    """Returns every legal layout with its memory and time, best first.

    The settings of `config` are fixed, and the profile (name or path; None: all shipped ones).
    """
    memory_model = MemoryModel(config, cluster.device)
    cost_model = CostModel(memory_model, cluster)
    share = config.resources.share
    legal = combinations(
        config, world_size=cluster.world_size, gpus_per_node=cluster.gpus_per_node, profile=profile
    )
    groups: dict[tuple[bool | int, ...], list[Plan]] = defaultdict(list)
    for combination, missing in legal:
        has_usual_axes = next(zero.unusual_axes(combination), None) is None
        for layout in _layouts(combination):
            memory = memory_model.estimate(layout)
            # on CPUs, the ranks' memory is the host's
            fits = memory.fits if cluster.device == "cpu" else memory.fits_host
            has_memory_tier = True
            if not fits(cluster, share=share) and memory.has_memory_tier:
                memory = memory_model.estimate(layout, has_memory_tier=False)
                has_memory_tier = False
                fits = memory.fits if cluster.device == "cpu" else memory.fits_host
            if not fits(cluster, share=share) and config.checkpoint.background is None:
                memory = memory_model.estimate(layout, has_copy=False, has_memory_tier=False)
            cost = cost_model.estimate(layout)
            plan = Plan(
                **vars(layout),
                profile=combination.profile,
                memory=memory,
                cost=cost,
                saves_in_background=memory.saves_in_background,
                deepspeed=combination.deepspeed | _run_settings(combination, layout),
                fits=memory.fits(cluster, share=share),
                has_memory_tier=has_memory_tier,
                missing=missing,
            )
            comes_first = (
                bool(missing),
                not plan.fits,
                # among those that do not fit, the smallest
                0 if plan.fits else memory.of_device(cluster),
                not plan.saves_in_background,  # there is room for a copy to write from
                not plan.has_memory_tier,
                not has_usual_axes,
                # the speed of a host's optimizer is assumed, so offloading is a last resort
                layout.offloads_optimizer,
            )
            groups[comes_first].append(plan)
    return [plan for key in sorted(groups) for plan in _fastest_first(groups[key])]


def _fastest_first(plans: list[Plan]) -> list[Plan]:
    """Orders plans by speed, the simplest or smallest of those that are about the fastest first.

    Stable: among equal plans the first of the enumeration wins, which cuts least.
    """

    def speed(plan: Plan) -> float:
        return plan.estimates()[1].tokens_per_second

    about = max(map(speed, plans)) / EQUAL_SPEED

    def rank(plan: Plan) -> tuple[bool, float, int, int]:
        cut = sum(getattr(plan.degrees, axis) > 1 for axis in AXES if axis != "data")
        complexity = cut + plan.zero_stage + plan.recomputes + plan.offloads_optimizer
        is_about = speed(plan) >= about
        order = 0.0 if is_about else -speed(plan)
        return not is_about, order, complexity, plan.estimates()[0].total

    return sorted(plans, key=rank)


def combinations(
    config: Config, *, world_size: int, gpus_per_node: int, profile: str | None = None
) -> Iterator[tuple[Combination, tuple[str, ...]]]:
    """Enumerates combinations that break no rule but those about this version.

    With each come the features that this version lacks for it; none if it can run. Tensor groups
    do not leave a node. Raises PlanError if a profile cannot be read.
    """
    read = cache(lambda name: read_profile(profile_path(name)))  # files may change between searches
    for degrees in _degrees(config, world_size, gpus_per_node):
        names = ["zero1", zero.profile_name(2, degrees), "zero2_offload"]
        if not config.model.has_deepspeed_experts:
            names += ["zero3", "zero3_offload"]
        if degrees.pipeline > 1:
            names = ["pipeline"]
        for name in names if profile is None else [profile]:
            combination = Combination(config, degrees, read(name), name, world_size)
            broken = [rule for rule in rules.RULES if rule.applies(combination)]
            if all(rule.source == rules.THIS_VERSION for rule in broken):
                yield combination, tuple(rule.id.removesuffix("-unavailable") for rule in broken)


def _layouts(combination: Combination) -> Iterator[Layout]:
    """Layouts of a combination: every micro batch, with every form of recomputation."""
    config = combination.config
    training = config.training
    degrees = combination.degrees
    share = training.global_batch_size // degrees.sample_ranks
    micros = _divisors(share, LARGEST_MICRO_BATCH)
    # The tokens of a sample are split unasked only where a rank cannot take fewer samples.
    if degrees.sequence > 1 and "sequence" not in config.parallel.model_fields_set:
        micros = [1]
    if training.fixed_micro_batch_size is not None:
        micros = [training.fixed_micro_batch_size]
    forms: list[Recomputation] = ["none", "selective", zero.most_recomputed(config.model)]
    if config.model.kind == "hf":
        forms.remove("selective")
    if "activation_checkpointing" in training.model_fields_set:
        forms = [training.activation_checkpointing]
    elif training.compile != "off":  # of whole sequences
        forms = ["none", "block"]
    bucket = combination.zero.get("reduce_bucket_size", Layout.bucket_elements)
    stage = combination.zero_stage
    overlaps = stage >= 2 and combination.zero.get("overlap_comm", stage == 3)
    reduced_type = combination.deepspeed.get("communication_data_type")
    for micro in micros:
        for form in forms:
            span, _ = zero.sequence_checkpoint_tokens(config, degrees, form)
            yield Layout(
                degrees,
                combination.zero_stage,
                micro,
                share // micro,
                form,
                span,
                offloads_optimizer=combination.offloads("offload_optimizer"),
                offloads_parameters=combination.offloads("offload_param"),
                bucket_elements=int(bucket),
                overlaps_reduction=overlaps,
                reduced_bytes=ELEMENT_BYTES[reduced_type] if reduced_type else None,
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
    if combination.config.optimizer.kind == "muon":
        # It clips what AdamW trains by itself.
        settings["gradient_clipping"] = 0.0
    if combination.config.optimizer.kind != "adamw":
        settings["zero_allow_untested_optimizer"] = True
    if training.precision == "bf16":
        # Read by BF16_Optimizer alone, which adds each gradient to the float32 sum, and frees it,
        # where the backward pass makes it.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
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
    if model.kind == "hf":  # data ranks alone; the rules refuse whatever else is given
        inner = parallel.tensor * parallel.pipeline
        if world % inner == 0 and parallel.data in (None, world // inner):
            given = (parallel.tensor, parallel.pipeline, parallel.sequence, parallel.expert or 1)
            yield Degrees(world // inner, *given)
        return
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
