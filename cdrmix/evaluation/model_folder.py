"""Folders that hold a model to judge: their kind, and what their files say of it. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cdrmix.checkpoint.candidates import candidates
from cdrmix.checkpoint.files import read_json
from cdrmix.config.hugging_face import CONFIG_FILE, read_model_config
from cdrmix.config.schema import Config
from cdrmix.data.shards import read_manifest
from cdrmix.data.tokenizer_base import TOKENIZER_FILE
from cdrmix.errors import ConfigError, DataError, StateError
from cdrmix.planning.evaluation_plan import config_of_judged

# run: a run directory or a checkpoint; export: of `cdrmix export --format hf`, with our own code of
# the model; hf: any other folder of transformers, exported here or not
Kind = Literal["run", "export", "hf"]
_METADATA_FILE = "training_metadata.json"  # of an export
_ADAPTER_FILE = "adapter_config.json"  # of peft
_MODEL_TYPE = "cdrmix"
# A table of positions may be longer than any text to judge, and a window as long takes the memory.
_LONGEST = 4_096
# Keys of an exported configuration, by ours.
_EXPORTED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "ffn_hidden_size": "intermediate_size",
    "mixers": "layer_kinds",
}
_EXPORTED_EXPERTS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_hidden_size": "moe_intermediate_size",
}


class FolderModel(NamedTuple):
    """Model of a folder of transformers, as its files describe it.

    Attributes:
        config: with the sizes of the model, and the most tokens of an input as sequence length;
            the rest has no meaning.
        tokenizer_digest: sha256 of the tokenizer's file that it was trained with, hex.
        step: optimizer steps of its training; None if its folder does not tell.
        weights: `ema` of an export of their average.
    """

    config: Config
    tokenizer_digest: str
    step: int | None
    weights: Literal["trained", "ema"]


def kind_of(path: Path) -> Kind:
    """Tells what a folder holds. Raises StateError unless it can be judged, DataError or
    InfrastructureError if it cannot be read."""
    if (path / CONFIG_FILE).is_file():
        return "export" if _values(path)["model_type"] == _MODEL_TYPE else "hf"
    if path.is_dir() and candidates(path):
        return "run"
    try:
        read_manifest(path)
        why = "is a data set, not a run; `cdrmix data inspect` describes one"
    except DataError:
        why = "holds no checkpoint, and is no folder of an exported model"
    if (path / _ADAPTER_FILE).is_file():
        why = "holds adapters alone: merge them with `cdrmix export --format hf`"
    elif not path.is_dir():
        why = "there is no such folder"
    raise StateError(
        f"{path}: {why}. Give a run directory that has trained to its first save, one of its "
        f"checkpoints/<step>, an export of the format hf, or a Hugging Face model ({CONFIG_FILE}, "
        f"*.safetensors, {TOKENIZER_FILE})"
    )


def describe_folder(path: Path, kind: Kind) -> FolderModel:
    """Describes the model of an export or of a Hugging Face folder.

    Raises:
        ConfigError, StateError: if its files do not describe a model that can be judged.
    """
    values = _values(path)
    metadata = _metadata(path)
    longest = values.get("max_position_embeddings")
    length = longest if isinstance(longest, int) else _LONGEST
    model: dict[str, Any] = {"kind": "hf", "path": str(path)}
    if kind == "export":
        model = _exported_model(values, path)
    else:
        length = min(length, _LONGEST)
    digest = metadata.get("tokenizer", {}).get("sha256") if kind == "export" else None
    return FolderModel(
        config=config_of_judged(
            path.name or "model", model, sequence_length=length, place=str(path / CONFIG_FILE)
        ),
        tokenizer_digest=digest or _sha256(path / TOKENIZER_FILE),
        step=metadata.get("step"),
        weights="ema" if "ema_decay" in metadata else "trained",
    )


def _exported_model(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Section `model` of an export's config.json."""
    try:
        model = {ours: values[theirs] for ours, theirs in _EXPORTED.items()}
        if values["num_experts"]:
            model["moe"] = {ours: values[theirs] for ours, theirs in _EXPORTED_EXPERTS.items()}
    except KeyError as error:
        raise _wrong(path, f"its {CONFIG_FILE} tells no {error.args[0]}") from None
    if values.get("mtp") is not None:
        model["mtp"] = values["mtp"]
    return model


def _values(path: Path) -> dict[str, Any]:
    try:
        return read_model_config(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _metadata(path: Path) -> dict[str, Any]:
    """Content of training_metadata.json; empty for a folder that was not exported here."""
    try:
        content = read_json(path / _METADATA_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _wrong(path, f"its {_METADATA_FILE} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise _wrong(path.parent, f"its {path.name} cannot be read ({error.strerror})") from error


def _wrong(path: Path, why: str) -> StateError:
    return StateError(f"{path}: {why}. Give a folder of `cdrmix export`, or a Hugging Face model")
