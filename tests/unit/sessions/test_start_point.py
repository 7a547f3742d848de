"""Weights to start from that are refused before any rank, with exit code 2, and those that fit."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.weight_source import CheckpointWeights
from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.data.shards import read_manifest
from cdrmix.data.tokenizer_files import content_digest
from cdrmix.engines import start_point
from cdrmix.errors import ConfigError, StateError
from cdrmix.export.exported_run import export_run
from cdrmix.sessions.preflight import check_start
from tests.harness import ROOT
from tests.made_run import SETTINGS, VOCABULARY, made_run
from tests.small_run import CONFIG
from tests.unit.data.token_folder import write_token_folder

REASON = ROOT / "model_configs" / "cdrmix-reason-tiny.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run, its export, and a data set of the run's tokenizer."""
    root = tmp_path_factory.mktemp("made")
    made_run(root / "run")
    export_run(root / "run", root / "export")
    splits = {"train": [range(300)], "validation": [range(100)]}
    data = write_token_folder(root / "data", splits, vocab_size=VOCABULARY)
    tokenizer = (root / "run" / "tokenizer.json").read_bytes()
    manifest = json.loads((data / "manifest.json").read_text())
    checkpoint = root / "run" / "checkpoints" / "7" / "state.json"
    manifest["tokenizer"]["sha256"] = json.loads(checkpoint.read_text())["tokenizer"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    (data / "tokenizer.json").write_bytes(tokenizer)
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies one of the folders, to be changed."""

    def make(name: str) -> Path:
        folder = Path(shutil.copytree(made / name, tmp_path / name))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return folder

    return make


def config(made: Path, source: Path, *settings: str) -> Config:
    start_from = [f"training.start_from={source}", f"data.path={made / 'data'}"]
    return load_config(ROOT / CONFIG, [*SETTINGS, *start_from, *settings])


def check(
    made: Path, source: Path, *settings: str, run_dir: Path | None = None, resume: str = "never"
) -> None:
    given = config(made, source, *settings)
    check_start(given, world_size=1, profile=None, device="cpu", run_dir=run_dir, resume=resume)


def refusal(made: Path, source: Path, *settings: str) -> str:
    with pytest.raises(StateError) as caught:
        check(made, source, *settings)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert len(text.splitlines()) == 1 or "differs from what was exported" in text
    assert str(source) in text
    return text


def test_a_run_a_checkpoint_and_an_export_fit(made: Path) -> None:
    for source in ("run", "run/checkpoints", "run/checkpoints/7", "export"):
        check(made, made / source)
    of_run = start_point.of_checkpoint(made / "run" / "checkpoints" / "7")
    of_export = start_point.of_export(made / "export")
    assert of_run.shapes == of_export.shapes
    assert of_run.model == of_export.model
    assert of_run.tokenizer == of_export.tokenizer
    assert (of_run.step, of_export.step) == (7, 7)
    dense = made.parent / "dense"
    model = made_run(dense / "run", "model.moe=null", "model.transformer_fraction=0")
    export_run(dense / "run", dense / "export")
    of_run = start_point.of_checkpoint(dense / "run" / "checkpoints" / "7")
    assert of_run.model == start_point.of_export(dense / "export").model
    assert "rope_theta" not in of_run.model and "moe.top_k" not in of_run.model
    assert of_run.num_parameters == sum(each.numel() for each in model.parameters())


def test_what_is_no_trained_model_is_told_as_such(made: Path, tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(made, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "there is no such folder" in refusal(made, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    told = refusal(made, tmp_path / "empty")
    assert "is neither a run nor a checkpoint nor an export. Give a run directory" in told
    assert "is a data set, not a trained model" in refusal(made, made / "data")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    assert "is a model of type llama, and weights are taken" in refusal(made, tmp_path / "llama")


def test_run_of_a_hugging_face_model_is_told_to_be_exported(
    made: Path, copy: Callable[[str], Path]
) -> None:
    checkpoint = copy("run") / "checkpoints" / "7"
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"]["model"] = {"kind": "hf", "path": "/gone"}
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(StateError, match="Export it .*, and give that folder as model.path"):
        start_point.of_checkpoint(checkpoint)


@pytest.mark.parametrize("source", ["run", "export"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["model.hidden_size=128", "model.num_heads=4"],
            ["model.hidden_size: 64 there, 128 here", "tensors differ, such as blocks.0"],
        ),
        (["model.num_layers=2"], ["model.num_layers: 4 there, 2 here", "missing here"]),
        (["model.moe.num_experts=4"], ["model.moe.num_experts: 8 there, 4 here"]),
        (["model.num_kv_heads=1"], ["model.num_kv_heads: 2 there, 1 here"]),
        (["model.schedule=top-of-x"], ["model.schedule: rtrt there, rrtt here"]),
        (["model.vocab_size=512"], ["model.vocab_size: 320 there, 512 here", "1 tensors differ"]),
    ],
)
def test_another_model_is_refused_with_what_differs(
    made: Path, source: str, settings: list[str], told: list[str]
) -> None:
    text = refusal(made, made / source, *settings)
    assert "holds another model" in text
    assert all(each in text for each in told), text


def test_settings_without_tensors_may_differ_with_a_warning(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(made, made / "run", "model.rope_theta=500000.0", "model.moe.top_k=1")
    assert "was trained with model.moe.top_k: 2 there, 1 here; model.rope_theta" in caplog.text


@pytest.mark.parametrize("source", ["run", "export"])
def test_another_tokenizer_is_refused(made: Path, source: str, tmp_path: Path) -> None:
    data = Path(shutil.copytree(made / "data", tmp_path / "data"))
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "tokenizer.json").write_text("{}")
    sha256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    manifest["tokenizer"]["sha256"] = sha256
    (data / "manifest.json").write_text(json.dumps(manifest))
    text = refusal(made, made / source, f"data.path={data}")
    assert "was trained with another tokenizer than that of data.path" in text
    assert f"{sha256[:12]} here" in text
    # a store is looked at by the ranks
    check(made, made / source, "data.path=s3://bucket/folder")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),  # saved again by another program
        ({"content_sha256": "1" * 64}, "another tokenizer than that of data.path"),
        ({"content_sha256": None}, "another tokenizer than that of data.path"),
        ({"document_prefix": (5,)}, r"document_prefix \(\) there, \(5,\) here"),
        ({"eos_id": 7}, "eos_id 0 there, 7 here"),
    ],
)
def test_tokenizers_are_compared_by_what_decides_the_ids(
    made: Path, changes: dict[str, Any], told: str | None
) -> None:
    content = content_digest((made / "run" / "tokenizer.json").read_bytes())
    values: dict[str, Any] = {"sha256": "0" * 64, "content_sha256": content, **changes}
    eos_id = values.pop("eos_id", 0)
    manifest = read_manifest(made / "data")
    tokenizer = manifest.tokenizer.model_copy(update=values)
    data = manifest.model_copy(update={"tokenizer": tokenizer, "eos_id": eos_id})
    point = start_point.of_checkpoint(made / "run" / "checkpoints" / "7")
    model = config(made, made / "run").model
    outcome: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if told is not None:
        outcome = pytest.raises(StateError, match=told)
    with outcome:
        start_point.check_fits(point, model, data=data)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_export_is_refused(made: Path, copy: Callable[[str], Path]) -> None:
    folder = copy("export")
    weights = "model-00001-of-00001.safetensors"
    flip(folder / weights)
    assert f"{weights}: changed, its sha256 differs" in refusal(made, folder)
    shutil.copy(made / "export" / weights, folder)
    check(made, folder)
    (folder / "MANIFEST.json").unlink()
    assert "holds no MANIFEST.json" in refusal(made, folder)


def test_damaged_checkpoints_are_refused_where_none_is_whole(
    made: Path, copy: Callable[[str], Path]
) -> None:
    run = copy("run")
    path = run / "checkpoints" / "7" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "no checkpoint there is whole: 7: rank-00000.safetensors:" in refusal(made, run)
    shutil.copytree(made / "run" / "checkpoints" / "7", run / "checkpoints" / "3")
    check(made, run)


def test_a_run_that_has_a_checkpoint_does_not_read_it(made: Path, tmp_path: Path) -> None:
    run_dir = made / "run"
    check(made, tmp_path / "gone", run_dir=run_dir, resume="auto")
    check(made, tmp_path / "gone", resume=str(run_dir / "checkpoints" / "7"))
    with pytest.raises(StateError, match="there is no such folder"):
        check(made, tmp_path / "gone", run_dir=tmp_path / "new", resume="auto")


def test_tensors_of_stage_b_are_left_and_listed(made: Path) -> None:
    folder = made.parent / "stage_b"
    made_run(folder, more={"stage_b.memory.query": torch.zeros(2)})
    check(made, folder)
    point = start_point.of_checkpoint(folder / "checkpoints" / "7")
    assert point.as_json()["not_taken"] == ["stage_b.memory.query"]
    assert "stage_b.memory.query" not in point.shapes
    with CheckpointFile(folder / "checkpoints" / "7") as checkpoint:
        assert set(CheckpointWeights(checkpoint).names()) == set(point.shapes)


def test_stage_b_alone_has_a_key_of_its_own() -> None:
    with pytest.raises(ConfigError, match="training.start_from begins Stage A"):
        load_config(REASON, ["training.stage=b", "training.start_from=run", "stage_b.run=run"])


def test_the_check_needs_no_torch() -> None:
    program = "import sys, cdrmix.engines.start_point; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
