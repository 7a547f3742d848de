"""Parts of a model that get adapters, those that are refused, and the first values of adapters."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from cdrmix.config.lora_targets import LoraTargets
from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import LoraConfig
from cdrmix.errors import ConfigError
from cdrmix.hf import lora
from cdrmix.hf.lora import adapters_in, add_adapters
from tests.hf_models import VOCAB_SIZE, config_of, make_folder


def made(family: str) -> Any:
    torch.manual_seed(0)
    config = config_of(family, vocab_size=VOCAB_SIZE, tied=False)
    return transformers.AutoModelForCausalLM.from_config(config)


def wrapped(family: str, *, seed: int = 1, **settings: Any) -> Any:
    return add_adapters(made(family), LoraConfig(rank=4, **settings), seed=seed)


def leaves(model: Any) -> set[str]:
    """Last words of the adapted weights' names, without `weight`."""
    names = (name.removesuffix(".weight") for name in adapters_in(model))
    return {".".join(name.split(".")[-2:]) for name in names}


ATTENTION = {f"self_attn.{letter}_proj" for letter in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}
MIXERS = {f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "in", "up", "down")}
SHARED = {"shared_experts.up_proj", "shared_experts.down_proj"}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ATTENTION | MLP),
        ("qwen3", ATTENTION | MLP),
        ("mixtral", ATTENTION | EXPERTS),
        ("qwen3_moe", ATTENTION | EXPERTS),
        ("nemotron_h", MIXERS | SHARED | {"experts.up_proj", "experts.down_proj"}),
    ],
)
def test_each_family_has_targets_of_its_own(family: str, expected: set[str]) -> None:
    model = wrapped(family)
    assert leaves(model) == expected
    assert leaves(wrapped(family, target_modules=("all-linear",))) == expected
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)


def test_adapters_begin_with_the_model_as_it_is() -> None:
    ids = torch.arange(20)[None]
    for family in ("llama", "mixtral", "nemotron_h"):
        expected = made(family).eval()(ids, use_cache=False).logits
        assert torch.equal(wrapped(family).eval()(ids, use_cache=False).logits, expected)


def test_first_values_follow_from_seed_and_name() -> None:
    torch.manual_seed(5)
    one = dict(wrapped("mixtral").named_parameters())
    torch.manual_seed(6)
    # fewer adapters, as other layers have none: the others begin as before
    some = dict(wrapped("mixtral", target_modules=("o_proj",)).named_parameters())
    other = dict(wrapped("mixtral", seed=2).named_parameters())
    trained = [name for name, p in some.items() if p.requires_grad]
    assert len(trained) == 2 * (2 + 2 * 2)  # A and B of o_proj and two matrices, two layers
    for name in trained:
        assert torch.equal(one[name], some[name]), name
        if ".lora_A." in name:
            assert not torch.equal(one[name], other[name]), name
            bound = some[name].shape[1] ** -0.5
            assert 0.8 * bound < some[name].abs().max() <= bound, name
        else:
            assert not some[name].any(), name


def test_both_halves_of_a_fused_matrix_have_the_whole_rank() -> None:
    found = adapters_in(wrapped("mixtral", alpha=16.0))
    model = dict(wrapped("mixtral").named_parameters())
    fused = found["model.layers.0.mlp.experts.gate_up_proj"]
    plain = found["model.layers.0.mlp.experts.down_proj"]
    rows = {
        each.a: len(model[f"base_model.model.{each.a}".replace("lora_A.", "lora_A.default.")])
        for each in (fused, plain)
    }
    assert rows == {fused.a: 4 * 2 * 4, plain.a: 4 * 4}
    assert {each.scale for each in found.values()} == {16 / 4}


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        # all of Mixtral's linear layers and dropout: peft would speak of a ParamWrapper
        (
            "mixtral",
            {"dropout": 0.05, "target_modules": ("all-linear",)},
            "model.lora.dropout = 0.05",
        ),
        ("nemotron_h", {"dropout": 0.05}, "model.lora.dropout = 0.05"),
        ("llama", {"target_modules": ("q_prj",)}, "no layer of the model. Near names are q_proj"),
        ("llama", {"target_modules": ("lm_head",)}, "head and the embeddings are not adapted"),
        ("llama", {"target_modules": ("embed_tokens",)}, "head and the embeddings"),
        ("llama", {"target_modules": ("input_layernorm",)}, "LlamaRMSNorm"),
        ("mixtral", {"target_modules": ("q_proj", "gate")}, "routers are not adapted"),
        ("qwen3_moe", {"target_modules": ("gate",)}, "routers are not adapted"),
        ("nemotron_h", {"target_modules": ("out_proj",)}, "kernel of Mamba"),
        ("nemotron_h", {"target_modules": ("conv1d",)}, "kernel of Mamba"),
        ("olmo2", {}, "model_type 'olmo2'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    family: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        wrapped(family, **settings)
    assert words in str(refused.value)


def test_dropout_beside_experts_is_refused_with_the_configuration(tmp_path: Path) -> None:
    values = {"kind": "hf", "path": str(make_folder(tmp_path / "base", "mixtral"))}
    with pytest.raises(ValidationError, match="lora.dropout = 0.05"):
        ModelConfig.model_validate({**values, "lora": {"dropout": 0.05}})
    ModelConfig.model_validate({**values, "lora": {"dropout": 0.05, "experts": False}})


def test_dropout_is_for_models_without_adapted_experts() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [("llama", {}), ("mixtral", {"experts": False})]
    for family, settings in cases:
        drops = [
            m.p
            for m in wrapped(family, dropout=0.5, **settings).modules()
            if isinstance(m, torch.nn.Dropout)
        ]
        assert 0.5 in drops, family


def test_a_model_whose_experts_would_all_stay_frozen_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wrapped("nemotron_h")
    assert "100 % of attention, 100 % of mlp, 100 % of experts, 66.84 % of mamba" in caplog.text
    caplog.clear()
    wrapped("nemotron_h", experts=False)
    assert "0 % of experts" in caplog.text
    monkeypatch.setattr(lora, "default_targets", lambda _: LoraTargets(("q_proj",), ()))
    with pytest.raises(ConfigError, match="0 % of the 6,144 parameters of experts"):
        wrapped("nemotron_h")


def test_a_missing_peft_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[lora\]'"):
        wrapped("llama")


def test_another_base_than_that_of_the_adapters_is_refused(tmp_path: Path) -> None:
    from cdrmix.checkpoint.base_model import recorded_base, refuse_other_base
    from cdrmix.errors import StateError

    recorded = recorded_base({"base": {"digest": "a" * 64, "folder": "/models/theirs"}}, tmp_path)
    refuse_other_base(recorded, "a" * 64, tmp_path)
    with pytest.raises(StateError, match="digest b{12} here, a{12} of /models/theirs"):
        refuse_other_base(recorded, "b" * 64, tmp_path)
    with pytest.raises(StateError, match="no digest of the base"):
        recorded_base({"base": {}}, tmp_path)
