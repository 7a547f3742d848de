"""Numbers that verbs take as flags, and misspelt verbs and flags."""

import argparse

import pytest

from cdrmix import cli
from cdrmix.errors import ConfigError
from cdrmix.planning.cluster import PRESETS
from cdrmix.verbs.flags import at_least
from launch.train import parse


def test_a_flags_number_is_of_its_type_and_not_below_the_lowest() -> None:
    assert at_least(1)("1") == 1
    assert at_least(0.0)("0.25") == 0.25
    for lowest, text in ((1, "0"), (0, "-1"), (0.0, "-0.001"), (0.0, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"given {text}, allowed .* from"):
            at_least(lowest)(text)
    with pytest.raises(ValueError):  # which argparse tells as an invalid value
        at_least(1)("1.5")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian", "train"),
        ("pretrain", "train"),
        ("fit", "train"),
        ("run", "train"),
        ("xyzzy", None),
        ("evalute", "evaluate"),
        ("Plan", "plan"),
        ("data bulid", "build"),
        ("evaluate --suite reasning run", "reasoning"),
    ],
)
def test_a_misspelt_verb_or_choice_is_led_to_the_near_one(
    line: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "choose from" in told
    assert told.rstrip().endswith(f"Did you mean '{meant}'?" if meant else ")")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("slurm --nodes 1 --partitions gpu", "Did you mean --option partition=gpu?"),
        ("slurm --nodes 1 --qos=long", "Did you mean --option qos=long?"),
        ("slurm --nodes 1 --exclusive", "Did you mean --option exclusive?"),
        ("slurm --nodes 1 --ntasks-per-node 8", "Give --gpus-per-node, a rank a device"),
        ("slurm --nodes 1 --lr 3", "Did you mean --set training.learning_rate=3?"),
        ("train --lr 3", "Did you mean --set training.learning_rate=3?"),
        ("launch --learning-rate 3", "Did you mean --set training.learning_rate=3?"),
        ("train --batch_size", "Did you mean --set training.global_batch_size=VALUE?"),
        ("train --max_steps 3", "Did you mean --max-steps?"),
        ("train --partition gpu", None),
        ("train --confg f --lr 3", "Did you mean --set training.learning_rate=3?"),
        ("evaluate run --lr 3", None),
        ("evaluate run --exmples 3", "Did you mean --examples?"),
        ("data inspect folder --jsn", "Did you mean --json?"),
        ("train --xyzzy", None),
        ("evaluate run other", None),
    ],
)
def test_an_unknown_flag_is_led_to_what_it_may_mean(
    line: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    verb = " ".join(word for word in line.split()[:2] if word in ("data", "inspect"))
    assert told.startswith(f"usage: cdrmix {verb or line.split(maxsplit=1)[0]} ")
    assert "unrecognized arguments: " in told
    if meant is None:
        assert "Did you mean" not in told
    else:
        assert told.rstrip().endswith(meant)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train --conf f", "--config"),
        ("train --gpu-mem 3", "--gpu-memory-gib"),
        ("train --max 3", "--max-restarts or --max-steps"),
        ("plan --conf f --nodes 1 --gpus-per-node 1", "--config"),
        ("plan --config f --nodes 1 --gpus 1", "--gpus-per-node"),
    ],
)
def test_a_shortened_flag_is_refused(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(f"Did you mean {meant}?")


def test_a_shortened_flag_of_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --conf"):
        parse(["--conf", "f"])
    assert parse(["--config", "f", "--local_rank=1"]).config == "f"


def test_the_help_lists_every_preset_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    *others, last = PRESETS
    assert f"--gpu PRESET {', '.join(others)} or {last} " in shown
