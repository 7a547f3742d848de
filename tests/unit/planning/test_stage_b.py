"""Stage B's plan: layout, memory, time of a step, pieces of its rows."""

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, PlanError
from cdrmix.planning.cluster import make_cluster, processes
from cdrmix.planning.layout import Degrees
from cdrmix.planning.lesson_sizes import most_steps, pieces_of_rows
from cdrmix.planning.plan import StageBLayout
from cdrmix.planning.profile import choose
from cdrmix.planning.stage_b import stage_b_layout, stage_b_plan, stage_b_reason
from tests.unit.stage_b.short_phases import TINY, config, section


def test_episodes_of_the_longest_text_are_counted() -> None:
    given = config("length_ratios=[1, 8]", "window_tokens=256")
    # 2,048 tokens in segments of 64, each with its neighbour longer than that; then four rounds
    assert most_steps(section(given), 256) == 64 + 9
    # where they are more than what a lesson saves for its backward pass
    few, many = (
        stage_b_layout(
            config("texts_per_lesson=1", "backbone_lr_scale=0", f"group_size={size}"),
            processes(1),
            zero_stage=1,
        )
        for size in (2, 4096)
    )
    assert few is not None and many is not None
    assert few.memory.buffers["episodes"] == 0
    saved = few.memory.activations
    episodes = 8 * 4096 * (2 * 8 * 64 // 16 + 9) * 128  # float32 twice, width 128
    assert many.memory.buffers["episodes"] == episodes - saved


def test_episodes_of_all_lessons_of_a_step_wait_on_the_host() -> None:
    def layout(*more: str, host_memory_gib: float = 1900) -> StageBLayout:
        given = load_config(TINY.with_name("cdrmix-reason-40b.yaml"), more)
        cluster = make_cluster(
            nodes=4, gpus_per_node=8, gpu="h100-80", host_memory_gib=host_memory_gib
        )
        found = stage_b_layout(given, cluster, zero_stage=2)
        assert found is not None
        if not found.fits:
            assert "Try fewer stage_b.training.lessons_per_step" in stage_b_reason(
                given, cluster, found
            )
        return found

    found = layout()
    # 16 of 64 lessons on each of four pipelines; 4 texts x 16 episodes of 8 windows of 4,096 tokens
    # in segments of 64, each with its neighbour longer than that; four rounds; bf16
    assert found.degrees.data == 4 and found.fits
    assert found.memory.waiting_episodes == 16 * 64 * (2 * 8 * 64 + 9) * 2 * 6144
    assert layout("stage_b.policy.horizon=100").memory.waiting_episodes == 16 * 64 * 100 * 2 * 6144
    assert layout("stage_b.training.policy_steps=0").memory.waiting_episodes == 0
    small = layout(host_memory_gib=100)
    assert not small.fits
    assert small.degrees == found.degrees, (
        "more stages have fewer data ranks, and more wait on each"
    )


def test_a_window_in_which_no_sentence_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_tokens: given 32, allowed is a .* from 64"):
        config("window_tokens=32")
    short = ["training.sequence_length=32", "stage_b.training.window_tokens=null"]
    with pytest.raises(ConfigError, match="training.sequence_length = 32.*window_tokens=64"):
        load_config(TINY, short)


@pytest.mark.parametrize(
    ("lessons", "world_size", "slots", "is_warned"),
    [(4, 2, 2, False), (3, 2, 2, True), (2, 4, 1, True)],
)
def test_where_ranks_do_not_divide_the_lessons_micro_steps_stay_empty(
    lessons: int, world_size: int, slots: int, is_warned: bool
) -> None:
    given = config(f"lessons_per_step={lessons}")
    choice = stage_b_plan(given, choose(given, processes(world_size)), world_size=world_size)
    assert choice.gradient_accumulation_steps == slots
    assert choice.deepspeed["train_batch_size"] == slots * world_size
    assert choice.degrees.data == world_size
    assert bool(choice.warnings) is is_warned


@pytest.mark.parametrize(
    ("scale", "ranks", "pipeline", "held"),
    [
        ("1b", 8, 1, "as every rank holds the whole backbone"),
        ("40b", 128, 8, "as 8 stages share out the frozen backbone (whole it would take "),
    ],
)
def test_a_plan_takes_as_few_stages_as_the_frozen_backbone_fits_on(
    scale: str, ranks: int, pipeline: int, held: str
) -> None:
    given = load_config(TINY.with_name(f"cdrmix-reason-{scale}.yaml"))
    cluster = make_cluster(nodes=ranks // 8, gpus_per_node=8, gpu="h100-80")
    choice = choose(given, cluster)
    (told,) = [reason for reason in choice.reasons if reason.startswith("Stage B: ")]
    assert held in told and told.endswith(": within the 90 % that a plan may fill")
    assert not any(warning.startswith("Stage B") for warning in choice.warnings)
    assert not any("Stage B" in r for r in choose(stage_a(given), cluster).reasons)
    laid_out = stage_b_plan(given, choice, world_size=ranks)
    assert laid_out.degrees == Degrees(ranks // pipeline, 1, pipeline, 1, 1)
    lessons = section(given).training.lessons_per_step
    assert laid_out.gradient_accumulation_steps == -(-lessons // (ranks // pipeline))


@pytest.mark.parametrize(
    ("scale", "nodes", "pipeline"), [("4b", 1, 1), ("40b", 4, 8), ("200b", 64, 64)]
)
def test_fewer_stages_than_planned_do_not_fit(scale: str, nodes: int, pipeline: int) -> None:
    given = load_config(TINY.with_name(f"cdrmix-reason-{scale}.yaml"))
    cluster = make_cluster(nodes=nodes, gpus_per_node=8, gpu="h100-80")
    found = stage_b_layout(given, cluster, zero_stage=2)
    assert found is not None and found.memory.fits(cluster, share=0.9)
    assert found.degrees == Degrees(8 * nodes // pipeline, 1, pipeline, 1, 1)
    if pipeline > 1:
        stage_b = section(given).model_copy(update={"pipeline": pipeline // 2})
        given = given.model_copy(update={"stage_b": stage_b})
        fewer = stage_b_layout(given, cluster, zero_stage=2)
        assert fewer is not None and not fewer.memory.fits(cluster, share=0.9)


def stage_a(given: Config) -> Config:
    training = given.training.model_copy(update={"stage": "a"})
    return given.model_copy(update={"training": training})


def test_a_trained_backbone_stays_whole() -> None:
    scale = ["stage_b.training.backbone_lr_scale=0.1"]
    given = load_config(TINY.with_name("cdrmix-reason-40b.yaml"), scale)
    cluster = make_cluster(nodes=16, gpus_per_node=8, gpu="h100-80")
    found = stage_b_layout(given, cluster, zero_stage=2)
    assert found is not None and found.degrees.pipeline == 1
    told = stage_b_reason(given, cluster, found)
    assert "as every rank holds the whole backbone" in told
    assert "A frozen backbone (backbone_lr_scale = 0) can be shared out over stages" in told


def test_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline = 2 with training.backbone_lr_scale = 0.1: "):
        load_config(TINY, ["stage_b.pipeline=2", "stage_b.training.backbone_lr_scale=0.1"])
    frozen = ["stage_b.training.backbone_lr_scale=0"]
    with pytest.raises(PlanError, match="stage_b.pipeline = 8 is more than model.num_layers = 4"):
        choose(load_config(TINY, [*frozen, "stage_b.pipeline=8"]), processes(8))
    with pytest.raises(PlanError, match="pipeline = 3 does not divide the 4 ranks. Try .* 2 or 4"):
        choose(load_config(TINY, [*frozen, "stage_b.pipeline=3"]), processes(4))


@pytest.mark.parametrize(("profile", "kept"), [("zero1", "zero1"), ("zero2", "zero2")])
def test_the_zero_stage_of_stage_a_is_kept(profile: str, kept: str) -> None:
    given = config()
    choice = stage_b_plan(given, choose(given, processes(1), profile=profile), world_size=1)
    assert choice.name == kept
    assert choice.deepspeed["gradient_clipping"] == 0.0


def layout_of_1b(*overrides: str) -> StageBLayout:
    given = load_config(shipped("model_configs") / "cdrmix-reason-1b.yaml", overrides)
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="h100-80")
    made = stage_b_layout(given, cluster, zero_stage=1)
    assert made is not None
    return made


def test_a_step_of_the_policy_is_timed_by_its_episodes() -> None:
    def step(*overrides: str) -> float:
        return layout_of_1b(*overrides).policy_step_seconds

    usual = step()
    # texts are read once for all episodes; the window of each is read in a call of its own
    assert 1.3 * usual < step("stage_b.training.group_size=32") < 1.8 * usual
    # an answer's tokens come one by one, those of all episodes together: next to nothing
    longer = step("stage_b.training.answer_tokens=28")
    assert 1.02 * usual < longer < 1.1 * usual
    assert step("stage_b.policy.retrieval_rounds=1") < usual
    # behind its question a segment of 64 tokens is as much again, and the question is read alone
    assert 1.2 * usual < step("stage_b.training.question=first") < 1.6 * usual
    assert step("stage_b.training.length_ratios=[8]") > usual
    # stages of a pipeline share out reading, and take turns at a token
    assert step("stage_b.pipeline=8") > 4 * usual


def test_a_step_of_stage_b_is_timed_by_its_lessons() -> None:
    def step(*overrides: str) -> float:
        return layout_of_1b(*overrides).step_seconds

    frozen = step()
    more = "stage_b.training.texts_per_lesson=32"
    assert step(more) > 1.5 * step("stage_b.training.texts_per_lesson=16")
    assert step("stage_b.training.lessons_per_step=16") == pytest.approx(
        2 * step("stage_b.training.lessons_per_step=8"), rel=0.05
    )
    assert step("stage_b.training.backbone_lr_scale=0.1") > 1.2 * frozen, "more is differentiated"
    without = ("stage_b.memory.parts=[episodic]", "stage_b.training.adapter_steps=0")
    assert step(*without) < 0.9 * frozen, "plastic adapters start kernels of their own"
    # four texts a lesson are too few for eight stages: some wait, and with more fewer do; and each
    # piece starts the kernels of its stage anew
    more = "stage_b.training.texts_per_lesson=16"
    assert 4 * frozen < step("stage_b.pipeline=8") < 12 * frozen
    assert step("stage_b.pipeline=8", more) < 3 * step(more)


@pytest.mark.parametrize("stages", [1, 2, 8])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 4096), (7, 1), (7, 300), (64, 512)])
def test_pieces_are_all_rows_in_order(rows: int, tokens: int, stages: int) -> None:
    pieces = pieces_of_rows(rows, tokens, stages)
    assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows))
    assert len(pieces) <= (1 if stages == 1 else 4 * stages)
    if len(pieces) > 1:
        assert min(piece.stop - piece.start for piece in pieces) * tokens > 256


def test_pieces_are_several_where_stages_would_wait() -> None:
    assert len(pieces_of_rows(64, 512, 2)) == 8
    assert len(pieces_of_rows(7, 300, 8)) == 4
    assert len(pieces_of_rows(64, 1, 8)) == 1, "a single token reads all weights of a stage"
