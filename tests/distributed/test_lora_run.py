"""A run that trains adapters, from its start to its exports; its base is never written by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cdrmix.checkpoint.base_model import base_records
from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.cli import main
from cdrmix.config.load import load_config
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.errors import StateError
from cdrmix.evaluation.trained import continue_text, evaluate_run, load_trained
from cdrmix.export.manifest import verify_export
from cdrmix.export.peft_adapter import check_adapter, open_adapter
from tests.conftest import TINY
from tests.harness import run_ranks
from tests.hf_models import make_folder
from tests.small_run import overrides, start

CONFIG = """
name: adapted
model: {{kind: hf, path: {base}, lora: {{rank: 4}}}}
training:
  max_steps: 3
  global_batch_size: 4
  sequence_length: 32
  precision: fp32
  learning_rate: 1.0e-2
  min_learning_rate: 1.0e-3
  warmup_steps: 1
  ema_decay: 0.4
data: {{path: {data}}}
checkpoint: {{every_steps: 2}}
evaluation: {{final_tokens: 512, sample_tokens: 4, baselines: false}}
monitoring: {{log_every_steps: 1}}
"""


class Trained(NamedTuple):
    """A finished run and its base."""

    run_dir: Path
    base: Path


@pytest.fixture(scope="module")
def trained(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run of a Mixtral on two ranks with ZeRO-3."""
    root = tmp_path_factory.mktemp("adapted")
    vocabulary = load_config(TINY).model.vocab_size
    base = make_folder(root / "base", "mixtral", vocab_size=vocabulary, tokenizer=small_corpus)
    (root / "config.yaml").write_text(CONFIG.format(base=base, data=small_corpus))
    run_dir = root / "run"
    argv = ["--config", str(root / "config.yaml"), "--run-dir", str(run_dir), "--profile", "zero3"]
    assert run_ranks(start, 2, argv) == [0, 0]
    return Trained(run_dir, base)


IDS = torch.arange(300, 332)[None]


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def test_checkpoints_hold_adapters_and_the_log_tells_their_share(trained: Trained) -> None:
    with CheckpointFile(trained.run_dir / "checkpoints" / "3") as checkpoint:
        names = checkpoint.names()
        assert len(names) == 2 * 2 * (4 + 2) and all(".lora_" in name for name in names)
        assert checkpoint.state["base"]["folder"] == str(trained.base)
    log = (trained.run_dir / "train.log").read_text()
    assert "LoRA adapts 100 % of attention, 100 % of experts: 12,544 trainable parameters" in log


def test_the_run_leaves_an_adapter_that_peft_loads(trained: Trained) -> None:
    folder = trained.run_dir / "adapter"
    assert verify_export(folder)[0] == 4
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes["adapter_model.safetensors"] > 4 * 12_544
    base = AutoModelForCausalLM.from_pretrained(trained.base)
    of_base = scores(base)
    found = scores(PeftModel.from_pretrained(base, folder))
    ours = load_trained(trained.run_dir).model
    assert torch.equal(found, ours.logits(ours(IDS).hidden))
    assert (found - of_base).abs().max() > 1e-3, "control: adapters act"
    metadata = open_adapter(folder, trained.base)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(trained.base)
    assert metadata["base"]["digest"] in (folder / "README.md").read_text()


def test_average_of_the_adapters_is_exported_alone_and_merged(
    trained: Trained, tmp_path: Path
) -> None:
    run, adapter, merged = str(trained.run_dir), tmp_path / "adapter", tmp_path / "merged"
    words = ["export", run, "--weights", "ema", "--out"]
    assert main([*words, str(adapter), "--format", "peft"]) == 0
    assert main([*words, str(merged)]) == 0
    base = AutoModelForCausalLM.from_pretrained(trained.base)
    found = scores(PeftModel.from_pretrained(base, adapter))
    ours = load_trained(trained.run_dir, weights="ema").model
    assert torch.equal(found, ours.logits(ours(IDS).hidden))
    of_trained = load_trained(trained.run_dir).model
    assert not torch.equal(found, of_trained.logits(of_trained(IDS).hidden)), "control"
    assert (scores(AutoModelForCausalLM.from_pretrained(merged)) - found).abs().max() <= 1e-5


def test_merged_export_is_the_run_in_the_layout_of_its_base(
    trained: Trained, tmp_path: Path
) -> None:
    assert main(["export", str(trained.run_dir), "--out", str(tmp_path / "merged")]) == 0
    assert set(tensor_sizes(tmp_path / "merged")) == set(tensor_sizes(trained.base))
    merged = scores(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    ours = load_trained(trained.run_dir).model
    assert (merged - ours.logits(ours(IDS).hidden)).abs().max() <= 1e-5
    again = tmp_path / "adapter"
    assert main(["export", str(trained.run_dir), "--out", str(again), "--format", "peft"]) == 0
    name = "adapter_model.safetensors"
    assert (again / name).read_bytes() == (trained.run_dir / "adapter" / name).read_bytes()


def test_evaluation_and_text_are_those_of_the_run(trained: Trained) -> None:
    evaluation = json.loads((trained.run_dir / "metrics.json").read_text())["evaluation"]
    measured = evaluate_run(trained.run_dir, max_tokens=512)
    assert measured.loss == pytest.approx(evaluation["loss"], abs=1e-5)
    text = continue_text(trained.run_dir, "def", max_new_tokens=4, temperature=0, seed=1)
    assert isinstance(text, str)


def test_another_base_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained.base, other)
    shutil.copytree(trained.run_dir, tmp_path / "run")
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # one bit of one weight
    file.write_bytes(bytes(content))
    with pytest.raises(StateError, match="is not the base of these adapters"):
        open_adapter(trained.run_dir / "adapter", other)
    argv = ["--run-dir", str(tmp_path / "run"), "--resume", "auto"]
    more = overrides([f"model.path={other}", "training.max_steps=5"])
    assert run_ranks(start, 1, [*argv, *more]) == [2]
    gone = overrides([f"model.path={tmp_path / 'gone'}", "training.max_steps=5"])
    assert run_ranks(start, 1, [*argv, *gone]) == [2]


def test_an_adapter_without_its_tensors_is_refused(trained: Trained, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from cdrmix.checkpoint.trained_run import config_of
    from cdrmix.export.peft_adapter import RunAdapters

    whole = load_file(trained.run_dir / "adapter" / "adapter_model.safetensors")
    first = next(iter(whole))
    faults: list[dict[str, torch.Tensor]] = [
        {},  # the file of 40 bytes
        {name: values for name, values in whole.items() if name != first},
        whole | {first: whole[first][:0].clone()},
        whole | {first: torch.full_like(whole[first], torch.nan)},
    ]
    with CheckpointFile(trained.run_dir / "checkpoints" / "3") as reader:
        adapters = RunAdapters(reader, config_of(reader))
        for fault in faults:
            save_file(fault, tmp_path / "adapter_model.safetensors")
            with pytest.raises(StateError, match="does not hold the 24 tensors"):
                check_adapter(tmp_path, adapters)


def test_the_run_goes_on_where_its_base_has_moved(trained: Trained, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained.base, moved)
    trained.base.rename(trained.base.with_name("away"))
    with pytest.raises(StateError, match="--base DIR"):
        load_trained(trained.run_dir)
    more = overrides([f"model.path={moved}", "training.max_steps=5"])
    argv = ["--run-dir", str(trained.run_dir), "--resume", "auto", "--profile", "zero2", *more]
    assert run_ranks(start, 2, argv) == [0, 0]
    assert "resumed from" in (trained.run_dir / "train.log").read_text()
    assert load_trained(trained.run_dir).step == 5
    metadata = open_adapter(trained.run_dir / "adapter", moved)
    assert metadata["step"] == 5
    assert base_records(moved).keys() == {"config.json", "model.safetensors"}
