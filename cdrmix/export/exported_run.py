"""Writes a trained model as an immutable folder that transformers loads.

The same checkpoint gives the same bytes: no file holds a date or a path of the machine. The folder
is written under another name beside, flushed, digested and renamed, so that it is there whole or
not at all.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, check_names
from cdrmix.checkpoint.files import MANIFEST_FILE as CHECKPOINT_MANIFEST
from cdrmix.checkpoint.files import digest, write_text
from cdrmix.checkpoint.fragments import is_stage_b, part_of
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.trained_run import config_of, newest_checkpoint, tokenizer_of
from cdrmix.config.schema import Config
from cdrmix.data.folders import locked, new_folder, remove_unfinished, sync
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import StateError
from cdrmix.export.configuration_cdrmix import CDRMixConfig
from cdrmix.export.formats import check_format, layout, write_model
from cdrmix.export.hugging_face import model_config, parameter_shapes
from cdrmix.export.manifest import write_export_manifest
from cdrmix.export.provenance import metadata_text, model_card, training_metadata
from cdrmix.export.weights import Target

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
    is_widened: bool  # written at twice the width, as `cdrmix.export.widened` does


@dataclass(frozen=True)
class _Source:
    """A verified checkpoint, and what it says of itself."""

    checkpoint: FoundCheckpoint
    config: Config
    format: str
    hf_config: CDRMixConfig
    num_parameters: int
    targets: dict[str, Target]  # tensors to write, by their names there
    tokenizer: Path  # folder that holds it
    tokenizer_digest: str
    left_out: Sequence[str]


def export_run(
    source: Path,
    out: Path,
    *,
    checkpoint: str = "last",
    max_shard_bytes: int = 5 * 10**9,
    format: str = "hf",
    weights: str = "trained",
) -> Exported:
    """Writes a checkpoint of a run as a folder for other programs, in the run's own precision.

    Args:
        source: a run directory, or one of its checkpoints.
        out: folder to make; it must not exist.
        checkpoint: `last`, the newest that verifies, or the step of one in the run directory.
        max_shard_bytes: most bytes of tensors in one file; GGUF has one.
        format: one of `cdrmix.export.formats.FORMATS`.
        weights: `trained`, or `ema` for their average, which no run keeps.
    Raises:
        StateError: if there is no such checkpoint, it is damaged or of another model, the format
            cannot hold that model, or `out` exists or cannot be written.
        DataError: if its tokenizer is damaged.
    """
    _refuse_existing(out)
    found = newest_checkpoint(_checkpoint_folder(source, checkpoint))
    if weights != "trained":
        raise StateError(
            f"{source}: this run kept no average of its weights. Give --weights trained"
        )
    checkpoints = found.path.resolve().parent
    if checkpoints.name == "checkpoints" and checkpoints in out.resolve().parents:
        raise StateError(
            f"{out}: lies among the checkpoints of the run, which removes them and reads their "
            "names. Give another --out"
        )
    try:
        with CheckpointFile(found.path) as reader:
            described = _describe(found, reader, format)
            _check_room(out, described)
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


def _checkpoint_folder(source: Path, checkpoint: str) -> Path:
    """Folder to look for the checkpoint in."""
    if checkpoint == "last":
        return source
    folder = source / "checkpoints" / checkpoint
    if folder.is_dir():
        return folder
    root = source / "checkpoints"
    if not root.is_dir() and source.is_dir():
        raise StateError(
            f"{source}: has no checkpoints folder to look for step {checkpoint} in. Give the run "
            "directory, or this checkpoint without --checkpoint"
        )
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = sorted(int(name) for name in names if re.fullmatch(r"\d+", name))
    there = f"has checkpoints of steps {', '.join(map(str, steps))}" if steps else "has none"
    raise StateError(f"{source}: has no checkpoint of step {checkpoint}; it {there}. Try last")


def _describe(found: FoundCheckpoint, reader: CheckpointFile, format: str) -> _Source:
    """Reads all but the tensors, and checks that they are those of the exported model."""
    config = config_of(reader)
    check_format(format, config.model)
    folder, tokenizer_digest = tokenizer_of(found.path, reader.state, config)
    tokenizer: Tokenizer = load_tokenizer(folder)
    dtype = _DTYPES[config.training.precision]
    hf_config = model_config(config, tokenizer, dtype)
    shapes = parameter_shapes(hf_config)
    stage_b = [name for name in reader.names() if is_stage_b(name)]
    check_names(reader, shapes, others=frozenset(stage_b))
    parts = sorted({part_of(name) for name in stage_b})
    return _Source(
        checkpoint=found,
        config=config,
        format=format,
        hf_config=hf_config,
        num_parameters=sum(map(math.prod, shapes.values())),
        targets=layout(format, hf_config, shapes, dtype),
        tokenizer=folder,
        tokenizer_digest=tokenizer_digest,
        left_out=parts,
    )


def _check_room(out: Path, described: _Source) -> None:
    """Refuses what the disk cannot hold, before anything is written."""
    needed = sum(target.num_bytes for target in described.targets.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise StateError(
            f"{out.parent}: {free / 1e9:,.2f} GB are free, and the weights take "
            f"{needed / 1e9:,.2f} GB. Make room, or give another --out"
        )


def _write(
    folder: Path, reader: CheckpointFile, described: _Source, max_shard_bytes: int
) -> Exported:
    """Writes all files, read-only, into a folder that has not got its name yet."""
    dtype = _DTYPES[described.config.training.precision]
    dtype_name = str(dtype).removeprefix("torch.")
    records, texts = write_model(
        described.format,
        folder,
        reader,
        described.targets,
        described.hf_config,
        described.tokenizer,
        name=described.config.name,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    path = described.checkpoint.path.resolve()  # its run's name, from wherever it was named
    metadata = training_metadata(
        path.parent.parent if path.parent.name == "checkpoints" else None,
        step=described.checkpoint.step,
        state=reader.state,
        config=described.config,
        tokenizer_digest=described.tokenizer_digest,
        manifest_digest=digest(path / CHECKPOINT_MANIFEST),
        left_out=list(described.left_out),
    )
    texts["training_metadata.json"] = metadata_text(metadata)
    texts["README.md"] = model_card(
        metadata,
        described.config,
        num_parameters=described.num_parameters,
        dtype=dtype_name,
        format=described.format,
    )
    for name, text in texts.items():
        records[name] = write_text(folder / name, text)
    manifest = write_export_manifest(folder, records)
    for file in folder.iterdir():
        file.chmod(0o444)
    sync(folder)
    return Exported(
        step=described.checkpoint.step,
        num_parameters=described.num_parameters,
        dtype=dtype_name,
        num_files=len(records) + 1,
        num_bytes=sum(record["bytes"] for record in records.values()) + manifest["bytes"],
        manifest_digest=manifest["sha256"],
        left_out=tuple(described.left_out),
        is_widened=described.format != "hf",
    )
