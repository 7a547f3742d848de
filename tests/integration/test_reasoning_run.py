"""One command takes a reasoning variant from text to its table, and one folder opens alone."""

import json
import shutil
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.monitoring.sinks import read_metrics
from cdrmix.stage_b.controls import CONTROLS
from tests.harness import run_ranks
from tests.launcher import launch
from tests.small_reasoning_run import PHASE_STEPS, STAGE_A_STEPS, STEPS, arguments
from tests.small_run import refused, start


@pytest.fixture(scope="module")
def finished(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of both stages, started as a user starts it."""
    folder = tmp_path_factory.mktemp("reasoning")
    settings = ("evaluation.reasoning_examples=1", "evaluation.reasoning_controls=true")
    more = [word for setting in settings for word in ("--set", setting)]
    argv = arguments(small_corpus, folder / "run", folder, *more)
    done = launch(["launch/train.py", *argv], nproc=2)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_steps_and_metrics_go_on_where_stage_a_ended(finished: Path) -> None:
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert ["loss" in line for line in lines] == [step < STAGE_A_STEPS for step in range(STEPS)]
    assert ["policy/return" in line for line in lines][-PHASE_STEPS - 1 :] == [False, True, True]


def test_the_table_is_stored_and_shown(finished: Path) -> None:
    rows = json.loads((finished / "reasoning.json").read_text())["rows"]
    assert {row["length_ratio"] for row in rows} <= {1, 2, 4, 8, 16}
    assert all(0 <= row["score"] <= 1 and row["n"] == 1 for row in rows)
    assert all(list(row["controls"]) == ["agent", *CONTROLS] for row in rows)
    summary = json.loads((finished / "metrics.json").read_text())
    assert summary["stage_b"]["reasoning"] == rows
    assert summary["evaluation"]["loss"] > 0, "what Stage A wrote is still there"
    page = (finished / "report.html").read_text()
    for told in ("Reasoning over long texts", "Stage B: learning", "Memory agent", f"of {STEPS}"):
        assert told in page


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--max-tokens", "200"),
        ("generate", "--prompt", "def", "--max-new-tokens", "4"),
        ("generate", "--memory", "--prompt", "One. Two. Three.", "--question", "Which?"),
    ],
    ids=["text", "generate", "memory"],
)
def test_its_last_checkpoint_opens_alone(
    words: tuple[str, ...], finished: Path, tmp_path: Path
) -> None:
    verb, *flags = words
    step = finished / "checkpoints" / str(STEPS)
    shutil.copytree(step, tmp_path / "checkpoints" / str(STEPS))
    assert main([verb, str(tmp_path), *flags]) == 0


def test_rivals_answer_the_same_texts(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    flags = ["--suite", "reasoning", "--examples", "1", "--controls", "--json"]
    assert main(["evaluate", str(run), *flags]) == 0
    cells = json.loads(capsys.readouterr().out)["controls"]
    stored = json.loads((run / "reasoning.json").read_text())["rows"]
    assert [cell["columns"] for cell in cells] == [row["controls"] for row in stored]
    assert all(list(cell["columns"]) == ["agent", *CONTROLS] for cell in cells)
    assert main(["report", str(run)]) == 0
    assert "Rivals and controls" in (run / "report.html").read_text()


def test_stage_b_goes_on_in_the_run_directory_of_a_finished_stage_a(
    small_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(small_corpus, tmp_path / "run", tmp_path)
    assert run_ranks(start, 1, [*argv, "--set", "training.stage=a"]) == [0]
    assert not (tmp_path / "run" / "ds_config_stage_b.json").exists()
    short = ["--set", "stage_b.training.policy_steps=0", "--resume", "auto"]
    assert run_ranks(start, 1, [*argv, "--set", "training.stage=b", *short]) == [0]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS - PHASE_STEPS + 1))
    text = refused([*argv, "--set", "training.stage=a", "--resume", "auto"], capfd)
    assert "training.stage: b -> a: cannot change" in text
    assert "`a` is refused for a checkpoint of Stage B" in text
