"""Writes a trained model as an immutable folder that transformers loads.

The same checkpoint gives the same bytes: no file holds a date or a path of the machine. The folder
is written under another name beside, flushed, digested and renamed, so that it is there whole or
not at all.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.files import MANIFEST_FILE as CHECKPOINT_MANIFEST
from cdrmix.checkpoint.files import FileRecord, digest, write_text
from cdrmix.checkpoint.fragments import is_stage_b, part_of
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.trained_run import (
    checkpoint_place,
    config_of,
    newest_checkpoint,
    tokenizer_of,
)
from cdrmix.config.schema import Config
from cdrmix.data.folders import locked, new_folder, remove_unfinished, sync
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import StateError
from cdrmix.export.configuration_cdrmix import CDRMixConfig
from cdrmix.export.hugging_face import PREFIX, model_config, parameter_shapes, small_files
from cdrmix.export.hugging_face_run import HuggingFaceRun, weights_of
from cdrmix.export.manifest import write_export_manifest
from cdrmix.export.peft_adapter import AdapterExport
from cdrmix.export.provenance import metadata_text, model_card, training_metadata
from cdrmix.export.weights import write_weights

Format = Literal["hf", "peft"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """An export that has been written."""

    step: int
    num_parameters: int
    dtype: str  # `float32`, `bfloat16` or `float16`
    num_files: int
    num_bytes: int
    manifest_digest: str  # sha256 of MANIFEST.json, hex
    left_out: tuple[str, ...]  # parts of Stage B that the run has and the folder has not


@dataclass(frozen=True)
class _Source:
    """A verified checkpoint, and what it says of itself."""

    checkpoint: FoundCheckpoint
    config: Config
    hf_config: CDRMixConfig
    shapes: dict[str, tuple[int, ...]]  # of each parameter, by logical name
    tokenizer: Path  # folder that holds it
    tokenizer_digest: str
    left_out: list[str]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the exported weights."""
        return _DTYPES[self.config.training.precision]

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_bytes(self) -> int:
        """Size of the exported weights."""
        return self.num_parameters * self.dtype.itemsize


def export_run(
    source: Path,
    out: Path,
    *,
    checkpoint: str = "last",
    form: Format = "hf",
    max_shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Writes a checkpoint of a run as a folder for transformers, in the run's own precision.

    Args:
        source: a run directory, or one of its checkpoints.
        out: folder to make; it must not exist.
        checkpoint: `last`, the newest that verifies; `best`, that with the lowest held-out loss;
            or the step of one in the run directory.
        form: `hf`, the whole model, with adapters merged into its weights; `peft`, adapters alone.
        max_shard_bytes: most bytes of tensors in one file.
    Raises:
        StateError: if there is no such checkpoint, it is damaged or of another model, or `out`
            exists or cannot be written.
        DataError: if its tokenizer is damaged.
    """
    _refuse_existing(out)
    found = newest_checkpoint(checkpoint_place(source, checkpoint))
    return export_checkpoint(found, out, form=form, max_shard_bytes=max_shard_bytes)


def export_checkpoint(
    found: FoundCheckpoint, out: Path, *, form: Format, max_shard_bytes: int = 5 * 10**9
) -> Exported:
    """Writes a verified checkpoint on this rank alone; as `export_run` otherwise."""
    checkpoints = found.path.resolve().parent
    if checkpoints.name == "checkpoints" and checkpoints in out.resolve().parents:
        raise StateError(
            f"{out}: lies among the checkpoints of the run, which removes them and reads their "
            "names. Give another --out"
        )
    try:
        with CheckpointFile(found.path) as reader:
            described = _describe(found, reader, form)
            _check_room(out, described.num_bytes)
            lock = out.parent / f".{out.name}.lock"
            with locked(lock, blocking=False) as is_ours:
                if not is_ours:
                    raise StateError(
                        f"{out}: another export is writing there. Wait for it, or give another "
                        "--out"
                    )
                try:
                    _refuse_existing(out)  # another export may have ended meanwhile
                    remove_unfinished(out)  # of killed exports: the lock is held
                    with new_folder(out) as folder:
                        exported = _write(folder, reader, described, max_shard_bytes)
                    out.chmod(0o555)
                finally:
                    lock.unlink()
    except OSError as error:
        raise StateError(
            f"{error.filename or out}: {error.strerror}. Nothing is left of the export: correct "
            "this, or give another --out"
        ) from error
    return exported


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise StateError(f"{out}: exists, and an export is never written over. Give another --out")


def _describe(
    found: FoundCheckpoint, reader: CheckpointFile, form: Format
) -> _Source | HuggingFaceRun | AdapterExport:
    """Reads all but the tensors, and checks that they are those of the exported model."""
    config = config_of(reader)
    if form == "peft":
        return AdapterExport(found, reader, config)
    if config.model.kind == "hf":
        return HuggingFaceRun(found, reader, config, weights_of(reader, config))
    folder, tokenizer_digest = tokenizer_of(found.path, reader.state, config)
    tokenizer: Tokenizer = load_tokenizer(folder)
    hf_config = model_config(config, tokenizer, _DTYPES[config.training.precision])
    shapes = parameter_shapes(hf_config)
    stage_b = [name for name in reader.names() if is_stage_b(name)]
    check_names(reader, shapes, others=frozenset(stage_b))
    parts = sorted({part_of(name) for name in stage_b})
    return _Source(found, config, hf_config, shapes, folder, tokenizer_digest, list(parts))


def _check_room(out: Path, needed: int) -> None:
    """Refuses what the disk cannot hold, before anything is written; `needed` bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise StateError(
            f"{out.parent}: {free / 1e9:,.2f} GB are free, and the weights take "
            f"{needed / 1e9:,.2f} GB. Make room, or give another --out"
        )


def _write(
    folder: Path,
    reader: CheckpointFile,
    described: _Source | HuggingFaceRun | AdapterExport,
    max_shard_bytes: int,
) -> Exported:
    """Writes all files, read-only, into a folder that has not got its name yet."""
    left_out: list[str] = []
    if isinstance(described, AdapterExport):
        records = described.write(folder)
    elif isinstance(described, HuggingFaceRun):
        records = described.write(folder, max_shard_bytes=max_shard_bytes)
    else:
        records = _write_ours(folder, reader, described, max_shard_bytes)
        left_out = described.left_out
    manifest = write_export_manifest(folder, records)
    for file in folder.rglob("*"):
        if file.is_dir():  # of a model's own code
            file.chmod(0o555)
            continue
        file.chmod(0o444)
    sync(folder)
    return Exported(
        step=described.checkpoint.step,
        num_parameters=described.num_parameters,
        dtype=str(described.dtype).removeprefix("torch."),
        num_files=len(records) + 1,
        num_bytes=sum(record["bytes"] for record in records.values()) + manifest["bytes"],
        manifest_digest=manifest["sha256"],
        left_out=tuple(left_out),
    )


def _write_ours(
    folder: Path, reader: CheckpointFile, described: _Source, max_shard_bytes: int
) -> dict[str, FileRecord]:
    """Writes all files but the manifest of a model of ours."""
    dtype = described.dtype
    names = {PREFIX + name: name for name in described.shapes}
    records: dict[str, FileRecord] = dict(
        write_weights(folder, reader, names, dtype=dtype, max_shard_bytes=max_shard_bytes)
    )
    path = described.checkpoint.path.resolve()  # its run's name, from wherever it was named
    metadata = training_metadata(
        path.parent.parent if path.parent.name == "checkpoints" else None,
        step=described.checkpoint.step,
        state=reader.state,
        config=described.config,
        tokenizer_digest=described.tokenizer_digest,
        manifest_digest=digest(path / CHECKPOINT_MANIFEST),
        left_out=described.left_out,
    )
    texts = small_files(described.hf_config, described.tokenizer)
    texts["training_metadata.json"] = metadata_text(metadata)
    texts["README.md"] = model_card(
        metadata,
        described.config,
        num_parameters=described.num_parameters,
        dtype=str(dtype).removeprefix("torch."),
    )
    for name, text in texts.items():
        records[name] = write_text(folder / name, text)
    return records
