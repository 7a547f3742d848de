"""`cdrmix export` as a user calls it: on a trained run, on what cannot be exported, and killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from cdrmix.data.folders import locked
from cdrmix.evaluation.trained import continue_text
from tests.harness import RANK_ENVIRONMENT, run_ranks
from tests.integration.test_cli import cdrmix
from tests.made_run import made_run
from tests.small_run import STEPS, arguments, start

# A program of somebody who has torch and transformers, and not this package.
_READER = """
import json, sys
sys.modules["cdrmix"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("def main", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(json.dumps(tokenizer.decode(tokens[0], skip_special_tokens=True)))
"""
# The verb in a process that sends itself a signal when the weights are written.
_ENDED = """
import os, sys
from cdrmix.cli import main
from cdrmix.export import rwkx_run
write_text = rwkx_run.write_text
def ending(*arguments):
    os.kill(os.getpid(), int(sys.argv[1]))
    return write_text(*arguments)
rwkx_run.write_text = ending
sys.exit(main(["export", sys.argv[2], "--out", sys.argv[3]]))
"""


@pytest.fixture(scope="module")
def trained(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a finished run on two ranks."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert run_ranks(start, 2, arguments(small_corpus, run_dir)) == [0, 0]
    return run_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory with a checkpoint of step 7 that nobody trained."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    made_run(run_dir)
    return run_dir


def child(program: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **RANK_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(cwd / "hf"), "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_another_program_continues_a_text_as_the_run_does(trained: Path, tmp_path: Path) -> None:
    said = cdrmix("export", trained, "--out", tmp_path / "folder").stdout
    assert said.startswith(f"{tmp_path / 'folder'}: step {STEPS}, ")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = child(_READER, tmp_path / "folder", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    expected = continue_text(trained, "def main", max_new_tokens=20, temperature=0, seed=0)
    assert json.loads(done.stdout.splitlines()[-1]) == "def main" + expected
    assert "cdrmix export --verify" in (tmp_path / "folder" / "README.md").read_text()


def test_two_exports_are_equal_to_the_byte(trained: Path, tmp_path: Path) -> None:
    for name, source in (("one", trained), ("two", trained / "checkpoints" / str(STEPS))):
        cdrmix("export", source, "--out", tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    modes = {path.stat().st_mode & 0o222 for path in (tmp_path / "one", *tmp_path.glob("one/*"))}
    assert modes == {0}, "nobody may write"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"], "no leftovers"


def test_the_metadata_name_run_data_and_metrics(trained: Path, tmp_path: Path) -> None:
    cdrmix("export", trained, "--out", tmp_path / "folder")
    metadata = json.loads((tmp_path / "folder" / "training_metadata.json").read_text())
    summary = json.loads((trained / "metrics.json").read_text())
    environment = json.loads((trained / "environment.json").read_text())
    assert (metadata["run"], metadata["step"]) == ("run", STEPS)
    assert metadata["metrics"]["held_out"]["loss"] == summary["evaluation"]["loss"]
    assert metadata["metrics"]["step"] == STEPS
    assert metadata["trained_with"]["commit"] == environment["commit"]
    assert len(metadata["data"]["manifest_digest"]) == 64
    assert str(trained) not in (tmp_path / "folder" / "training_metadata.json").read_text()
    card = ModelCard.load(tmp_path / "folder" / "README.md")
    assert card.data.library_name == "transformers"
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["perplexity"] == summary["evaluation"]["perplexity"]
    assert f"{summary['evaluation']['perplexity']:.2f}" in card.text


def test_an_earlier_step_is_exported_by_its_number(trained: Path, tmp_path: Path) -> None:
    said = cdrmix("export", trained, "--out", tmp_path / "folder", "--checkpoint", "6").stdout
    assert ": step 6, " in said
    metadata = json.loads((tmp_path / "folder" / "training_metadata.json").read_text())
    assert metadata["metrics"]["step"] == 6
    assert "held_out" not in metadata["metrics"], "of the end of the run, not of this step"
    refused = cdrmix("export", trained, "--out", tmp_path / "x", "--checkpoint", "5", code=2)
    assert "has no checkpoint of step 5; it has checkpoints of steps " in refused.stderr
    one = trained / "checkpoints" / "6"
    refused = cdrmix("export", one, "--out", tmp_path / "x", "--checkpoint", "6", code=2)
    assert "Give the run directory, or this checkpoint without --checkpoint" in refused.stderr


def test_small_shards_load_as_one(made: Path, tmp_path: Path) -> None:
    cdrmix("export", made, "--out", tmp_path / "one")
    cdrmix("export", made, "--out", tmp_path / "many", "--max-shard-gib", "0.0001")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    from cdrmix.export.modeling_cdrmix import CDRMixForCausalLM

    one, many = (
        CDRMixForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many")
    )
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_stage_b_is_left_out_and_named(tmp_path: Path) -> None:
    more = {"stage_b.memory.slots": torch.ones(4, 4), "stage_b.policy.head": torch.ones(4)}
    made_run(tmp_path / "run", more=more)
    said = cdrmix("export", tmp_path / "run", "--out", tmp_path / "folder").stdout
    assert said.startswith("The run's parts of Stage B (memory, policy) are left out")
    assert "(memory, policy) are not here" in (tmp_path / "folder" / "README.md").read_text()
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert not [name for name in index["weight_map"] if "stage_b" in name]


@pytest.mark.parametrize("damage", ["changed", "missing", "extra"])
def test_verify_names_what_differs(made: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "folder"
    cdrmix("export", made, "--out", folder)
    assert ": as exported" in cdrmix("export", "--verify", folder).stdout
    folder.chmod(0o755)
    path = folder / "config.json"
    path.chmod(0o644)
    if damage == "changed":
        path.write_bytes(path.read_bytes().replace(b"rwkv", b"rwkw", 1))
    elif damage == "missing":
        path.unlink()
    else:
        path = folder / "more.txt"
        path.write_text("more")
    refused = cdrmix("export", "--verify", folder, code=2)
    assert f"{path.name}: {damage}" in refused.stderr


def test_what_cannot_be_exported_is_refused_in_one_message(made: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    damaged = tmp_path / "damaged"
    shutil.copytree(made, damaged)
    shard = damaged / "checkpoints" / "7" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    cases = (
        (made, tmp_path / "there", 2, "exists, and an export is never written over"),
        (tmp_path / "empty", tmp_path / "out", 2, "holds no checkpoint"),
        (tmp_path / "nothing", tmp_path / "out", 2, "holds no checkpoint"),
        (exported, tmp_path / "out", 2, "holds no checkpoint: it is a model for transformers"),
        (damaged, tmp_path / "out", 3, "every checkpoint is damaged"),
        (made, damaged / "tokenizer.json" / "out", 2, "tokenizer.json: File exists"),
        (made, made / "checkpoints" / "8", 2, "lies among the checkpoints of the run"),
        (made, made / "checkpoints" / "7" / "out", 2, "lies among the checkpoints of the run"),
    )
    before = sorted(tmp_path.rglob("*"))
    for source, out, code, message in cases:
        refused = cdrmix("export", source, "--out", out, code=code)
        assert refused.stderr.count("error: ") == 1
        assert message in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before, "nothing half-written"


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["--out", "folder"],
        ["run", "--verify", "folder"],
        ["--verify", "folder", "--checkpoint", "last"],
        ["run", "--out", "folder", "--format", "onnx"],
        ["run", "--out", "folder", "--format", "gguf", "--max-shard-gib", "1"],
        ["--verify", "folder", "--weights", "trained"],
        ["run", "--out", "folder", "--checkpoint", "newest"],
        ["run", "--out", "folder", "--max-shard-gib", "0"],
        ["run", "--out", "folder", "--weights", "best"],
    ],
)
def test_wrong_flags_are_refused_by_the_parser(words: list[str]) -> None:
    assert "usage: " in cdrmix("export", *words, code=2).stderr


@pytest.mark.parametrize("name", ["fla", "gguf"])
def test_a_format_of_twice_the_width_says_so(name: str, tmp_path: Path) -> None:
    dense = ("model.transformer_fraction=0", "model.moe=null", "model.ffn_hidden_size=96")
    made_run(tmp_path / "run", *dense)
    said = cdrmix("export", tmp_path / "run", "--out", tmp_path / "folder", "--format", name).stdout
    assert said.startswith("Written at twice the width: LayerNorm then")
    cdrmix("export", "--verify", tmp_path / "folder")


def test_what_a_format_or_a_run_has_not_is_refused(made: Path, tmp_path: Path) -> None:
    words = ("export", made, "--out", tmp_path / "folder")
    refused = cdrmix(*words, "--format", "gguf", code=2).stderr
    assert "--format gguf holds dense models of RWKV blocks alone" in refused
    refused = cdrmix(*words, "--weights", "ema", code=2).stderr
    assert "holds no average of the weights: its run had no training.ema_decay" in refused
    assert not list(tmp_path.iterdir())


def test_a_kill_leaves_no_folder_and_the_next_export_clears_up(made: Path, tmp_path: Path) -> None:
    done = child(_ENDED, int(signal.SIGKILL), made, tmp_path / "folder", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "folder").exists()
    assert list(tmp_path.glob(".folder.building-*")), "it was killed in the middle"
    cdrmix("export", made, "--out", tmp_path / "folder")
    assert not list(tmp_path.glob(".folder.*"))


def test_a_stopped_export_leaves_nothing(made: Path, tmp_path: Path) -> None:
    done = child(_ENDED, int(signal.SIGTERM), made, tmp_path / "folder", cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert f"stopped; {tmp_path / 'folder'} was not written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*folder*"))


def test_two_exports_at_once_do_not_mix(made: Path, tmp_path: Path) -> None:
    with locked(tmp_path / ".folder.lock", blocking=False):
        refused = cdrmix("export", made, "--out", tmp_path / "folder", code=2)
    assert "another export is writing there" in refused.stderr
    cdrmix("export", made, "--out", tmp_path / "folder")


def test_a_full_disk_is_told_before_anything_is_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused = cdrmix("export", made, "--out", tmp_path / "folder", code=2)
    assert "0.00 GB are free, and the weights take 0.00 GB. Make room" in refused.stderr
    assert not list(tmp_path.iterdir())
