"""`cdrmix plan` as people and scripts meet it: exit code, messages, and reasons that hold."""

import json

import pytest

from cdrmix.cli import main
from cdrmix.config.load import shipped

TOO_SMALL = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100-80"]


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


def test_where_nothing_fits_the_json_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("core-40b", *TOO_SMALL, "--json") == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_where_stage_b_alone_does_not_fit_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--set", "stage_b.training.texts_per_lesson=64"]
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
    assert plan("core-200b", *TOO_SMALL, "--explain") == 2
    page = capsys.readouterr().out
    step, exchanged, run = (
        next(line for line in page.splitlines() if line.startswith(f"  {name} "))
        for name in ("a step", "exchanged", "the run")
    )
    assert " minutes, " in step and run.endswith(" years")
    assert "GiB a step, " in exchanged
    assert "e+0" not in exchanged
    assert " s, " not in step and " days" not in page
    plan("core-200b", *TOO_SMALL, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed["days"] > 1_000 and printed["step_seconds"] > 1_000
