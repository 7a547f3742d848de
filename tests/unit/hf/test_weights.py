"""Names of Hugging Face models: every parameter is made of the tensors that transformers takes."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import dynamic_module_utils
from transformers.core_model_loading import Transpose, WeightConverter

from cdrmix.config.safetensors_headers import tensor_sizes
from cdrmix.errors import ConfigError, DataError
from cdrmix.hf import weights
from cdrmix.hf.weights import NameMap, map_names, skeleton
from tests.hf_models import FAMILIES, make_folder

Shapes = dict[str, tuple[int, ...]]


def shapes_of(folder: Path) -> Shapes:
    """Shape of each tensor in a folder's files."""
    return {name: size.shape for name, size in tensor_sizes(folder).items()}


def assembled(folder: Path, names: NameMap) -> dict[str, torch.Tensor]:
    """Puts the parameters of a model together from the tensors of its files."""
    stored = load_file(folder / "model.safetensors")
    tensors = {}
    for name, parts in names.parts.items():
        ends = [[a + b for a, b in zip(p.offset, p.shape, strict=True)] for p in parts]
        whole = torch.full([max(each) for each in zip(*ends, strict=True)], torch.nan)
        for part, end in zip(parts, ends, strict=True):
            box = tuple(slice(a, b) for a, b in zip(part.offset, end, strict=True))
            whole[box] = stored[part.source].reshape(part.shape)
        tensors[name] = whole
    return tensors


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_parameters_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path / family, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = model.state_dict()
    expected: dict[str, torch.Tensor] = dict(model.named_parameters())
    expected |= {name: values for name, values in model.named_buffers() if name in saved}
    names = map_names(skeleton(folder), shapes_of(folder), place=folder)
    made = assembled(folder, names)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], values) for name, values in expected.items())
    # backwards, every tensor of the files is found again
    assert names.origins().keys() == shapes_of(folder).keys()
    assert names.dropped == names.tied == ()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Shapes]:
    """A Mixtral without values, and the shapes of its files."""
    folder = make_folder(tmp_path_factory.mktemp("hf") / "mixtral", "mixtral")
    return skeleton(folder), shapes_of(folder)


EXPERTS = "model.layers.1.block_sparse_moe.experts"


def lose_expert(shapes: Shapes) -> None:
    """Removes a tensor of one expert."""
    del shapes[f"{EXPERTS}.2.w3.weight"]


def lose_norm(shapes: Shapes) -> None:
    """Removes a tensor that a parameter is made of alone."""
    del shapes["model.norm.weight"]


def add_other(shapes: Shapes) -> None:
    """Adds a tensor of another model."""
    shapes["model.layers.0.self_attn.q_norm.weight"] = (16,)


def turn(shapes: Shapes) -> None:
    """Gives a tensor with as many numbers, in other rows."""
    shapes[f"{EXPERTS}.0.w2.weight"] = (48, 32)


def widen(shapes: Shapes) -> None:
    """Gives the head more rows than the configuration tells."""
    shapes["lm_head.weight"] = (321, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_expert, f"{EXPERTS}.2.w3.weight: missing"),
        (lose_norm, "model.norm.weight: missing"),
        (add_other, "model.layers.0.self_attn.q_norm.weight: not of the model"),
        (turn, f"{EXPERTS}.0.w2.weight: (48, 32), beyond model.layers.1.mlp.experts.down_proj"),
        (widen, "lm_head.weight: (321, 32), beyond lm_head.weight, which is (320, 32)"),
    ],
)
def test_other_tensors_are_refused(
    mixtral: tuple[Any, Shapes], damage: Callable[[Shapes], None], message: str
) -> None:
    model, shapes = mixtral
    changed = dict(shapes)
    damage(changed)
    with pytest.raises(DataError) as caught:
        map_names(model, changed, place="base")
    assert message in str(caught.value)
    assert "1 differences" in str(caught.value)


def test_tied_head_under_both_names_is_to_be_compared(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tied", "llama-tied")
    model, shapes = skeleton(folder), shapes_of(folder)
    embedding = "model.embed_tokens.weight"
    names = map_names(model, {**shapes, "lm_head.weight": shapes[embedding]}, place=folder)
    assert names.tied == (("lm_head.weight", embedding),)
    assert "lm_head.weight" not in names.parts
    assert names.origins()["lm_head.weight"] == names.origins()[embedding]
    # the head alone stands for both
    renamed = {"lm_head.weight" if name == embedding else name: s for name, s in shapes.items()}
    assert map_names(model, renamed, place=folder).parts[embedding][0].source == "lm_head.weight"


def test_tensors_that_the_family_leaves_out_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "nemotron", "nemotron_h")
    shapes = {**shapes_of(folder), "mtp.layers.0.norm.weight": (32,)}
    assert map_names(skeleton(folder), shapes, place=folder).dropped == (
        "mtp.layers.0.norm.weight",
    )


def test_other_conversion_is_refused(
    mixtral: tuple[Any, Shapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = WeightConverter("q_proj.weight", "q_proj.weight", [Transpose(0, 1)])
    monkeypatch.setattr(weights, "get_model_conversion_mapping", lambda _: [turned])
    with pytest.raises(ConfigError, match=r"'mixtral' are converted by Transpose"):
        map_names(*mixtral, place="base")


CODE = {
    "configuration_own.py": "from transformers import LlamaConfig\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import LlamaForCausalLM\n"
    "from .configuration_own import OwnConfig\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n",
}


def test_model_of_code_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    # Of an earlier test: it would be searched in the folder of that one.
    for name in [each for each in sys.modules if each.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    folder = make_folder(tmp_path / "own", "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    classes = {"AutoConfig": "configuration_own.OwnConfig"}
    classes["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
    digests = []
    for name, text in CODE.items():
        (folder / name).write_text(text)
        digests.append(hashlib.sha256(text.encode()).hexdigest())
    model = skeleton(folder, digests)
    assert type(model).__name__ == "OwnForCausalLM"
    shapes = shapes_of(folder)
    assert map_names(model, shapes, place=folder).origins().keys() == shapes.keys()
    with pytest.raises(ConfigError, match=digests[1]):
        skeleton(folder, digests[:1])
