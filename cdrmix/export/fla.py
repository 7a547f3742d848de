"""The configuration that flash-linear-attention reads beside the weights of `widened_targets`."""

from __future__ import annotations

import json

from cdrmix.export.configuration_cdrmix import CDRMixConfig


def group_norm_eps(config: CDRMixConfig) -> float:
    """Eps of the group norm there: the one eps of all norms, by the size of a head."""
    return config.head_dim * config.rms_norm_eps


def config_text(config: CDRMixConfig) -> str:
    """Text of config.json for the model of twice the width."""
    wide = 2 * config.hidden_size
    settings = {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "vocab_size": config.vocab_size,
        "hidden_size": wide,
        "hidden_ratio": None,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "num_heads": wide // config.head_dim,
        "value_dim": [wide] * config.num_hidden_layers,
        "decay_low_rank_dim": config.decay_rank,
        "a_low_rank_dim": config.iclr_rank,
        "v_low_rank_dim": config.value_rank,
        "gate_low_rank_dim": config.gate_rank,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": config.rms_norm_eps,
        "fuse_norm": False,  # its fused norm of keys has an eps that ours has not
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "float32",  # rounded again, what is multiplied would differ from training
    }
    return json.dumps(settings, indent=2) + "\n"
