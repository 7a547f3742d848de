"""A target size becomes dimensions near the shipped variants; the tools print them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.errors import ConfigError
from cdrmix.planning.autosize import SCALES, parse_size, size_for_active, variant_sizes
from cdrmix.planning.counts import count
from tests.harness import ROOT

CORE = ROOT / "tools" / "core_param_autosizer.py"
REASON = ROOT / "tools" / "reasoning_param_autosizer.py"


def run(tool: Path, *flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tool), *flags])
    runpy.run_path(str(tool), run_name="__main__")


@pytest.mark.parametrize(
    ("text", "size"),
    [("3B", 3e9), ("1.5b", 1.5e9), ("500M", 5e8), ("3e9", 3e9), ("3000000000", 3e9), ("1T", 1e12)],
)
def test_a_size_is_read_with_its_unit(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "3Q", "-3B", "0", "three", "3 B B", "1e400", "nan", "9999T"])
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="from 20M to 1000T"):
        parse_size(text)


@pytest.mark.parametrize("target", [2e7, 1e8, 4.2e8, 1e9, 3e9, 7e9, 1.3e10, 7e10, 4e11, 1e13])
def test_a_new_size_meets_its_target_within_3_percent(target: float) -> None:
    size = size_for_active("core", target)
    model = size.model
    assert size.counts.active_params == pytest.approx(target, rel=0.03)
    assert size.counts == count(model, 4096)
    assert model.moe is not None
    assert model.head_dim == 128
    assert model.num_layers % 4 == 0
    assert model.moe.expert_hidden_size % 256 == 0


@pytest.mark.parametrize("index", range(4), ids=SCALES)
def test_the_size_of_a_variant_gives_the_variant_back(index: int) -> None:
    shipped = variant_sizes("core")[index]
    assert size_for_active("core", shipped.counts.active_params).model == shipped.model


def test_shapes_grow_with_the_target() -> None:
    targets = [1.5e9 * 3**step for step in range(5)]
    models = [size_for_active("core", target).model for target in targets]
    for smaller, larger in zip(models, models[1:], strict=False):
        assert smaller.hidden_size <= larger.hidden_size
        assert smaller.num_layers <= larger.num_layers


def test_a_target_below_the_smallest_shape_says_so() -> None:
    with pytest.raises(ConfigError, match="no model within 3% of 5M .* Try a target from 20M"):
        size_for_active("core", 5e6)


@pytest.mark.parametrize(("tool", "family"), [(CORE, "core"), (REASON, "reason")])
def test_the_tools_list_all_variants_as_json(tool: Path, family: str, monkeypatch, capsys) -> None:
    run(tool, "--json", monkeypatch=monkeypatch)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [f"cdrmix-{family}-{scale}" for scale in SCALES]
    for row, size in zip(rows, variant_sizes(family), strict=True):
        assert row["total_params"] == size.counts.total_params
        assert row["active_params"] == size.counts.active_params
        assert row["train_flops_per_token"] == size.counts.train_flops_per_token


@pytest.mark.parametrize("tool", [CORE, REASON])
def test_the_tools_size_a_new_model(tool: Path, monkeypatch, capsys) -> None:
    run(tool, "--target-active", "3B", "--json", monkeypatch=monkeypatch)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["active_params"] == pytest.approx(3e9, rel=0.03)


def test_the_table_shows_variants_and_the_new_model_aligned(monkeypatch, capsys) -> None:
    run(REASON, "--target-active", "3B", monkeypatch=monkeypatch)
    table, _, section = capsys.readouterr().out.partition("\n\n")
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    row = " ".join(lines[1].split())
    assert row == "cdrmix-reason-1b 2048 24 16 4608 4.17 1.45 9.14 5.36"
    assert lines[5].startswith("cdrmix-reason-3b-active")
    assert section.startswith("model:\n  hidden_size: ")


@pytest.mark.parametrize(("size", "told"), [("3Q", "given '3Q'"), ("1M", "Try a target from 20M")])
def test_a_bad_size_ends_a_tool_with_one_message_and_exit_code_2(
    size: str, told: str, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(CORE, "--target-active", size, monkeypatch=monkeypatch)
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.out == ""
    assert shown.err.count("error:") == 1
    assert told in shown.err


def test_a_tool_runs_as_a_script_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, str(CORE), "--json"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)) == 4
