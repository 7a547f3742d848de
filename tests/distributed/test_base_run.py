"""A run from a Hugging Face folder, from its start to the export of the trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from cdrmix.checkpoint.base_model import (
    base_records,
    digest_of_base,
    recorded_digest,
    write_base_files,
)
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.config.load import load_config
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.evaluation.trained import evaluate_run, load_trained
from cdrmix.export.exported_run import export_run
from tests.conftest import TINY
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.small_run import overrides, start

CONFIG = """
name: further
model: {{kind: hf, path: {base}}}
training:
  max_steps: 4
  global_batch_size: 4
  sequence_length: 32
  precision: fp32
  learning_rate: 3.0e-3
  min_learning_rate: 1.0e-3
  warmup_steps: 1
  ema_decay: 0.4
data: {{path: {data}}}
checkpoint: {{every_steps: 2}}
evaluation: {{final_tokens: 512, sample_tokens: 4, baselines: false}}
monitoring: {{log_every_steps: 1}}
"""


class Trained(NamedTuple):
    """A finished run whose base has gone."""

    run_dir: Path
    data: Path
    names: set[str]  # of the tensors of its base
    digest: str  # of its base


@pytest.fixture(scope="module")
def trained(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run of a Mixtral on two ranks with ZeRO-3, whose base is away when it has ended.

    It is the second start, of a run that was killed before its first save, and the folder of the
    model has been replaced meanwhile.
    """
    root = tmp_path_factory.mktemp("further")
    vocabulary = load_config(TINY).model.vocab_size
    base = make_folder(root / "base", "mixtral", vocab_size=vocabulary, tokenizer=small_corpus)
    (root / "config.yaml").write_text(CONFIG.format(base=base, data=small_corpus))
    run_dir = root / "run"
    earlier = make_folder(
        root / "earlier", "mixtral", seed=1, vocab_size=vocabulary, tokenizer=small_corpus
    )
    write_base_files(run_dir, earlier, digest_of_base(base_records(earlier)))
    argv = ["--config", str(root / "config.yaml"), "--run-dir", str(run_dir), "--profile", "zero3"]
    argv += ["--resume", "auto"]
    assert run_ranks(start, 2, argv) == [0, 0]
    names, digest = set(tensor_sizes(base)), digest_of_base(base_records(base))
    shutil.move(base, root / "away")
    return Trained(run_dir, small_corpus, names, digest)


def record_of(run_dir: Path) -> dict[str, Any]:
    """Record of the newest start of a run."""
    newest = sorted((run_dir / "starts").glob("*.json"))[-1]
    return dict(json.loads(newest.read_text()))


def test_base_is_on_record(trained: Trained) -> None:
    base = record_of(trained.run_dir)["base"]
    assert base["digest"] == trained.digest == recorded_digest(trained.run_dir / "base")
    with CheckpointFile(trained.run_dir / "checkpoints" / "4") as checkpoint:
        assert checkpoint.state["base"] == base
    log = (trained.run_dir / "train.log").read_text()
    assert f"model: mixtral, {base['parameters']:,} parameters of {base['folder']}" in log
    assert trained.digest[:12] in (trained.run_dir / "report.html").read_text()


def test_export_and_evaluation_need_no_base(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_run(trained.run_dir, out)
    assert set(tensor_sizes(out)) == trained.names
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    ours = load_trained(trained.run_dir).model
    ids = torch.arange(300, 332)[None]
    assert torch.equal(exported(ids).logits, ours.logits(ours(ids).hidden))
    evaluation = json.loads((trained.run_dir / "metrics.json").read_text())["evaluation"]
    measured = evaluate_run(trained.run_dir, max_tokens=512)
    assert measured.loss == pytest.approx(evaluation["loss"], abs=1e-5)


def test_the_average_of_the_weights_is_exported_in_the_names_of_the_base(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_run(trained.run_dir, out, weights="ema")
    assert set(tensor_sizes(out)) == trained.names
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.arange(300, 332)[None]
    of_average, of_trained = (
        model.logits(model(ids).hidden)
        for model in (load_trained(trained.run_dir, weights=w).model for w in ("ema", "trained"))
    )
    assert torch.equal(exported(ids).logits, of_average)
    assert not torch.equal(of_average, of_trained), "control"
    evaluation = json.loads((trained.run_dir / "metrics.json").read_text())["ema_evaluation"]
    measured = evaluate_run(trained.run_dir, max_tokens=512, weights="ema")
    assert measured.loss == pytest.approx(evaluation["loss"], abs=1e-5)


def test_run_does_not_go_on_as_another_model(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained.run_dir / "base", other)
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    more = overrides([f"model.path={other}", "training.max_steps=6"])
    argv = ["--run-dir", str(trained.run_dir), "--resume", "auto", *more]
    assert run_ranks(start, 1, argv) == [2]
    assert "its config.json is not that of the run" in capsys.readouterr().out


def test_run_goes_on_without_its_base(trained: Trained) -> None:
    more = overrides(["training.max_steps=6"])
    argv = ["--run-dir", str(trained.run_dir), "--resume", "auto", "--profile", "zero2", *more]
    assert run_ranks(start, 2, argv) == [0, 0]
    record = record_of(trained.run_dir)
    assert (record["from_step"], record["base"]["digest"]) == (4, trained.digest)
