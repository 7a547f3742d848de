"""Models that suites judge: a run, its checkpoints, exports, Hugging Face folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from cdrmix import cli
from cdrmix.config.load import load_config
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import DataError
from cdrmix.evaluation.trained import held_out_folder
from cdrmix.monitoring.suite_results import read_results
from cdrmix.verbs.evaluate_verb import add_evaluate, asked_of
from tests import tiny_suite
from tests.conftest import TINY
from tests.hf_models import make_folder
from tests.made_run import VOCABULARY, made_run
from tests.unit.data.token_folder import write_token_folder

TEXT = "def f(x): return x\n"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_suite.SUITES, "perplexity", (tiny_suite.__name__, "TinySuite"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("made") / "run"
    made_run(run_dir)
    made_run(run_dir, step=9)
    return run_dir


@pytest.fixture(scope="module")
def export(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "export"
    assert cli.main(["export", str(run), "--out", str(out)]) == 0
    return out


def held_out(folder: Path, run: Path) -> Path:
    """A data set in the tokens of a run, of 200 tokens."""
    text = (run / "tokenizer.json").read_bytes()
    numbers = [20 + (7 * i * i + 3) % (VOCABULARY - 20) for i in range(99)]
    ids = [[*numbers, 0], [*[50] * 98, 0]]  # each ends with EOS
    splits = {"train": [[1, 2]], "validation": ids}
    return write_token_folder(folder, splits, vocab_size=VOCABULARY, tokenizer_file=text)


def evaluated(source: Path, *flags: str | Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    words = ["evaluate", source, "--option", f"text={TEXT}", "--json", *flags]
    assert cli.main([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(source: Path, *flags: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    try:
        assert cli.main(["evaluate", str(source), *map(str, flags)]) == 2
    except SystemExit as ending:  # of argparse
        assert ending.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_a_run_its_checkpoint_and_its_export_have_the_same_scores(
    run: Path, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = held_out(tmp_path / "data", run)
    of_run = evaluated(run, "--data", data, capsys=capsys)
    assert [row["task"] for row in of_run["rows"]] == ["held-out", "text"]
    assert of_run["rows"][0]["n"] == 192  # three samples of 64
    assert (of_run["step"], of_run["weights"], of_run["source"]) == (9, "trained", str(run))
    checkpoint = evaluated(run / "checkpoints" / "7", "--data", data, capsys=capsys)
    assert checkpoint["rows"] == of_run["rows"]  # of the same weights
    assert checkpoint["step"] == 7
    exported = evaluated(export, "--data", data, "--out", tmp_path / "out.json", capsys=capsys)
    assert exported["rows"] == of_run["rows"]
    assert exported["step"] == 9
    assert json.loads((tmp_path / "out.json").read_text()) == exported
    # kept where they belong, and nothing in the export
    kept = {(each.suite, each.step) for each in read_results(run)}
    assert kept == {("perplexity", 7), ("perplexity", 9)}
    assert not (export / "evaluations").exists()


def test_a_suite_of_a_users_has_the_name_of_its_class(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cdrmix_counts.py").write_text(
        "from cdrmix.monitoring.suite_results import Row\n"
        "class Counts:\n"
        "    options = {'text': 'what is scored'}\n"
        "    def check(self, request): pass\n"
        "    def measure(self, judged, request):\n"
        "        return judged.result('../x', [Row('a', 'b', 1.0, None, None, 1)])\n"
        "class NoSuite:\n    pass\n"
    )
    flags = ("--suite", "cdrmix_counts:Counts", "--plugins", tmp_path)
    found = evaluated(run, *flags, capsys=capsys)
    assert (found["suite"], found["settings"]["suite"]) == ("Counts", "cdrmix_counts:Counts")
    assert len(found["settings"]["code"]) == 64
    assert [each.step for each in read_results(run) if each.suite == "Counts"] == [9]
    no_suite = ("--suite", "cdrmix_counts:NoSuite", "--plugins", tmp_path)
    told = refused(run, *no_suite, capsys=capsys)
    assert "--suite: cdrmix_counts:NoSuite is no class made of cdrmix.evaluation.suite" in told
    told = refused(run, *flags, "--branches", capsys=capsys)
    assert "--branches goes with --suite reasoning" in told
    told = refused(run, "--plugins", tmp_path / "none", capsys=capsys)
    assert "there is no such folder" in told


def test_another_checkpoint_is_named_by_its_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(run, "--checkpoint", "7", capsys=capsys)["step"] == 7
    assert "has no checkpoint of step 8" in refused(run, "--checkpoint", "8", capsys=capsys)


def test_scores_of_a_hugging_face_folder_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "llama", "llama")
    found = evaluated(folder, capsys=capsys)
    (row,) = found["rows"]
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([[*tokenizer.prefix_ids, *tokenizer.encode(TEXT)]])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        nats = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    assert row["score"] == pytest.approx(float(nats), abs=1e-5)
    assert (found["step"], found["settings"]["max_length"]) == (None, 128)
    assert found["settings"]["precision"] == "fp32"


def test_a_family_whose_scores_are_others_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "granite", "granite")
    assert "cannot be evaluated: hidden states times its head" in refused(folder, capsys=capsys)


def test_a_run_directory_that_cannot_be_written_is_warned_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made_run(tmp_path / "run")
    (tmp_path / "run" / "evaluations").write_text("not a folder")
    assert evaluated(tmp_path / "run", capsys=capsys)["step"] == 7
    told = capsys.readouterr().err + caplog.text
    assert "warning: the result is not stored in its run directory" in told


def test_flags_of_a_run_do_not_go_with_a_folder(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(export, "--checkpoint", "best", "--weights", "ema", capsys=capsys)
    assert "is an exported folder, and --checkpoint and --weights choose among" in told
    told = refused(export, "--out", tmp_path / "no" / "x.json", capsys=capsys)
    assert f"there is no folder {tmp_path / 'no'}" in told


def test_a_data_set_that_is_not_there_is_told_of_the_flag(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(run, "--data", tmp_path / "no", capsys=capsys)
    assert f"{tmp_path / 'no' / 'manifest.json'}: not found. --data must be a folder of" in told
    with pytest.raises(DataError, match="not found. --data must be a folder of token shards"):
        held_out_folder(load_config(TINY), run, None, str(tmp_path / "no"))


def test_data_of_another_tokenizer_are_refused_for_an_export(
    run: Path, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_token_folder(tmp_path / "data", {"validation": [range(99)]})
    assert "its tokens are of another tokenizer" in refused(export, "--data", data, capsys=capsys)


def test_an_export_that_was_changed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run), "--out", str(tmp_path / "x")]) == 0
    text = (tmp_path / "x" / "config.json").read_text()
    (tmp_path / "x" / "config.json").chmod(0o644)
    (tmp_path / "x" / "config.json").write_text(text.replace("10000.0", "20000.0"))
    told = refused(tmp_path / "x", capsys=capsys)
    assert "differs from what was exported in 1 of" in told


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "holds no checkpoint, and is no folder of an exported model"),
        ({"adapter_config.json": "{}"}, "holds adapters alone"),
        ({"config.json": "{}"}, "names no model_type"),
        ({"config.json": '{"model_type": "cdrmix"}'}, "tells no hidden_size"),
    ],
)
def test_a_folder_that_is_no_model_is_told_once(
    files: dict[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    told = refused(tmp_path, capsys=capsys)
    assert why in told
    assert told.count("error: ") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--suite", "routing", "--tasks", "x"), "--tasks goes with --suite perplexity and"),
        (("--limit", "1", "--examples", "1", "--suite", "infill"), "are the same"),
        (("--suite", "infill", "--limit", "1"), "needs --examples 2 or more"),
        (("--accept-threshold", "1", "--suite", "reasoning"), "goes with --branches"),
        (("--suite", "reasoning", "--tasks", "t", "--lengths", "32"), "without --examples, --len"),
        (("--lengths", "32"), "--lengths goes with --suite reasoning"),
        (("--option", "colour=red"), "takes no such NAME=VALUE. It takes text: what is scored"),
        (("--suite", "text"), "choose from"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_all_else(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(Path("/nowhere"), *words, capsys=capsys)


def test_a_threshold_of_zero_is_given_and_not_left_to_the_run() -> None:
    parser = argparse.ArgumentParser()
    add_evaluate(parser.add_subparsers())
    words = ["evaluate", "run", "--suite", "reasoning", "--branches", "--accept-threshold", "0"]
    asked = asked_of(parser, parser.parse_args(words))
    assert asked.request.options == {"branches": True, "accept_threshold": 0.0}
