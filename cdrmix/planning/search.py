"""All layouts of a configuration on a cluster, each with its memory and its time, and the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.planning import rules, scale
from cdrmix.planning.cluster import Cluster
from cdrmix.planning.cost import Cost, CostModel
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Arrangement, Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.rank_memory import Memory

# Bounds of what is enumerated, so that a plan takes well under two seconds.
LARGEST_TENSOR = 8
LARGEST_PIPELINE = 32
LARGEST_SEQUENCE = 8
LARGEST_MICRO_BATCH = 16
# Layouts whose estimated speed differs by less are ordered by simplicity, then by memory.
SPEED_STEP = 1.03


@dataclass(frozen=True)
class Candidate:
    """One layout with what it takes.

    Attributes:
        profile: DeepSpeed profile: shipped name, or path of the user's file.
        arrangement: degrees, batch sizes, checkpointing.
        memory: bytes on the fullest rank.
        cost: time of a step.
        fits: whether memory stays within 90 % of the device's, and of the host's.
        missing: what this version cannot carry out yet; empty if it can.
        is_usual: whether it is what the model's size asks for (`scale`).
    """

    profile: str
    arrangement: Arrangement
    memory: Memory
    cost: Cost
    fits: bool
    missing: tuple[str, ...]
    is_usual: bool

    @cached_property
    def preference(self) -> tuple[int, int, int]:
        """Sorts better layouts of equal standing first."""
        degrees = self.arrangement.degrees
        speed = round(math.log(self.cost.tokens_per_second) / math.log(SPEED_STEP))
        axes = (degrees.tensor, degrees.pipeline, degrees.sequence, degrees.expert)
        parts = sum(degree > 1 for degree in axes) + self.arrangement.zero_stage
        parts += self.arrangement.activation_checkpointing + self.arrangement.offloads_optimizer
        return -speed, parts, self.memory.total

    def describe(self) -> str:
        """In one line, with the names of the configuration."""
        a, d = self.arrangement, self.arrangement.degrees
        axes = ("data", "tensor", "pipeline", "sequence", "expert")
        spread = " x ".join(f"{axis} {getattr(d, axis)}" for axis in axes if getattr(d, axis) > 1)
        recomputed = ", activation checkpointing" if a.activation_checkpointing else ""
        if a.sequence_checkpoint_tokens is not None:
            recomputed += f" by {a.sequence_checkpoint_tokens:,} tokens"
        batch = f"micro batch {a.micro_batch_size}"
        return f"{Path(self.profile).stem}, {spread or 'one rank'}, {batch}{recomputed}"

    def to_json(self) -> dict[str, Any]:
        """Layout, memory and time as plain values."""
        made = self.arrangement
        return {
            "profile": Path(self.profile).stem,
            "degrees": asdict(made.degrees),
            "micro_batch_size": made.micro_batch_size,
            "gradient_accumulation_steps": made.gradient_accumulation_steps,
            "activation_checkpointing": made.activation_checkpointing,
            "sequence_checkpoint_tokens": made.sequence_checkpoint_tokens,
            "memory_per_rank_bytes": self.memory.to_json(),
            "buffers_bytes": self.memory.buffers,
            "host_memory_per_rank_bytes": self.memory.on_host,
            "saves_in_background": self.memory.saves_in_background,
            "fits": self.fits and not self.missing,
            "not_available": list(self.missing),
            **self.cost.to_json(),
        }


def candidates(config: Config, cluster: Cluster, *, profile: str | None = None) -> list[Candidate]:
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
    usual: dict[tuple[Degrees, int, bool], bool] = {}
    found = []
    for name, arrangement, missing in _arrangements(config, cluster, profile, total):
        memory = _memory(memory_model, arrangement, cluster)
        fits = memory.fits(cluster)
        cost = cost_model.estimate(arrangement)
        key = (arrangement.degrees, arrangement.zero_stage, arrangement.offloads_optimizer)
        if key not in usual:
            usual[key] = _is_usual(config, arrangement, total)
        found.append(Candidate(name, arrangement, memory, cost, fits, missing, usual[key]))
    return sorted(found, key=_standing)


def _memory(model: MemoryModel, arrangement: Arrangement, cluster: Cluster) -> Memory:
    """What a layout takes, without the copy of a checkpoint where hosts have no room for it and the
    configuration leaves that open."""
    memory = model.estimate(arrangement)
    # on CPUs the hosts hold everything
    has_room = memory.fits(cluster) if cluster.device == "cpu" else memory.fits_host(cluster)
    if has_room or model.config.checkpoint.background is not None:
        return memory
    return model.estimate(arrangement, has_copy=False)


def _standing(candidate: Candidate) -> tuple[Any, ...]:
    # what does not fit is ordered by how little it is too large
    excess = 0 if candidate.fits else candidate.memory.total
    lacking, usual = bool(candidate.missing), candidate.is_usual
    in_front = not candidate.memory.saves_in_background
    # how fast a host steps is assumed: nothing is offloaded where it need not be
    on_host = candidate.arrangement.offloads_optimizer
    return lacking, not candidate.fits, excess, in_front, not usual, on_host, candidate.preference


def _is_usual(config: Config, arrangement: Arrangement, total_params: int) -> bool:
    degrees, dense = arrangement.degrees, config.model.moe is None
    stage, _ = scale.zero_stage(total_params, data=degrees.data, pipeline=degrees.pipeline)
    # what ZeRO-2 cannot hold of a dense model, ZeRO-3 does before its matrices are cut
    stages = {stage, 3} if dense and degrees.data > 1 else {stage}
    if arrangement.zero_stage not in stages or arrangement.offloads_optimizer:
        return False
    if not scale.has_axes_of_its_size(config, degrees, total_params):
        return False
    if total_params >= scale.STAGED_PARAMS:
        return True
    expert, _ = scale.expert_degree(
        config,
        ranks=degrees.data * degrees.tensor,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
    )
    return degrees.expert == expert


def _arrangements(
    config: Config, cluster: Cluster, given: str | None, total_params: int
) -> Iterator[tuple[str, Arrangement, tuple[str, ...]]]:
    """Legal arrangements with the profile of each, and what this version lacks for it."""
    read = cache(lambda profile: read_profile(profile_path(profile)))  # anew in each search
    for degrees in _degrees(config, cluster):
        for profile in _profiles(config, degrees) if given is None else [given]:
            layout = Layout(config, degrees, read(profile), profile, cluster.world_size)
            broken = [rule for rule in rules.RULES if rule.applies(layout)]
            if any(not rule.is_about_this_version for rule in broken):
                continue
            missing = tuple(rule.id.removesuffix("-unavailable") for rule in broken)
            for made in _batched(config, layout, total_params):
                yield profile, made, missing


def _profiles(config: Config, degrees: Degrees) -> list[str]:
    """Those of the shipped profiles that suit."""
    if degrees.pipeline > 1:
        return ["pipeline"]
    names = ["zero1", scale.profile(2, degrees), "zero2_offload"]
    return names if config.model.moe else [*names, "zero3", "zero3_offload"]


def _batched(config: Config, layout: Layout, total_params: int) -> Iterator[Arrangement]:
    """A layout with every micro batch, kept and recomputed."""
    degrees, zero = layout.degrees, layout.deepspeed.get("zero_optimization", {})
    for micro, steps in _batches(config, degrees):
        for recompute in _checkpointing(config):
            span, _ = scale.sequence_checkpoint_tokens(
                config,
                sequence=degrees.sequence,
                recompute=recompute,
                total_params=total_params,
            )
            yield Arrangement(
                degrees,
                layout.zero_stage,
                micro,
                steps,
                recompute,
                span,
                offloads_optimizer=layout.offloads("offload_optimizer"),
                offloads_parameters=layout.offloads("offload_param"),
                bucket_elements=int(zero.get("reduce_bucket_size", Arrangement.bucket_elements)),
            )


def _degrees(config: Config, cluster: Cluster) -> Iterator[Degrees]:
    given, model, world = config.parallel, config.model, cluster.world_size
    is_set = given.model_fields_set
    heads = math.gcd(model.num_heads, model.num_kv_heads)
    within = math.gcd(heads, model.vocab_size, cluster.gpus_per_node)
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
