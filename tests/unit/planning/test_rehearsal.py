"""Plans made small: every axis is kept, no more processes than a laptop runs."""

import functools
from dataclasses import replace

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.planning import rules
from cdrmix.planning.cluster import make_cluster
from cdrmix.planning.comparison import compare
from cdrmix.planning.deepspeed_json import profile_path, read_profile
from cdrmix.planning.layout import Combination, Degrees, Layout
from cdrmix.planning.shrink import (
    MOST_RANKS,
    PHASE_STEPS,
    SEQUENCE_LENGTH,
    STEPS,
    Aspect,
    Rehearsal,
    _small_config,
    aspects,
    planned_stage_b,
    rehearsals,
    small_degrees,
    stage_b_aspects,
    stage_b_rehearsal,
)
from cdrmix.planning.stages import stage_layers
from cdrmix.sessions.rehearse import Check, Rehearsed, RehearsedStage

AXES = ("pipeline", "tensor", "sequence", "sample_ranks", "expert")
CLUSTERS = {"1b": (1, 8), "4b": (4, 8), "40b": (16, 8), "200b": (32, 8)}
VARIANTS = [f"cdrmix-{family}-{size}" for family in ("core", "reason") for size in CLUSTERS]


@pytest.mark.parametrize(
    "planned",
    [
        Degrees(data=8, tensor=1, pipeline=1, sequence=1, expert=8),
        Degrees(data=16, tensor=4, pipeline=2, sequence=1, expert=8),
        Degrees(data=4, tensor=8, pipeline=8, sequence=4, expert=8),
        Degrees(data=8, tensor=8, pipeline=4, sequence=4, expert=8),
        Degrees(data=4, tensor=1, pipeline=1, sequence=4, expert=2),
        Degrees(data=1, tensor=1, pipeline=1, sequence=1, expert=1),
    ],
)
def test_every_axis_is_kept_on_at_most_eight_ranks(planned: Degrees) -> None:
    small = small_degrees(planned)
    assert len(small) <= 2
    assert all(degrees.world_size <= MOST_RANKS for degrees in small)
    for axis in AXES:
        largest = max(getattr(degrees, axis) for degrees in small)
        assert largest == min(2, getattr(planned, axis)), axis


def test_what_does_not_fit_at_once_is_split_so_that_axes_meet() -> None:
    small = small_degrees(Degrees(data=8, tensor=8, pipeline=4, sequence=4, expert=8))
    assert [(d.pipeline, d.tensor, d.sequence, d.sample_ranks) for d in small] == [
        (2, 2, 2, 1),
        (2, 1, 2, 2),
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_small_layouts_of_every_variant_are_sound(variant: str) -> None:
    nodes, gpus = CLUSTERS[variant.rsplit("-", 1)[1]]
    config = load_config(shipped("model_configs") / f"{variant}.yaml")
    made = compare(config, make_cluster(nodes=nodes, gpus_per_node=gpus, gpu="a100-80"))
    small = rehearsals(config, made.plan)
    for each in small:
        settings = read_profile(profile_path(each.profile))
        ranks = each.degrees.world_size
        layout = Combination(each.config, each.degrees, settings, each.profile, ranks, "cpu")
        rules.check(layout, of_this_version=False)
        kinds = set(each.config.model.layer_kinds())
        assert kinds == {"rwkv", "transformer"}
    unseen = {each.name for each in aspects(config, made.plan, small) if each.is_exercised is False}
    assert unseen == {
        "precision",
        "hidden size",
        "layers",
        "tokens a sample",
        "ranks",
        "devices and links",
        "tokens beyond an expert's capacity",
    } | ({"mixture"} if config.data.mixture is not None else set())


def test_listed_layers_are_rehearsed_once_in_each_kind_for_every_stage() -> None:
    config = load_config(
        shipped("model_configs") / "cdrmix-moe5b.yaml",
        ["parallel.pipeline=2", "model.mod.layers=[2, 5, 9]"],
    )
    made = compare(config, make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80"))
    (small,) = rehearsals(config, made.plan)
    model = small.config.model
    routed = model.routed_layers()
    layers = [
        (kind, model.has_experts(layer), layer in routed)
        for layer, kind in enumerate(model.layer_kinds())
    ]
    different = [
        ("transformer", False, False),
        ("transformer", True, True),
        ("transformer", True, False),
        ("mamba", False, True),
        ("routing_mamba", False, True),
        ("mamba", False, False),
        ("routing_mamba", False, False),
    ]
    assert layers == different * 2
    assert (model.ffn_activation, model.mtp) == ("swiglu", config.model.mtp)
    settings = read_profile(profile_path(small.profile))
    ranks = small.degrees.world_size
    layout = Combination(small.config, small.degrees, settings, small.profile, ranks, "cpu")
    rules.check(layout, of_this_version=False)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "model.mixers=[transformer*32]",
            "model.routing_mamba=null",
            "model.ffn_activation=squared_relu",
            f"model.moe.layers={list(range(0, 32, 2))}",
            "model.mtp.num_tokens=2",
            "objectives.mtp=[1]",
        ),
        ("model.mtp.num_tokens=8", f"objectives.mtp={[1 / 7] * 7}"),
    ],
    ids=["dense last layer", "many further tokens"],
)
def test_each_small_stage_has_experts_however_short_the_last_one_is(
    overrides: tuple[str, ...],
) -> None:
    config = load_config(
        shipped("model_configs") / "cdrmix-moe5b.yaml", ["parallel.pipeline=2", *overrides]
    )
    degrees = Degrees(data=2, pipeline=2, expert=2)
    layout = Layout(degrees, 1, 1, 2, activation_checkpointing="block")
    model = _small_config(config, layout, degrees).model
    first, last = stage_layers(model, SEQUENCE_LENGTH, 2)
    assert any(map(model.has_experts, first)) and any(map(model.has_experts, last))
    # no more layers than that takes
    kinds = len(
        dict.fromkeys(
            zip(
                model.layer_kinds(),
                map(model.has_experts, range(len(model.layer_kinds()))),
                strict=True,
            )
        )
    )
    assert len(last) <= 2 * kinds


def small_and_unseen(*overrides: str) -> tuple[list[Rehearsal], set[str]]:
    config = load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml", overrides)
    made = compare(config, make_cluster(nodes=1, gpus_per_node=6, gpu="a100-80"))
    small = rehearsals(config, made.plan)
    unseen = {each.name for each in aspects(config, made.plan, small) if each.is_exercised is False}
    return small, unseen


def test_a_schedule_too_long_for_a_rehearsal_is_left_out() -> None:
    small, _ = small_and_unseen(
        "training.schedule=infinite",
        "training.hold_learning_rate=2e-3",
        "training.settle_steps=100",
        "training.global_batch_size=6",
    )
    assert {each.config.training.schedule for each in small} == {"cosine"}


def test_an_odd_number_of_experts_is_rehearsed_with_one_more() -> None:
    (small,), unseen = small_and_unseen(
        "model.moe.num_experts=9", "parallel.expert=3", "training.global_batch_size=12"
    )
    assert small.config.model.moe is not None
    assert (small.degrees.expert, small.config.model.moe.num_experts) == (2, 10)
    assert "experts a layer" in unseen


def test_what_the_corpus_cannot_show_of_the_data_is_told() -> None:
    (small,), unseen = small_and_unseen(
        "training.global_batch_size=12",
        "data.token_weights.text=0",
        "data.token_weights.answer=2",
        "data.mixture.temperature=2",
        "data.order=windowed",
    )
    assert small.config.data.token_weights is not None, "the weighted loss is exercised"
    assert small.config.data.token_weights.text == 1
    assert {"weights of tokens", "mixture", "order of samples"} <= unseen
    (small,), unseen = small_and_unseen(
        "training.global_batch_size=12", "objectives.text=0", "objectives.z_loss=1e-4"
    )
    objectives = small.config.objectives
    assert objectives is not None and (objectives.text, objectives.thought) == (1, 0)
    assert objectives.z_loss == 1e-4
    assert "objectives" in unseen


@functools.cache
def small_stage_b(size: str, *overrides: str) -> tuple[Config, Rehearsal, dict[str, Aspect]]:
    """Configuration of a reasoning variant, its small Stage B, and what that exercises."""
    nodes, gpus = CLUSTERS[size]
    config = load_config(shipped("model_configs") / f"cdrmix-reason-{size}.yaml", overrides)
    cluster = make_cluster(nodes=nodes, gpus_per_node=gpus, gpu="a100-80")
    pick = compare(config, cluster).plan
    planned = planned_stage_b(config, pick, cluster)
    assert planned is not None
    small = stage_b_rehearsal(config, planned, rehearsals(config, pick)[0])
    return config, small, {each.name: each for each in stage_b_aspects(config, planned, small)}


@pytest.mark.parametrize("size", CLUSTERS)
def test_the_small_stage_b_keeps_what_costs_no_time(size: str) -> None:
    config, small, found = small_stage_b(size)
    there, here = config.stage_b, small.config.stage_b
    assert there is not None and here is not None
    assert (here.adapters, here.policy, here.losses) == (there.adapters, there.policy, there.losses)
    assert here.training.tasks == there.training.tasks
    assert here.training.phases == tuple((p, PHASE_STEPS) for p, _ in there.training.phases)
    assert here.memory.top_k == there.memory.top_k
    assert small.degrees.data == 2
    assert small.degrees.pipeline == min(2, int(found["pipeline"].planned))
    assert small.degrees.world_size == 2 * small.degrees.pipeline
    assert STEPS < small.saved_step < small.last_step == STEPS + 4 * PHASE_STEPS
    assert {name for name, each in found.items() if each.is_exercised is False} == {
        "precision",
        "tokens a window",
        "steps",
        *(["texts a lesson"] if there.training.texts_per_lesson > 2 else []),
        "windows of the longest text",
        "episodes of a text",
        "width of summaries",
        "tokens of memory",
        "agent",
        "tasks at the end",
        "devices and links",
        "ranks",
    }


@pytest.mark.parametrize("scale", [0, 0.5])
@pytest.mark.parametrize(
    "phases", [("memory",), ("memory", "policy"), ("joint", "memory", "policy")]
)
def test_a_small_stage_b_has_the_plans_phases_and_saves_inside_of_one(
    phases: tuple[str, ...], scale: float
) -> None:
    lengths = ("memory", "adapter", "joint", "policy")
    left_out = [f"stage_b.training.{name}_steps=0" for name in lengths if name not in phases]
    backbone = f"stage_b.training.backbone_lr_scale={scale}"
    config, small, found = small_stage_b("1b", backbone, *left_out)
    assert config.stage_b is not None and small.config.stage_b is not None
    assert [phase for phase, _ in small.config.stage_b.training.phases] == [
        phase for phase, _ in config.stage_b.training.phases
    ]
    assert (small.saved_step - STEPS) % PHASE_STEPS == 1
    assert small.saved_step < small.last_step
    assert ("agent" in found) == ("policy" in phases)
    assert found["backbone"].planned == ("trained in the joint phase" if scale else "frozen")


def test_a_users_tasks_stay_with_the_windows_that_they_are_made_for() -> None:
    _, small, aspects = small_stage_b(
        "1b",
        "stage_b.training.task_file=mine.jsonl",
        "stage_b.training.answer_tokens=100",
        "stage_b.training.segment_tokens=512",
    )
    assert small.config.stage_b is not None
    training = small.config.stage_b.training
    assert (training.task_file, training.answer_tokens, training.segment_tokens) == (None, 32, None)
    assert aspects["tasks of your own"].planned == "mine.jsonl"


def test_lessons_that_ranks_do_not_divide_do_not_divide_the_small_ones() -> None:
    _, small, found = small_stage_b("1b", "stage_b.training.lessons_per_step=5")  # on 8 ranks
    assert small.config.stage_b is not None
    assert small.config.stage_b.training.lessons_per_step == 3, "each rank has one at least"
    assert found["micro-steps without a lesson"].planned == "3"
    assert found["micro-steps without a lesson"].rehearsed == ("1",)
    _, small, found = small_stage_b("1b")  # 32 on 8
    assert small.config.stage_b is not None
    assert small.config.stage_b.training.lessons_per_step == 4
    assert "micro-steps without a lesson" not in found


def test_zero_stage_of_stage_b_is_the_plans() -> None:
    assert small_stage_b("1b")[2]["DeepSpeed profile"].rehearsed == ("zero1",)
    assert small_stage_b("40b")[2]["DeepSpeed profile"].rehearsed == ("zero1",)


def test_stage_a_alone_has_no_stage_b_to_rehearse() -> None:
    config = load_config(shipped("model_configs") / "cdrmix-reason-1b.yaml", ("training.stage=a",))
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80")
    assert planned_stage_b(config, compare(config, cluster).plan, cluster) is None


def test_a_stage_b_that_fails_fails_the_rehearsal() -> None:
    config, small, _ = small_stage_b("1b")
    made = compare(config, make_cluster(nodes=1, gpus_per_node=8, gpu="a100-80"))
    stage_a = RehearsedStage("Stage A", {}, [small], [[Check("runs", 0.0, 0.0)]], [])
    alone = Rehearsed(made, stage_a, None, 1.0)
    assert alone.passed and "stage_b" not in alone.to_json()
    assert alone.as_text().endswith("rehearsal passed in 1 s")
    failed = [[Check("runs", None, 0.0, "exit codes [1, 0]")]]
    both = Rehearsed(made, stage_a, replace(stage_a, checks=failed), 1.0)
    assert not both.passed and not both.to_json()["passed"]
    (layout,) = both.to_json()["stage_b"]["layouts"]
    assert layout["checks"][0]["fault"] == "exit codes [1, 0]"
    text = both.as_text()
    assert "rehearsed 1: zero1, data 2, 2 processes\n  ok     runs: equal to the bit" in text
    assert "rehearsed 2: zero1, data 2, 2 processes\n  FAILED runs: exit codes [1, 0]" in text
    assert text.endswith("rehearsal FAILED in 1 s")
