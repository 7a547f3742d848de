"""Sizes of a Hugging Face model from the config.json of its folder; no torch, no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
# Folder of a run directory with config.json and other small files of the model that it began with.
BASE_FOLDER = "base"
# A config.json has a few kilobytes; one with lists of many layers, some hundred.
_MAX_BYTES = 2**24
# Families whose layers, losses and packing are tested; others must pass a check at their start.
TESTED_FAMILIES = (
    "llama", "mistral", "mixtral", "nemotron_h", "qwen2", "qwen3", "qwen3_moe"
)  # fmt: skip
# Hybrids list a kind for each layer, as words or letters, in place of their number.
_LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern")
_EXPERT_LAYERS = ("moe", "E")
# Our name of each size, and the names that families give it, the first one that is there counts.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", *_LAYER_LISTS),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "attention_head_dim"),
    "vocab_size": ("vocab_size",),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim"),
}
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok",)
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")


def read_model_config(folder: Path) -> dict[str, Any]:
    """Values of a folder's config.json.

    Raises:
        ValueError: if there is none, or it is not that of a Hugging Face model.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ValueError(
            f"path = {folder}: no such folder. Give the local folder of a Hugging Face model; "
            "nothing is downloaded"
        )
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
        values = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("it names no model_type")
    except FileNotFoundError:
        raise ValueError(
            f"path = {folder}: holds no {CONFIG_FILE}. Give the folder of a Hugging Face model"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not the configuration of a model ({error})") from None
    return values


def sizes_of_folder(folder: Path) -> dict[str, Any]:
    """Sizes of the model in a folder by their names in `ModelConfig`; `moe` where it has experts.

    Raises:
        ValueError: if config.json is missing, damaged, or tells no sizes.
    """
    values = read_model_config(folder)
    sizes: dict[str, Any] = {key: _first(values, names) for key, names in _NAMES.items()}
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    if heads and sizes["num_kv_heads"] is None:
        sizes["num_kv_heads"] = heads
    if heads and hidden and sizes["head_dim"] is None:
        sizes["head_dim"] = hidden // heads
    if hidden and sizes["ffn_hidden_size"] is None:
        sizes["ffn_hidden_size"] = 4 * hidden
    missing = [_NAMES[key][0] for key, size in sizes.items() if size is None]
    if missing:
        raise ValueError(
            f"{folder / CONFIG_FILE}: tells no {', '.join(missing)}: model_type "
            f"{values['model_type']!r} is no causal language model of a kind that is known here. "
            f"Known are {', '.join(TESTED_FAMILIES)}"
        )
    experts = _first(values, _NUM_EXPERTS)
    if experts and _has_expert_layers(values):
        sizes["moe"] = {
            "num_experts": experts,
            "top_k": _first(values, _TOP_K) or 2,
            "expert_hidden_size": _first(values, _EXPERT_WIDTH),
            "load_balance_weight": float(values.get("router_aux_loss_coef") or 0.0),
            "z_loss_weight": 0.0,
        }
    return sizes


def _first(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of several keys that holds a count, or a list of so many."""
    for name in names:
        value = values.get(name)
        if name in _LAYER_LISTS and isinstance(value, list | str):
            value = len(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _has_expert_layers(values: dict[str, Any]) -> bool:
    """False where the kinds of all layers are listed, and none has experts."""
    lists = [values[name] for name in _LAYER_LISTS if isinstance(values.get(name), list | str)]
    return not lists or any(kind in lists[0] for kind in _EXPERT_LAYERS)
