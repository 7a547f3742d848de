"""Every shipped variant on the clusters of its specification, and what a plan says when none does.

The figures below are what the plan comes to today. They move when the model of memory or time
does: then look at the difference before you change them.
"""

import functools
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from cdrmix.cli import main
from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning.cluster import GIB, make_cluster, processes
from cdrmix.planning.comparison import Comparison, check_fits, compare, plan_text
from cdrmix.planning.profile import choose, with_micro_batch

MOST_LAYOUTS = 3_000  # a thousand take a fifth of a second


def config(name: str, *overrides: str) -> Config:
    return load_config(shipped("model_configs") / f"cdrmix-{name}.yaml", overrides)


@functools.cache  # plans are not changed, and several tests ask for the same
def planned(name: str, nodes: int, gpu: str, *overrides: str) -> Comparison:
    return compare(config(name, *overrides), make_cluster(nodes=nodes, gpus_per_node=8, gpu=gpu))


# variant, nodes of 8, GPU; profile, expert ranks, micro batch, accumulation, GiB a device of the
# pick. What is cheap is computed again where ZeRO-1 leaves no room to keep all, and experts are
# shared out where not all fit a rank.
@pytest.mark.parametrize(
    ("scale", "nodes", "gpu", "profile", "expert", "micro", "steps", "gib"),
    [
        ("1b", 1, "a100-80", "zero1", 8, 2, 8, 42),
        ("4b", 2, "a100-80", "zero1", 8, 1, 16, 66),
        ("4b", 4, "a100-80", "expert", 8, 1, 8, 50),
    ],
)
@pytest.mark.parametrize("family", ["core", "reason"])
def test_what_fits_keeps_activations_and_spreads_no_more_than_it_must(
    family: str,
    scale: str,
    nodes: int,
    gpu: str,
    profile: str,
    expert: int,
    micro: int,
    steps: int,
    gib: int,
) -> None:
    made = planned(f"{family}-{scale}", nodes, gpu)
    pick = made.plan
    assert made.fits
    assert made.plan.profile == profile
    assert asdict(pick.degrees) == {
        "data": 8 * nodes, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": expert
    }  # fmt: skip
    assert (pick.micro_batch_size, pick.gradient_accumulation_steps) == (micro, steps)
    assert not pick.recomputes_blocks
    assert made.plan.estimates()[0].total / 2**30 == pytest.approx(gib, abs=1)
    assert 0.15 < made.plan.estimates()[1].mfu < made.plan.estimates()[1].scaling_efficiency < 1
    assert not made.changes


SHORT = "training.sequence_length=1024"


@pytest.mark.parametrize(
    ("name", "nodes", "gpu", "given", "profile", "micro", "reason"),
    [
        ("core-4b", 1, "h100-80", (), "zero1", 1, "without it no micro batch fits with this"),
        ("core-1b", 4, "rtx4090-24", (SHORT,), "expert", 4, "what it saves lets a micro batch"),
        ("core-1b", 4, "cpu", (), "expert", 1, "leaves memory for the copy that a checkpoint is"),
    ],
)
def test_cheap_activations_are_computed_again_where_that_is_best_and_the_plan_says_why(
    name: str,
    nodes: int,
    gpu: str,
    given: tuple[str, ...],
    profile: str,
    micro: int,
    reason: str,
) -> None:
    made = planned(name, nodes, gpu, *given)
    plan = made.plan
    assert (plan.activation_checkpointing, plan.profile) == ("selective", profile)
    assert plan.micro_batch_size == micro
    (told,) = [each for each in plan.reasons if each.startswith("activation checkpointing")]
    assert told.startswith(f"activation checkpointing selective: {reason}")
    for form in ("none", "block"):
        other = planned(name, nodes, gpu, *given, f"training.activation_checkpointing={form}").plan
        speeds = [each.estimates()[1].tokens_per_second for each in (plan, other)]
        assert speeds[0] > speeds[1] or (plan.saves_in_background and not other.saves_in_background)


# what the size of a model asks for: the axes along which it is cut beside the data ranks
@pytest.mark.parametrize(
    ("scale", "nodes", "gpu", "axes"),
    [
        ("40b", 8, "h100-80", {"tensor", "pipeline", "expert"}),
        ("40b", 8, "h200-141", {"tensor", "pipeline", "expert"}),
        ("40b", 16, "a100-80", {"tensor", "pipeline", "expert"}),
        ("200b", 32, "h100-80", {"tensor", "pipeline", "sequence", "expert"}),
        ("200b", 64, "h100-80", {"tensor", "pipeline", "sequence", "expert"}),
        ("200b", 32, "mi300x-192", {"tensor", "pipeline", "sequence", "expert"}),
    ],
)
def test_large_models_are_cut_along_the_axes_of_their_size(
    scale: str, nodes: int, gpu: str, axes: set[str]
) -> None:
    made = planned(f"core-{scale}", nodes, gpu)
    assert made.fits
    assert made.plan.profile == "pipeline"
    assert made.plan.recomputes_blocks
    degrees = asdict(made.plan.degrees)
    assert {axis for axis, degree in degrees.items() if degree > 1} - {"data"} == axes
    assert not made.plan.missing


@pytest.mark.parametrize("scale", ["40b", "200b"])
def test_large_models_are_recomputed_in_spans_of_tokens(scale: str) -> None:
    made = planned(f"core-{scale}", 32, "mi300x-192")
    for candidate in (made.plan, *made.runners_up, *made.later):
        tokens = 4096 // candidate.degrees.sequence
        assert candidate.activation_checkpointing == "spans"
        assert candidate.sequence_checkpoint_tokens == min(2048, tokens // 2)
    assert made.to_json()["sequence_checkpoint_tokens"] is not None
    assert any("sequence checkpointing by" in reason for reason in made.plan.reasons)
    given = planned(f"core-{scale}", 32, "mi300x-192", "training.activation_checkpointing=block")
    assert given.plan.sequence_checkpoint_tokens is None
    small = planned("core-4b", 4, "a100-80")
    assert small.plan.sequence_checkpoint_tokens is None


@pytest.mark.parametrize("nodes", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("path", sorted(shipped("model_configs").glob("*.yaml")),
                         ids=lambda path: path.stem)  # fmt: skip
def test_every_shipped_config_plans_on_any_cluster_within_a_bounded_search(path, nodes) -> None:
    given = load_config(path, ["training.global_batch_size=2048"])
    made = compare(given, make_cluster(nodes=nodes, gpus_per_node=8, gpu="h100-80"))
    assert 0 < made.num_layouts <= MOST_LAYOUTS
    assert made.fits or made.changes
    limit = 0.9 * made.cluster.memory_bytes
    assert all(
        (candidate.estimates()[0].total <= limit) == candidate.fits
        for candidate in (made.plan, *made.runners_up)
    )


# CPU seconds of this process: 1.2, 0.7 and 0.4 are usual. Where gradients are in float32, as those
# of the tiny model, each partition's cuts were once looked at, one by one: 7 to 12 seconds.
@pytest.mark.parametrize(("name", "most"), [("core-4b", 5), ("core-200b", 4), ("core-tiny", 2.5)])
def test_16384_gpus_are_planned_within_seconds(name: str, most: float) -> None:
    given = config(name, "training.global_batch_size=65536")
    began = time.process_time()
    made = compare(given, make_cluster(nodes=2048, gpus_per_node=8, gpu="h100-80"))
    assert time.process_time() - began < most
    assert made.fits
    assert 0 < made.num_layouts <= MOST_LAYOUTS


@pytest.mark.parametrize(("name", "nodes"), [("core-tiny", 1), ("core-1b", 1), ("reason-4b", 4)])
def test_a_run_on_the_same_cluster_is_laid_out_as_planned(name: str, nodes: int) -> None:
    overrides = ["training.global_batch_size=256"]
    made = planned(name, nodes, "h100-80", *overrides)
    choice = choose(config(name, *overrides), made.cluster)
    pick = made.plan
    assert (choice.name, choice.degrees) == (made.plan.profile, pick.degrees)
    assert choice.micro_batch_size == pick.micro_batch_size
    assert choice.gradient_accumulation_steps == pick.gradient_accumulation_steps
    assert choice.activation_checkpointing == pick.activation_checkpointing
    assert choice.deepspeed["train_micro_batch_size_per_gpu"] == pick.micro_batch_size
    assert choice.memory == made.plan.estimates()[0]
    assert choice.reasons == made.plan.reasons


def test_a_run_that_would_not_fit_is_warned() -> None:
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="rtx4090-24")
    choice = choose(config("core-40b"), cluster)
    assert "NOT within the 90 %" in choice.warnings[-1]


def test_what_the_configuration_gives_is_kept() -> None:
    made = planned(
        "core-1b", 1, "a100-80", "parallel.expert=4", "training.micro_batch_size=1",
        "training.activation_checkpointing=true",
    )  # fmt: skip
    for candidate in (made.plan, *made.runners_up, *made.later):
        assert candidate.degrees.expert == 4
        assert candidate.micro_batch_size == 1
        assert candidate.activation_checkpointing == "block"


@pytest.mark.parametrize(
    ("scale", "nodes", "given", "axes"),
    [
        ("40b", 8, {"tensor": 4}, {"data", "tensor", "pipeline", "expert"}),
        ("40b", 8, {"data": 8}, {"data", "tensor", "pipeline", "expert"}),
        ("200b", 32, {"sequence": 2}, {"data", "tensor", "pipeline", "sequence", "expert"}),
    ],
)
def test_one_degree_that_is_given_leaves_the_others_to_the_search(
    scale: str, nodes: int, given: dict[str, int], axes: set[str]
) -> None:
    overrides = [f"parallel.{axis}={degree}" for axis, degree in given.items()]
    made = planned(f"core-{scale}", nodes, "h200-141", *overrides)
    degrees = asdict(choose(made.config, made.cluster).degrees)
    assert made.fits
    assert degrees == asdict(made.plan.degrees)
    assert degrees | given == degrees
    assert {axis for axis, degree in degrees.items() if degree > 1} == axes


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "sequence"])
def test_an_axis_that_a_small_model_is_given_brings_no_other(axis: str) -> None:
    made = planned("core-tiny", 1, "h100-80", f"parallel.{axis}=2")
    expected = {"data": 8, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1} | {axis: 2}
    expected["data"] //= expected["tensor"] * expected["pipeline"]
    assert asdict(made.plan.degrees) == expected


def test_a_given_profile_takes_only_layouts_that_it_can_carry_out() -> None:
    cluster = make_cluster(nodes=8, gpus_per_node=8, gpu="h100-80")
    choice = choose(config("core-40b"), cluster, profile="zero1")
    degrees = choice.degrees
    assert choice.name == "zero1"
    # without its section for pipelines, DeepSpeed would share out what crosses a border
    assert degrees.tensor == 1 or degrees.pipeline == 1


def test_recomputation_that_was_refused_is_not_planned() -> None:
    made = planned("core-4b", 1, "rtx4090-24", "training.activation_checkpointing=false")
    assert not made.plan.recomputes
    assert not made.fits
    assert "would take less with training.activation_checkpointing = block" in made.changes


def test_processors_that_share_too_little_memory_are_told_of_fewer_ranks() -> None:
    crowded = make_cluster(nodes=1, gpus_per_node=32, gpu="cpu", gpu_memory_gib=0.4)
    made = compare(config("core-tiny"), crowded)
    assert not made.fits
    assert made.changes == ("would fit with 8 ranks a host (--nproc 8), which have 1.6 GiB each",)
    roomier = make_cluster(nodes=1, gpus_per_node=8, gpu="cpu", gpu_memory_gib=1.6)
    assert compare(config("core-tiny"), roomier).fits
    # of 6, a half, no batch of 8 is a multiple
    of_twelve = compare(config("core-tiny"), replace(crowded, gpus_per_node=12))
    assert of_twelve.changes[0].startswith("would fit with 4 ranks a host (--nproc 4)")


def test_what_the_search_has_tried_in_vain_is_not_advised() -> None:
    # one rank alone has too little memory, and the smallest layout recomputes nothing
    crowded = make_cluster(nodes=1, gpus_per_node=64, gpu="cpu", gpu_memory_gib=0.005)
    made = compare(config("core-tiny"), crowded)
    assert not made.plan.recomputes_blocks
    assert not any("activation_checkpointing" in each for each in made.changes)


def test_what_is_enough_is_advised_before_what_takes_less() -> None:
    small = make_cluster(nodes=1, gpus_per_node=1, gpu="cpu", gpu_memory_gib=0.4)
    made = compare(config("core-tiny", "training.micro_batch_size=8"), small)
    assert "would take less with training.micro_batch_size = 1" in made.changes
    with pytest.raises(PlanError, match="What to try: it would fit on 1 device of 2 GiB$"):
        check_fits(made)
    roomier = replace(small, memory_gib=0.97)
    made = compare(config("core-tiny", "training.micro_batch_size=8"), roomier)
    assert "would fit with training.micro_batch_size = 1" in made.changes


@pytest.mark.parametrize(("scale", "params"), [("40b", "114B"), ("200b", "679B")])
def test_recomputation_of_a_large_model_cannot_be_turned_off(scale: str, params: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(f"core-{scale}", 32, "h200-141", "training.activation_checkpointing=false")
    told = f"cdrmix-core-{scale}: training.activation_checkpointing = none with {params} "
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("Try spans, or leave it out")


def test_the_share_of_memory_that_a_plan_may_fill_is_the_configurations() -> None:
    usual = planned("core-4b", 2, "a100-80")
    tight = planned("core-4b", 2, "a100-80", "training.memory_share=0.5")
    limits = [share * usual.cluster.memory_bytes for share in (0.9, 0.5)]
    assert limits[1] < usual.plan.estimates()[0].total <= limits[0]
    assert tight.fits and tight.plan.estimates()[0].total <= limits[1]
    assert "within the 50 % that a plan may fill" in " ".join(tight.plan.reasons)


@pytest.mark.parametrize("scale", ["1b", "4b", "40b", "200b"])
def test_stage_b_is_counted_where_it_is_part_of_the_run(scale: str) -> None:
    made = planned(f"reason-{scale}", 32, "h100-80")
    assert made.plan.stage_b is not None
    assert made.to_json()["stage_b"]["fits"] is made.plan.stage_b.fits
    assert made.plan.reasons[-1].startswith("Stage B: ")
    assert planned(f"reason-{scale}", 32, "h100-80", "training.stage=a").plan.stage_b is None
    assert planned(f"core-{scale}", 32, "h100-80").plan.stage_b is None


def test_a_lesson_that_is_too_long_is_told_with_what_would_fit() -> None:
    usual = planned("reason-1b", 1, "a100-80").plan.reasons[-1]
    assert usual.endswith(": within the 90 % that a plan may fill")
    large = planned("reason-1b", 1, "a100-80", "stage_b.training.texts_per_lesson=80").plan.reasons[
        -1
    ]
    assert large.endswith("Try fewer stage_b.training.texts_per_lesson or a smaller window_tokens")
    held = planned("reason-200b", 32, "h100-80", "stage_b.pipeline=1").plan.reasons[-1]
    assert "every rank holds the whole backbone" in held
    assert "training.stage = a leaves it out" in held


def test_the_fastest_layout_that_fits_is_taken_whatever_is_usual_for_the_size() -> None:
    """All experts on every rank exchange no tokens, and fit an H200."""
    made = planned("core-1b", 1, "h200-141")
    # gradients are exchanged under the backward pass, and leave room for a larger micro batch
    assert (made.plan.name, made.plan.degrees.describe()) == ("zero2", "data 8")
    fastest = max(each.estimates()[1].tokens_per_second for each in made.runners_up)
    assert made.plan.estimates()[1].tokens_per_second > fastest
    told = dict(reason.partition(": ")[::2] for reason in made.plan.reasons)
    assert "; ZeRO-1 has 26" in told["profile zero2"]
    assert told["expert 1"].startswith("estimated faster than expert 8, whose best is ")
    reserved = planned("core-4b", 2, "h100-80").plan.reasons[0]
    assert reserved.startswith("profile zero1: estimated faster than ZeRO-2, whose best is ")


KEPT = "training.activation_checkpointing=none"
# the profile of a plan: variant, nodes, devices of a node, device, and settings
PROFILES = {
    "zero1": ("core-tiny", 1, 1, "cpu"),
    "zero2": ("core-4b", 1, 8, "mi250x-64", "model.moe=null", KEPT),
    "expert": ("core-4b", 4, 8, "mi250x-64", KEPT),
    "zero2_offload": ("core-4b", 2, 8, "rtx4090-24"),
    "zero3": ("core-4b", 1, 8, "rtx4090-24", "model.moe=null"),
    "zero3_offload": ("core-1b", 1, 1, "rtx4090-24", "model.moe=null"),
    "pipeline": ("core-40b", 8, 8, "h100-80"),
}


@pytest.mark.parametrize("profile", [path.stem for path in shipped("ds_configs").glob("*.json")])
def test_every_shipped_profile_is_that_of_some_plan(profile: str) -> None:
    name, nodes, devices, gpu, *overrides = PROFILES[profile]
    cluster = make_cluster(nodes=nodes, gpus_per_node=devices, gpu=gpu)
    made = compare(config(name, *overrides), cluster)
    assert made.plan.profile == profile
    assert made.fits
    assert (made.plan.estimates()[0].host > 0) is profile.endswith("_offload")
    # under ZeRO-2 for a second bucket, where memory is not what the profile is there for
    is_overlapped = profile in ("zero2", "expert", "zero3", "zero3_offload")
    assert made.plan.overlaps_reduction is is_overlapped


def test_training_waits_for_saves_where_hosts_have_no_room_for_a_copy_of_the_state() -> None:
    made = planned("core-4b", 2, "rtx4090-24")
    assert made.fits
    assert not made.plan.estimates()[0].saves_in_background
    (saves,) = (reason for reason in made.plan.reasons if reason.startswith("checkpoints: "))
    assert saves.startswith("checkpoints: training waits for each save: with a copy to write in ")
    assert "GiB of 240 GiB a host would be filled, NOT within 90 %" in saves
    chosen = planned("core-4b", 2, "rtx4090-24", "checkpoint.background=false")
    assert chosen.plan.estimates_to_json() == made.plan.estimates_to_json()
    assert not any(reason.startswith("checkpoints: ") for reason in chosen.plan.reasons)


def test_training_goes_on_beside_saves_where_there_is_room() -> None:
    made = planned("core-1b", 1, "a100-80")
    assert made.plan.estimates()[0].checkpoint > 0
    assert not any(reason.startswith("checkpoints: ") for reason in made.plan.reasons)
    asked = planned("core-1b", 1, "a100-80", "checkpoint.background=true")
    assert asked.plan.estimates_to_json() == made.plan.estimates_to_json()


def test_checkpoints_in_memory_are_counted_and_left_out_where_hosts_have_no_room() -> None:
    plain = planned("core-1b", 1, "a100-80").plan.estimates()[0]
    kept = planned("core-1b", 1, "a100-80", "checkpoint.tiers.memory={keep: 2}").plan
    memory = kept.estimates()[0]
    # A copy to write the run directory from, and one for the tier; the third replaces the oldest.
    assert (memory.checkpoint, memory.memory_tier) == (2 * plain.checkpoint, 3 * plain.checkpoint)
    assert memory.on_host == memory.checkpoint + memory.memory_tier
    assert not any(reason.startswith("checkpoints: ") for reason in kept.reasons)
    many = planned("core-1b", 1, "a100-80", "checkpoint.tiers.memory={keep: 40}").plan
    assert many.fits
    assert not many.has_memory_tier
    assert many.estimates()[0].memory_tier == 0
    (told,) = (reason for reason in many.reasons if reason.startswith("checkpoints: "))
    assert told.startswith("checkpoints: checkpoint.tiers.memory is left out: with it ")
    local = planned("core-1b", 1, "a100-80", "checkpoint.tiers.local={path: /disk}").plan
    assert local.estimates()[0].checkpoint == 2 * plain.checkpoint


@pytest.mark.parametrize(("spare_bytes", "in_background"), [(1e6, True), (-1e6, False)])
def test_cpu_ranks_wait_for_saves_where_their_own_memory_has_no_room_for_a_copy(
    spare_bytes: float, in_background: bool
) -> None:
    given = ("training.micro_batch_size=1", "training.activation_checkpointing=false")
    chosen = config("core-tiny", *given)
    taken = choose(chosen, processes(1), profile="zero1").memory
    assert taken is not None
    gib = (taken.total + spare_bytes) / 0.9 / GIB
    cluster = make_cluster(nodes=1, gpus_per_node=1, gpu="cpu", gpu_memory_gib=gib)
    choice = choose(chosen, cluster, profile="zero1")
    assert choice.saves_in_background is in_background
    told = [reason for reason in choice.reasons if reason.startswith("checkpoints: ")]
    assert len(told) == (not in_background)
    smaller = with_micro_batch(choice, chosen, 1, device="cpu", reason="to see the memory")
    assert smaller.memory == choice.memory


def test_a_host_without_room_for_a_copy_that_is_asked_for_is_told_what_saves_it() -> None:
    cluster = make_cluster(nodes=2, gpus_per_node=8, gpu="rtx4090-24")
    made = compare(config("core-4b", "checkpoint.background=true"), cluster)
    assert not made.fits
    assert "would take less of a host with checkpoint.background = false" in made.changes
    (memory,) = (reason for reason in made.plan.reasons if reason.startswith("memory: "))
    assert memory.endswith("GiB of 240 GiB a host, NOT within it")


def test_nothing_is_offloaded_where_it_need_not_be() -> None:
    made = planned("core-1b", 1, "a100-80")
    assert not made.plan.offloads_optimizer
    others = [candidate.profile for candidate in made.runners_up]
    assert others == sorted(others, key=lambda name: name.endswith("_offload"))


def test_too_small_a_cluster_says_how_much_more_it_takes() -> None:
    made = planned("core-40b", 1, "h100-80")
    (more,) = (change for change in made.changes if "such nodes" in change)
    wider = planned("core-40b", 2, "h100-80")
    assert wider.fits
    assert more == f"would fit on 2 such nodes: {wider.plan.describe()}"


def test_more_nodes_are_looked_at_with_layouts_of_their_own() -> None:
    made = planned("core-200b", 4, "h100-80")
    assert made.plan.profile == "zero2_offload"
    assert any(change.startswith("would fit on 32 such nodes: pipeline") for change in made.changes)


def test_what_follows_from_wrong_degrees_is_not_told() -> None:
    with pytest.raises(PlanError) as caught:
        planned("core-4b", 2, "a100-80", "parallel.pipeline=3")
    assert str(caught.value).endswith("is not the number of ranks, 16. Try 12 or 24 ranks")
    with pytest.raises(PlanError, match="16. Try parallel.data = 2 or 4, or leave it out$"):
        planned("core-4b", 2, "a100-80", "parallel.data=3")


def test_a_host_that_is_too_small_is_told_apart_from_its_devices() -> None:
    made = planned("core-4b", 1, "rtx4090-24")
    assert not made.fits
    (memory,) = (reason for reason in made.plan.reasons if reason.startswith("memory"))
    assert "GiB a device, within the 90 %" in memory
    assert memory.endswith("GiB of 240 GiB a host, NOT within it")
    assert made.changes[-1].endswith("GiB a host")


@pytest.mark.parametrize(
    ("nodes", "override", "told"),
    [
        (1, "parallel.tensor=3", "parallel.tensor = 3 does not divide model.num_heads = 16"),
        (1, "parallel.expert=3", "Try parallel.expert = 2 or 4"),
        (1, "parallel.pipeline=16", "is not the number of ranks, 8. Try 16 ranks"),
        (3, "parallel.data=24", "Try training.global_batch_size = 120 or 144, or 16 or 32"),
    ],
)
def test_what_cannot_be_laid_out_is_told_with_the_nearest_legal_choice(
    nodes: int, override: str, told: str
) -> None:
    with pytest.raises(PlanError) as caught:
        planned("core-1b", nodes, "a100-80", override)
    assert told in str(caught.value)


def test_a_plan_is_made_without_torch() -> None:
    path = shipped("model_configs") / "cdrmix-core-200b.yaml"
    flags = ["--nodes", "32", "--gpus-per-node", "8", "--gpu", "h100-80", "--json"]
    code = (
        "import sys\nfrom cdrmix.cli import main\n"
        f"code = main(['plan', '--config', {str(path)!r}, *{flags}])\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["fits"] is True
    assert printed["degrees"]["pipeline"] > 1


def test_the_command_prints_the_contracts_object(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shipped("model_configs") / "cdrmix-core-1b.yaml")
    cluster = ["--nodes", "1", "--gpus-per-node", "8", "--gpu-memory-gib", "80"]
    assert main(["plan", "--config", path, *cluster, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["degrees"]) == {"data", "tensor", "pipeline", "sequence", "expert"}
    assert list(printed["memory_per_rank_bytes"]) == [
        "weights", "gradients", "optimizer", "activations", "buffers", "total"
    ]  # fmt: skip
    assert (printed["profile"], printed["fits"]) == ("zero1", True)
    times = ("product", "memory", "accumulation", "launch", "optimizer", "step")
    assert all(printed[f"{part}_seconds"] > 0 for part in times)
    assert printed["micro_batch_size"] * printed["gradient_accumulation_steps"] * 8 == 128
    assert printed["reasons"]
    assert main(["plan", "--config", path, *cluster[:-2], "--gpu", "a100"]) == 2
    assert "Did you mean 'a100-80'?" in capsys.readouterr().err


def test_the_page_shows_memory_speed_and_reasons() -> None:
    made = planned("core-40b", 1, "h100-80")
    short, long = plan_text(made), plan_text(made, explain=True)
    assert short.startswith("cdrmix-core-40b on 1 x 8 h100-80 (79.1 GiB): does NOT fit")
    for heading in ("per rank", "MFU", "why", "what would have to change", "runners-up"):
        assert heading in short
    assert set(short.splitlines()) - set(long.splitlines()) == {
        line for line in short.splitlines() if line.startswith("  buffers ")
    }
    assert "buffers: logits" in long
    assert "expert all to all" in long
    assert "gradients all reduce" not in long, "one data rank exchanges none"


def test_the_page_says_what_a_rank_keeps_on_its_host() -> None:
    copied = "  on the host: checkpoint copy      5.83"
    assert copied in plan_text(planned("core-1b", 1, "h100-80")).splitlines()
    offloading = make_cluster(nodes=1, gpus_per_node=4, gpu="rtx4090-24")
    made = compare(config("core-1b"), offloading, profile="zero2_offload")
    memory, _ = made.plan.estimates()
    rows = [row.split() for row in plan_text(made).splitlines() if "on the host: " in row]
    assert [row[-2:] for row in rows] == [
        ["copy", f"{memory.checkpoint / GIB:.2f}"],
        ["offloaded", f"{memory.host / GIB:.2f}"],
    ]


def rows_of(made: Comparison, title: str) -> list[tuple[float, int, bool]]:
    """GiB, tokens per second, and whether it fits, of the plans below a title."""
    lines = plan_text(made).splitlines()
    below = lines[lines.index(title) + 2 :]
    rows = below[: below.index("")] if "" in below else below
    return [
        (float(gib.replace(",", "")), int(speed.replace(",", "")), "does not fit" not in row)
        for row in rows
        for gib, speed, *_ in [row.split()]
    ]


def test_the_page_orders_the_runners_up_by_a_column_and_says_so() -> None:
    made = planned("core-1b", 1, "h100-80")
    rows = rows_of(made, "runners-up, the fastest first")
    assert len(rows) == len(made.runners_up) > 1
    assert rows == sorted(rows, key=lambda row: -row[1])
    none_fits = planned("core-40b", 1, "h100-80")
    rows = rows_of(none_fits, "runners-up, the smallest first")
    assert rows == sorted(rows) and not any(fits for _, _, fits in rows)
    both = replace(made, runners_up=(*none_fits.runners_up[::-1], *made.runners_up))
    title = "runners-up, the fastest first, then those that do not fit, the smallest first"
    rows = rows_of(both, title)
    assert rows == sorted(rows, key=lambda row: (not row[2], -row[1] if row[2] else row[0]))


def test_the_page_of_a_reasoning_variant_tells_its_stages_apart() -> None:
    more = ("stage_b.training.texts_per_lesson=80",)  # which no device holds
    for overrides, verdict in (((), "fits"), (more, "does NOT fit")):
        text = plan_text(planned("reason-1b", 1, "a100-80", *overrides))
        told = f"cdrmix-reason-1b on 1 x 8 a100-80 (79.1 GiB): Stage A fits, Stage B {verdict}\n"
        assert text.startswith(told)
        assert "  Stage A     572,205 steps, 32 days\n" in text
        (timed,) = (line for line in text.splitlines() if line.startswith("  Stage B  "))
        assert timed.startswith("  Stage B     8,000 steps of ")
        assert " and 1,000 of the policy of " in timed
    alone = plan_text(planned("reason-1b", 1, "a100-80", "training.stage=a"))
    assert alone.startswith("cdrmix-reason-1b on 1 x 8 a100-80 (79.1 GiB): fits\n")


def test_equal_input_gives_an_equal_plan() -> None:
    made = planned.__wrapped__  # not the same plan twice
    first, second = (made("core-4b", 2, "a100-80").to_json() for _ in range(2))
    assert first == second
