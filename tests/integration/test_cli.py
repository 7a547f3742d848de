"""The verbs of `cdrmix` as a user calls them on a trained run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdrmix.cli import main
from cdrmix.data.shards import read_manifest, verify_shards
from tests.harness import RANK_ENVIRONMENT, ROOT, run_ranks
from tests.launcher import launch
from tests.small_run import CONFIG, arguments, start


@pytest.fixture(scope="module")
def trained(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a finished run on two ranks."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert run_ranks(start, 2, arguments(small_corpus, run_dir)) == [0, 0]
    return run_dir


@dataclass(frozen=True)
class Ended:
    """Output of a command that has ended."""

    stdout: str
    stderr: str


def cdrmix(*words: str | Path, code: int = 0) -> Ended:
    """Run the command in this process; it must end with `code`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            ended = main([str(word) for word in words])
        except SystemExit as ending:  # of argparse
            ended = ending.code
    assert ended == code, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return Ended(out.getvalue(), err.getvalue())


def test_the_installed_command_prints_nothing_but_its_json(trained: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "cdrmix", "evaluate", trained, "--json"],
        cwd=ROOT,
        env={**os.environ, **RANK_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = json.loads((trained / "metrics.json").read_text())["evaluation"]
    assert found["tokens"] == expected["tokens"]
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name  # other batches
    for here, there in zip(found["layers"], expected["layers"], strict=True):
        assert here["utilisation"] == pytest.approx(there["utilisation"], abs=1e-3)


def test_evaluate_asks_for_lines_of_held_out_documents(trained: Path) -> None:
    words = ("evaluate", trained, "--suite", "infill", "--examples", "3")
    header, *rows = cdrmix(*words).stdout.splitlines()
    assert header.split()[:3] == ["task", "metric", "score"]
    tasks = ["psm", "psm-other-suffix", "spm", "spm-other-suffix"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [(task, "3") for task in tasks]
    found = json.loads(cdrmix(*words, "--json").stdout)["infill"]
    assert [row["order"] for row in found] == ["psm", "spm"]
    told = cdrmix(*words, "--max-tokens", "9", code=2).stderr
    assert "--max-tokens goes with --suite perplexity and routing" in told


def test_evaluate_shows_a_table_of_one_checkpoint(trained: Path) -> None:
    words = ("evaluate", trained / "checkpoints" / "3", "--max-tokens", "128")
    done = cdrmix(*words)
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["task", "metric", "score", "95", "%", "interval", "n"]
    assert [row.split()[:2] for row in rows[:4]] == [
        ["packed", "nats_per_token"],
        ["packed", "perplexity"],
        ["packed", "bits_per_byte"],
        ["packed:code", "nats_per_token"],
    ]
    assert [row.split()[-1] for row in rows[:3]] == ["2"] * 3, "samples of 64 tokens"
    assert rows[4].split()[:2] == ["documents", "nats_per_token"]
    documents, state = rows[-2:]
    assert documents.startswith("documents: windows of 64 tokens, stride 32, behind '<|eos|>'; ")
    assert state.startswith("state of windows: ")
    stored = trained / "evaluations" / "perplexity-3.json"
    assert f"stored: {stored}" in done.stderr
    assert json.loads(stored.read_text())["tokens"] == 128


def test_evaluate_tells_routing_against_its_bounds(trained: Path) -> None:
    lines = cdrmix("evaluate", trained, "--suite", "routing", "--max-tokens", "1000").stdout
    rows = [line for line in lines.splitlines() if line.startswith("layer ")]
    scores, checks = rows[:10], rows[10:]
    assert [row.split()[1] for row in scores] == ["0"] * 5 + ["1"] * 5
    assert [check.split(":")[0] for check in checks] == ["layer 0", "layer 0", "layer 1", "layer 1"]
    assert all(" the bound " in check for check in checks)


def test_texts_of_files_are_compared_by_bits_per_byte(trained: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\nprint(os.name)\n" * 20)
    words = ("evaluate", trained, "--tasks", text, "--option", "stride=64", "--json")
    found = json.loads(cdrmix(*words).stdout)
    assert found["settings"]["bytes"] == len(text.read_text())
    assert {row["task"] for row in found["rows"]} >= {"documents", "documents-carried"}
    assert "loss" not in found, "no held-out text of the data set was read"


def test_the_deepspeed_launcher_evaluates_a_run_in_another_layout(
    trained: Path, tmp_path: Path
) -> None:
    script = ROOT / "launch" / "evaluate.py"
    words = [script, trained, "--set", "parallel.pipeline=2", "--max-tokens", "256"]
    out = tmp_path / "result.json"
    done = launch([*words, "--out", out], nproc=2, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["settings"]["layout"] == "pipeline 2, pipeline"
    alone = json.loads(cdrmix("evaluate", trained, "--max-tokens", "256", "--json").stdout)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    for here, there in zip(found["rows"], alone["rows"], strict=True):
        assert here["score"] == pytest.approx(there["score"], rel=1e-6)
    assert "packed" in done.stdout  # the table, once
    assert done.stdout.count("bits_per_byte") == sum(
        row["metric"] == "bits_per_byte" for row in found["rows"]
    )


def test_generate_goes_on_from_the_prompt_and_repeats_by_seed(trained: Path) -> None:
    flags = ("--prompt", "import os", "--max-new-tokens", "6")
    first, again, other = (
        cdrmix("generate", trained, *flags, "--seed", seed).stdout for seed in ("1", "1", "2")
    )
    assert first.startswith("import os")
    assert len(first) > len("import os\n")
    assert first == again != other


def test_report_is_written_anew(trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    (run_dir / "report.html").unlink()
    assert cdrmix("report", run_dir).stdout == f"{run_dir / 'report.html'}\n"
    assert "cdrmix-core-tiny" in (run_dir / "report.html").read_text()


def test_data_sample_builds_a_folder_that_verifies(tmp_path: Path) -> None:
    out = tmp_path / "sample"
    assert cdrmix("data", "sample", "--vocab-size", "300", "--out", out).stdout == f"{out}\n"
    manifest = read_manifest(out)
    verify_shards(out, manifest)
    assert manifest.tokenizer.num_tokens == 300
    assert manifest.splits["train"].tokens > 10 * manifest.splits["validation"].tokens > 0


def test_config_prints_what_a_run_would_take(tmp_path: Path) -> None:
    shown = cdrmix("config", "--config", CONFIG, "--set", "training.seed=7").stdout
    (tmp_path / "resolved.yaml").write_text(shown)
    assert "seed: 7" in shown
    assert cdrmix("config", "--config", tmp_path / "resolved.yaml").stdout == shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "/nowhere"], "/nowhere: there is no such folder. Give a run directory"),
        (["generate", "/nowhere"], "/nowhere: there is no such folder, and it holds no checkpoint"),
        (["generate", ROOT / "docs"], "docs: holds no checkpoint. Give a run directory"),
        (["report", "/nowhere"], "/nowhere/metrics.jsonl: not found"),
        (
            ["data", "sample", "--out", ROOT / "setup.py" / "x"],
            "setup.py: File exists. The sample corpus is built in",
        ),
        (["config", "--config", "nope.yaml"], "nope.yaml: no such file. Shipped in"),
        (["config", "--config", CONFIG, "--set", "model.heads=2"], "model.heads: unknown key"),
    ],
)
def test_what_a_user_got_wrong_is_one_line(words: list[str | Path], told: str) -> None:
    done = cdrmix(*words, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "RUN", "--temperature", "-1"], "given -1, allowed is a number from 0"),
        (["generate", "RUN", "--max-new-tokens", "0"], "given 0, allowed is a number from 1"),
        (
            ["generate", "RUN", "--memory", "--seed", "1"],
            "--speculate go without --memory",
        ),
        (
            ["generate", "RUN", "--memory", "--weights", "ema"],
            "--speculate go without --memory",
        ),
        (
            ["evaluate", "RUN", "--suite", "reasoning", "--weights", "ema"],
            "--weights goes with --suite perplexity",
        ),
        (["evaluate", "RUN", "--max-tokens", "many"], "invalid number value: 'many'"),
        (["evaluate"], "required: RUN_DIR"),
    ],
)
def test_a_wrong_flag_is_refused_before_a_model_is_loaded(words: list[str], told: str) -> None:
    assert told in cdrmix(*words, code=2).stderr


def test_a_run_whose_every_checkpoint_is_damaged_ends_with_3(trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    for shard in run_dir.glob("checkpoints/*/rank-00000.safetensors"):
        os.truncate(shard, 100)
    assert "every checkpoint is damaged" in cdrmix("evaluate", run_dir, code=3).stderr
