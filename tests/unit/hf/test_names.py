"""Names of parameters in checkpoints, whatever is wrapped around a model."""

import pytest

from cdrmix.hf.names import is_adapter, logical_name

LAYER = "model.layers.0."
PEFT = f"causal.base_model.model.{LAYER}"


@pytest.mark.parametrize(
    ("name", "logical"),
    [
        ("causal.lm_head.weight", "lm_head.weight"),
        (f"causal.{LAYER}self_attn.q_proj.bias", f"{LAYER}self_attn.q_proj.bias"),
        # as transformers itself names it
        (f"{LAYER}mlp.gate.weight", f"{LAYER}mlp.gate.weight"),
        # inside of PEFT's wrapper
        (f"{PEFT}input_layernorm.weight", f"{LAYER}input_layernorm.weight"),
        (f"{PEFT}q_proj.base_layer.weight", f"{LAYER}q_proj.weight"),
        (f"{PEFT}q_proj.lora_A.default.weight", f"{LAYER}q_proj.lora_A.weight"),
        # experts have two adapters, one wrapped inside of the other
        (
            f"{PEFT}experts.base_layer.base_layer.up_proj",
            f"{LAYER}experts.up_proj",
        ),
        (
            f"{PEFT}experts.base_layer.lora_B.default.weight",
            f"{LAYER}experts.base_layer.lora_B.weight",
        ),
        (
            f"{PEFT}experts.lora_B.default.weight",
            f"{LAYER}experts.lora_B.weight",
        ),
    ],
)  # fmt: skip
def test_logical_name(name: str, logical: str) -> None:
    assert logical_name(name) == logical
    assert logical_name(logical) == logical
    assert is_adapter(name) == is_adapter(logical) == ("lora" in name)
