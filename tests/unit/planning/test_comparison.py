"""`cdrmix plan` as people and scripts meet it: exit code, messages, and reasons that hold."""

import json
import random
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import Config
from cdrmix.planning.cluster import Cluster, make_cluster
from cdrmix.planning.comparison import compare
from cdrmix.planning.plan import Plan
from cdrmix.planning.profile import all_plans, explained

pytestmark = pytest.mark.usefixtures("shared_searches")

TOO_SMALL = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100-80"]


def config(name: str, *overrides: str) -> Config:
    return load_config(shipped("model_configs") / f"cdrmix-{name}.yaml", overrides)


def plan(name: str, *flags: str) -> int:
    return main(["plan", "--config", str(shipped("model_configs") / f"cdrmix-{name}.yaml"), *flags])


def test_where_nothing_fits_the_page_is_printed_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan("core-40b", *TOO_SMALL) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("cdrmix-core-40b on 1 x 8 h100-80 (79.1 GiB): does NOT fit")
    assert printed.err.startswith("error: cdrmix-core-40b: no layout fits 1 x 8 h100-80")
    assert "such nodes" in printed.err
    assert printed.err.count("\n") == 1


def test_where_no_number_of_such_nodes_fits_nodes_of_more_devices_are_named() -> None:
    made = compare(config("core-200b"), make_cluster(nodes=1, gpus_per_node=1, gpu="h100-80"))
    (change,) = (each for each in made.changes if each.startswith("would fit"))
    assert change.startswith("would fit on 32 nodes of 8 such devices: pipeline")


def test_where_nothing_fits_the_json_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("core-40b", *TOO_SMALL, "--json") == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_where_stage_b_alone_does_not_fit_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--set", "stage_b.training.texts_per_lesson=80"]
    cluster = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "a100-80"]
    assert plan("reason-1b", *cluster, *more) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: cdrmix-reason-1b: Stage A fits, Stage B does not: ")
    assert "Try fewer stage_b.training.texts_per_lesson" in told
    assert plan("reason-1b", *cluster) == 0


def test_the_help_says_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "Exit code 2 where no layout fits" in " ".join(capsys.readouterr().out.split())


def test_the_page_tells_times_in_words_and_the_json_in_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan("core-40b", *TOO_SMALL, "--explain") == 2
    page = capsys.readouterr().out
    step, exchanged, run = (
        next(line for line in page.splitlines() if line.startswith(f"  {name} "))
        for name in ("a step", "exchanged", "the run")
    )
    assert " minutes, " in step and run.endswith(" years")
    assert "GiB a step, " in exchanged
    assert "e+0" not in exchanged
    assert " s, " not in step and " days" not in page
    plan("core-40b", *TOO_SMALL, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed["days"] > 1_000 and printed["step_seconds"] > 700


def test_where_nothing_fits_the_reasons_say_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan("core-40b", *TOO_SMALL)
    page = capsys.readouterr().out
    reasons = page.partition("\nwhy\n")[2].partition("\n\n")[0].splitlines()
    told = dict(reason.removeprefix("  - ").partition(": ")[::2] for reason in reasons)
    assert told["missing"] == (
        "no layout fits, and the smallest of all, this one, takes 15.6 GiB too much for a device "
        "(the largest part of 86.8 GiB is gradients, 53.8 GiB) and 227.3 GiB too much for a host "
        "(all of the 1,937.3 GiB is offloaded states)"
    )
    assert told["micro batch 1"] == "a larger one takes more memory"
    for claim in ("fastest", "faster", "takes least", "copied all the same"):
        assert claim not in page
    assert "\nwhat would have to change\n  - would fit on 2 such nodes" in page


def test_recomputation_of_what_does_not_fit_is_no_gain_in_speed() -> None:
    small = make_cluster(nodes=1, gpus_per_node=1, gpu_memory_gib=10)
    made = compare(config("core-1b"), small)
    assert not made.fits
    assert "activation checkpointing block: takes less memory than without" in made.plan.reasons
    assert any("GiB too much for a device" in warning for warning in made.plan.warnings)
    assert made.changes[-1] == "would fit on 1 device of 31 GiB"


def test_the_page_says_where_the_memory_of_a_host_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "rtx4090-24"]
    assert plan("core-4b", *given) == 2
    assumed = capsys.readouterr()
    assert "  a host      240 GiB, assumed as in the preset rtx4090-24; --host" in assumed.out
    assert "\n  - would fit with 308 GiB a host\n" in assumed.out
    assert plan("core-4b", *given, "--host-memory-gib", "308") == 0
    told = capsys.readouterr().out
    assert "  a host      308 GiB, --host-memory-gib as given\n" in told
    assert plan("core-4b", *given, "--host-memory-gib", "-1") == 2
    assert "--host-memory-gib -1: allowed is a number above 0" in capsys.readouterr().err


CLUSTERS = [(1, "rtx4090-24"), (2, "a100-80"), (16, "h100-80"), (1, "cpu")]


def faster_than_the_choice(given: Config, cluster: Cluster) -> tuple[Plan, list[Plan]]:
    """The choice, and every plan of the search that can run, fits and is estimated faster."""
    best, *others = all_plans(given, cluster)
    rate = best.estimates()[1].tokens_per_second
    fitting = [other for other in others if other.fits and not other.missing]
    faster = [other for other in fitting if other.estimates()[1].tokens_per_second > rate]
    return explained(best, given, cluster, others=others), faster if best.fits else []


def check_reasons(given: Config, cluster: Cluster) -> None:
    """The choice is the fastest that fits and says so, or gives both figures and why."""
    choice, faster = faster_than_the_choice(given, cluster)
    told = [reason for reason in choice.reasons if reason.startswith("speed: ")]
    if not faster:
        assert not told
        assert any("the fastest that fits" in each for each in choice.reasons) == choice.fits
        return
    assert "fastest" not in " ".join(choice.reasons)
    fastest = max(each.estimates()[1].tokens_per_second for each in faster)
    (speed,) = told
    assert f"{choice.estimates()[1].tokens_per_second:,.0f} tokens per second" in speed
    assert f"{fastest:,.0f}" in speed


@pytest.mark.parametrize(("nodes", "gpu"), CLUSTERS)
@pytest.mark.parametrize("path", sorted(shipped("model_configs").glob("*.yaml")),
                         ids=lambda path: path.stem)  # fmt: skip
def test_fastest_is_said_only_where_nothing_that_fits_is_faster(
    path: Path, nodes: int, gpu: str
) -> None:
    batch = [] if "tiny" not in path.stem else ["training.global_batch_size=128"]
    check_reasons(load_config(path, batch), make_cluster(nodes=nodes, gpus_per_node=8, gpu=gpu))


@pytest.mark.parametrize("seed", range(20))
def test_the_reasons_of_a_drawn_model_hold_too(seed: int) -> None:
    draw = random.Random(seed)
    heads = draw.choice([4, 6, 12, 16, 32])
    head_dim = draw.choice([32, 64, 128])
    settings = {
        "model.num_heads": heads,
        "model.num_kv_heads": heads,
        "model.head_dim": head_dim,
        "model.hidden_size": heads * head_dim,
        "model.num_layers": draw.choice([4, 8, 24, 40]),
        "model.vocab_size": draw.choice([4096, 32768]),
        "training.sequence_length": draw.choice([512, 2048]),
        "training.global_batch_size": draw.choice([96, 192, 384]),
        "training.precision": draw.choice(["bf16", "fp32"]),
        "checkpoint.every_steps": draw.choice([10, 1000]),
    }
    if draw.random() < 0.4:
        settings["model.moe"] = "null"
    else:
        settings["model.moe.expert_hidden_size"] = draw.choice([256, 1024, 4096])
    given = config("core-tiny", *(f"{key}={value}" for key, value in settings.items()))
    cluster = make_cluster(
        nodes=draw.choice([1, 2, 6]),
        gpus_per_node=draw.choice([1, 2, 4, 8]),
        gpu=draw.choice(["rtx4090-24", "a100-80", "h200-141", "mi300x-192"]),
    )
    check_reasons(given, cluster)


def test_a_small_model_is_told_that_its_axes_come_before_speed() -> None:
    sizes = ("model.num_layers=8", "model.hidden_size=192", "model.num_heads=6")
    cluster = make_cluster(nodes=1, gpus_per_node=8, gpu="rtx4090-24")
    made = compare(config("core-tiny", *sizes), cluster)
    assert (made.plan.name, made.plan.degrees.describe()) == ("zero1", "data 8 x expert 8")
    (speed,) = (reason for reason in made.plan.reasons if reason.startswith("speed: "))
    assert speed == (
        "speed: 34,904 tokens per second are estimated, and 34,985 for zero1, data 4 x tensor 2 x "
        "expert 8, micro batch 2, which fits too; what is usual for the size comes before an "
        "estimate of speed: tensor 2 is usual from 50B parameters on, and this model has 8.65M"
    )
    assert "micro batch 1: no other is faster with this profile and these degrees" in (
        made.plan.reasons
    )


def test_one_data_rank_is_told_what_zero2_would_lack() -> None:
    alone = make_cluster(nodes=1, gpus_per_node=1, gpu="a100-80")
    made = compare(config("core-tiny"), alone)
    assert made.plan.reasons[0] == (
        "profile zero1: one data rank: ZeRO-2 would have no other rank to spread gradients over"
    )
