"""A run that goes on: with its own configuration, from any folder, its starts on record."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdrmix import __version__
from cdrmix.cli import main
from cdrmix.cluster.handover import TRAIN
from cdrmix.cluster.start_records import newest_start
from cdrmix.config.load import load_config
from cdrmix.config.resuming_rules import rule_of
from cdrmix.monitoring.metrics import deterministic_part
from cdrmix.monitoring.sinks import read_metrics
from tests.conftest import TINY
from tests.harness import ROOT, run_ranks
from tests.small_run import CONFIG, arguments, before_step, overrides, start

EARLIER = ROOT / "tests" / "data" / "earlier_run"


def start_in(argv: list[str], folder: str) -> int:
    """What one rank does, in another working directory."""
    os.chdir(folder)
    return start(argv)


def start_unchecked(argv: list[str], run_dir: str, settings: Sequence[str]) -> int:
    """What one rank does where nothing is refused before the ranks meet."""
    import launch.train

    snapshot = Path(run_dir) / "config_snapshot.yaml"
    launch.train.config_of_start = lambda *_, **__: load_config(snapshot, settings)
    return start(argv)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was stopped behind step 4 of 8."""
    return Path(shutil.copytree(EARLIER / "run", tmp_path / "run"))


def go_on(run_dir: Path, *settings: str, folder: Path = ROOT) -> int:
    """Goes on with a run without --config, on one rank; its exit code."""
    argv = [*overrides(settings), "--run-dir", str(run_dir), "--resume", "auto"]
    (code,) = run_ranks(start_in, 1, argv, str(folder))
    return int(code)


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    # without the loss by domain, which the version of the earlier run did not have
    lines = [deterministic_part(line) for line in read_metrics(run_dir / "metrics.jsonl")]
    return [{k: v for k, v in line.items() if not k.startswith("eval/domain/")} for line in lines]


def record_of(run_dir: Path, number: int) -> dict[str, Any]:
    content = json.loads((run_dir / "starts" / f"{number:04}.json").read_text())
    assert content["number"] == number
    return dict(content)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def whole() -> list[dict[str, float]]:
    return [deterministic_part(line) for line in read_metrics(EARLIER / "whole_metrics.jsonl")]


def test_a_run_goes_on_from_elsewhere_and_each_start_is_on_record(
    stopped: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # refused: nothing of it stays
    before = content_of(stopped)
    assert go_on(stopped, "training.seed=7") == 2
    assert "training.seed: 1234 -> 7: cannot change" in capfd.readouterr().out
    assert content_of(stopped) == before
    # its own data.path is relative to the repository
    rate = "training.min_learning_rate=1e-5"
    assert go_on(stopped, rate, "training.max_steps=6") == 0
    told = capfd.readouterr().out
    assert "warning: changed since the run's last start: training.max_steps: 8 -> 6" in told
    first = record_of(stopped, 1)
    assert (first["from_step"], first["stage"], first["version"]) == (4, "a", __version__)
    assert [each["key"] for each in first["changes"]] == [
        "training.max_steps",
        "training.min_learning_rate",
    ]
    assert first["command"][:2] == ["python", str(TRAIN)]
    assert rate in first["command"]
    assert first["folder"] == str(ROOT)
    assert first["config"]["data"]["path"] == str(EARLIER / "data")
    manifest = json.loads((EARLIER / "data" / "manifest.json").read_text())
    data = first["data"]
    assert data["folder"] == str(EARLIER / "data")
    assert data["tokenizer_sha256"] == manifest["tokenizer"]["sha256"]
    assert (
        sum(each["train_tokens"] for each in data["domains"])
        == (manifest["splits"]["train"]["tokens"])
    )
    assert sum(each["weight"] for each in data["domains"]) == pytest.approx(1)
    assert first["hosts"] == [{"name": os.uname().nodename, "ranks": 1}]
    assert first["plan"]["degrees"]["data"] == 1
    assert f"digest {data['digest'][:12]}" in told
    # trained on from another folder, without --config
    kept = (stopped / "starts" / "0001.json").read_bytes()
    assert go_on(stopped, "training.max_steps=8", folder=tmp_path) == 0
    second = record_of(stopped, 2)
    assert (second["from_step"], second["folder"]) == (6, str(tmp_path))
    assert second["changes"] == [{"key": "training.max_steps", "old": 6, "new": 8}]
    assert second["config"]["training"]["min_learning_rate"] == 1e-5, "of the start before"
    assert (stopped / "starts" / "0001.json").read_bytes() == kept
    assert "changed since the start before: training.max_steps: 6 -> 8" in (
        (stopped / "train.log").read_text()
    )
    # and read from there
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(stopped), "--json"]) == 0
    assert main(["generate", str(stopped), "--max-new-tokens", "1"]) == 0
    assert not (tmp_path / "data").exists()


def test_a_finished_run_stays_as_it_is(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert go_on(stopped) == 0
    done, wanted = steps_of(stopped), whole()
    assert done[:4] == wanted[:4]
    # the earlier version rounded norms and losses otherwise
    for ours, theirs in zip(done[4:], wanted[4:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), "that of the run that was never stopped"
    before = content_of(stopped)
    capfd.readouterr()
    assert go_on(stopped) == 0
    told = capfd.readouterr().out
    assert "the run is at its end (step 8 of 8)" in told
    assert "To train on, give --set training.max_steps=N" in told
    assert go_on(stopped, "training.learning_rate=1e-3") == 2
    assert "give --set training.max_steps=N" in capfd.readouterr().out
    assert content_of(stopped) == before
    assert go_on(stopped, "training.max_steps=9") == 0
    assert [line["step"] for line in steps_of(stopped)] == list(range(1, 10))


FREE = (
    "monitoring.log_every_steps=1",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "evaluation.final_tokens=500",
    "evaluation.sample_temperature=0.5",
    "supervision.deadline_seconds=90",
    "data.prefetch_batches=0",
    "data.verify=size",
    "training.memory_share=0.8",
    "name=another",
)


def test_free_keys_do_not_alter_training(stopped: Path, tmp_path: Path) -> None:
    assert {rule_of(each.partition("=")[0]).kind for each in FREE} == {"free"}
    # Bit by bit that of this version and machine, which may round otherwise than the earlier one.
    unchanged = Path(shutil.copytree(stopped, tmp_path / "unchanged"))
    assert go_on(stopped, *FREE) == go_on(unchanged) == 0
    found, expected = ([line["loss"] for line in steps_of(run)] for run in (stopped, unchanged))
    assert found == expected and len(found) == len(whole())


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=1e-3",
        "training.gradient_clipping=0.01",
        "training.weight_decay=0.9",
        "training.max_steps=7",
    ],
)
def test_keys_that_alter_training_do_so_with_a_warning(
    override: str, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = override.partition("=")[0]
    assert rule_of(key).kind == "alters"
    assert go_on(stopped, override) == 0
    assert f"warning: changed since the run's last start: {key}: " in capfd.readouterr().out
    here = [line["loss"] for line in steps_of(stopped)]
    there = [line["loss"] for line in whole()][: len(here)]
    assert here[:4] == there[:4]
    assert here[4:] != there[4:]


@pytest.mark.parametrize(
    "override",
    [
        "model.moe.load_balance_weight=0.5",
        "training.seed=7",
        "training.sequence_length=16",
        "data.order=sequential",
    ],
)
def test_what_is_refused_at_once_the_ranks_would_refuse(
    override: str, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go_on(stopped, override) == 2
    assert f"{override.partition('=')[0]}: " in capfd.readouterr().out
    argv = ["--run-dir", str(stopped), "--resume", "auto"]
    assert run_ranks(start_unchecked, 1, argv, str(stopped), [override]) == [2]
    text = capfd.readouterr().out
    assert "was trained with another model" in text or "in another order" in text


def test_data_that_is_gone_is_named_and_never_built(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(EARLIER / "data", tmp_path / "data"))
    assert go_on(stopped, f"data.path={data}", "training.max_steps=5") == 0
    data.rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["evaluate", str(stopped)]) == 2
    told = capsys.readouterr().err
    assert f"{data}: the data set that" in told and "Give --data DIR" in told
    assert main(["evaluate", str(stopped), "--data", str(tmp_path / "moved")]) == 0


def test_the_sample_corpus_is_the_one_that_the_run_began_with(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, away, run_dir = (tmp_path / name for name in ("here", "away", "run"))
    away.mkdir()
    sample = here / "data" / "sample-4096"
    shutil.copytree(small_corpus, sample)
    argv = arguments(Path("sample"), run_dir, "--max-steps", "2", config=TINY)
    assert run_ranks(start_in, 1, argv, str(here)) == [0]
    assert load_config(run_dir / "config_snapshot.yaml").data.path == "sample"
    assert go_on(run_dir, "training.max_steps=3", folder=away) == 0
    # and of a run of its own, that begins with a checkpoint of this one
    source = str(run_dir / "checkpoints" / "2")
    argv = ["--resume", source, "--run-dir", str(tmp_path / "other"), "--max-steps", "4"]
    assert run_ranks(start_in, 1, argv, str(away)) == [0]
    for run in (run_dir, tmp_path / "other"):
        assert newest_start(run)["data"]["folder"] == str(sample)
    monkeypatch.chdir(away)
    assert main(["evaluate", str(run_dir)]) == 0
    assert list(away.iterdir()) == []


def start_and_stop(argv: list[str]) -> int:
    """What one rank does that is asked to stop at its sixth step."""
    before_step(5, partial(os.kill, os.getpid(), signal.SIGTERM))
    return start(argv)


def test_a_stopped_run_tells_a_command_that_is_enough(stopped: Path, tmp_path: Path) -> None:
    rate = "training.learning_rate=1e-3"
    argv = ["--run-dir", str(stopped), "--resume", "auto", "--set", rate, "--profile", "zero1"]
    assert run_ranks(start_and_stop, 1, argv) == [75]
    (line,) = [t for t in (stopped / "train.log").read_text().splitlines() if "Go on with: " in t]
    program, script, *words = shlex.split(line.partition("Go on with: ")[2])
    assert (program, script) == ("python", str(TRAIN))
    assert words == ["--profile", "zero1", "--run-dir", str(stopped), "--resume", "auto"]
    assert run_ranks(start_in, 1, words, str(tmp_path)) == [0]
    assert [line["step"] for line in steps_of(stopped)] == list(range(1, 9))
    assert load_config(stopped / "config_snapshot.yaml").training.learning_rate == 1e-3


def test_one_rank_tells_the_changes(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [*overrides(["training.learning_rate=1e-3", "training.max_steps=5"])]
    argv += ["--config", str(ROOT / CONFIG), "--run-dir", str(stopped), "--resume", "auto"]
    assert run_ranks(start, 2, argv) == [0, 0]
    told = capfd.readouterr().out
    assert told.count("changed since the run's last start") == 1
    assert told.count("differ from the run's own") == 1
