"""Config and cluster -> DeepSpeed profile, degrees, batch sizes, and why.

What the configuration gives is kept; the rest is what a search over all layouts prefers (`search`),
by the rules of the model's size (`scale`) among those that fit the memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import rules, scale
from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.cluster import GIB, PRESETS, Cluster, make_cluster
from cdrmix.planning.counts import count
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Arrangement, Degrees, Layout
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.rank_memory import USABLE_SHARE, Memory
from cdrmix.planning.search import Candidate, candidates
from cdrmix.planning.sequence import recurrence_bytes, sequence_form, state_bytes
from cdrmix.planning.stage_b_memory import stage_b_layout, stage_b_reason


@dataclass(frozen=True)
class Choice:
    """How a run is laid out.

    Attributes:
        name: profile, shipped name or stem of the user's file.
        path: its JSON file.
        arrangement: degrees, batch sizes, recomputation.
        memory: estimated bytes on the fullest rank; None: not estimated.
        saves_in_background: whether training goes on while a checkpoint is copied and written.
        deepspeed: complete settings for `deepspeed.initialize`.
        reasons: why each was chosen, one line each.
        warnings: what runs at a cost that the user may not expect, one line each.
        stage_b_pipeline: stages that share out the backbone in Stage B.
    """

    name: str
    path: Path
    arrangement: Arrangement
    memory: Memory | None
    saves_in_background: bool
    deepspeed: dict[str, Any]
    reasons: list[str]
    warnings: list[str]
    stage_b_pipeline: int = 1

    @property
    def degrees(self) -> Degrees:
        """Parallel degrees."""
        return self.arrangement.degrees

    @property
    def micro_batch_size(self) -> int:
        """Samples per data rank and forward pass."""
        return self.arrangement.micro_batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.arrangement.gradient_accumulation_steps

    @property
    def activation_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass."""
        return self.arrangement.activation_checkpointing

    @property
    def sequence_checkpoint_tokens(self) -> int | None:
        """Tokens of a sample that are recomputed together; None: all."""
        return self.arrangement.sequence_checkpoint_tokens

    @property
    def zero_stage(self) -> int:
        """ZeRO stage."""
        return self.arrangement.zero_stage

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, as it stands in plan.json."""
        return {
            "profile": self.name,
            "profile_path": str(self.path),
            "degrees": asdict(self.degrees),
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "activation_checkpointing": self.activation_checkpointing,
            "sequence_checkpoint_tokens": self.sequence_checkpoint_tokens,
            "memory_per_rank_bytes": self.memory and self.memory.to_json(),
            "saves_in_background": self.saves_in_background,
            "reasons": self.reasons,
            "warnings": self.warnings,
        }


def choose(config: Config, cluster: Cluster, *, profile: str | None = None) -> Choice:
    """Lay a run out on a cluster as `plan` does; what the configuration gives is kept.

    Args:
        config: of the run.
        cluster: where it runs.
        profile: name of a shipped profile or path of a JSON file; chosen when left out.

    Raises:
        PlanError: if the combination cannot run, naming everything that is wrong with it.
    """
    return carried_out(laid_out(config, cluster, profile)[0], config, cluster, profile)


def check_world(
    config: Config, *, world_size: int, profile: str | None = None, device: str | None = None
) -> None:
    """Refuse what cannot run on so many ranks, before it is known how large their devices are.

    Raises:
        PlanError: naming everything that is wrong with it.
    """
    gpu = "cpu" if device == "cpu" else next(iter(PRESETS))
    choose(config, make_cluster(nodes=1, gpus_per_node=world_size, gpu=gpu), profile=profile)


def laid_out(config: Config, cluster: Cluster, profile: str | None = None) -> list[Candidate]:
    """Every legal layout on a cluster, best first; at least one.

    Raises:
        PlanError: if there is none, naming what is wrong with the plainest one.
    """
    found, world_size = candidates(config, cluster, profile=profile), cluster.world_size
    # data ranks that do not divide the batch are no reason to cut a model that needs no cutting
    is_free = not config.parallel.model_fields_set
    if not found or (is_free and world_size <= config.training.global_batch_size):
        rules.check(_plainest(config, cluster, profile), of_this_version=False)
    if not found:
        raise PlanError(f"{config.name}: no layout of {world_size} ranks is legal")
    return found


def _plainest(config: Config, cluster: Cluster, profile: str | None) -> Layout:
    """What is given, and otherwise nothing but data ranks, and experts spread as usual."""
    given = config.parallel
    data = given.data or max(1, cluster.world_size // (given.tensor * given.pipeline))
    expert, _ = scale.expert_degree(
        config, ranks=data * given.tensor, tensor=given.tensor, pipeline=given.pipeline
    )
    degrees = Degrees(data, given.tensor, given.pipeline, given.sequence, expert)
    total = count(config.model, config.training.sequence_length).total_params
    stage, _ = scale.zero_stage(total, data=data, pipeline=given.pipeline)
    return _layout(config, degrees, profile or scale.profile(stage, degrees), cluster)


def carried_out(
    best: Candidate, config: Config, cluster: Cluster, profile: str | None = None
) -> Choice:
    """The choice that a layout of the search comes to.

    Raises:
        PlanError: if this version cannot carry it out.
    """
    made, path = best.arrangement, profile_path(best.profile)
    layout = _layout(config, made.degrees, best.profile, cluster)
    rules.check(layout)
    warnings = rules.advise(layout)
    if not best.fits:
        warnings.append(memory_reason(best, cluster))
    reasons = _reasons(best, config, cluster, profile)
    stage_b = stage_b_layout(config, cluster, zero_stage=made.zero_stage)
    if stage_b is not None:
        reasons.append(stage_b_reason(config, cluster, stage_b))
        if not stage_b.memory.fits(cluster):  # better told before Stage A than after it
            warnings.append(reasons[-1])
    return Choice(
        name=path.stem,
        path=path,
        arrangement=made,
        memory=best.memory,
        saves_in_background=best.memory.saves_in_background,
        deepspeed=layout.deepspeed | _of_the_run(layout, made),
        reasons=reasons,
        warnings=warnings,
        stage_b_pipeline=stage_b.degrees.pipeline if stage_b else 1,
    )


def _layout(config: Config, degrees: Degrees, profile: str, cluster: Cluster) -> Layout:
    path = profile_path(profile)
    label = f"ds_configs/{path.name}" if profile == path.stem else profile
    settings = read_profile(path)
    return Layout(config, degrees, settings, label, cluster.world_size, cluster.device)


def _reasons(best: Candidate, config: Config, cluster: Cluster, profile: str | None) -> list[str]:
    """Why each part of a layout is what it is."""
    made, degrees = best.arrangement, best.arrangement.degrees
    batch = config.training.global_batch_size
    shared = f" / sequence {degrees.sequence}" if degrees.sequence > 1 else ""
    reasons = [
        f"profile {Path(best.profile).stem}: {_profile_reason(best, config, profile)}",
        f"degrees: data {degrees.data} = {cluster.world_size} ranks / (tensor {degrees.tensor} * "
        f"pipeline {degrees.pipeline}), sequence {degrees.sequence}",
        f"expert {degrees.expert}: {_expert_reason(config, degrees)}",
        f"micro batch {made.micro_batch_size}: {_micro_batch_reason(best, config)}",
        memory_reason(best, cluster),
    ]
    if made.activation_checkpointing:
        reasons.append("activation checkpointing: " + _checkpointing_reason(config))
    if config.checkpoint.background is None and not best.memory.saves_in_background:
        reasons.append("checkpoints: " + _saving_reason(made, config, cluster))
    return [
        *reasons,
        *_sequence_reasons(config, made),
        f"accumulation {made.gradient_accumulation_steps} = global batch {batch} / "
        f"(micro batch {made.micro_batch_size} * {degrees.data} data ranks{shared})",
    ]


def _profile_reason(best: Candidate, config: Config, profile: str | None) -> str:
    if profile is not None:
        return "--profile as given"
    made, degrees = best.arrangement, best.arrangement.degrees
    total = count(config.model, config.training.sequence_length).total_params
    stage, reason = scale.zero_stage(total, data=degrees.data, pipeline=degrees.pipeline)
    usual = made.zero_stage == stage and not made.offloads_optimizer
    return reason if usual else "takes less memory"


def _expert_reason(config: Config, degrees: Degrees) -> str:
    expert, reason = scale.expert_degree(
        config,
        ranks=degrees.data * degrees.tensor,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
    )
    return reason if degrees.expert == expert else "takes less memory"


def _micro_batch_reason(best: Candidate, config: Config) -> str:
    if config.training.micro_batch_size is not None:
        return "training.micro_batch_size as given"
    return "the fastest that fits" if best.fits else "what takes least"


def memory_reason(best: Candidate, cluster: Cluster) -> str:
    """How much of a device, and of a host where something is offloaded, a layout fills."""
    used, there = best.memory.total, cluster.memory_bytes
    verdict = "within" if used <= USABLE_SHARE * there else "NOT within"
    told = (
        f"memory: {used / GIB:.1f} GiB of {there / GIB:.1f} GiB a device, {verdict} the 90 % "
        "that a plan may fill"
    )
    if not best.memory.host and best.memory.fits_host(cluster):
        return told
    used_by_all = best.memory.on_host * cluster.gpus_per_node
    verdict = "within" if best.memory.fits_host(cluster) else "NOT within"
    there_gib = cluster.host_memory_gib
    return f"{told}; {used_by_all / GIB:.1f} GiB of {there_gib:g} GiB a host, {verdict} it"


def _saving_reason(made: Arrangement, config: Config, cluster: Cluster) -> str:
    """Why training waits for the disk in each save."""
    model = MemoryModel(config, cluster.device)
    copied = model.estimate(made, has_copy=True)
    if cluster.device == "cpu":
        used, there_gib, where = copied.total, cluster.memory_gib, "a rank"
    else:
        used = copied.on_host * cluster.gpus_per_node
        there_gib, where = cluster.host_memory_gib, "a host"
    return (
        "training waits for each save: with a copy to write in the background "
        f"{used / GIB:.1f} GiB of {there_gib:g} GiB {where} would be filled, NOT within 90 %; "
        "checkpoint.background = true has it copied all the same"
    )


def _checkpointing_reason(config: Config) -> str:
    if config.training.activation_checkpointing:
        return "training.activation_checkpointing as given"
    return "what it saves lets a larger micro batch fit, which is faster"


def _sequence_reasons(config: Config, made: Arrangement) -> list[str]:
    """How a recurrence is recomputed, and how it meets the tokens of other ranks."""
    reasons, degrees, training = [], made.degrees, config.training
    if made.sequence_checkpoint_tokens is not None:
        span, why = scale.sequence_checkpoint_tokens(
            config,
            sequence=degrees.sequence,
            recompute=made.activation_checkpointing,
            total_params=count(config.model, training.sequence_length).total_params,
        )
        reasons.append(f"sequence checkpointing by {span:,} tokens: {why}")
    if degrees.sequence == 1:
        return reasons
    model, length = config.model, training.sequence_length
    size = ELEMENT_BYTES[training.precision]
    form = sequence_form(
        model, sequence_length=length, sequence=degrees.sequence, element_bytes=size
    )
    state = state_bytes(model, 1, degrees.sequence) / 2**20
    heads = recurrence_bytes(model, length // degrees.sequence, size) / 2**20
    compared = f"{state:.3g} MiB of states a layer and sample, {heads:.3g} MiB of heads"
    how = "recurrences pass their state" if form == "state" else "recurrences exchange heads"
    return [*reasons, f"sequence {degrees.sequence}: {how}: {compared}"]


def _of_the_run(layout: Layout, made: Arrangement) -> dict[str, Any]:
    """DeepSpeed settings that belong to the run and follow from the configuration."""
    training, micro = layout.training, made.micro_batch_size
    steps = made.gradient_accumulation_steps
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
    made = replace(choice.arrangement, micro_batch_size=micro, gradient_accumulation_steps=steps)
    return replace(
        choice,
        arrangement=made,
        memory=MemoryModel(config, "cpu" if device == "cpu" else "cuda").estimate(
            made, has_copy=choice.saves_in_background
        ),
        deepspeed=choice.deepspeed | batches,
        reasons=[*choice.reasons, f"micro batch {micro} instead, accumulation {steps}: {reason}"],
    )
