"""A run that keeps an average of its weights: its metrics, its checkpoints, and what reads them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.cli import main
from cdrmix.errors import StateError
from cdrmix.evaluation.scoring import Scorer
from cdrmix.evaluation.trained import evaluate_run, load_trained
from cdrmix.models.backbone import logical_name
from cdrmix.monitoring.sinks import read_metrics
from tests.equal_runs import assert_equal_runs, result_of
from tests.harness import run_ranks
from tests.small_run import STEPS, arguments, before_step, overrides, start

DECAY = "training.ema_decay=0.4"
LAST = f"checkpoints/{STEPS}"


def train(argv: list[str], stopped_before: int = 0) -> int:
    """One rank of launch/train.py, told to stop before a step."""
    if stopped_before:
        before_step(stopped_before, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return start(argv)


@pytest.fixture(scope="module")
def averaged(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run on two ranks."""
    run_dir = tmp_path_factory.mktemp("averaged") / "run"
    assert run_ranks(train, 2, arguments(small_corpus, run_dir, *overrides([DECAY]))) == [0, 0]
    return run_dir


def test_the_loss_of_the_average_is_logged_and_in_the_summary_and_report(averaged: Path) -> None:
    lines = {line["step"]: line for line in read_metrics(averaged / "metrics.jsonl")}
    assert "eval/ema_loss" not in lines[3]
    assert 0 < abs(lines[4]["eval/ema_loss"] - lines[4]["eval/loss"]) < 1
    summary = json.loads((averaged / "metrics.json").read_text())
    of_average, trained = summary["ema_evaluation"], summary["evaluation"]
    assert of_average["tokens"] == trained["tokens"]
    assert of_average["loss"] != trained["loss"]
    log = (averaged / "train.log").read_text()
    assert "validation of the average of the weights: loss " in log
    # the best checkpoint is that of the trained weights
    best = json.loads((averaged / "checkpoints" / "held_out.json").read_text())
    assert of_average["loss"] not in [entry["loss"] for entry in best["checkpoints"]]


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    averaged: Path, small_corpus: Path, tmp_path: Path
) -> None:
    argv = arguments(small_corpus, tmp_path / "run", *overrides([DECAY]))
    assert run_ranks(train, 2, argv, 5) == [75, 75]
    assert run_ranks(train, 2, [*argv, "--resume", "auto"]) == [0, 0]
    assert_equal_runs(tmp_path / "run", averaged, steps=STEPS)


def evaluate_beside_a_copy(argv: list[str]) -> int:
    """One rank that is asked to evaluate while the first checkpoint is copied, which takes until
    the weights make room for their average, or as long as a rank would wait for it."""
    from cdrmix.checkpoint import engine_state, host_memory

    is_swapped = threading.Event()
    copy, swap = host_memory.HostMemory._copy, engine_state.swap_average

    def copy_late(*args: Any, **kwargs: Any) -> Any:
        is_swapped.wait(1.0)
        return copy(*args, **kwargs)

    def swap_and_tell(engine: Any) -> None:
        swap(engine)
        is_swapped.set()

    host_memory.HostMemory._copy = copy_late
    engine_state.swap_average = swap_and_tell
    return start(argv)


def test_a_checkpoint_holds_the_weights_that_an_evaluation_takes_out_meanwhile(
    averaged: Path, small_corpus: Path, run_dir: Path
) -> None:
    settings = [DECAY, "checkpoint.background=true", "evaluation.every_steps=null"]
    settings += ["hooks=[{use: 'tests.noting_hooks:Asking', options: {evaluate: 3}}]"]
    argv = arguments(small_corpus, run_dir, *overrides(settings))
    assert run_ranks(evaluate_beside_a_copy, 2, argv) == [0, 0]
    lines = {line["step"]: line for line in read_metrics(run_dir / "metrics.jsonl")}
    assert "eval/ema_loss" in lines[3], "evaluated behind the step that is saved"
    (_, found), (_, expected) = (result_of(each, 3) for each in (run_dir, averaged))
    assert found.keys() == expected.keys() and any(name.startswith("ema ") for name in found)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_evaluation_and_text_are_of_the_average_that_is_asked_for(
    averaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((averaged / "metrics.json").read_text())
    for weights, name in (("trained", "evaluation"), ("ema", "ema_evaluation")):
        found = evaluate_run(averaged, weights=weights)  # type: ignore[arg-type]
        assert found.loss == pytest.approx(summary[name]["loss"], abs=1e-5)
    run = load_trained(averaged, weights="ema")
    with CheckpointFile(averaged / LAST) as reader:
        for name, parameter in run.model.named_parameters():
            expected = reader.full(logical_name(name), "ema")
            assert torch.equal(parameter, expected), name
    pair = ([5, 6, 7], [8, 9])  # as lm-eval in this process scores it
    scores = [
        Scorer(load_trained(averaged, weights=of).model, run.tokenizer, 64, 8).score([pair])
        for of in ("trained", "ema")
    ]
    assert scores[0] != scores[1]
    words = ["generate", str(averaged), "--prompt", "def", "--max-new-tokens", "3"]
    assert main([*words, "--weights", "ema", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def")


@pytest.mark.parametrize("weights", ["trained", "ema"])
def test_an_export_holds_the_weights_that_are_asked_for(
    weights: str, averaged: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(averaged), "--out", str(out), "--weights", weights]) == 0
    tensors = load_file(out / "model-00001-of-00001.safetensors")
    kind, other = ("ema", "param") if weights == "ema" else ("param", "ema")
    with CheckpointFile(averaged / LAST) as reader:
        names = {name.removeprefix("model."): name for name in tensors}
        assert set(names) == set(reader.names())
        for name, key in names.items():
            assert torch.equal(tensors[key], reader.full(name, kind).to(tensors[key].dtype)), name
        matrix = names["embedding.weight"]
        assert not torch.equal(tensors[matrix], reader.full("embedding.weight", other))
    metadata = json.loads((out / "training_metadata.json").read_text())
    assert metadata.get("ema_decay") == (0.4 if weights == "ema" else None)
    of = "ema_evaluation" if weights == "ema" else "evaluation"
    summary = json.loads((averaged / "metrics.json").read_text())
    assert metadata["metrics"]["held_out"]["loss"] == summary[of]["loss"]
    assert ("moving average" in (out / "README.md").read_text()) == (weights == "ema")


def test_an_average_that_is_turned_off_is_dropped_and_one_that_is_turned_on_begins_anew(
    averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(averaged, run_dir)

    def go_on(*settings: str) -> str:
        argv = ["--run-dir", str(run_dir), "--resume", "auto", *overrides(settings)]
        assert run_ranks(train, 1, argv) == [0]
        return (run_dir / "train.log").read_text()

    off = go_on("training.ema_decay=null", f"training.max_steps={STEPS + 1}")
    assert f"{LAST}: its average of the weights is dropped" in off
    with pytest.raises(StateError, match="holds no average of the weights: its run had no tr"):
        load_trained(run_dir, weights="ema")
    for verb in (["evaluate"], ["generate"], ["export", "--out", str(tmp_path / "out")]):
        assert main([verb[0], str(run_dir), *verb[1:], "--weights", "ema"]) == 2
        said = capsys.readouterr().err
        assert said.count("holds no average of the weights") == 1 and "Traceback" not in said
    on = go_on(DECAY, f"training.max_steps={STEPS + 2}")
    assert f"checkpoints/{STEPS + 1}: holds no average of the weights: training.ema_decay" in on
    with (
        CheckpointFile(run_dir / "checkpoints" / str(STEPS + 1)) as before,
        CheckpointFile(run_dir / "checkpoints" / str(STEPS + 2)) as after,
    ):
        for name in after.names():
            begun, new = before.full(name), after.full(name)
            assert after.full(name, "ema_count").item() == 2
            # of the two, 2 / 11 are the weights that it began with
            assert torch.equal(after.full(name, "ema"), begun.lerp(new, 1 - 2 / 11)), name


def test_stage_b_begins_with_the_trained_weights_and_keeps_no_average(
    small_corpus: Path, tmp_path: Path
) -> None:
    from tests.small_reasoning_run import STAGE_A_STEPS
    from tests.small_reasoning_run import arguments as both_stages

    phases = [f"stage_b.training.{phase}_steps=0" for phase in ("adapter", "joint", "policy")]
    argv = both_stages(small_corpus, tmp_path / "run", tmp_path, *overrides([DECAY, *phases]))
    assert run_ranks(train, 1, argv) == [0]
    last = tmp_path / "run" / "checkpoints" / str(STAGE_A_STEPS + 2)
    with (
        CheckpointFile(last.with_name(str(STAGE_A_STEPS)), weights="ema") as of_stage_a,
        CheckpointFile(last) as of_stage_b,
    ):
        assert not of_stage_b.has_average
        for name in of_stage_a.names():
            assert torch.equal(of_stage_b.full(name), of_stage_a.full(name)), name
    with pytest.raises(StateError, match="Stage B keeps none. The last checkpoint of Stage A"):
        CheckpointFile(last, weights="ema")
    assert "begins with the trained weights" in (tmp_path / "run" / "train.log").read_text()
