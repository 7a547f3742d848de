"""Sizes of Hugging Face models by their config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.hugging_face import sizes_of_folder
from cdrmix.config.model import ModelConfig

HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def sizes(folder: Path, **values: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(HYBRID | values))
    return sizes_of_folder(folder)


@pytest.mark.parametrize(
    "layers",
    [
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
        {"hybrid_override_pattern": "M-*E"},
    ],
    ids=["words", "letters"],
)
def test_layers_of_a_hybrid_are_counted(layers: dict[str, Any], tmp_path: Path) -> None:
    found = sizes(tmp_path, **layers)
    assert found["num_layers"] == 4
    assert found["moe"]["num_experts"] == 4
    assert found["moe"]["expert_hidden_size"] == 24


@pytest.mark.parametrize(
    "layers",
    [
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        {"hybrid_override_pattern": "M-*"},
    ],
    ids=["words", "letters"],
)
def test_a_hybrid_without_expert_layers_is_dense(layers: dict[str, Any], tmp_path: Path) -> None:
    found = sizes(tmp_path, **layers)
    assert found["num_layers"] == 3
    assert "moe" not in found


def test_experts_of_a_folder_drop_no_tokens(tmp_path: Path) -> None:
    sizes(tmp_path, hybrid_override_pattern="ME")
    given = {"kind": "hf", "path": str(tmp_path)}
    assert ModelConfig.model_validate(given).moe is not None
    with pytest.raises(ValueError, match=r"moe.drop_tokens = true has no meaning with kind = hf"):
        ModelConfig.model_validate(given | {"moe": {"drop_tokens": True}})
