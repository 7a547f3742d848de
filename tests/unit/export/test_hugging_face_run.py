"""Exports of runs that began with a Hugging Face model: names, types and values of its folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from cdrmix.checkpoint.base_model import base_records, digest_of_base, write_base_files
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.cli import main
from cdrmix.config.load import snapshot_yaml
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TOKENIZER_FILE
from cdrmix.errors import StateError
from cdrmix.evaluation.trained import continue_text, load_trained
from cdrmix.export.exported_run import export_run
from cdrmix.export.manifest import verify_export
from cdrmix.hf.lora import add_adapters
from cdrmix.parallel.apply import logical_name_in
from tests.checkpoints import save_checkpoint, whole
from tests.harness import RANK_ENVIRONMENT, ROOT
from tests.hf_models import make_folder

# The verb in a process that is killed when some of the weights are written.
_KILLED = """
import os, sys
from cdrmix.cli import main
from cdrmix.export import weights
weights.write_json = lambda *_: os.kill(os.getpid(), 9)
sys.exit(main(["export", sys.argv[1], "--out", sys.argv[2]]))
"""


def config_from(base: Path, *, precision: str, lora: dict[str, int] | None = None) -> Config:
    """Configuration of a run from a base."""
    training = {
        "max_steps": 7,
        "global_batch_size": 4,
        "sequence_length": 32,
        "learning_rate": 1e-3,
        "min_learning_rate": 1e-4,
        "warmup_steps": 0,
        "precision": precision,
    }
    model = {"kind": "hf", "path": str(base), "lora": lora}
    return Config(name="further", model=model, training=training, data={"path": "none"})


def made_run(run_dir: Path, base: Path, *, precision: str) -> Any:
    """Makes the directory of a run from a base; returns the model whose weights it holds."""
    trained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    saved = trained.state_dict()
    buffers = {name: values for name, values in trained.named_buffers() if name in saved}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as after training: no value is that of the base
        for values in (*trained.parameters(), *buffers.values()):
            values.add_(0.05 * torch.randn(values.shape, generator=generator))
    fragments = [whole(name, p.detach()) for name, p in trained.named_parameters()]
    fragments += [whole(name, values, "buffer") for name, values in buffers.items()]
    save_run(run_dir, base, config_from(base, precision=precision), fragments)
    return trained


def save_run(run_dir: Path, base: Path, config: Config, fragments: list[Fragment]) -> None:
    """Writes the checkpoint of step 7 and what a run keeps of its base."""
    digest = digest_of_base(base_records(base))
    write_base_files(run_dir, base, digest)
    tokenizer = shutil.copyfile(base / TOKENIZER_FILE, run_dir / TOKENIZER_FILE)
    state = {
        "config": config.model_dump(mode="json"),
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        "base": {"folder": str(base), "digest": digest},
        "stage": "a",
    }
    save_checkpoint(run_dir / "checkpoints", 7, fragments, state=state, rank_state={}, keep=9)


def made_adapters(run_dir: Path, base: Path) -> Any:
    """Makes the directory of a run that trained adapters; returns the model with them."""
    config = config_from(base, precision="fp32", lora={"rank": 2})
    assert config.model.lora is not None, "given"
    causal = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = add_adapters(causal, config.model.lora, seed=1).eval()
    name_of = logical_name_in(config.model)
    generator = torch.Generator().manual_seed(1)
    fragments = []
    for name, values in adapted.named_parameters():
        if values.requires_grad:
            drawn = torch.randn(values.shape, generator=generator)
            values.data.copy_(drawn)
            fragments.append(whole(name_of(name), drawn))
    save_run(run_dir, base, config, fragments)
    return adapted


def test_adapters_are_used_with_a_base_that_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run_dir, moved = tmp_path / "base", tmp_path / "run", tmp_path / "moved"
    adapted = made_adapters(run_dir, make_folder(base, "llama"))
    base.rename(moved)
    ids = torch.arange(24).view(2, 12)
    for use in (load_trained, lambda run: export_run(run, tmp_path / "out")):
        with pytest.raises(StateError, match=rf"not in {base}\. Give its folder with --base DIR"):
            use(run_dir)
    words = ["export", str(run_dir), "--out", str(tmp_path / "out")]
    assert main([*words, "--base", str(moved)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-4)
    capsys.readouterr()
    assert main(["generate", str(run_dir), "--base", str(moved), "--max-new-tokens", "2"]) == 0
    # The run has gone on elsewhere since, without a checkpoint.
    later = config_from(moved, precision="fp32", lora={"rank": 2})
    (run_dir / "config_snapshot.yaml").write_text(snapshot_yaml(later))
    ours = load_trained(run_dir).model
    assert torch.equal(ours.logits(ours(ids).hidden), adapted(ids).logits)
    other = make_folder(tmp_path / "other", "llama", seed=1)
    with pytest.raises(StateError, match="is not the base of these adapters"):
        load_trained(run_dir, base=other)


def test_base_is_refused_for_a_run_without_adapters(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama")
    made_run(tmp_path / "run", base, precision="fp32")
    with pytest.raises(StateError, match="Leave out --base"):
        load_trained(tmp_path / "run", base=base)
    with pytest.raises(StateError, match="Leave out --base"):
        export_run(tmp_path / "run", tmp_path / "out", base=base)


@pytest.mark.parametrize(
    ("family", "base_dtype", "precision"),
    [
        ("llama-tied", "float32", "fp32"),
        ("mixtral", "float32", "fp32"),
        ("mixtral", "bfloat16", "bf16"),
        ("nemotron_h", "float32", "fp32"),
        ("nemotron_h", "float32", "bf16"),
        ("llama", "bfloat16", "fp32"),
    ],
)
def test_export_is_the_trained_model_in_the_layout_of_its_base(
    tmp_path: Path, family: str, base_dtype: str, precision: str
) -> None:
    base = make_folder(tmp_path / "base", family, dtype=base_dtype, max_shard_size="40KB")
    trained = made_run(tmp_path / "run", base, precision=precision)
    names = set(tensor_sizes(base))
    tokenizer = (base / TOKENIZER_FILE).read_bytes()
    shutil.rmtree(base)  # what the run keeps of it is enough
    out = tmp_path / "out"
    exported = export_run(tmp_path / "run", out, max_shard_bytes=30_000)
    stored = tensor_sizes(out)
    assert stored.keys() == names
    assert (out / TOKENIZER_FILE).read_bytes() == tokenizer
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    config = json.loads((out / "config.json").read_text())
    assert exported.dtype == config["dtype"] == str(dtype).removeprefix("torch.")
    assert verify_export(out)[0] == exported.num_files - 1
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.arange(24).view(2, 12)
    if precision == "fp32":
        assert torch.equal(loaded(ids).logits, trained(ids).logits)
    else:
        for (name, ours), theirs in zip(
            loaded.state_dict().items(), trained.state_dict().values(), strict=True
        ):
            kept = "e_score_correction_bias" in name
            assert ours.dtype == (torch.float32 if kept else dtype)
            assert torch.equal(ours, theirs.to(ours.dtype)), name
    assert AutoTokenizer.from_pretrained(out)("def")["input_ids"]
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "base"
    assert family.removesuffix("-tied") in card.data.tags
    metadata = json.loads((out / "training_metadata.json").read_text())
    assert metadata["base"]["digest"] in card.text


def test_trained_model_is_evaluated_without_its_base(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "mixtral")
    trained = made_run(tmp_path / "run", base, precision="bf16")
    shutil.rmtree(base)
    ours = load_trained(tmp_path / "run")
    ids = torch.arange(24).view(2, 12)
    output = ours.model(ids)
    assert torch.equal(ours.model.logits(output.hidden), trained(ids).logits)
    text = continue_text(tmp_path / "run", "def", max_new_tokens=5, temperature=0, seed=1)
    assert isinstance(text, str)


def test_killed_export_leaves_no_folder(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama")
    made_run(tmp_path / "run", base, precision="fp32")
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "run"), str(out)],
        env={**os.environ, **RANK_ENVIRONMENT},
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    export_run(tmp_path / "run", out)
    assert verify_export(out)
    assert not list(tmp_path.glob(".out*"))
