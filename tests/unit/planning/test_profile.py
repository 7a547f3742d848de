"""A config and a world become a profile, degrees, batch sizes and DeepSpeed's settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.errors import PlanError
from cdrmix.planning import profile as profile_module
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.counts import count, stage_b_params
from cdrmix.planning.deepspeed_json import (
    DEEPSPEED_VERSION,
    OWNED_BY_YAML,
    PROFILE_KEYS,
    REFUSED_KEYS,
    ZERO_KEYS,
    Allowed,
    profile_path,
    read_profile,
)
from cdrmix.planning.memory import MemoryModel
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import check_legal, choose, smaller_micro_batch, with_micro_batch

SHIPPED = sorted(shipped("model_configs").glob("*.yaml"))
PROFILES = sorted(shipped("ds_configs").glob("*.json"))


def config(name: str, *overrides: str) -> Config:
    return load_config(shipped("model_configs") / f"cdrmix-{name}.yaml", overrides)


def devices(number: int, gpu: str = "mi300x-192") -> Cluster:
    return make_cluster(nodes=1, gpus_per_node=number, gpu=gpu)


def written(folder: Path, text: str) -> str:
    path = folder / "given.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(profile: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        choose(config("core-tiny"), devices(1), profile=profile)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_counts_and_plans(path: Path, world_size: int) -> None:
    given = load_config(path, ["training.global_batch_size=128"])
    counts = count(given.model, given.training.sequence_length)
    assert 0 < counts.active_params < counts.total_params
    if given.stage_b is not None:
        assert 0 < stage_b_params(given.model, given.stage_b).total_params < counts.active_params
    choice = choose(given, devices(world_size))
    assert choice.degrees.world_size == world_size
    micro_step = choice.micro_batch_size * choice.degrees.sample_ranks
    assert micro_step * choice.gradient_accumulation_steps == 128
    told = [reason.split(maxsplit=1)[0].rstrip(":") for reason in choice.reasons]
    assert told[:5] == ["profile", "degrees", "expert", "micro", "memory"]
    assert told[-2:] == ["accumulation", "Stage"] if given.stage_b else told[-1] == "accumulation"


@pytest.mark.parametrize(
    ("name", "world_size", "profile", "expert"),
    [
        ("core-tiny", 1, "zero1", 1),
        ("core-tiny", 4, "zero1", 1),
        ("core-1b", 1, "zero1", 1),
        ("core-1b", 2, "zero1", 1),
        ("core-1b", 8, "zero1", 1),
        ("core-4b", 32, "zero2", 1),
        ("reason-4b", 12, "zero2", 1),
        ("core-1b", 3, "zero1", 1),
    ],
)
def test_profile_and_expert_degree_follow_size_and_world(
    name: str, world_size: int, profile: str, expert: int
) -> None:
    choice = choose(config(name, "training.global_batch_size=384"), devices(world_size))
    assert (choice.name, choice.degrees.expert) == (profile, expert)
    assert choice.to_json()["profile_path"] == str(shipped("ds_configs") / f"{profile}.json")


def test_shipped_profiles_differ() -> None:
    settings = [json.dumps(read_profile(path), sort_keys=True) for path in PROFILES]
    assert len(set(settings)) == len(PROFILES)


def test_what_the_config_gives_is_kept() -> None:
    given = config("core-tiny", "parallel.expert=4", "training.micro_batch_size=1")
    choice = choose(given, devices(4), profile="zero2")
    assert (choice.name, choice.degrees.expert, choice.micro_batch_size) == ("zero2", 4, 1)
    assert choice.gradient_accumulation_steps == 2
    assert sum("as given" in reason for reason in choice.reasons) == 3


@pytest.mark.parametrize(
    ("precision", "block"),
    [
        (
            "bf16",
            {
                "bf16": {"enabled": True, "immediate_grad_update": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
        ),
        ("fp16", {"fp16": {"enabled": True, "loss_scale": 0}}),
        ("fp32", {}),
    ],
)
def test_deepspeed_gets_the_profile_and_what_follows_from_the_run(
    precision: str, block: dict
) -> None:
    given = config("core-tiny", f"training.precision={precision}", "training.gradient_clipping=0.5")
    choice = choose(given, devices(2))
    assert choice.deepspeed == {
        **read_profile(profile_path(choice.profile)),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        **block,
    }


def test_an_offloaded_optimizer_may_be_the_loops_own() -> None:
    choice = choose(config("core-tiny"), devices(2), profile="zero2_offload")
    assert choice.deepspeed["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in choose(config("core-tiny"), devices(2)).deepspeed


def test_a_plan_is_written_as_json_with_its_reasons() -> None:
    large = replace(devices(8, "cpu"), memory_gib=500)
    choice = choose(config("core-1b", "training.micro_batch_size=1"), large)
    plan = json.loads(json.dumps(choice.to_json()))
    assert plan["profile"] == "zero1"
    assert plan["degrees"] == {"data": 8, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1}
    assert (plan["micro_batch_size"], plan["gradient_accumulation_steps"]) == (1, 16)
    assert plan["reasons"] == list(choice.reasons)
    (warning,) = (each for each in plan["warnings"] if "60 times slower" in each)
    # of processors of the preset's kind: others are asked by the run itself
    assert "those without native support" in warning
    assert "unless it says that bf16 pays" in warning


def test_equal_input_gives_an_equal_choice() -> None:
    first, second = (choose(config("core-4b"), devices(16)) for _ in range(2))
    assert isinstance(first, Plan)
    assert first == second


def test_a_combination_that_cannot_run_is_refused_while_planning() -> None:
    with pytest.raises(PlanError, match="parallel.expert = 3 does not divide"):
        choose(config("core-tiny", "parallel.expert=3"), devices(2))
    with pytest.raises(PlanError, match="is not the number of ranks, 2"):
        choose(config("core-tiny", "parallel.data=4"), devices(2))


# overrides, ranks, profile: of combinations that the rules refuse, and of two that they let pass
REFUSED = {
    "wrong degree": (["parallel.expert=3"], 2, None),
    "wrong world": (["parallel.data=4"], 2, None),
    "batch": (["training.global_batch_size=7"], 2, None),
    "precision": (["training.precision=fp16"], 1, None),
    "not yet": (["training.precision=fp16", "parallel.pipeline=2"], 2, None),
    "profile of dense models": ([], 1, "zero3"),
    "unknown profile": ([], 1, "zero9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rules_alone_refuse_what_a_search_refuses(case: str, monkeypatch) -> None:
    overrides, ranks, profile = REFUSED[case]
    given, told = config("core-tiny", *overrides), []
    with pytest.raises(PlanError) as caught:
        choose(given, devices(ranks, "cpu"), profile=profile)
    told.append(str(caught.value))
    monkeypatch.setattr(profile_module, "search", None)  # neither memory nor time is estimated
    with pytest.raises(PlanError) as caught:
        check_legal(given, world_size=ranks, profile=profile, device="cpu")
    told.append(str(caught.value))
    assert told[0] == told[1]


def test_rules_alone_let_pass_what_a_search_would_find(monkeypatch) -> None:
    monkeypatch.setattr(profile_module, "search", None)
    for name, ranks in (("core-tiny", 1), ("core-40b", 64), ("reason-1b", 8)):
        check_legal(config(name), world_size=ranks, device="cuda")
    with pytest.raises(PlanError, match="stage_b.pipeline = 3 does not divide the 8 ranks"):
        check_legal(config("reason-1b", "stage_b.pipeline=3"), world_size=8)


# --- profiles of the user's own ---------------------------------------------------------------


def test_a_profile_of_the_users_own_is_taken_by_path(tmp_path: Path) -> None:
    path = written(tmp_path, '{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    choice = choose(config("core-tiny"), devices(2), profile=path)
    assert (choice.name, choice.profile) == ("given", path)
    assert choice.deepspeed["zero_optimization"] == {"stage": 2, "overlap_comm": True}


@pytest.mark.parametrize(
    ("zero", "overlaps"),
    [
        ('"stage": 2', False),
        ('"stage": 2, "overlap_comm": true', True),
        ('"stage": 1, "overlap_comm": true', False),  # the bf16 optimizer does not read it
        ('"stage": 3', True),  # DeepSpeed's default
        ('"stage": 3, "overlap_comm": false', False),
    ],
)
def test_a_plan_knows_whether_gradients_are_reduced_under_the_backward_pass(
    zero: str, overlaps: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, f'{{"zero_optimization": {{{zero}, "reduce_bucket_size": 1000}}}}')
    dense = config("core-tiny", "model.moe=null", "model.ffn_hidden_size=64")
    layout = choose(dense, devices(2), profile=path)
    assert layout.overlaps_reduction is overlaps
    memory = MemoryModel(dense, "cuda")
    other = replace(layout, overlaps_reduction=not overlaps)
    sizes = [memory.estimate(each).buffers["gradient_buckets"] for each in (layout, other)]
    filled_beside = 1000 * memory.element_bytes if layout.zero_stage == 2 else 0
    assert abs(sizes[0] - sizes[1]) == filled_beside


def test_a_whole_float_is_a_whole_number_and_a_setting_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, '{"zero_optimization": {"stage": 1, "reduce_bucket_size": 2e8}}')
    assert read_profile(Path(path))["zero_optimization"]["reduce_bucket_size"] == 2e8


@pytest.mark.parametrize("key", OWNED_BY_YAML)
def test_what_belongs_to_the_run_is_refused_in_a_profile(key: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({key: 1}))
    (line,) = refused(path)
    owner = OWNED_BY_YAML[key]
    assert line == f"{path}: {key}: belongs to the run, not to a profile. Set {owner}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ('{"zero_optimisation": {}}', "zero_optimisation: unknown key (DeepSpeed would ignore it). "
         "Did you mean 'zero_optimization'? Known: comms_logger"),
        ('{"zero_optimization": {"stge": 1}}', "zero_optimization.stge: unknown key"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: given 4, allowed is one "
         "of 0, 1, 2, 3"),
        ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage: given true"),
        ('{"zero_optimization": {"reduce_bucket_size": "auto"}}', "zero_optimization."
         "reduce_bucket_size: given 'auto', allowed is a whole number from 0"),
        ('{"zero_optimization": {"overlap_comm": 1}}', "zero_optimization.overlap_comm: given 1, "
         "allowed is true or false"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}', "zero_optimization."
         "offload_optimizer.device: given 'gpu', allowed is one of none, cpu, nvme"),
        ('{"zero_optimization": {"offload_param": {"ratio": 1}}}', "zero_optimization."
         "offload_param.ratio: unknown key"),
        ('{"zero_optimization": 2}', "zero_optimization: given 2, allowed is a section"),
        ('{"zero_optimization": {"cpu_offload": true}}', "zero_optimization.cpu_offload: an old "
         "name. Give zero_optimization.offload_optimizer"),
        ('{"data_types": {"grad_accum_dtype": "bf16"}}', "data_types: gradients are summed in"),
        ('{"zero_optimization": {"legacy_stage1": true}}', "zero_optimization.legacy_stage1: "),
        ('{"steps_per_print": -1}', "steps_per_print: given -1, allowed is a whole number from 0"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "steps_per_print: this key stands here a "
         "second time"),
        ('[1]', "given a list, allowed is an object of settings"),
        ('{"a": }', "line 1, column 7: Expecting value"),
        ("", "line 1, column 1: Expecting value"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_told_with_what_is_allowed(
    settings: str, told: str, tmp_path: Path
) -> None:
    path = written(tmp_path, settings)
    assert refused(path)[0].startswith(f"{path}: {told}")


def test_all_problems_of_a_profile_are_in_one_report(tmp_path: Path) -> None:
    path = written(tmp_path, '{"bf16": {}, "x": 1, "zero_optimization": {"y": 1, "stage": 9}}')
    assert len(refused(path)) == 4


def test_an_unknown_profile_is_told_with_the_nearest_and_all_known_ones() -> None:
    (line,) = refused("zero")
    assert line.startswith("--profile zero: unknown profile. Did you mean 'zero3'? Known: expert, ")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "none.json")) == [f"{tmp_path / 'none.json'}: no such file"]


# --- the installed DeepSpeed ------------------------------------------------------------------


def fields_of(model: type) -> set[str]:
    """Names under which DeepSpeed documents the fields of one of its sections."""
    return {field.alias or name for name, field in model.model_fields.items()}  # type: ignore[attr-defined]


def test_the_allowed_zero_settings_are_those_of_the_installed_deepspeed() -> None:
    from cdrmix.runtime import import_deepspeed

    deepspeed = import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    told = f"the list is that of {DEEPSPEED_VERSION}; read DeepSpeed's changes and update it"
    assert deepspeed.__version__.split("+")[0] == DEEPSPEED_VERSION, told
    of_zero = "zero_optimization."
    refused_names = {key.removeprefix(of_zero) for key in REFUSED_KEYS if key.startswith(of_zero)}
    assert {*ZERO_KEYS, *refused_names} == fields_of(DeepSpeedZeroConfig)
    assert not {*ZERO_KEYS} & refused_names
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        kind = ZERO_KEYS.get(field.alias or name)
        if kind in (bool, int):
            assert kind in (field.annotation, *get_args(field.annotation)), name
    pairs: list[tuple[Allowed, type]] = [
        (ZERO_KEYS["offload_param"], DeepSpeedZeroOffloadParamConfig),
        (ZERO_KEYS["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig),
    ]
    for keys, model in pairs:
        assert {*keys} == fields_of(model)


def test_deepspeed_reads_every_other_setting_that_a_profile_may_hold() -> None:
    """DeepSpeed has no list of its top-level keys, so each must be a name in its sources."""
    from cdrmix.runtime import import_deepspeed

    package = Path(import_deepspeed().__file__).parent
    files = ("runtime/config", "runtime/constants", "comm/constants", "profiling/constants")
    text = "".join((package / f"{name}.py").read_text(encoding="utf-8") for name in files)
    unknown = {key for key in PROFILE_KEYS if f'"{key}"' not in text and f"'{key}'" not in text}
    assert unknown <= {"zero_optimization"}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_deepspeed_accepts_every_shipped_profile(profile: Path) -> None:
    from cdrmix.runtime import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    dense = ["model.moe=null"] if profile.stem.startswith("zero3") else []
    choice = choose(config("core-tiny", *dense), devices(1), profile=profile.stem)
    parsed = DeepSpeedConfig(choice.deepspeed)
    assert parsed.zero_optimization_stage == choice.deepspeed["zero_optimization"]["stage"]
    assert parsed.gradient_clipping == 1.0


def test_smaller_micro_batches_keep_what_a_rank_takes_of_a_step() -> None:
    given = config("core-tiny", "training.global_batch_size=12", "training.micro_batch_size=6")
    choice = choose(given, devices(1, "cpu"))
    sizes = [6]
    while sizes[-1] > 1:
        sizes.append(smaller_micro_batch(choice, sizes[-1]))
    assert sizes == [6, 3, 1]
    smaller = with_micro_batch(choice, given, 3, device="cpu", reason="of this test")
    assert (smaller.micro_batch_size, smaller.gradient_accumulation_steps) == (3, 4)
    assert smaller.deepspeed == choice.deepspeed | {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
    }
    assert smaller.memory is not None
    assert choice.memory is not None
    assert smaller.memory.activations < choice.memory.activations
    assert smaller.reasons[-1] == "micro batch 3 instead, accumulation 4: of this test"
