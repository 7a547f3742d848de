"""Stage B that trains its backbone too: in the joint phase alone, and the same on two ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.cli import main
from cdrmix.monitoring.sinks import read_metrics
from tests.harness import run_ranks
from tests.small_reasoning_run import PHASE_STEPS, STAGE_A_STEPS, STEPS, arguments
from tests.small_run import overrides, refused, start

CLIP = 0.01  # below every norm
LEARNS = overrides(
    ["stage_b.training.backbone_lr_scale=0.5", f"stage_b.training.gradient_clipping={CLIP}"]
)
BETA1 = 0.9
JOINT = STAGE_A_STEPS + 2 * PHASE_STEPS  # the last step before the joint phase


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def run_dir(
    request: pytest.FixtureRequest, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("run")
    argv = arguments(small_corpus, folder / "run", folder, *LEARNS)
    assert run_ranks(start, request.param, argv) == [0] * request.param
    assert len(list((folder / "run" / "starts").iterdir())) == 1, "one start, of both stages"
    return folder / "run"


def backbone_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    with CheckpointFile(run_dir / "checkpoints" / str(step)) as reader:
        return {name: reader.full(name) for name in reader.names() if "stage_b." not in name}


def test_the_backbone_moves_in_the_joint_phase_alone(run_dir: Path) -> None:
    states = [
        backbone_of(run_dir, step)
        for step in (STAGE_A_STEPS, JOINT, JOINT + PHASE_STEPS, JOINT + 2 * PHASE_STEPS)
    ]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
        assert torch.equal(states[2][name], states[3][name]), name
    moved = [name for name in states[0] if not torch.equal(states[1][name], states[2][name])]
    assert any("experts" in name for name in moved) and "embedding.weight" in moved


def test_its_groups_are_clipped_by_their_common_norm(run_dir: Path) -> None:
    with CheckpointFile(run_dir / "checkpoints" / str(JOINT + 1)) as reader:
        names = [name for name in reader.names() if "exp_avg" in reader.kinds(name)]
        means = [reader.full(name, "exp_avg") for name in names if "stage_b." not in name]
    norm = sum(float(mean.double().square().sum()) for mean in means) ** 0.5
    # the first step's mean of the gradients, which were zero before
    assert norm == pytest.approx((1 - BETA1) * CLIP, rel=1e-3)


def copy_of(run_dir: Path, target: Path, *steps: int) -> Path:
    """A run directory with some checkpoints of another."""
    for step in steps:
        name = f"checkpoints/{step}"
        shutil.copytree(run_dir / name, target / name)
    return target


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / "checkpoints" / str(step) / "state.json"
    return json.loads(path.read_text(encoding="utf-8"))["stage_b"]


def test_the_end_of_stage_a_stays_and_gives_the_next_stage_b_its_backbone(
    run_dir: Path, small_corpus: Path, tmp_path: Path
) -> None:
    source = copy_of(run_dir, tmp_path / "source", STAGE_A_STEPS, STEPS - 1)
    frozen = overrides(["checkpoint.keep=1", "training.stage=b"])
    argv = arguments(small_corpus, source, tmp_path, *frozen, "--resume", "auto")
    assert run_ranks(start, 1, argv) == [0]
    left = {folder.name for folder in (source / "checkpoints").iterdir() if folder.is_dir()}
    assert left == {str(STAGE_A_STEPS), str(STEPS)}
    assert state_of(source, STEPS)["is_backbone_trained"], "though this start did not train it"
    none = [f"stage_b.training.{name}_steps=0" for name in ("adapter", "joint", "policy")]
    more = overrides(["training.stage=b", f"stage_b.run={source}", *none])
    argv = arguments(small_corpus, tmp_path / "next", tmp_path, *more)
    assert run_ranks(start, 1, argv) == [0]
    told = state_of(tmp_path / "next", STAGE_A_STEPS + PHASE_STEPS)
    assert told["origin"] == str(source / "checkpoints" / str(STAGE_A_STEPS))
    assert not told["is_backbone_trained"]


def test_a_backbone_that_stage_b_has_trained_is_refused(
    run_dir: Path, small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = copy_of(run_dir, tmp_path / "source", STEPS)
    more = overrides(["training.stage=b", f"stage_b.run={source}"])
    text = refused(arguments(small_corpus, tmp_path / "next", tmp_path, *more), capfd)
    assert "its backbone was trained in Stage B" in text
    assert f"{source} has no checkpoint of step {STAGE_A_STEPS}, where that began" in text
    assert f"came from {run_dir / 'checkpoints' / str(STAGE_A_STEPS)}. Try stage_b.run" in text


def test_its_losses_are_reported(run_dir: Path) -> None:
    lines = read_metrics(run_dir / "metrics.jsonl")
    joint = [line for line in lines if JOINT < line["step"] <= JOINT + PHASE_STEPS]
    assert len(joint) == PHASE_STEPS
    assert all({"stage_b/drill_loss", "stage_b/replay_loss"} <= line.keys() for line in joint)


def test_its_reasoning_is_evaluated_and_stored(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["evaluate", "--suite", "reasoning", str(run_dir), "--examples", "1", "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((run_dir / "reasoning.json").read_text(encoding="utf-8"))
    assert set(stored) == {"rows"} and stored["rows"]
    assert [{name: row[name] for name in stored["rows"][0]} for row in printed["rows"]] == stored[
        "rows"
    ]
    for row in stored["rows"]:
        columns = {"task", "length_ratio", "score", "backbone_score", "n", "low", "high"}
        assert set(row) == columns
        assert row["low"] is row["high"] is None, "of a single text"
        assert 0 <= row["score"] <= 1 and 0 <= row["backbone_score"] <= 1 and row["n"] == 1


def test_branches_are_accepted_by_the_threshold_that_is_given(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--suite", "reasoning", str(run_dir), "--examples", "1", "--json", "--branches"]
    shares = []
    for threshold in ("-1000000", "1e6"):
        assert main(["evaluate", *flags, "--accept-threshold", threshold]) == 0
        shares.append(json.loads(capsys.readouterr().out)["accepted_branches"])
    assert shares == [1.0, 0.0]


def test_it_answers_from_a_file_longer_than_its_window(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The code of bami is 1234. It rained in lolo again. " * 20, encoding="utf-8")
    asked = ["--question", "What is the code of bami?", "--show-memory"]
    assert main(["generate", str(run_dir), "--memory", "--file", str(text), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = {line.split()[0] for line in lines[: lines.index("")]}
    assert kinds <= {"written", "summarised", "dropped", "retrieved", "evicted"}
    assert sum("bami is 1234" in line for line in lines) >= 20


def test_a_run_of_stage_a_alone_has_no_memory(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_a = run_dir / "checkpoints" / str(STAGE_A_STEPS)
    for verb in (["evaluate", "--suite", "reasoning"], ["generate", "--memory", "--question", "?"]):
        assert main([verb[0], str(stage_a), *verb[1:]]) == 2
        assert "has no memory to read with. Memory is trained in Stage B" in capsys.readouterr().err
