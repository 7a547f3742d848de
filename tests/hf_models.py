"""Folders of tiny Hugging Face models with random weights, written by transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from cdrmix.data.tokenizer import SPECIAL_TOKENS, TOKENIZER_FILE, train_tokenizer

# Families that differ in what the training loop must know of them.
FAMILIES = ("llama", "llama-tied", "qwen3", "mixtral", "nemotron_h")
VOCAB_SIZE = 320
_NUM_EXPERTS = 4
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # larger than usual: what a token sees of others shows in the scores of so small a model
    "initializer_range": 0.08,
}
_LAYERS = {"num_hidden_layers": 2}
_EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 48}
# Class of the configuration, and what it takes beside `_COMMON`.
_MADE_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_LAYERS, "intermediate_size": 64}),
    "mistral": (
        "MistralConfig",
        {**_LAYERS, "intermediate_size": 64, "sliding_window": 8},  # shorter than samples
    ),
    "qwen2": ("Qwen2Config", {**_LAYERS, "intermediate_size": 64}),
    "qwen3": ("Qwen3Config", {**_LAYERS, "intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {**_LAYERS, **_EXPERTS, "num_local_experts": _NUM_EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_LAYERS, **_EXPERTS, "num_experts": _NUM_EXPERTS, "moe_intermediate_size": 24},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "intermediate_size": 48,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": _NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    # Not among the tested families: `granite` scales its logits, `olmo2` passes the check.
    "granite": (
        "GraniteConfig",
        {**_LAYERS, "intermediate_size": 64, "logits_scaling": 4.0},
    ),
    "olmo2": ("Olmo2Config", {**_LAYERS, "intermediate_size": 64}),
}


def make_folder(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    tied: bool | None = None,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Path | None = None,
    **settings: Any,
) -> Path:
    """Writes the folder of a model as transformers saves it, with a tokenizer.

    Args:
        path: the folder, made here.
        family: its model_type, or `llama-tied`.
        seed: of the weights.
        tied: head and embedding are one; None: as the family name says.
        dtype: of the weights in the files, a name of torch.
        max_shard_size: of a file of weights.
        vocab_size: rows of the embedding; at least those of the tokenizer.
        tokenizer: data folder whose tokenizer.json is copied; None: a tiny one of the same kind.
        settings: further values of the configuration, instead of those here.
    Returns:
        `path`.
    """
    if tied is None:
        tied = family.endswith("-tied")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(family.removesuffix("-tied"), vocab_size=vocab_size, tied=tied, **settings),
        dtype=getattr(torch, dtype),
    )
    with torch.no_grad():
        # norms, biases and saved buffers begin alike: one read for another would not be seen
        for values in model.state_dict().values():
            if values.dim() == 1 and values.is_floating_point():
                values.add_(0.1 * torch.randn(values.shape).to(values.dtype))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer is None:
        train_tokenizer(["def f(x):\n    return x + 1\n"], vocab_size).save(
            str(path / TOKENIZER_FILE)
        )
    else:
        shutil.copyfile(tokenizer / TOKENIZER_FILE, path / TOKENIZER_FILE)
    eos, bos, pad = SPECIAL_TOKENS[:3]
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": bos}
    described["pad_token"] = pad
    (path / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    return path


def config_of(family: str, *, vocab_size: int, tied: bool, **settings: Any) -> Any:
    """Configuration of a family in the sizes of these tests; ids of special tokens are ours."""
    name, sizes = _MADE_BY[family]
    ids = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
    values = {**_COMMON, **sizes, **ids, **settings}
    return getattr(transformers, name)(vocab_size=vocab_size, tie_word_embeddings=tied, **values)
