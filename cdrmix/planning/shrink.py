"""A plan made small enough for the processors of a laptop, with every axis of it kept.

Each degree above one stays at two, in the same order of axes, with both kinds of blocks, the same
DeepSpeed profile, accumulation and recomputation; widths, layers and lengths shrink.

Stage B of a plan made small: its layout, phases, tasks and parts kept, on few short texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import StageBConfig, StageBTraining
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, processes
from cdrmix.planning.layout import AXES, Degrees, Layout
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from cdrmix.planning.stage_b import stage_b_plan

# Processes that a laptop runs at once.
MOST_RANKS = 8
# Of the small model: what all degrees of two divide, and a kernel still likes.
HEAD_DIM = 32
SEQUENCE_LENGTH = 64
VOCAB_SIZE = 512
EXPERT_WIDTH = 64
SMALL_SPAN_TOKENS = 12  # of a sample that is recomputed together, where a plan does so
STEPS = 6
SAVED_STEP = 3
# Of AdamW: with its usual 1e-8, weights whose gradients almost cancel out move by rounding alone,
# and the nearest choices of experts with them.
EPSILON = 1e-6


@dataclass(frozen=True)
class Rehearsal:
    """One small layout that stands for a plan, or for a part of it.

    Attributes:
        config: the small run, with its degrees given.
        profile: DeepSpeed profile, as planned.
        degrees: of the small run.
        last_step: that it trains.
        saved_step: that a checkpoint is written at on the way.
    """

    config: Config
    profile: str
    degrees: Degrees
    last_step: int = STEPS
    saved_step: int = SAVED_STEP

    def describe(self) -> str:
        """In one line."""
        return rehearsal_text(self.profile, self.degrees)


def rehearsal_text(profile: str, degrees: Degrees) -> str:
    """A layout in one line."""
    axes = ("pipeline", "tensor", "data", "sequence", "expert")
    spread = [f"{axis} {getattr(degrees, axis)}" for axis in axes]
    kept = [part for part in spread if not part.endswith(" 1")]
    return f"{profile}, {' x '.join(kept) or 'one rank'}"


@dataclass(frozen=True)
class Aspect:
    """One property of a plan: what it is there, and in each rehearsed layout.

    Attributes:
        name: of the property.
        planned: its value in the plan.
        rehearsed: its value in each small layout.
        is_exercised: whether any of them shows what the plan relies on; None where the plan does
            not have the property.
    """

    name: str
    planned: str
    rehearsed: tuple[str, ...]
    is_exercised: bool | None


def rehearsals(config: Config, plan: Plan) -> list[Rehearsal]:
    """The small layouts that together have every axis of a plan: one, or two where one would need
    more processes than a laptop runs."""
    layout = plan.layout
    return [
        Rehearsal(_small_config(config, layout, degrees), plan.profile, degrees)
        for degrees in small_degrees(layout.degrees)
    ]


def small_degrees(planned: Degrees) -> list[Degrees]:
    pipeline, tensor, sequence, samples = (
        min(2, degree)
        for degree in (planned.pipeline, planned.tensor, planned.sequence, planned.sample_ranks)
    )
    layouts = [(pipeline, tensor, sequence, samples)]
    if math.prod(layouts[0]) > MOST_RANKS:  # each axis meets each other one in one of the two
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


def _small_config(config: Config, layout: Layout, degrees: Degrees) -> Config:
    accumulation = min(2, layout.gradient_accumulation_steps)
    micro = min(2, layout.micro_batch_size)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["name"] = f"{config.name}-rehearsal"
    values["model"] = _small_model(config.model, degrees)
    values["parallel"] = {axis: getattr(degrees, axis) for axis in AXES}
    values["training"] |= {
        "stage": "a",
        "max_steps": STEPS,
        "total_tokens": None,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "epsilon": EPSILON,
        "min_learning_rate": 1e-4,
        "global_batch_size": micro * accumulation * degrees.sample_ranks,
        "micro_batch_size": micro,
        "sequence_length": SEQUENCE_LENGTH,
        "precision": "fp32",  # so that rounding does not hide a wrong sum
        "activation_checkpointing": layout.activation_checkpointing,
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
    values["data"] = {"path": "rehearsal", "segment_documents": config.data.segment_documents}
    if config.data.token_weights is not None:
        values["data"]["token_weights"] = {"text": 1.0}  # the corpus has nothing else
    return Config.model_validate(values)


def _small_model(model: ModelConfig, degrees: Degrees) -> dict[str, Any]:
    shares_keys = model.num_kv_heads < model.num_heads
    heads = 8 if shares_keys else 4
    fraction = model.transformer_fraction
    both_kinds = math.ceil(1 / fraction) if 0 < fraction < 1 else 1
    experts = None
    if model.moe is not None:
        number = model.moe.num_experts
        experts = model.moe.model_dump() | {
            "num_experts": number + number % degrees.expert,  # of an odd number, two ranks cannot
            "expert_hidden_size": EXPERT_WIDTH,
            "drop_tokens": False,  # what is dropped depends on the layout
        }
    return {
        "hidden_size": heads * HEAD_DIM,
        "num_heads": heads,
        "num_kv_heads": 4,
        "num_layers": max(4, both_kinds),
        "vocab_size": VOCAB_SIZE,
        "schedule": model.schedule,
        "transformer_fraction": fraction,
        "moe": experts,
    }


def aspects(config: Config, plan: Plan, small: list[Rehearsal]) -> list[Aspect]:
    """Lists the properties of a plan that its rehearsals cover, and those they do not."""
    layout = plan.layout
    degrees = layout.degrees
    found = [
        degree_aspect(axis, getattr(degrees, axis), [getattr(each.degrees, axis) for each in small])
        for axis in ("pipeline", "tensor", "sequence", "expert")
    ]
    readers = [each.degrees.sample_ranks for each in small]
    found.append(degree_aspect("ranks with samples of their own", degrees.sample_ranks, readers))
    accumulated = min(2, layout.gradient_accumulation_steps)
    found.append(_kept("accumulation", layout.gradient_accumulation_steps, accumulated, small))
    found.append(_same("DeepSpeed profile", plan.profile, small))
    found.append(_same("activation checkpointing", _on(layout.activation_checkpointing), small))
    if layout.sequence_checkpoint_tokens is not None:
        planned = f"spans of {layout.sequence_checkpoint_tokens:,} tokens"
        shown = (f"spans of {SMALL_SPAN_TOKENS} tokens",) * len(small)
        found.append(Aspect("sequence checkpointing", planned, shown, True))
    found.append(_same("schedule", f"{config.model.schedule}, both kinds of blocks", small))
    found += _not_exercised(config, layout, small)
    return found


def degree_aspect(name: str, planned: int, rehearsed: list[int]) -> Aspect:
    is_exercised = any(number > 1 for number in rehearsed) if planned > 1 else None
    return Aspect(name, str(planned), tuple(map(str, rehearsed)), is_exercised)


def _kept(name: str, planned: int, rehearsed: int, small: list[Rehearsal]) -> Aspect:
    return Aspect(name, str(planned), (str(rehearsed),) * len(small), True)


def _same(name: str, value: str, small: list[Rehearsal]) -> Aspect:
    return Aspect(name, value, (value,) * len(small), True)


def _not_exercised(config: Config, layout: Layout, small: list[Rehearsal]) -> list[Aspect]:
    """Properties that only the cluster itself can show."""
    shown = small[0].config
    rows = [
        ("precision", config.training.precision, "fp32"),
        ("hidden size", f"{config.model.hidden_size:,}", str(shown.model.hidden_size)),
        ("layers", str(config.model.num_layers), str(shown.model.num_layers)),
        ("tokens a sample", f"{config.training.sequence_length:,}", str(SEQUENCE_LENGTH)),
        ("devices and links", "as planned", "processors, gloo"),
        *_not_exercised_of_experts(config, small),
        *_not_exercised_of_data(config),
    ]
    found = [
        Aspect(name, planned, (rehearsed,) * len(small), planned == rehearsed)
        for name, planned, rehearsed in rows
    ]
    ranks = tuple(str(each.degrees.world_size) for each in small)
    planned = f"{layout.degrees.world_size:,}"
    return [*found, Aspect("ranks", planned, ranks, planned in ranks)]


_Row = tuple[str, str, str]


def _not_exercised_of_experts(config: Config, small: list[Rehearsal]) -> Iterator[_Row]:
    if config.model.moe is None:
        return
    numbers = [each.config.model.moe.num_experts for each in small if each.config.model.moe]
    if max(numbers) != config.model.moe.num_experts:
        yield "experts a layer", str(config.model.moe.num_experts), str(max(numbers))
    if config.model.moe.drop_tokens:
        yield "tokens beyond an expert's capacity", "dropped", "kept"


def _not_exercised_of_data(config: Config) -> Iterator[_Row]:
    if config.data.token_weights is not None:
        yield "weights of tokens", "by what they are part of", "all 1"
    if config.data.mixture is not None:
        yield "mixture", "as given", "one domain"
    if config.data.order != "shuffled":
        yield "order of samples", config.data.order, "shuffled"


def _on(value: bool) -> str:
    return "on" if value else "off"


PHASE_STEPS = 2  # so that one of them starts from what the phase has changed
WINDOW_TOKENS = 128  # whose segments hold a sentence of any task in the corpus's short tokens
LENGTH_RATIOS = (1, 2)
TEXTS = 2
GROUP_SIZE = 2
SUMMARY_DIM = 64
MEMORY_TOKENS = 512


def planned_stage_b(config: Config, plan: Plan, cluster: Cluster) -> Plan | None:
    """Plan of Stage B on a cluster, from that of Stage A; None where the run has no Stage B."""
    if config.stage_b is None or config.training.stage == "a":
        return None
    return stage_b_plan(config, plan, world_size=cluster.world_size)


def stage_b_rehearsal(config: Config, planned: Plan, stage_a: Rehearsal) -> Rehearsal:
    """The small layout of Stage B, on the backbone of a small Stage A.

    Its degrees are those that Stage B takes on so many ranks.

    Args:
        config: of the run, with a Stage B.
        planned: its layout there.
        stage_a: of the same plan; its end gives the backbone.
    """
    (wanted,) = small_degrees(planned.degrees)
    small = _small_stage_b_config(_section(config), planned, stage_a.config, wanted)
    chosen = choose(small, processes(wanted.world_size), profile=planned.name)
    taken = stage_b_plan(small, chosen, world_size=wanted.world_size)
    assert small.checkpoint.every_steps is not None, "given"
    return Rehearsal(
        config=small,
        profile=planned.name,
        degrees=taken.degrees,
        last_step=STEPS + _section(small).training.num_steps,
        saved_step=small.checkpoint.every_steps,
    )


def _small_stage_b_config(
    stage_b: StageBConfig, planned: Plan, stage_a: Config, degrees: Degrees
) -> Config:
    steps = PHASE_STEPS * len(stage_b.training.phases)
    values = stage_a.model_dump(mode="json", exclude_unset=True)
    values["parallel"] = {"data": degrees.world_size}  # of Stage A, which does not run here
    values["training"] |= {
        "stage": "b",
        "global_batch_size": degrees.world_size,
        "micro_batch_size": 1,
    }
    # in the middle, at the first of the two steps of a phase
    values["checkpoint"]["every_steps"] = STEPS + (steps // 2 | 1)
    values["evaluation"]["reasoning_examples"] = 0
    values["stage_b"] = stage_b.model_dump(mode="json") | {
        "memory": _small_memory(stage_b),
        "training": _small_training(stage_b.training, planned, degrees),
    }
    if degrees.pipeline > 1:
        values["stage_b"]["pipeline"] = degrees.pipeline
    return Config.model_validate(values)


def _small_memory(stage_b: StageBConfig) -> dict[str, Any]:
    memory = stage_b.memory
    return memory.model_dump() | {
        "summary_dim": min(SUMMARY_DIM, memory.summary_dim),
        "max_tokens": min(MEMORY_TOKENS, memory.max_tokens),
    }


def _small_training(training: StageBTraining, planned: Plan, degrees: Degrees) -> dict[str, Any]:
    lengths = ("memory_steps", "adapter_steps", "joint_steps", "policy_steps")
    is_uneven = _empty(training, planned.degrees, planned.gradient_accumulation_steps) > 0
    slots = 2 if is_uneven else min(2, planned.gradient_accumulation_steps)
    return (
        training.model_dump(mode="json")
        | {name: PHASE_STEPS if getattr(training, name) else 0 for name in lengths}
        | {
            "window_tokens": WINDOW_TOKENS,
            "length_ratios": LENGTH_RATIOS if max(training.length_ratios) > 1 else (1,),
            "lessons_per_step": slots * degrees.data - (is_uneven and degrees.data > 1),
            "texts_per_lesson": min(TEXTS, training.texts_per_lesson),
            "group_size": min(GROUP_SIZE, training.group_size),
            "warmup_steps": min(1, training.warmup_steps),
        }
    )


def stage_b_aspects(config: Config, planned: Plan, small: Rehearsal) -> list[Aspect]:
    """Lists the properties of a plan's Stage B that its rehearsal covers, and the others.

    Args:
        config: of the run, with a Stage B.
        planned: its layout there.
        small: the layout that is run.
    """
    axes = (("ranks with lessons of their own", "data"), ("pipeline", "pipeline"))
    return [
        *(
            degree_aspect(name, getattr(planned.degrees, axis), [getattr(small.degrees, axis)])
            for name, axis in axes
        ),
        *(Aspect(*row, is_exercised=True) for row in _unshrunk_in_stage_b(config, planned, small)),
        *(
            Aspect(name, there, (here,), there == here)
            for name, there, here in _shrunk(config, small, planned.degrees.world_size)
        ),
    ]


def _unshrunk_in_stage_b(
    config: Config, planned: Plan, small: Rehearsal
) -> Iterator[tuple[str, str, tuple[str]]]:
    """Properties that the small layout shares with the plan, if with smaller numbers."""
    there = _section(config)
    here = _section(small.config)
    slots = planned.gradient_accumulation_steps
    shown_slots = _slots(here.training, small.degrees)
    yield "DeepSpeed profile", planned.name, (small.profile,)
    yield "accumulation", str(slots), (str(shown_slots),)
    empty = _empty(there.training, planned.degrees, slots)
    if empty:
        shown = _empty(here.training, small.degrees, shown_slots)
        yield "micro-steps without a lesson", str(empty), (str(shown),)
    phases = ", ".join(phase for phase, _ in there.training.phases)
    yield "phases", phases, (phases,)
    yield "tasks", str(len(there.training.tasks)), (str(len(here.training.tasks)),)
    trains = there.training.backbone_lr_scale > 0
    backbone = "trained in the joint phase" if trains else "frozen"
    yield "backbone", backbone, (backbone,)
    yield "rank of adapters", str(there.adapters.rank), (str(here.adapters.rank),)


def _shrunk(config: Config, small: Rehearsal, world_size: int) -> Iterator[tuple[str, str, str]]:
    """Properties that only the cluster itself, or a whole run, can show."""
    there = _section(config)
    here = _section(small.config)
    window = there.training.window_tokens or config.training.sequence_length
    yield "precision", config.training.precision, small.config.training.precision
    yield "tokens a window", f"{window:,}", str(here.training.window_tokens)
    for name, sizes in (
        ("steps", [each.training.num_steps for each in (there, here)]),
        ("texts a lesson", [each.training.texts_per_lesson for each in (there, here)]),
        ("windows of the longest text", [max(s.training.length_ratios) for s in (there, here)]),
        ("episodes of a text", [each.training.group_size for each in (there, here)]),
        ("width of summaries", [each.memory.summary_dim for each in (there, here)]),
        ("tokens of memory", [each.memory.max_tokens for each in (there, here)]),
    ):
        yield name, f"{sizes[0]:,}", f"{sizes[1]:,}"
    if there.training.policy_steps:
        yield "agent", "earns rewards", "untrained, earns none"
    if config.evaluation.reasoning_examples:
        yield "tasks at the end", f"{config.evaluation.reasoning_examples} a cell", "left out"
    yield "devices and links", "as planned", "processors, gloo"
    yield "ranks", f"{world_size:,}", str(small.degrees.world_size)


def _slots(training: StageBTraining, degrees: Degrees) -> int:
    return -(-training.lessons_per_step // degrees.data)


def _empty(training: StageBTraining, degrees: Degrees, slots: int) -> int:
    """Micro-steps of a step, of all ranks, that have no lesson."""
    return slots * degrees.data - training.lessons_per_step


def _section(config: Config) -> StageBConfig:
    assert config.stage_b is not None, "Stage B has its section"
    return config.stage_b
