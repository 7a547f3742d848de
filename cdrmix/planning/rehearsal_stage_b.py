"""Stage B of a plan made small: its layout, phases, tasks and parts kept, on few short texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdrmix.config.reasoning import StageBConfig, StageBTraining
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, processes
from cdrmix.planning.layout import Degrees
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import choose
from cdrmix.planning.rehearsal import STEPS, Aspect, Rehearsal, degree_aspect, small_degrees
from cdrmix.planning.stage_b import stage_b_plan

PHASE_STEPS = 2  # so that one of them starts from what the phase has changed
WINDOW_TOKENS = 128  # whose segments hold a sentence of any task in the corpus's short tokens
LENGTH_RATIOS = (1, 2)
TEXTS, GROUP_SIZE = 2, 2
SUMMARY_DIM, MEMORY_TOKENS = 64, 512


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
    small = _small_config(_section(config), planned, stage_a.config, wanted)
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


def _small_config(
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
        *(Aspect(*row, is_exercised=True) for row in _kept(config, planned, small)),
        *(
            Aspect(name, there, (here,), there == here)
            for name, there, here in _shrunk(config, small, planned.degrees.world_size)
        ),
    ]


def _kept(config: Config, planned: Plan, small: Rehearsal) -> Iterator[tuple[str, str, tuple[str]]]:
    """Properties that the small layout shares with the plan, if with smaller numbers."""
    there, here = _section(config), _section(small.config)
    slots, shown_slots = planned.gradient_accumulation_steps, _slots(here.training, small.degrees)
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
    there, here = _section(config), _section(small.config)
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
