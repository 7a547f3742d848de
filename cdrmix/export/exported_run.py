"""Writes a trained model as an immutable folder that transformers loads.

The same checkpoint gives the same bytes: no file holds a date or a path of the machine. The folder
is written under another name beside, flushed, digested and renamed, so that it is there whole or
not at all.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cdrmix.checkpoint.checkpoint_file import CheckpointFile, Weights
from cdrmix.checkpoint.files import FileRecord
from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.checkpoint.trained_run import checkpoint_place, config_of, newest_checkpoint
from cdrmix.data.folders import locked, new_folder, remove_unfinished, sync
from cdrmix.errors import StateError
from cdrmix.export.format_check import check_format
from cdrmix.export.hugging_face_run import HuggingFaceRun, weights_of
from cdrmix.export.manifest import refuse_existing, write_export_manifest
from cdrmix.export.peft_adapter import AdapterExport
from cdrmix.export.rwkx_run import RwkxRun


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
    is_widened: bool  # written at twice the width, for a format whose norms are LayerNorms


class Exportable(Protocol):
    """A checkpoint that has been checked, ready to be written in one format.

    Attributes:
        num_bytes: size of the weights to write.
        left_out: parts of Stage B that the checkpoint holds and the export does not.
    """

    checkpoint: FoundCheckpoint
    dtype: torch.dtype
    left_out: tuple[str, ...]

    @property
    def num_parameters(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def write(self, folder: Path, *, max_shard_bytes: int) -> dict[str, FileRecord]:
        """Writes all files but the manifest durably; gives their records."""


def export_run(
    source: Path,
    out: Path,
    *,
    checkpoint: str = "last",
    max_shard_bytes: int = 5 * 10**9,
    format: str = "hf",
    weights: Weights = "trained",
    base: Path | None = None,
) -> Exported:
    """Writes a checkpoint of a run as a folder for other programs, in the run's own precision.

    Args:
        source: a run directory, or one of its checkpoints.
        out: folder to make; it must not exist.
        checkpoint: `last`, the newest that verifies; `best`, that with the lowest held-out loss;
            or the step of one in the run directory.
        max_shard_bytes: most bytes of tensors in one file; GGUF has one.
        format: `hf`, `fla` or `gguf` for the whole model, with adapters merged into its weights;
            `peft` for adapters alone.
        weights: `trained`, or `ema` for the average that a run with training.ema_decay keeps.
        base: folder of the base of adapters that `hf` merges; None: where the run has read it.
    Raises:
        StateError: if there is no such checkpoint, it is damaged or of another model, it holds no
            average that is asked for, the format cannot hold that model, or `out` exists or cannot
            be written.
        DataError: if its tokenizer is damaged.
    """
    refuse_existing(out)
    found = newest_checkpoint(checkpoint_place(source, checkpoint))
    return export_checkpoint(
        found, out, format=format, max_shard_bytes=max_shard_bytes, weights=weights, base=base
    )


def export_checkpoint(
    found: FoundCheckpoint,
    out: Path,
    *,
    format: str,
    max_shard_bytes: int = 5 * 10**9,
    weights: Weights = "trained",
    base: Path | None = None,
) -> Exported:
    """Writes a verified checkpoint on this rank alone; as `export_run` otherwise."""
    checkpoints = found.path.resolve().parent
    if checkpoints.name == "checkpoints" and checkpoints in out.resolve().parents:
        raise StateError(
            f"{out}: lies among the checkpoints of the run, which removes them and reads their "
            "names. Give another --out"
        )
    try:
        with CheckpointFile(found.path, weights=weights) as reader:
            described = _describe(found, reader, format, base)
            _check_room(out, described.num_bytes)
            lock = out.parent / f".{out.name}.lock"
            with locked(lock, blocking=False) as is_ours:
                if not is_ours:
                    raise StateError(
                        f"{out}: another export is writing there. Wait for it, or give another "
                        "--out"
                    )
                try:
                    refuse_existing(out)  # another export may have ended meanwhile
                    remove_unfinished(out)  # of killed exports: the lock is held
                    with new_folder(out) as folder:
                        exported = _write(folder, described, max_shard_bytes, format)
                    out.chmod(0o555)
                finally:
                    lock.unlink()
    except OSError as error:
        raise StateError(
            f"{error.filename or out}: {error.strerror}. Nothing is left of the export: correct "
            "this, or give another --out"
        ) from error
    return exported


def _describe(
    found: FoundCheckpoint, reader: CheckpointFile, format: str, base: Path | None
) -> Exportable:
    """Reads all but the tensors, and checks that they are those of the exported model."""
    config = config_of(reader, base=base)
    check_format(format, config.model, found.path)
    if format == "peft":
        return AdapterExport(found, reader, config)
    if config.model.kind == "rwkx":
        return RwkxRun(found, reader, config, format)
    return HuggingFaceRun(found, reader, config, weights_of(reader, config, base=base))


def _check_room(out: Path, needed: int) -> None:
    """Refuses what the disk cannot hold, before anything is written; `needed` bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise StateError(
            f"{out.parent}: {free / 1e9:,.2f} GB are free, and the weights take "
            f"{needed / 1e9:,.2f} GB. Make room, or give another --out"
        )


def _write(folder: Path, described: Exportable, max_shard_bytes: int, format: str) -> Exported:
    """Writes all files, read-only, into a folder that has not got its name yet."""
    records = described.write(folder, max_shard_bytes=max_shard_bytes)
    manifest = write_export_manifest(folder, records)
    for file in folder.rglob("*"):
        file.chmod(0o444 if file.is_file() else 0o555)  # a folder is of a model's own code
    sync(folder)
    return Exported(
        step=described.checkpoint.step,
        num_parameters=described.num_parameters,
        dtype=str(described.dtype).removeprefix("torch."),
        num_files=len(records) + 1,
        num_bytes=sum(record["bytes"] for record in records.values()) + manifest["bytes"],
        manifest_digest=manifest["sha256"],
        left_out=described.left_out,
        is_widened=format in ("fla", "gguf"),
    )
