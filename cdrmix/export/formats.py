"""The formats of an exported model: their tensors, and the writing of these and of other files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.files import FileRecord
from cdrmix.config.model import ModelConfig
from cdrmix.export import fla
from cdrmix.export.configuration_cdrmix import CDRMixConfig
from cdrmix.export.gguf_file import (
    GROUP_NORM_EPS,
    MODEL_FILE,
    check_gguf,
    check_tokenizer,
    gguf_targets,
    write_gguf,
)
from cdrmix.export.hugging_face import (
    PREFIX,
    check_translatable,
    plain_files,
    small_files,
    tokenizer_text,
)
from cdrmix.export.weights import Target, plain_target, write_weights
from cdrmix.export.widened import widened_targets


def check_writable(format: str, model: ModelConfig) -> None:
    """Raises StateError unless a format that is for the model can be written here."""
    if format == "hf":
        check_translatable(model)
    if format == "gguf":
        check_gguf()


def check_format_of_tokenizer(format: str, folder: Path) -> None:
    """Raises StateError unless the format can hold the tokenizer of a folder."""
    if format == "gguf":
        check_tokenizer(tokenizer_text(folder), folder)


def layout(
    format: str,
    config: CDRMixConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, Target]:
    """Plans the tensors of a format by their names there, without reading any.

    Args:
        shapes: of the parameters, by logical name.
        dtype: type that the run computed in.
    """
    if format == "hf":
        return {PREFIX + name: plain_target(name, shape, dtype) for name, shape in shapes.items()}
    if format == "fla":
        return widened_targets(config, dtype, group_norm_eps=fla.group_norm_eps(config))
    return gguf_targets(widened_targets(config, dtype, group_norm_eps=GROUP_NORM_EPS))


def write_model(
    format: str,
    folder: Path,
    reader: CheckpointFile,
    targets: Mapping[str, Target],
    config: CDRMixConfig,
    tokenizer_folder: Path,
    *,
    name: str,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    """Writes the weights; gives their records, and the texts of the other files by their names."""
    if format == "gguf":
        text = tokenizer_text(tokenizer_folder)
        record = write_gguf(
            folder, reader, targets, config, name=name, tokenizer_text=text, dtype=dtype
        )
        return {MODEL_FILE: record}, {}
    records = write_weights(folder, reader, targets, max_shard_bytes=max_shard_bytes)
    if format == "hf":
        return records, small_files(config, tokenizer_folder)
    texts = plain_files(config, tokenizer_folder)
    texts["config.json"] = fla.config_text(config)
    return records, texts
