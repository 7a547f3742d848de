"""Config and world -> DeepSpeed profile, degrees, batch sizes, and why.

Profile and expert degree follow from the model's size (`scale`). Where the cluster is known, what
fits its memory is chosen (`search`); where it is not, large models take one sample at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules, scale
from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.cluster import GIB, PRESETS, Cluster, make_cluster
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Arrangement, Degrees, Layout, offloads
from cdrmix.planning.memory import USABLE_SHARE, Memory, MemoryModel
from cdrmix.planning.search import Candidate, candidates
from cdrmix.planning.sequence import recurrence_bytes, sequence_form, state_bytes

# Tokens of one forward pass that keep a small model's matrices busy; more only takes memory.
SMALL_MICRO_STEP_TOKENS = 8_192


@dataclass(frozen=True)
class Choice:
    """How a run is laid out.

    Attributes:
        name: profile, shipped name or stem of the user's file.
        path: its JSON file.
        degrees: parallel degrees.
        micro_batch_size: samples per data rank and forward pass.
        gradient_accumulation_steps: forward passes per optimizer step.
        activation_checkpointing: whether blocks are recomputed in the backward pass.
        sequence_checkpoint_tokens: tokens of a sample that are recomputed together; None: all.
        memory: estimated bytes on the fullest rank; None where the device is not known.
        deepspeed: complete settings for `deepspeed.initialize`.
        reasons: why each was chosen, one line each.
        warnings: what runs at a cost that the user may not expect, one line each.
    """

    name: str
    path: Path
    degrees: Degrees
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: bool
    sequence_checkpoint_tokens: int | None
    memory: Memory | None
    deepspeed: dict[str, Any]
    reasons: list[str]
    warnings: list[str]

    @property
    def zero_stage(self) -> int:
        """ZeRO stage."""
        return int(self.deepspeed["zero_optimization"]["stage"])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, as it stands in plan.json."""
        memory = {"memory_per_rank_bytes": self.memory.to_json()} if self.memory else {}
        return {
            "profile": self.name,
            "profile_path": str(self.path),
            "degrees": asdict(self.degrees),
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "activation_checkpointing": self.activation_checkpointing,
            "sequence_checkpoint_tokens": self.sequence_checkpoint_tokens,
            **memory,
            "reasons": self.reasons,
            "warnings": self.warnings,
        }


class _Pick(NamedTuple):
    """What is chosen before DeepSpeed's settings follow from it, and why."""

    profile: str
    degrees: Degrees
    micro_batch_size: int
    activation_checkpointing: bool
    sequence_checkpoint_tokens: int | None
    reasons: list[str]


def choose(
    config: Config,
    *,
    world_size: int,
    profile: str | None = None,
    device: str | None = None,
    cluster: Cluster | None = None,
) -> Choice:
    """Lay a run out on `world_size` ranks; what the configuration gives is kept.

    Args:
        config: of the run.
        world_size: ranks.
        profile: name of a shipped profile or path of a JSON file; chosen when left out.
        device: "cpu" or "cuda", for advice about precision and memory; None where it is not known.
        cluster: where it runs, `world_size` devices; the layout is then the one of `plan`.

    Raises:
        PlanError: if the combination cannot run, naming everything that is wrong with it.
    """
    if cluster is None:
        return _completed(
            *_checked(config, _by_size(config, world_size, profile), world_size, device)
        )
    assert cluster.world_size == world_size, "the cluster is the run's"
    best = laid_out(config, cluster, profile)[0]
    return carried_out(best, config, cluster, profile)


def check_world(
    config: Config, *, world_size: int, profile: str | None = None, device: str | None = None
) -> None:
    """Refuse what cannot run on so many ranks, before it is known what devices they have.

    Raises:
        PlanError: naming everything that is wrong with it.
    """
    try:
        _checked(config, _by_size(config, world_size, profile), world_size, device)
    except PlanError:
        if world_size <= config.training.global_batch_size:
            raise
        # data ranks alone are more than there are samples; other axes may take some of them
        gpu = "cpu" if device == "cpu" else next(iter(PRESETS))
        nominal = make_cluster(nodes=1, gpus_per_node=world_size, gpu=gpu)
        best = laid_out(config, nominal, profile)[0]
        _checked(config, _by_memory(best, config, nominal, profile), world_size, device)


def laid_out(config: Config, cluster: Cluster, profile: str | None = None) -> list[Candidate]:
    """Every legal layout on a cluster, best first; at least one.

    Raises:
        PlanError: if there is none, naming what is wrong with the one that follows from sizes.
    """
    settings = read_profile(profile_path(profile)) if profile is not None else None
    found = candidates(config, cluster, settings=settings)
    if not found or cluster.world_size <= config.training.global_batch_size:
        pick = _by_size(config, cluster.world_size, profile)
        layout = _layout(config, pick, cluster.world_size, cluster.device)
        rules.check(layout, of_this_version=False)
    if not found:
        raise PlanError(f"{config.name}: no layout of {cluster.world_size} ranks is legal")
    return found


def carried_out(
    best: Candidate, config: Config, cluster: Cluster, profile: str | None = None
) -> Choice:
    """The choice that a layout of the search comes to.

    Raises:
        PlanError: if this version cannot carry it out.
    """
    pick = _by_memory(best, config, cluster, profile)
    choice = _completed(*_checked(config, pick, cluster.world_size, cluster.device))
    if best.fits:
        return choice
    return replace(choice, warnings=[*choice.warnings, memory_reason(best, cluster)])


def _layout(config: Config, pick: _Pick, world_size: int, device: str | None) -> Layout:
    path = profile_path(pick.profile)
    label = f"ds_configs/{path.name}" if pick.profile == path.stem else pick.profile
    return Layout(config, pick.degrees, read_profile(path), label, world_size, device)


def _checked(
    config: Config, pick: _Pick, world_size: int, device: str | None
) -> tuple[Layout, _Pick]:
    """The pick with its layout.

    Raises:
        PlanError: if it cannot run.
    """
    layout = _layout(config, pick, world_size, device)
    rules.check(layout)
    return layout, pick


def _completed(layout: Layout, pick: _Pick) -> Choice:
    """The pick with DeepSpeed's settings and what it takes."""
    config, degrees, micro = layout.config, pick.degrees, pick.micro_batch_size
    path, batch = profile_path(pick.profile), config.training.global_batch_size
    steps = batch // (micro * degrees.sample_ranks)
    shared = f" / sequence {degrees.sequence}" if degrees.sequence > 1 else ""
    choice = Choice(
        name=path.stem,
        path=path,
        degrees=degrees,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        activation_checkpointing=pick.activation_checkpointing,
        sequence_checkpoint_tokens=pick.sequence_checkpoint_tokens,
        memory=None,
        deepspeed=layout.deepspeed | _of_the_run(layout, micro, steps),
        reasons=[
            *pick.reasons,
            f"accumulation {steps} = global batch {batch} / "
            f"(micro batch {micro} * {degrees.data} data ranks{shared})",
        ],
        warnings=rules.advise(layout),
    )
    if layout.device is None:
        return choice
    model = MemoryModel(config, "cpu" if layout.device == "cpu" else "cuda")
    return replace(choice, memory=model.estimate(arrangement(choice)))


def smaller_micro_batch(choice: Choice, micro: int) -> int:
    """The largest micro batch that is at most half of `micro` and divides a rank's samples of a
    step; 1 where there is none."""
    samples = choice.micro_batch_size * choice.gradient_accumulation_steps
    return max((n for n in range(1, micro // 2 + 1) if samples % n == 0), default=1)


def with_micro_batch(
    choice: Choice, config: Config, micro: int, *, device: str, reason: str
) -> Choice:
    """The same layout in other micro batches; the global batch and the order of samples stay.

    Args:
        choice: as planned.
        config: of the run.
        micro: samples per data rank and forward pass; divides what a rank takes of a step.
        device: "cpu" or "cuda".
        reason: why.
    """
    steps, rest = divmod(choice.micro_batch_size * choice.gradient_accumulation_steps, micro)
    assert rest == 0, f"micro batch {micro} does not divide a rank's samples"
    batches = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    changed = replace(
        choice,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        deepspeed=choice.deepspeed | batches,
        reasons=[*choice.reasons, f"micro batch {micro} instead, accumulation {steps}: {reason}"],
    )
    model = MemoryModel(config, "cpu" if device == "cpu" else "cuda")
    return replace(changed, memory=model.estimate(arrangement(changed)))


def arrangement(choice: Choice) -> Arrangement:
    """What memory and time of a choice follow from."""
    zero = choice.deepspeed["zero_optimization"]
    return Arrangement(
        choice.degrees,
        choice.zero_stage,
        choice.micro_batch_size,
        choice.gradient_accumulation_steps,
        choice.activation_checkpointing,
        choice.sequence_checkpoint_tokens,
        offloads_optimizer=offloads(choice.deepspeed, "offload_optimizer"),
        offloads_parameters=offloads(choice.deepspeed, "offload_param"),
        bucket_elements=int(zero.get("reduce_bucket_size", Arrangement.bucket_elements)),
    )


def _by_size(config: Config, world_size: int, profile: str | None) -> _Pick:
    """The layout that follows from the sizes of model and world."""
    given = config.parallel
    data = given.data or max(1, world_size // (given.tensor * given.pipeline))
    expert, expert_reason = scale.expert_degree(
        config, ranks=data * given.tensor, tensor=given.tensor, pipeline=given.pipeline
    )
    degrees = Degrees(data, given.tensor, given.pipeline, given.sequence, expert)
    total = count(config.model, config.training.sequence_length).total_params
    stage, profile_reason = scale.zero_stage(total, data=data, pipeline=given.pipeline)
    usual = scale.profile(stage, degrees)
    if profile is not None:
        profile_reason = "--profile as given"
    micro, micro_reason = _micro_batch_size(config, degrees, total)
    reasons = [
        f"profile {Path(profile or usual).stem}: {profile_reason}",
        _degrees_reason(degrees, world_size),
        f"expert {expert}: {expert_reason}",
        f"micro batch {micro}: {micro_reason}",
    ]
    recompute = config.training.activation_checkpointing
    span, span_reason = scale.sequence_checkpoint_tokens(
        config, sequence=degrees.sequence, recompute=recompute, total_params=total
    )
    reasons += _sequence_reasons(config, degrees, span, span_reason)
    return _Pick(profile or usual, degrees, micro, recompute, span, reasons)


def _by_memory(best: Candidate, config: Config, cluster: Cluster, profile: str | None) -> _Pick:
    """The layout that a search over the cluster prefers."""
    made, degrees = best.arrangement, best.arrangement.degrees
    total = count(config.model, config.training.sequence_length).total_params
    stage, profile_reason = scale.zero_stage(total, data=degrees.data, pipeline=degrees.pipeline)
    expert, expert_reason = scale.expert_degree(
        config, ranks=degrees.data, tensor=degrees.tensor, pipeline=degrees.pipeline
    )
    if made.zero_stage != stage or made.offloads_optimizer:
        profile_reason = "takes less memory"
    if degrees.expert != expert:
        expert_reason = "takes less memory"
    micro_reason = "the fastest that fits" if best.fits else "what takes least"
    if config.training.micro_batch_size is not None:
        micro_reason = "training.micro_batch_size as given"
    reasons = [
        f"profile {best.profile}: {'--profile as given' if profile else profile_reason}",
        _degrees_reason(degrees, cluster.world_size),
        f"expert {degrees.expert}: {expert_reason}",
        f"micro batch {made.micro_batch_size}: {micro_reason}",
        memory_reason(best, cluster),
    ]
    if made.activation_checkpointing:
        reasons.append("activation checkpointing: " + _checkpointing_reason(config))
    span, span_reason = scale.sequence_checkpoint_tokens(
        config,
        sequence=degrees.sequence,
        recompute=made.activation_checkpointing,
        total_params=total,
    )
    reasons += _sequence_reasons(config, degrees, span, span_reason)
    return _Pick(
        profile or best.profile,
        degrees,
        made.micro_batch_size,
        made.activation_checkpointing,
        span,
        reasons,
    )


def memory_reason(best: Candidate, cluster: Cluster) -> str:
    """How much of a device, and of a host where something is offloaded, a layout fills."""
    used, there = best.memory.total, cluster.memory_bytes
    verdict = "within" if used <= USABLE_SHARE * there else "NOT within"
    told = (
        f"memory: {used / GIB:.1f} GiB of {there / GIB:.1f} GiB a device, {verdict} the 90 % "
        "that a plan may fill"
    )
    if not best.memory.host:
        return told
    used_by_all = best.memory.host * cluster.gpus_per_node
    verdict = "within" if best.memory.fits_host(cluster) else "NOT within"
    there_gib = cluster.host_memory_gib
    return f"{told}; {used_by_all / GIB:.1f} GiB of {there_gib:g} GiB a host, {verdict} it"


def _checkpointing_reason(config: Config) -> str:
    if config.training.activation_checkpointing:
        return "training.activation_checkpointing as given"
    return "what it saves lets a larger micro batch fit, which is faster"


def _degrees_reason(degrees: Degrees, world_size: int) -> str:
    return (
        f"degrees: data {degrees.data} = {world_size} ranks / (tensor {degrees.tensor} * "
        f"pipeline {degrees.pipeline}), sequence {degrees.sequence}"
    )


def _sequence_reasons(
    config: Config, degrees: Degrees, span: int | None, span_reason: str
) -> list[str]:
    """How a recurrence meets the tokens of other ranks, and how it is recomputed."""
    reasons = []
    if span is not None:
        reasons.append(f"sequence checkpointing by {span:,} tokens: {span_reason}")
    if degrees.sequence == 1:
        return reasons
    model, length = config.model, config.training.sequence_length
    size = ELEMENT_BYTES[config.training.precision]
    form = sequence_form(
        model, sequence_length=length, sequence=degrees.sequence, element_bytes=size
    )
    state = state_bytes(model, 1, degrees.sequence) / 2**20
    heads = recurrence_bytes(model, length // degrees.sequence, size) / 2**20
    compared = f"{state:.3g} MiB of states a layer and sample, {heads:.3g} MiB of heads"
    how = "recurrences pass their state" if form == "state" else "recurrences exchange heads"
    return [*reasons, f"sequence {degrees.sequence}: {how}: {compared}"]


def _micro_batch_size(config: Config, degrees: Degrees, total_params: int) -> tuple[int, str]:
    """Samples per forward pass, and why; divides what a rank takes of the global batch."""
    training = config.training
    if training.micro_batch_size is not None:
        return training.micro_batch_size, "training.micro_batch_size as given"
    if total_params >= scale.LARGE_PARAMS:
        return 1, "the safest where the device's memory is not known; `cdrmix plan` finds more"
    per_rank = training.global_batch_size // degrees.sample_ranks
    cap = max(1, SMALL_MICRO_STEP_TOKENS // training.sequence_length)
    # no sample for each rank: the rules say so
    micro = max((n for n in range(1, min(cap, per_rank) + 1) if per_rank % n == 0), default=1)
    return micro, (
        f"largest share of {per_rank} samples a rank with at most {SMALL_MICRO_STEP_TOKENS} "
        "tokens a forward pass"
    )


def _of_the_run(layout: Layout, micro: int, steps: int) -> dict[str, Any]:
    """DeepSpeed settings that belong to the run and follow from the configuration."""
    training = layout.training
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
    if layout.offloads("offload_optimizer"):
        # the loop's own AdamW steps on the host, with torch's kernel for it
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings
