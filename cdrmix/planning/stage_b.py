"""Layout of Stage B: data ranks with different lessons, or pipelines over a frozen backbone.

The checkpoint of Stage A is read into this layout whatever its own layout was.
"""

from __future__ import annotations

from dataclasses import replace

from cdrmix.config.schema import Config
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Degrees, stage_layers
from cdrmix.planning.plan import Plan
from cdrmix.planning.stage_b_memory import stage_b_window


def stage_b_layers(config: Config, pipeline: int) -> list[range]:
    """Cuts the blocks into pipeline stages for Stage B, by the rule of Stage A."""
    return stage_layers(config.model, stage_b_window(config), pipeline)


def stage_b_plan(config: Config, plan: Plan, *, world_size: int) -> Plan:
    """Derives the plan of Stage B from that of Stage A.

    Args:
        config: of the run, with a Stage B.
        plan: of Stage A on the same ranks; ZeRO-3 becomes ZeRO-2.
        world_size: number of ranks, a multiple of the stages of Stage B.
    """
    assert config.stage_b is not None, "called for runs with Stage B"
    lessons = config.stage_b.training.lessons_per_step
    pipeline = plan.stage_b_pipeline
    data = world_size // pipeline
    # some micro-steps are empty where the data ranks do not divide the lessons
    slots = -(-lessons // data)
    name = "zero1" if plan.zero_stage <= 1 else "zero2"
    precision = ("bf16", "fp16", "data_types")
    settings = {key: plan.deepspeed[key] for key in precision if key in plan.deepspeed} | {
        "train_batch_size": slots * data,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": slots,
        "gradient_clipping": 0.0,  # Stage B clips each part by itself
    }
    held = f"data {data}: every rank holds the whole backbone"
    if pipeline > 1:
        held = f"data {data}, pipeline {pipeline}: a rank holds its stage's blocks of the backbone"
    reasons = [f"Stage B: {name}, {held}"]
    empty = slots * data - lessons
    warnings = []
    if empty:
        warnings.append(
            f"Stage B: {lessons} lessons of a step leave {empty} of {slots * data} "
            f"micro-steps empty. Try stage_b.training.lessons_per_step = {slots * data}"
        )
    return replace(
        plan,
        profile=name,
        layout=replace(
            plan.layout,
            degrees=Degrees(data=data, pipeline=pipeline),
            zero_stage=1 if name == "zero1" else 2,
            micro_batch_size=1,
            gradient_accumulation_steps=slots,
            activation_checkpointing=False,
            sequence_checkpoint_tokens=None,
            offloads_optimizer=False,
            offloads_parameters=False,
        ),
        memory=None,
        cost=None,
        fits=plan.stage_b is None or plan.stage_b.fits,
        deepspeed=read_profile(profile_path(name)) | settings,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )
