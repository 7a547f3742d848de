"""What planning tells of a Hugging Face model without torch is what transformers and peft build."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.config.hugging_face import TESTED_FAMILIES
from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import LoraConfig
from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.errors import ConfigError, DataError, PlanError
from cdrmix.planning.counts import count, forward_flops_by_layer, parameters, trained_params
from cdrmix.planning.folder_model import folder_parameters
from tests.hf_models import config_of, make_folder

# Settings that add or drop parameters, by family.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in TESTED_FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 4}),
    ("llama", {"tied": True}),
    ("qwen3", {"attention_bias": True, "tied": True}),
    ("qwen3_moe", {"mlp_only_layers": [0], "num_hidden_layers": 3}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    ("nemotron_h", {"use_bias": True, "use_conv_bias": False, "mlp_bias": True}),
    ("nemotron_h", {"moe_latent_size": 16, "attention_bias": True, "tied": True}),
]


def only_config(folder: Path, family: str, *, tied: bool = False, **settings: Any) -> Path:
    """A folder with a config.json and no weights."""
    config_of(family, vocab_size=320, tied=tied, **settings).save_pretrained(folder)
    return folder


def model_of(folder: Path, **values: Any) -> ModelConfig:
    return ModelConfig.model_validate({"kind": "hf", "path": str(folder), **values})


def built(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(("family", "settings"), VARIANTS, ids=str)
def test_parameters_are_those_of_transformers_in_its_order(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = only_config(tmp_path, family, **settings)
    listed = [(each.name, each.shape) for each in folder_parameters(model_of(folder))]
    assert listed == [(name, tuple(p.shape)) for name, p in built(folder).named_parameters()]


@pytest.mark.parametrize("family", [*TESTED_FAMILIES, "llama-tied"])
def test_files_and_table_tell_the_same(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", family)
    with_weights = folder_parameters(model_of(folder))
    (folder / "model.safetensors").unlink()
    assert folder_parameters(model_of(folder)) == with_weights


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "llama")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 72'))
    with pytest.raises(PlanError, match=r"files hold 39,072 parameters, and config.json tells "):
        folder_parameters(model_of(folder))


def test_a_folder_of_which_a_file_is_missing_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "llama", max_shard_size="40KB")
    next(folder.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(DataError, match="is not there"):
        count(model_of(folder), 32)


def test_an_unknown_family_is_counted_by_its_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "olmo2", tied=True)
    model = model_of(folder)
    total = sum(p.numel() for p in built(folder).parameters())
    assert count(model, 32).total_params == total
    assert len(forward_flops_by_layer(model, 32)) == 2
    sizes = tensor_sizes(folder).items()
    record = {
        name: {"dtype": each.dtype, "shape": each.shape, "file": each.file, "bytes": each.num_bytes}
        for name, each in sizes
    }
    (folder / "model.safetensors").unlink()
    (folder / "weights.json").write_text(json.dumps({"tensors": record}))
    assert count(model, 32).total_params == total  # as a run has kept it
    (folder / "weights.json").write_text('{"tensors": 3}')
    with pytest.raises(DataError, match="not what a run keeps of its base"):
        count(model, 32)
    (folder / "weights.json").unlink()
    with pytest.raises(PlanError, match="without its weights nothing tells the parameters of"):
        count(model, 32)


def test_an_index_alone_says_that_the_weights_are_elsewhere(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3", max_shard_size="40KB")
    whole = folder_parameters(model_of(folder))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert (folder / "model.safetensors.index.json").exists()
    assert folder_parameters(model_of(folder)) == whole


@pytest.mark.parametrize("key", ["n_groups", "mamba_head_dim"])
def test_a_size_that_is_no_count_is_refused(key: str, tmp_path: Path) -> None:
    folder = only_config(tmp_path, "nemotron_h")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, key: "many"}))
    with pytest.raises(PlanError, match=f"{key} = 'many' is no count"):
        count(model_of(folder), 32)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "mixtral", "qwen3_moe", "nemotron_h"])
@pytest.mark.parametrize("experts", [True, False])
def test_adapters_are_those_of_peft_in_its_order(
    family: str, experts: bool, tmp_path: Path
) -> None:
    from cdrmix.hf.lora import add_adapters

    folder = only_config(tmp_path, family.removesuffix("-tied"), tied=family.endswith("-tied"))
    model = model_of(folder, lora={"rank": 3, "experts": experts})
    from transformers import AutoConfig, AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    adapted = add_adapters(causal, LoraConfig(rank=3, experts=experts), seed=0)
    trained = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    assert [p.shape for p in parameters(model) if p.is_trained] == trained
    assert trained_params(model) == sum(map(torch.Size.numel, map(torch.Size, trained)))
    frozen = sum(p.numel() for p in adapted.parameters() if not p.requires_grad)
    assert count(model, 32).total_params == trained_params(model) + frozen


def test_adapters_without_a_place_are_refused(tmp_path: Path) -> None:
    folder = only_config(tmp_path, "llama")
    with pytest.raises(PlanError, match="no linear layers of the names wrong_proj"):
        count(model_of(folder, lora={"target_modules": ["wrong_proj"]}), 32)
    other = make_folder(tmp_path / "other", "olmo2")
    with pytest.raises(ConfigError, match="nothing is known of the linear layers of"):
        count(model_of(other, lora={}), 32)


def test_training_flops_of_adapters_leave_out_gradients_of_frozen_matrices(tmp_path: Path) -> None:
    folder = only_config(tmp_path, "llama", tied=True)
    length = 64
    full, lora = model_of(folder), model_of(folder, lora={"rank": 4})
    by_layer = forward_flops_by_layer(full, length)
    matrices = {each.name: each for each in parameters(full) if len(each.shape) > 1}
    in_blocks = sum(each.num_elements for each in matrices.values() if each.layer is not None)
    attention = 2 * length * 32 * 2  # causal half, 2 heads of 16, 2 layers
    assert sum(by_layer) == 2 * in_blocks + attention
    head = 2 * 320 * 32
    assert count(full, length).train_flops_per_token == 3 * (sum(by_layer) + head)
    adapters = trained_params(lora)
    expected = 2 * (2 * in_blocks + head) + 3 * (attention + 2 * adapters)
    assert count(lora, length).train_flops_per_token == expected


def test_experts_in_use_are_the_chosen_ones(tmp_path: Path) -> None:
    counts = count(model_of(only_config(tmp_path, "mixtral")), 32)
    experts = 2 * 4 * 3 * 32 * 48
    assert counts.total_params - counts.active_params == experts // 2


def write_sparse(folder: Path) -> None:
    """Weights of a model that take no room on the disk: a true header, and a hole."""
    position = 0
    header = {}
    for parameter in folder_parameters(model_of(folder)):
        end = position + 2 * parameter.num_elements
        offsets = [position, end]
        header[parameter.name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": offsets,
        }
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
