"""A new run that begins with the weights of an earlier one, and the best checkpoint of that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.held_out import recorded_scores
from cdrmix.cli import main
from cdrmix.evaluation.trained import evaluate_run
from cdrmix.export.exported_run import export_run
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.layouts import _held, _whole
from tests.small_run import arguments, overrides, refused, start
from tests.unit.data.token_folder import write_backwards

LENGTH, TOKENS = 64, 1000
# At this rate the loss of the end over all of the text is not the lowest.
EARLIER = ("evaluation.every_steps=2", "checkpoint.every_steps=2", "checkpoint.keep=1")
RATE = "training.learning_rate=0.1"


@pytest.fixture(scope="module")
def earlier(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a finished run on two ranks, ZeRO-1."""
    run_dir = tmp_path_factory.mktemp("earlier") / "run"
    argv = arguments(small_corpus, run_dir, *overrides([*EARLIER, RATE]))
    assert run_ranks(start, 2, argv) == [0, 0]
    return run_dir


@pytest.fixture(scope="module")
def other_data(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of the corpus backwards, by the same tokenizer."""
    folder = tmp_path_factory.mktemp("data") / "backwards"
    return write_backwards(folder, small_corpus, length=LENGTH)


def test_the_best_checkpoint_stays_and_is_named(earlier: Path) -> None:
    checkpoints = earlier / "checkpoints"
    named = json.loads((earlier / "metrics.json").read_text())["checkpoints"]
    lines = read_metrics(earlier / "metrics.jsonl")
    losses = {int(line["step"]): line["eval/loss"] for line in lines if "eval/loss" in line}
    recorded = {each.step: each for each in recorded_scores(checkpoints)}
    # the evaluation of the end reads more text, over which losses do not compare
    evaluation = json.loads((earlier / "metrics.json").read_text())["evaluation"]
    assert recorded[8].score.examples < evaluation["tokens"]
    assert len({each.score.examples for each in recorded.values()}) == 1
    losses[8] = recorded[8].score.value
    best = min(losses, key=losses.__getitem__)
    assert named == {
        "last": 8,
        "best": {"step": best, "loss": losses[best]},
        "folder": "checkpoints",
    }
    there = {path.name for path in checkpoints.iterdir() if path.is_dir()}
    assert there == {str(best), "8"}


def begin(argv: list[str]) -> tuple[int, float, list[Any]]:
    """Starts one rank; gives its exit code, its held-out loss before the first step, and its share
    of the masters then."""
    from cdrmix.sessions import session

    seen: list[Any] = []
    run_stage = session.run_stage

    def watched(run: Any, *positional: Any, **given: Any) -> bool:
        loss = run.stage.evaluate_now(run, max_tokens=TOKENS).loss
        run.stage.samples.clear()
        seen.extend((loss, _held(run.engine, "param")))
        return run_stage(run, *positional, **given)

    session.run_stage = watched
    return start(argv), *seen


def from_weights(data: Path, run_dir: Path, source: Path | None, *more: str) -> list[str]:
    """Command line of a run of two steps."""
    settings = ["training.max_steps=2", "training.warmup_steps=1", "training.seed=5"]
    if source is not None:
        settings.append(f"training.start_from={source}")
    return arguments(data, run_dir, *overrides([*settings, *more]))


def test_other_data_at_another_layout_begin_with_the_weights_alone(
    earlier: Path, other_data: Path, tmp_path: Path
) -> None:
    expected = evaluate_run(earlier, data=str(other_data), max_tokens=TOKENS).loss
    with CheckpointFile(earlier / "checkpoints" / "8") as checkpoint:
        weights = {name: checkpoint.full(name) for name in checkpoint.names()}
    moved = tmp_path / "moved"
    shutil.copytree(earlier, moved)
    run_dir = tmp_path / "run"
    ((code, loss, held),) = run_ranks(begin, 1, from_weights(other_data, run_dir, moved))
    assert code == 0
    assert loss == pytest.approx(expected, abs=1e-6)
    taken = _whole([held])
    assert taken.keys() == weights.keys()
    assert all(torch.equal(taken[name], weights[name]) for name in weights)
    # its own steps, schedule and order of samples
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["learning_rate"] == pytest.approx(3e-3)
    (record,) = (run_dir / "starts").iterdir()
    told = json.loads(record.read_text())["start_from"]
    assert told["step"] == 8 and told["tensors"] == len(weights) and told["not_taken"] == []
    said = f"start_from: {told['parameters']:,} parameters of step 8 of {moved} (manifest "
    assert said + told["manifest_sha256"][:12] in (run_dir / "train.log").read_text()
    assert "weights of step 8 of" in (run_dir / "report.html").read_text()

    # a run that has a checkpoint does not read the folder, which is gone
    shutil.rmtree(moved)
    argv = from_weights(other_data, run_dir, moved, "training.max_steps=3")
    assert run_ranks(start, 1, [*argv, "--resume", "auto"]) == [0]
    second = json.loads((run_dir / "starts" / "0002.json").read_text())
    assert (second["from_step"], second["start_from"]) == (2, None)

    # control: without it, other weights
    ((code, loss, _),) = run_ranks(begin, 1, from_weights(other_data, tmp_path / "own", None))
    assert code == 0
    assert abs(loss - expected) > 1e-2


def test_an_export_gives_the_weights_of_its_checkpoint(
    earlier: Path, other_data: Path, tmp_path: Path
) -> None:
    export_run(earlier, tmp_path / "export", checkpoint="best")
    best = json.loads((earlier / "metrics.json").read_text())["checkpoints"]["best"]["step"]
    argv = from_weights(other_data, tmp_path / "run", tmp_path / "export")
    ranks = run_ranks(begin, 2, [*argv, "--profile", "zero2"])
    assert [code for code, *_ in ranks] == [0, 0]
    taken = _whole([held for *_, held in ranks])
    with CheckpointFile(earlier / "checkpoints" / str(best)) as checkpoint:
        assert taken.keys() == set(checkpoint.names())
        for name, values in taken.items():
            assert torch.equal(values, checkpoint.full(name)), name
    told = json.loads((tmp_path / "run" / "starts" / "0001.json").read_text())["start_from"]
    assert (told["kind"], told["step"]) == ("export", best)


def test_parts_for_further_tokens_begin_anew_where_they_are_others(
    earlier: Path,
    other_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_dir = tmp_path / "run"
    further = ["model.mtp.num_tokens=3", "training.max_steps=4", "checkpoint.every_steps=2"]
    argv = from_weights(other_data, run_dir, earlier, *further)
    ((code, _, held),) = run_ranks(begin, 1, argv)
    assert code == 0
    taken = _whole([held])
    with CheckpointFile(earlier / "checkpoints" / "8") as checkpoint:
        assert all(torch.equal(taken[name], checkpoint.full(name)) for name in checkpoint.names())
        fresh = taken.keys() - set(checkpoint.names())
    assert fresh == {"mtp.2.map.weight", "mtp.3.map.weight"}
    assert not any(taken[name].any() for name in fresh)
    said = "start_from: 0 tensors there that predict further tokens are not taken; those of"
    assert said in (run_dir / "train.log").read_text()
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert all(line["objective/mtp_3/loss"] > 0 for line in lines)

    # stopped and resumed it ends with the same numbers
    again = tmp_path / "again"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "checkpoints" / "4")
    assert run_ranks(
        start, 1, [*from_weights(other_data, again, earlier, *further), "--resume", "auto"]
    ) == [0]
    assert read_metrics(again / "metrics.jsonl")[-1]["loss"] == lines[-1]["loss"]
    with CheckpointFile(run_dir / "checkpoints" / "4") as checkpoint:
        with CheckpointFile(again / "checkpoints" / "4") as resumed:
            for name in checkpoint.names():
                assert torch.equal(checkpoint.full(name), resumed.full(name)), name
        weights = {name: checkpoint.full(name) for name in checkpoint.names()}

    # the other way round they are left there
    ((code, _, held),) = run_ranks(begin, 1, from_weights(other_data, tmp_path / "next", run_dir))
    assert code == 0
    taken = _whole([held])
    assert taken.keys() == weights.keys() - fresh
    assert all(torch.equal(taken[name], weights[name]) for name in taken)
    told = json.loads((tmp_path / "next" / "starts" / "0001.json").read_text())["start_from"]
    assert told["not_taken"] == sorted(fresh)

    # the run's text by speculation is its likeliest one
    flags = ["generate", str(run_dir), "--prompt", "def", "--max-new-tokens", "12"]
    capsys.readouterr()
    assert main([*flags, "--temperature", "0"]) == 0
    plain = capsys.readouterr().out
    assert main([*flags, "--speculate"]) == 0
    assert capsys.readouterr().out == plain
    assert "tokens per pass; guesses accepted: token 2" in caplog.text
    assert main(["generate", str(earlier), "--speculate"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model.mtp is null" in line


def test_ranks_refuse_what_is_damaged_in_the_content_alone(
    earlier: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "8"
    shutil.copytree(earlier / "checkpoints" / "8", damaged)
    path = damaged / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run_dir = tmp_path / "run"
    text = refused(from_weights(small_corpus, run_dir, damaged), capfd)
    assert f"training.start_from = {damaged}: no checkpoint there is whole" in text
    assert "rank-00001.safetensors: its content has changed" in text
    assert not (run_dir / "starts").exists()
