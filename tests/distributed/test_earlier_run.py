"""A run directory that an earlier version wrote still does all that it did there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdrmix import __version__
from cdrmix.checkpoint import files
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.cli import main
from cdrmix.config.load import load_config
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import ROOT, run_ranks
from tests.small_run import start

EARLIER = ROOT / "tests" / "data" / "earlier_run"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy of the run directory, beside one of its data set."""
    return Path(shutil.copytree(EARLIER / "run", tmp_path / "run"))


def test_an_earlier_run_resumes_on_two_ranks_with_zero2(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = earlier / "config_snapshot.yaml"
    assert load_config(config, []).training.max_steps == 8
    argv = ["--config", str(config), "--set", f"data.path={EARLIER / 'data'}", "--profile", "zero2"]
    assert run_ranks(start, 2, [*argv, "--run-dir", str(earlier), "--resume", "auto"]) == [0, 0]
    lines = read_metrics(earlier / "metrics.jsonl")
    whole = read_metrics(EARLIER / "whole_metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    # another layout: equal up to the order of sums in float32
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in whole], abs=1e-5
    )
    assert json.loads((earlier / "plan.json").read_text())["profile"] == "zero2"
    with CheckpointFile(earlier / "checkpoints" / "8") as reader:
        assert reader.state["world_size"] == 2
    # and it now holds what a run directory of this version does
    finished = json.loads((earlier / "finished.json").read_text())
    assert (finished["step"], finished["stage"]) == (8, "a")
    assert finished["finished"].endswith("+00:00")
    environment = json.loads((earlier / "environment.json").read_text())
    assert environment["cdrmix"] == __version__
    commit = environment["commit"]
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    monkeypatch.chdir(earlier)  # from where its data.path leads nowhere
    assert main(["generate", str(earlier), "--max-new-tokens", "2"]) == 0
    assert main(["generate", str(earlier / "checkpoints" / "8"), "--max-new-tokens", "2"]) == 0


def test_an_earlier_run_evaluates_generates_and_reports(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # its data.path is relative
    assert main(["evaluate", str(earlier), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["loss"] == pytest.approx(5.680685933, abs=1e-6)  # what that version said
    assert main(["generate", str(earlier), "--prompt", "def", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert main(["report", str(earlier)]) == 0
    assert "cdrmix-core-tiny" in (earlier / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", [("evaluate", "--json"), ("generate", "--max-new-tokens", "1")])
def test_each_file_of_the_checkpoint_is_digested_once(
    verb: tuple[str, ...], earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.digest
    digested: list[Path] = []

    def digest(path: Path, *args: Any) -> Any:
        digested.append(path)
        return original(path, *args)

    monkeypatch.setattr(files, "digest", digest)
    monkeypatch.chdir(ROOT)  # its data.path is relative
    assert main([verb[0], str(earlier), *verb[1:]]) == 0
    checkpoint = earlier / "checkpoints" / "4"
    ours = [path for path in digested if path.is_relative_to(checkpoint)]
    assert checkpoint / "state.json" in ours
    assert len(ours) == len(set(ours))
