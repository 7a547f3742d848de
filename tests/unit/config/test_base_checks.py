"""Folders of Hugging Face models that no run can start from, found without torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cdrmix.config.base_checks import check_base, runs_own_code
from cdrmix.config.model import ModelConfig
from cdrmix.errors import ConfigError, DataError, TrainingError
from tests.harness import ROOT

SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 320,
}
CODE = "class Model: ...\n"
DIGEST = hashlib.sha256(CODE.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose small files and headers are those of a model."""
    path = tmp_path / "base"
    path.mkdir()
    describe(path)
    save_file({"lm_head.weight": np.zeros((4, 4))}, path / "model.safetensors")
    return path


def describe(folder: Path, **values: Any) -> None:
    """Writes config.json with further values."""
    (folder / "config.json").write_text(json.dumps(SIZES | values))


def model(folder: Path, **values: Any) -> ModelConfig:
    """The `model` section of a run from a folder."""
    return ModelConfig.model_validate({"kind": "hf", "path": str(folder), **values})


def test_a_whole_folder_is_let_through(folder: Path) -> None:
    check_base(model(folder))


def test_adapters_need_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_base(model(folder, lora={}))
    monkeypatch.setattr("cdrmix.config.base_checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[lora\]'"):
        check_base(model(folder, lora={}))
    check_base(model(folder))


def cut_off(folder: Path) -> None:
    """Ends the weights too early."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def lose_shard(folder: Path) -> None:
    """Leaves an index without its files."""
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_alone(folder: Path) -> None:
    """Leaves a pickle."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_folder(folder: Path) -> None:
    """Moves the folder away."""
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (cut_off, DataError, "model.safetensors: cut off"),
        (lose_shard, DataError, "model-00001-of-00001.safetensors of model.safetensors.index.json"),
        (pickle_alone, DataError, "its weights are pickles (pytorch_model.bin)"),
        (lose_folder, ConfigError, "no such folder"),
        (lambda path: (path / "config.json").unlink(), ConfigError, "holds no config.json"),
        (lambda path: describe(path, model_type="lama"), ConfigError, "model_type 'lama' is unkn"),
        (lambda path: describe(path, quantization_config={"bits": 4}), ConfigError, "quantised"),
    ],
)  # fmt: skip
def test_a_folder_that_no_run_can_start_from(
    folder: Path, damage: Callable[[Path], None], kind: type[TrainingError], message: str
) -> None:
    configured = model(folder)
    damage(folder)
    with pytest.raises(TrainingError) as caught:
        check_base(configured)
    assert type(caught.value) is kind
    assert message in str(caught.value)


def test_code_of_a_folder_runs_only_where_all_of_it_is_listed(folder: Path) -> None:
    describe(folder, model_type="new", auto_map={"AutoModelForCausalLM": "modeling_new.Model"})
    with pytest.raises(ConfigError, match="the folder holds none"):
        runs_own_code(folder, [DIGEST])
    (folder / "modeling_new.py").write_text(CODE)
    with pytest.raises(ConfigError, match=DIGEST):
        check_base(model(folder))
    check_base(model(folder, remote_code=[DIGEST]))
    assert runs_own_code(folder, [DIGEST])
    (folder / "parts").mkdir()
    (folder / "parts" / "other.py").write_text("import os\n")
    with pytest.raises(ConfigError, match=r"parts/other\.py"):
        runs_own_code(folder, [DIGEST])


def test_a_family_of_transformers_runs_no_code_of_the_folder(folder: Path) -> None:
    describe(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.Model"})
    (folder / "modeling_llama.py").write_text(CODE)
    assert not runs_own_code(folder, ())
    assert runs_own_code(folder, [DIGEST])


def test_code_of_another_place_is_refused(folder: Path) -> None:
    describe(folder, model_type="new", auto_map={"AutoConfig": "user/repository--code.Config"})
    with pytest.raises(ConfigError, match="code of another place"):
        runs_own_code(folder, [DIGEST])


def test_a_folder_is_checked_without_torch(folder: Path) -> None:
    """Importing torch or transformers would take seconds."""
    describe(folder, model_type="gemma")  # a family that only the mapping of transformers names
    script = (
        "import sys; from cdrmix.config.base_checks import check_base\n"
        "from cdrmix.config.model import ModelConfig\n"
        f"check_base(ModelConfig.model_validate({{'kind': 'hf', 'path': {str(folder)!r}}}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
