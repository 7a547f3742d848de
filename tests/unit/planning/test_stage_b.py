"""Stage B's plan in time and over ranks: phases, rates, groups, clips, lessons, layout."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cdrmix.checkpoint.fragments import PARTS, reader_logical_name
from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, PlanError, StateError
from cdrmix.planning.cluster import make_cluster, processes
from cdrmix.planning.layout import Degrees
from cdrmix.planning.plan import StageBLayout
from cdrmix.planning.profile import choose
from cdrmix.planning.stage_b import (
    most_steps,
    pieces_of_rows,
    stage_b_layout,
    stage_b_plan,
    stage_b_reason,
)
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.stage_b.engine import LessonLoader, LessonResult, StageB
from cdrmix.stage_b.optimizer import (
    Clip,
    PhasePlace,
    TrainedParameters,
    learning_rates,
    place_of,
    stage_b_adamw,
)
from cdrmix.stage_b.phases import StepMean

TINY = shipped("model_configs") / "cdrmix-reason-tiny.yaml"


def config(*training: str) -> Config:
    lengths = ("memory_steps=3", "adapter_steps=0", "joint_steps=2", "policy_steps=1")
    settings = [f"stage_b.training.{setting}" for setting in (*lengths, *training)]
    return load_config(TINY, settings)


def section(config: Config) -> Any:
    assert config.stage_b is not None
    return config.stage_b


def test_the_phase_of_a_step_follows_from_its_number() -> None:
    training = section(config()).training
    places = [place_of(step, training) for step in range(6)]
    phases = ["memory"] * 3 + ["joint"] * 2 + ["policy"]
    assert [place.phase for place in places] == phases
    assert [place.step for place in places] == [0, 1, 2, 0, 1, 0]


def test_parts_that_do_not_learn_have_no_rate() -> None:
    rates = learning_rates(PhasePlace("memory", 0, 3), {"memory"}, config("warmup_steps=2"))
    assert rates["memory"] == 0.5 * section(config()).training.memory_learning_rate
    assert [rates[part] for part in PARTS if part != "memory"] == [0.0, 0.0, 0.0]


def test_a_rate_falls_to_its_share_at_the_end_of_each_phase() -> None:
    given = config("warmup_steps=1", "min_learning_rate_ratio=0.2", "backbone_lr_scale=0.1")
    peak = learning_rates(PhasePlace("joint", 0, 5), PARTS, given)
    lowest = learning_rates(PhasePlace("joint", 4, 5), PARTS, given)
    assert peak["backbone"] == pytest.approx(0.1 * given.training.learning_rate)
    for part in PARTS:
        assert lowest[part] == pytest.approx(0.2 * peak[part])


def reader() -> nn.Module:
    parts = {name: nn.Linear(2, 2, bias=False) for name in ("adapters", "memory", "policy")}
    return nn.ModuleDict({**parts, "retrieval": nn.Linear(2, 2), "backbone": nn.Linear(2, 2)})


def test_every_part_has_a_group_and_a_frozen_backbone_has_none() -> None:
    given = config()
    build = partial(stage_b_adamw, training=given.training, clip=Clip(given))
    of_reader = build(TrainedParameters(reader())).param_groups
    groups = {group["part"]: len(group["params"]) for group in of_reader}
    assert groups == {"memory": 3, "adapters": 1, "policy": 1}
    whole = [group["part"] for group in build(reader()).param_groups]
    assert whole == ["memory", "adapters", "policy", "backbone", "backbone"]


@pytest.mark.usefixtures("one_rank")
def test_the_value_head_is_clipped_apart_from_the_policy() -> None:
    given = config()
    assert given.stage_b is not None
    policy = given.stage_b.policy.model_copy(update={"value_gradient_clipping": 0.5})
    given = given.model_copy(
        update={"stage_b": given.stage_b.model_copy(update={"policy": policy})}
    )
    heads = MemoryPolicy(2, 3)
    model = nn.ModuleDict({"policy": heads})
    clip = Clip(given)
    optimizer = stage_b_adamw(TrainedParameters(model), given.training, clip=clip)
    assert [group["part"] for group in optimizer.param_groups] == ["policy", "policy"]
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    for name, parameter in heads.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if name in ("policy.weight", "value.weight"):
            parameter.grad[0, 0] = 0.8 if name == "policy.weight" else 50.0
    optimizer.step()
    assert heads.policy.weight.grad is not None and heads.value.weight.grad is not None
    # within its norm of 1 it stays, whatever the value head's is
    assert heads.policy.weight.grad[0, 0].item() == pytest.approx(0.8)
    assert heads.value.weight.grad[0, 0].item() == pytest.approx(0.5)
    assert clip.norms == pytest.approx({"policy": 0.8, "value": 50.0})


def test_parameters_that_deepspeed_sees_are_those_of_the_reader() -> None:
    model = reader()
    seen = {reader_logical_name(name): p for name, p in TrainedParameters(model).named_parameters()}
    for name, parameter in model.named_parameters():
        if not name.startswith("backbone"):
            assert seen.pop(reader_logical_name(name)) is parameter
    assert not seen


def test_a_backbone_keeps_the_names_of_stage_a() -> None:
    assert (
        reader_logical_name("plastic.backbone.blocks.0.mixer.key.weight")
        == "blocks.0.mixer.key.weight"
    )
    assert reader_logical_name("plastic/adapters/blocks/0/key/up").startswith(
        "stage_b.plastic.adapters"
    )


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdrmix.runtime.all_reduce_sum", lambda tensor: tensor)


def stepped(clip: Clip, gradients: dict[str, list[float]], rates: dict[str, float]) -> dict:
    """Gradients of each part after the clip."""
    groups = []
    for part, gradient in gradients.items():
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        rate = rates.get(part, 1.0)
        groups.append({"params": [parameter], "part": part, "clip": part, "lr": rate})
    optimizer = torch.optim.SGD(groups, lr=1.0)
    optimizer.register_step_pre_hook(clip)
    optimizer.step()
    return {group["part"]: group["params"][0].grad.tolist() for group in optimizer.param_groups}


@pytest.mark.usefixtures("one_rank")
def test_parts_are_clipped_apart() -> None:
    clip = Clip(config())  # adapters 2, the others 1
    found = stepped(clip, {"adapters": [30.0, 40.0], "memory": [3.0, 4.0], "policy": [0.3]}, {})
    assert found["adapters"] == pytest.approx([1.2, 1.6])
    assert found["memory"] == pytest.approx([0.6, 0.8])
    assert found["policy"] == pytest.approx([0.3])
    assert clip.norms == pytest.approx({"adapters": 50.0, "memory": 5.0, "policy": 0.3})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_zero", [False, True])
def test_the_groups_of_a_part_are_clipped_by_their_common_norm(is_zero: bool) -> None:
    groups: list[dict[str, Any]] = []
    for gradient in (30.0, 40.0):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([gradient])
        group = {"params": [parameter], "part": "backbone", "clip": "backbone", "lr": 1.0}
        groups.append(group)
    clip, optimizer = Clip(config()), torch.optim.SGD(groups, lr=1.0)
    optimizer.register_step_pre_hook(clip)
    if is_zero:
        step_as_zero(clip, optimizer)
    else:
        optimizer.step()
    assert [g["params"][0].grad.item() for g in groups] == pytest.approx([0.6, 0.8])
    assert clip.norms == pytest.approx({"backbone": 50.0})


def step_as_zero(clip: Clip, optimizer: torch.optim.Optimizer) -> None:
    """Steps of one group at a time, whose gradients were raised by a loss scale before."""
    groups = optimizer.param_groups
    raised = {number: [4 * p.grad for p in g["params"]] for number, g in enumerate(groups)}
    clip.prepare(SimpleNamespace(param_groups=groups, averaged_gradients=raised, loss_scale=4.0))
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_what_does_not_learn_is_not_measured() -> None:
    clip = Clip(config())
    assert stepped(clip, {"memory": [3.0]}, {"memory": 0.0}) == {"memory": [3.0]}
    assert clip.norms == {}


@pytest.mark.usefixtures("one_rank")
def test_a_metric_is_the_mean_over_the_lessons_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdrmix.runtime.all_gather_object", lambda own: [own])
    losses = [{"loss": torch.tensor(value)} for value in (1.0, 2.0, 6.0)]
    lessons = [losses[0], losses[1], {**losses[2], "recall": torch.tensor(0.5)}]
    clip = Clip(config())
    stage: Any = StageB(None, section(config()), clip, None, None, 0, 6, "")  # type: ignore[arg-type]
    result = LessonResult("memory", lessons, {"memory": 1.0}, 1, 0.0)
    metrics = stage.measure(None, result)
    assert (metrics["stage_b/loss"], metrics["stage_b/recall"]) == (3.0, 0.5)


class Moving:
    """A course whose policy is `moved` from where it played, by a quarter for each step taken."""

    moved = 0.0

    def rollout_loss(self, collected: Any) -> tuple[torch.Tensor, dict[str, StepMean]]:
        loss, steps = torch.tensor(6.0), torch.tensor(10)
        metrics = {
            "loss": StepMean(loss, torch.tensor(collected.num_learned)),
            "kl": StepMean(10 * torch.tensor(self.moved), steps),
        }
        return loss, metrics


def policy_step(
    monkeypatch: pytest.MonkeyPatch, learned: list[int], **policy: Any
) -> tuple[list[float], dict[str, float]]:
    """Scales of the losses of each optimizer step, and the metrics."""
    settings = section(config())
    changed = settings.policy.model_copy(update=policy)
    settings = settings.model_copy(update={"policy": changed})
    course, scales = Moving(), []
    stage: Any = StageB(course, settings, Clip(config()), None, None, 0, 6, "")  # type: ignore[arg-type]
    topology = SimpleNamespace(counts_tokens=True, degrees=SimpleNamespace(data=2))
    run: Any = SimpleNamespace(engine=None, topology=topology)

    def learn(engine: Any, losses: Any, slots: int, scale: float) -> None:
        assert [loss.item() for loss, _ in losses] == [6.0] * len(learned)
        scales.append(scale)
        course.moved += 0.25

    monkeypatch.setattr(stage, "_learn", learn)
    monkeypatch.setattr("cdrmix.runtime.all_gather_object", lambda own: [own])
    played = [SimpleNamespace(num_learned=number, metrics={}) for number in learned]
    metrics, epochs = stage._learn_policy(run, played, 3)
    result = LessonResult("policy", metrics, {"policy": 1.0}, epochs, 0.0)
    return scales, stage.measure(run, result)


@pytest.mark.usefixtures("one_rank")
def test_steps_of_all_lessons_weigh_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [5, 1, 0], epochs=1)
    # DeepSpeed divides by 3 micro-steps and 2 data ranks
    assert scales == [3 * 2 / 6]
    assert metrics["policy/loss"] == 3 * 6.0 / 6


@pytest.mark.usefixtures("one_rank")
def test_the_divergence_told_is_that_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [5, 1], epochs=3, kl_target=1e6)
    assert (len(scales), metrics["policy/epochs"], metrics["policy/kl"]) == (3, 3, 0.75)
    scales, metrics = policy_step(monkeypatch, [5, 1], epochs=8, kl_target=0.4, kl_margin=1.0)
    assert (len(scales), metrics["policy/epochs"], metrics["policy/kl"]) == (2, 2, 0.5)


@pytest.mark.usefixtures("one_rank")
def test_where_no_rollout_says_anything_no_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, metrics = policy_step(monkeypatch, [0, 0])
    assert scales == [] and metrics["policy/epochs"] == 0
    assert (metrics["policy/loss"], metrics["policy/kl"], metrics["grad_norm"]) == (0, 0, 0)


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


class Numbers:
    """A course whose lessons are their numbers."""

    def lesson(self, phase: str, number: int, *, lengths: Any) -> int:
        return number

    def collect(self, lesson: int) -> int:
        return -lesson


def test_ranks_share_out_every_lesson_once_and_a_position_is_one_number() -> None:
    training, course = section(config("lessons_per_step=3")).training, Numbers()
    ranks: list[Any] = [
        LessonLoader(course, training, rank=rank, world_size=2, manifest_digest="1", seed=0)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for step in range(5):
        taken = sorted(lesson for lessons in ranks for lesson in lessons.next(step))
        assert taken == [3 * step, 3 * step + 1, 3 * step + 2]
    alone: Any = LessonLoader(course, training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]
    alone.load_state_dict(ranks[1].state_dict())
    assert alone.next(5) == [-15, -16, -17], "those of the policy's phase are played"
    with pytest.raises(StateError, match=r"data.path \(manifest_digest\): 2 there, 1 here"):
        alone.load_state_dict(ranks[1].state_dict() | {"manifest_digest": "2"})


@pytest.mark.parametrize(
    ("changed", "seed", "named"),
    [
        ({}, 1, "training.seed"),
        ({"tasks": ("logic",)}, 0, "stage_b.training.tasks"),
        ({"length_ratios": (2,)}, 0, "stage_b.training.length_ratios"),
        ({"texts_per_lesson": 1}, 0, "stage_b.training.texts_per_lesson"),
        ({"answer_tokens": 20}, 0, "stage_b.training.answer_tokens"),
        ({"segment_tokens": 12}, 0, "stage_b.training.segment_tokens"),
        ({"question": "first"}, 0, "stage_b.training.question"),
        ({"task_file_share": 0.9}, 0, "stage_b.training.task_file_share"),
        ({"digest": "b" * 64}, 0, "stage_b.training.task_file (task_file): aaa"),
        ({"digest": None}, 0, "stage_b.training.task_file (task_file): aaa"),
        ({"memory_steps": 4}, 0, "stage_b.training.{memory,adapter,joint,policy}_steps"),
    ],
)
def test_stage_b_goes_on_with_the_lessons_that_it_began_with(
    changed: dict[str, Any], seed: int, named: str
) -> None:
    def lessons(seed: int = 0, *, digest: str | None = "a" * 64, **changed: Any) -> Any:
        stage_b = section(config("memory_steps=5", "joint_steps=2"))
        training = stage_b.training.model_copy(update=changed)
        return LessonLoader(
            Numbers(),  # type: ignore[arg-type]
            training,
            rank=0,
            world_size=1,
            manifest_digest="1",
            seed=seed,
            task_file=digest,
        )

    begun = lessons()
    for step in range(5):
        begun.next(step)
    other = lessons(seed, **changed)
    with pytest.raises(StateError) as caught:
        other.load_state_dict(begun.state_dict())
    assert named in str(caught.value)
    assert other.samples_consumed == 0
    longer = lessons(joint_steps=9)  # what is still to come may be longer
    longer.load_state_dict(begun.state_dict())
    assert longer.samples_consumed == begun.samples_consumed
    earlier = {"samples_consumed": 10, "manifest_digest": "1"}  # as an earlier version said it
    lessons(digest=None).load_state_dict(earlier)
    with pytest.raises(StateError, match="task_file"):  # which had no such file
        longer.load_state_dict(earlier)


def test_another_curriculum_is_refused_once_the_policy_has_learned_by_one() -> None:
    def lessons(**changed: Any) -> Any:
        training = section(config("policy_steps=3")).training.model_copy(update=changed)
        return LessonLoader(Numbers(), training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]

    begun, other = lessons(), lessons(curriculum=0.25)
    for step in range(6):
        other.load_state_dict(begun.state_dict())
        begun.next(step)
    state = begun.state_dict()
    with pytest.raises(StateError, match=r"stage_b.training.curriculum .*: 0.5 there, 0.25 here"):
        other.load_state_dict(state)
    del state["curriculum"]  # as of a version that had none
    lessons(curriculum=0.0).load_state_dict(state)
    with pytest.raises(StateError, match=r"curriculum .*: 0.0 there, 0.5 here"):
        lessons().load_state_dict(state)


def test_lengths_enter_one_by_one_over_their_share_of_the_policys_phase() -> None:
    training = section(config()).training.model_copy(update={"length_ratios": (8, 1, 4, 2)})
    of_steps = [training.lengths_at(step, 12) for step in range(14)]
    assert of_steps == [(1,)] * 2 + [(1, 2)] * 2 + [(1, 4, 2)] * 2 + [(8, 1, 4, 2)] * 8
    whole = training.model_copy(update={"curriculum": 0.0})
    assert whole.lengths_at(0, 12) == (8, 1, 4, 2)
    late = training.model_copy(update={"curriculum": 1.0})
    assert late.lengths_at(11, 12) == (1, 4, 2), "the longest comes with the end"


def test_the_loader_asks_for_the_lengths_of_its_step() -> None:
    asked: list[tuple[str, Any]] = []

    class Asked(Numbers):
        def lesson(self, phase: str, number: int, *, lengths: Any) -> int:
            asked.append((phase, lengths))
            return number

    training = section(config("policy_steps=8", "lessons_per_step=1")).training
    loader: Any = LessonLoader(Asked(), training, rank=0, world_size=1, manifest_digest="", seed=0)  # type: ignore[arg-type]
    for step in range(13):
        loader.next(step)
    assert asked[:5] == [("memory", None)] * 3 + [("joint", None)] * 2
    lengths = [each for _, each in asked[5:]]
    assert lengths == [(1,)] * 2 + [(1, 2)] + [(1, 2, 4)] + [(1, 2, 4, 8)] * 4


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


def test_where_a_phase_begins_the_steps_before_are_no_measure() -> None:
    training, course = section(config("lessons_per_step=3")).training, Numbers()
    forgotten: list[int] = []
    lessons: Any = LessonLoader(course, training, rank=0, world_size=1, manifest_digest="1", seed=0)  # type: ignore[arg-type]
    run: Any = SimpleNamespace(step=10)
    run.heartbeat = SimpleNamespace(forget_step=lambda are_uneven: forgotten.append(run.step))
    stage = StageB(
        None, section(config()), Clip(config()), lessons, None, 10, num_steps=16, origin=""
    )  # type: ignore[arg-type]
    for run.step in range(10, 16):
        stage.next_batch(run)
    assert forgotten == [10, 13, 15]
    resumed = StageB(
        None, section(config()), Clip(config()), lessons, None, 10, num_steps=16, origin=""
    )  # type: ignore[arg-type]
    run.step = 14
    resumed.next_batch(run)
    assert forgotten[-1] == 14


def test_a_step_of_stage_b_is_timed_by_its_lessons() -> None:
    def step(*overrides: str, nodes: int = 1) -> float:
        given = load_config(shipped("model_configs") / "cdrmix-reason-1b.yaml", overrides)
        cluster = make_cluster(nodes=nodes, gpus_per_node=8, gpu="h100-80")
        made = stage_b_layout(given, cluster, zero_stage=1)
        assert made is not None
        return made.step_seconds

    frozen = step()
    more = "stage_b.training.texts_per_lesson=32"
    assert step(more) > 1.5 * step("stage_b.training.texts_per_lesson=16")
    assert step("stage_b.training.lessons_per_step=16") == pytest.approx(
        2 * step("stage_b.training.lessons_per_step=8"), rel=0.05
    )
    assert step("stage_b.training.backbone_lr_scale=0.1") > 1.2 * frozen, "more is differentiated"
    # four texts a lesson are too few for eight stages: some wait, and with more fewer do
    more = "stage_b.training.texts_per_lesson=16"
    assert 4 * frozen < step("stage_b.pipeline=8") < 8 * frozen
    assert step("stage_b.pipeline=8", more) < 2.5 * step(more)


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
