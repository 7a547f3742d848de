"""Shrinks a plan, and its Stage B, to a rehearsal that runs on the processors of a laptop.

Each degree above one becomes two, in the same order of axes. Kinds of blocks, DeepSpeed profile,
accumulation, recomputation, and the phases, tasks and parts of Stage B stay; widths, layers,
lengths and numbers of texts shrink.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MoEConfig
from cdrmix.config.objectives import OF_TOKENS
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import Cluster, processes
from cdrmix.planning.layout import AXES, Degrees, Layout
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from cdrmix.planning.stage_b import stage_b_plan, stage_b_section
from cdrmix.planning.stages import stages_without_experts

# Processes that a laptop runs at once.
MOST_RANKS = 8
# Dimensions of the small model: degrees of two divide them, and the kernels support them.
HEAD_DIM = 32
SEQUENCE_LENGTH = 64
VOCAB_SIZE = 512
EXPERT_WIDTH = 64
SMALL_SPAN_TOKENS = 12  # of sequence checkpointing
STEPS = 6
SAVED_STEP = 3
# With AdamW's usual 1e-8, weights whose gradients almost cancel out move by rounding alone, and
# with them the choice between experts of about the same score.
EPSILON = 1e-6
PHASE_STEPS = 2  # of a phase of Stage B: the second step starts from weights that the first changed
WINDOW_TOKENS = 128  # whose segments hold a sentence of any task in the corpus's short tokens
LENGTH_RATIOS = (1, 2)
TEXTS = 2
GROUP_SIZE = 2
SUMMARY_DIM = 64
MEMORY_TOKENS = 512


@dataclass(frozen=True)
class Rehearsal:
    """Small run that covers a plan, or a part of it."""

    config: Config  # of the small run, with its degrees
    profile: str  # DeepSpeed profile of the plan
    degrees: Degrees  # of the small run
    last_step: int = STEPS  # last step that it trains
    saved_step: int = SAVED_STEP  # step after which it writes a checkpoint on the way

    def describe(self) -> str:
        """Describes the layout in one line."""
        return rehearsal_text(self.profile, self.degrees)


def rehearsal_text(profile: str, degrees: Degrees) -> str:
    """Describes a layout in one line."""
    spread = degrees.describe(("pipeline", "tensor", "data", "sequence", "expert"))
    return f"{profile}, {spread}"


@dataclass(frozen=True)
class Aspect:
    """Property of a plan, with its values in the plan and in each rehearsal.

    `is_exercised` is True if a rehearsal covers the property, None if the plan does not have it.
    """

    name: str
    planned: str
    rehearsed: tuple[str, ...]
    is_exercised: bool | None


def rehearsals(config: Config, plan: Plan) -> list[Rehearsal]:
    """Returns small runs that together have every axis of a plan: one, or two where one would need
    more processes than a laptop runs.

    Raises:
        PlanError: if the model is not RWKX-V, which alone has small ones here.
    """
    if config.model.kind == "hf":
        raise PlanError(
            f"{config.name}: model.kind = hf: only RWKX-V is made smaller for a rehearsal. Try a "
            "run of a small model of the same family: cdrmix train --set model.path=FOLDER --set "
            "training.max_steps=2"
        )
    return [
        Rehearsal(_small_config(config, plan, degrees), plan.profile, degrees)
        for degrees in small_degrees(plan.degrees)
    ]


def small_degrees(planned: Degrees) -> list[Degrees]:
    """Reduces each degree to two at most; splits the axes over two layouts past MOST_RANKS."""
    wanted = (planned.pipeline, planned.tensor, planned.sequence, planned.sample_ranks)
    pipeline, tensor, sequence, samples = (min(2, degree) for degree in wanted)
    layouts = [(pipeline, tensor, sequence, samples)]
    if math.prod(layouts[0]) > MOST_RANKS:  # pipeline and sequence are in both
        layouts = [(pipeline, tensor, sequence, 1), (pipeline, 1, sequence, samples)]
    return [
        Degrees(
            data=sequence * samples,
            tensor=tensor,
            pipeline=pipeline,
            sequence=sequence,
            expert=min(2, planned.expert, sequence * samples * tensor),
        )
        for pipeline, tensor, sequence, samples in layouts
    ]


def _small_experts(moe: MoEConfig, degrees: Degrees) -> dict[str, Any]:
    return moe.model_dump() | {
        "num_experts": moe.num_experts + moe.num_experts % degrees.expert,  # ranks have as many
        "expert_hidden_size": EXPERT_WIDTH,
        "layers": None,
        "drop_tokens": False,  # the dropped tokens would depend on the layout
    }


def _small_layers(model: ModelConfig, sizes: dict[str, Any], degrees: Degrees) -> dict[str, Any]:
    """Settings of a few layers that show every kind of the model's, beside its small `sizes`.

    A schedule stays as it is. Where layers are listed, each block type is there with each kind of
    feed-forward that it has, routed or not, in the order of the model, once for every stage, and
    oftener where a stage would be left without experts: the last has few layers if it computes much
    above them.
    """
    moe = None if model.moe is None else _small_experts(model.moe, degrees)
    mod = None if model.mod is None else model.mod.model_dump()
    is_routed_by_list = model.mod is not None and model.mod.layers is not None
    has_both = model.moe is not None and model.has_dense_layers
    if model.mixers is None and not has_both and not is_routed_by_list:
        fraction = model.transformer_fraction
        layers_of_both_kinds = math.ceil(1 / fraction) if 0 < fraction < 1 else 1
        return {
            "num_layers": max(4, layers_of_both_kinds),
            "schedule": model.schedule,
            "transformer_fraction": fraction,
            "moe": moe,
            "mod": mod,
        }
    routed = model.routed_layers() if is_routed_by_list else ()
    kinds = [
        (kind, model.has_experts(layer), layer in routed)
        for layer, kind in enumerate(model.layer_kinds())
    ]
    different = list(dict.fromkeys(kinds))
    for times in count(max(degrees.pipeline, -(-4 // len(different)))):
        layers = different * times
        if moe is not None:
            moe["layers"] = [n for n, (_, has_experts, _) in enumerate(layers) if has_experts]
        if mod is not None and is_routed_by_list:
            mod["layers"] = [n for n, (_, _, is_routed) in enumerate(layers) if is_routed]
        mixers = [kind for kind, *_ in layers]
        settings = {"num_layers": len(layers), "mixers": mixers, "moe": moe, "mod": mod}
        small = ModelConfig.model_validate(sizes | settings)
        if not stages_without_experts(small, SEQUENCE_LENGTH, degrees.pipeline):
            return settings
    raise AssertionError("a stage of enough layers has each kind")


def _small_config(config: Config, layout: Layout, degrees: Degrees) -> Config:
    model = config.model
    heads = 8 if model.num_kv_heads < model.num_heads else 4
    accumulation = min(2, layout.gradient_accumulation_steps)
    micro = min(2, layout.micro_batch_size)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["name"] = f"{config.name}-rehearsal"
    sizes = {
        "hidden_size": heads * HEAD_DIM,
        "num_heads": heads,
        "num_kv_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "ffn_activation": model.ffn_activation,
        "mamba": model.mamba and model.mamba.model_dump(),
        "routing_mamba": model.routing_mamba and model.routing_mamba.model_dump(),
        "mtp": model.mtp and model.mtp.model_dump(),
        "mixer_options": model.mixer_options,  # all types are there
    }
    values["model"] = sizes | _small_layers(model, sizes, degrees)
    values["parallel"] = {axis: getattr(degrees, axis) for axis in AXES}
    values["training"] |= {
        "stage": "a",
        "start_from": None,
        "max_steps": STEPS,
        "total_tokens": None,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "epsilon": EPSILON,
        "min_learning_rate": 1e-4,
        # whose lengths would not fit into so few steps
        "schedule": "cosine",
        "schedule_options": {},
        "hold_learning_rate": None,
        "settle_steps": None,
        "global_batch_size": micro * accumulation * degrees.sample_ranks,
        "micro_batch_size": micro,
        "sequence_length": SEQUENCE_LENGTH,
        "precision": "fp32",  # rounding in bf16 would hide a wrong sum
        "activation_checkpointing": layout.activation_checkpointing,
        "compile": "off",  # minutes for a small model as for a large one
        "sequence_checkpoint_tokens": layout.sequence_checkpoint_tokens and SMALL_SPAN_TOKENS,
    }
    values["checkpoint"] = {"every_steps": SAVED_STEP, "keep": STEPS}
    values["monitoring"] = {"log_every_steps": 1}
    values["evaluation"] = {
        "every_steps": None,
        "final_tokens": 4 * SEQUENCE_LENGTH,
        "sample_tokens": 2,
        "baselines": False,
    }
    values["cpt"] = None  # its data are not there
    values["data"] = {"path": "rehearsal", "segment_documents": config.data.segment_documents}
    if config.data.token_weights is not None:
        values["data"]["token_weights"] = {"text": 1.0}  # the only kind in the rehearsal's corpus
    if config.objectives is not None:
        # Likewise. What is given besides, such as the z-loss, is rehearsed as it is.
        values["objectives"] |= {name: float(name == "text") for name in OF_TOKENS}
    return Config.model_validate(values)


# Name, value in the plan, value in every rehearsal.
_Row = tuple[str, str, str]


def aspects(config: Config, plan: Plan, small: list[Rehearsal]) -> list[Aspect]:
    """Lists the properties of a plan that its rehearsals cover, and those they do not."""
    axes = {axis: axis for axis in ("pipeline", "tensor", "sequence", "expert")}
    axes["ranks with samples of their own"] = "sample_ranks"
    schedule = f"{config.model.schedule}, both kinds of blocks"
    if config.model.mixers is not None:
        schedule = f"mixers, {', '.join(dict.fromkeys(config.model.mixers))}"
    recomputes = plan.activation_checkpointing
    steps = plan.gradient_accumulation_steps
    covered = [
        ("accumulation", str(steps), str(min(2, steps))),
        ("DeepSpeed profile", plan.profile, plan.profile),
        ("activation checkpointing", recomputes, recomputes),
    ]
    if plan.sequence_checkpoint_tokens is not None:
        planned = f"spans of {plan.sequence_checkpoint_tokens:,} tokens"
        covered.append(("sequence checkpointing", planned, f"spans of {SMALL_SPAN_TOKENS} tokens"))
    covered.append(("schedule", schedule, schedule))
    # properties that only the cluster itself can cover
    model = config.model
    small_model = small[0].config.model
    reduced = [
        ("precision", config.training.precision, "fp32"),
        ("hidden size", f"{model.hidden_size:,}", str(small_model.hidden_size)),
        ("layers", str(model.num_layers), str(small_model.num_layers)),
        ("tokens a sample", f"{config.training.sequence_length:,}", str(SEQUENCE_LENGTH)),
        ("devices and links", "as planned", "processors, gloo"),
    ]
    if model.moe is not None:
        numbers = [each.config.model.moe.num_experts for each in small if each.config.model.moe]
        if max(numbers) != model.moe.num_experts:
            reduced.append(("experts a layer", str(model.moe.num_experts), str(max(numbers))))
        if model.moe.drop_tokens:
            reduced.append(("tokens beyond an expert's capacity", "dropped", "kept"))
    if config.data.token_weights is not None:
        reduced.append(("weights of tokens", "by what they are part of", "all 1"))
    if config.objectives is not None:
        reduced.append(("objectives", "as given", "text alone"))
    if config.data.mixture is not None:
        reduced.append(("mixture", "as given", "one domain"))
    if config.cpt is not None:
        reduced.append(("replay and forgetting", "as given", "none"))
    if config.data.order != "shuffled":
        reduced.append(("order of samples", config.data.order, "shuffled"))
    ranks = tuple(str(each.degrees.world_size) for each in small)
    planned_ranks = f"{plan.degrees.world_size:,}"
    is_exercised = planned_ranks in ranks
    return [
        *_aspects(axes, plan.degrees, small, covered, reduced),
        Aspect("ranks", planned_ranks, ranks, is_exercised),
    ]


def _aspects(
    axes: dict[str, str],
    planned: Degrees,
    small: list[Rehearsal],
    covered: Iterable[_Row],
    reduced: Iterable[_Row],
) -> Iterator[Aspect]:
    """Aspects of parallel degrees by name, each covered by a rehearsal with a degree above one; of
    what all rehearsals cover alike; and of what they cover only if values are equal."""
    for name, axis in axes.items():
        degree = getattr(planned, axis)
        degrees = [getattr(each.degrees, axis) for each in small]
        is_exercised = max(degrees) > 1 if degree > 1 else None
        yield Aspect(name, str(degree), tuple(map(str, degrees)), is_exercised)
    for name, there, here in covered:
        yield Aspect(name, there, (here,) * len(small), True)
    for name, there, here in reduced:
        yield Aspect(name, there, (here,) * len(small), there == here)


def planned_stage_b(config: Config, plan: Plan, cluster: Cluster) -> Plan | None:
    """Derives the plan of Stage B from that of Stage A; None if the run has none."""
    if config.stage_b is None or config.training.stage == "a":
        return None
    return stage_b_plan(config, plan, world_size=cluster.world_size)


def stage_b_rehearsal(config: Config, planned: Plan, stage_a: Rehearsal) -> Rehearsal:
    """Shrinks Stage B to a run on the backbone of a small Stage A.

    `planned` is the plan of Stage B, `stage_a` the rehearsal whose last checkpoint is the backbone.
    """
    (degrees,) = small_degrees(planned.degrees)
    stage_b = stage_b_section(config)
    training = stage_b.training
    memory = stage_b.memory
    lengths = ("memory_steps", "adapter_steps", "joint_steps", "policy_steps")
    # some micro-steps are empty where the data ranks do not divide the lessons
    slots = planned.gradient_accumulation_steps
    is_uneven = slots * planned.degrees.data > training.lessons_per_step
    slots = 2 if is_uneven else min(2, slots)
    steps = PHASE_STEPS * len(training.phases)
    values = stage_a.config.model_dump(mode="json", exclude_unset=True)
    ranks = degrees.world_size
    values["parallel"] = {"data": ranks}  # of Stage A, which does not run here
    values["training"] |= {"stage": "b", "global_batch_size": ranks, "micro_batch_size": 1}
    # in the middle, at the first of the two steps of a phase
    values["checkpoint"]["every_steps"] = STEPS + (steps // 2 | 1)
    values["evaluation"]["reasoning_examples"] = 0
    small_memory = {
        "summary_dim": min(SUMMARY_DIM, memory.summary_dim),
        "max_tokens": min(MEMORY_TOKENS, memory.max_tokens),
    }
    values["stage_b"] = stage_b.model_dump(mode="json") | {
        "memory": memory.model_dump() | small_memory,
        "training": training.model_dump(mode="json")
        | {name: PHASE_STEPS if getattr(training, name) else 0 for name in lengths}
        | {
            "window_tokens": WINDOW_TOKENS,
            "segment_tokens": None,
            # the tokenizer of so small a corpus cuts answers into more tokens
            "answer_tokens": WINDOW_TOKENS // 4,
            # its rows are made for the windows of the plan
            "task_file": None,
            "length_ratios": LENGTH_RATIOS if max(training.length_ratios) > 1 else (1,),
            "lessons_per_step": slots * degrees.data - (is_uneven and degrees.data > 1),
            "texts_per_lesson": min(TEXTS, training.texts_per_lesson),
            "group_size": min(GROUP_SIZE, training.group_size),
            "warmup_steps": min(1, training.warmup_steps),
        },
    }
    if degrees.pipeline > 1:
        values["stage_b"]["pipeline"] = degrees.pipeline
    small = Config.model_validate(values)
    plan = choose(small, processes(ranks), profile=planned.name)
    plan = stage_b_plan(small, plan, world_size=ranks)
    return Rehearsal(
        config=small,
        profile=planned.name,
        degrees=plan.degrees,
        last_step=STEPS + stage_b_section(small).training.num_steps,
        saved_step=values["checkpoint"]["every_steps"],
    )


def stage_b_aspects(config: Config, planned: Plan, small: Rehearsal) -> list[Aspect]:
    """Lists the properties of a planned Stage B that its rehearsal covers, and the others."""
    there = stage_b_section(config)
    here = stage_b_section(small.config)
    slots = planned.gradient_accumulation_steps
    small_slots = -(-here.training.lessons_per_step // small.degrees.data)
    phases = ", ".join(phase for phase, _ in there.training.phases)
    trains = there.training.backbone_lr_scale > 0
    backbone = "trained in the joint phase" if trains else "frozen"
    covered = [
        ("DeepSpeed profile", planned.name, small.profile),
        ("accumulation", str(slots), str(small_slots)),
        ("phases", phases, phases),
        ("tasks", str(len(there.training.tasks)), str(len(here.training.tasks))),
        ("backbone", backbone, backbone),
        ("rank of adapters", str(there.adapters.rank), str(here.adapters.rank)),
    ]
    empty = slots * planned.degrees.data - there.training.lessons_per_step
    if empty:
        small_empty = small_slots * small.degrees.data - here.training.lessons_per_step
        covered.insert(2, ("micro-steps without a lesson", str(empty), str(small_empty)))
    # properties that only the cluster itself, or a whole run, can cover
    window = there.training.window_tokens or config.training.sequence_length
    reduced = [
        ("precision", config.training.precision, small.config.training.precision),
        ("tokens a window", f"{window:,}", str(here.training.window_tokens)),
    ]
    longest, small_longest = (max(each.training.length_ratios) for each in (there, here))
    for name, planned_number, number in (
        ("steps", there.training.num_steps, here.training.num_steps),
        ("texts a lesson", there.training.texts_per_lesson, here.training.texts_per_lesson),
        ("windows of the longest text", longest, small_longest),
        ("episodes of a text", there.training.group_size, here.training.group_size),
        ("width of summaries", there.memory.summary_dim, here.memory.summary_dim),
        ("tokens of memory", there.memory.max_tokens, here.memory.max_tokens),
    ):
        reduced.append((name, f"{planned_number:,}", f"{number:,}"))
    if there.training.policy_steps:
        reduced.append(("agent", "earns rewards", "untrained, earns none"))
    if there.training.task_file is not None:
        reduced.append(("tasks of your own", there.training.task_file, "left out"))
    if examples := config.evaluation.reasoning_examples:
        reduced.append(("tasks at the end", f"{examples} a cell", "left out"))
    reduced.append(("devices and links", "as planned", "processors, gloo"))
    ranks = f"{planned.degrees.world_size:,}"
    reduced.append(("ranks", ranks, str(small.degrees.world_size)))
    axes = {"ranks with lessons of their own": "data", "pipeline": "pipeline"}
    return list(_aspects(axes, planned.degrees, [small], covered, reduced))
