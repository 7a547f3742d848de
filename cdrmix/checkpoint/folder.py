"""One checkpoint folder: written by all ranks, completed by rank 0, and only then named. Every step
here can be repeated after a failed attempt, over the files that it left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from cdrmix.checkpoint.candidates import step_folders, step_of
from cdrmix.checkpoint.files import (
    FORMAT,
    MANIFEST_FILE,
    FileRecord,
    damage,
    write_json,
    write_tensors,
    write_text,
)
from cdrmix.checkpoint.fragments import Fragment, merge_entries
from cdrmix.checkpoint.held_out import best_checkpoint
from cdrmix.checkpoint.retention import Retention, steps_to_drop, stored_checkpoints
from cdrmix.data.folders import sync
from cdrmix.errors import InfrastructureError
from cdrmix.log import get_logger

logger = get_logger(__name__)


def in_file_order(fragments: list[Fragment]) -> list[Fragment]:
    """Sorts by width of the elements, widest first, as `write_tensors` needs it, then by kind."""
    # Fragments of one kind are neighbours in memory, and are copied together.
    return sorted(fragments, key=lambda f: (-f.values.element_size(), f.kind))


def prepare(temporary: Path, *, clears_leftovers: bool) -> None:
    """Makes the folder to write into; one rank also removes the remains of dead saves."""
    root = temporary.parent
    root.mkdir(parents=True, exist_ok=True)
    # By each rank, in any order: no collective tells whose turn it is.
    temporary.mkdir(exist_ok=True)
    if clears_leftovers:
        sync(root.parent)  # or a crash could lose the name of `root` itself
        for folder in root.glob("*.tmp-*"):
            # Other ranks may already be writing into this save's own.
            if folder != temporary:
                _delete(folder)
        for replaced in root.glob("*.replaced"):
            # `publish` was killed between its two renames, or after them.
            final = replaced.with_suffix("")
            if final.exists():
                remove(replaced)
            else:
                os.rename(replaced, final)


def write_share(
    temporary: Path,
    rank: int,
    fragments: list[Fragment],
    data: list[torch.Tensor],
    state: Mapping[str, Any],
) -> None:
    """Writes one rank's files, with its own small `state`, and an account of them for rank 0.
    `data` are the values of its fragments `in_file_order`, or the bytes of these, end to end."""
    name = f"rank-{rank:05d}"
    tensor_file = f"{name}.safetensors"
    json_file = f"{name}.json"
    keys = _keys(fragments)
    tensors = [(keys[id(each)], each.values) for each in in_file_order(fragments)]
    files = {
        tensor_file: write_tensors(temporary / tensor_file, tensors, data),
        json_file: write_json(temporary / json_file, dict(state)),
    }
    index = []
    for each in fragments:
        span = each.span
        key = keys[id(each)]
        assert each.values.numel() == span.numel, f"{key}: values do not fill their span"
        fragment = {
            "file": tensor_file,
            "key": key,
            "block_offset": list(span.block.offset),
            "block_shape": list(span.block.shape),
            "start": span.start,
            "numel": span.numel,
        }
        entry = {"name": each.name, "kind": each.kind, "shape": list(each.shape)}
        entry["dtype"] = str(each.values.dtype).removeprefix("torch.")
        index.append({**entry, "fragment": fragment})
    write_account(temporary, rank, files, index)


def write_account(
    temporary: Path, rank: int, files: dict[str, FileRecord], index: list[dict[str, Any]]
) -> None:
    """Writes the account of a rank's files, which are on the disk, with the entries of the index
    for what they hold."""
    # Last: rank 0 takes an account as the proof that the files it lists are on the disk. It stands
    # in the folder, because the writing threads take part in no collective.
    text = json.dumps({"files": files, "index": index})
    write_text(temporary / f"rank-{rank:05d}.part", text)


def _keys(fragments: list[Fragment]) -> dict[int, str]:
    """Key in the file of each fragment, by its id; of several of one tensor the later have their
    start in it."""
    keys: dict[int, str] = {}
    taken: set[str] = set()
    for each in fragments:
        key = f"{each.kind}/{each.name}"
        keys[id(each)] = f"{key}@{each.span.start}" if key in taken else key
        taken.add(key)
    return keys


def complete(
    temporary: Path, parts: list[dict[str, Any]], state: str, *, save: int, is_whole: bool = True
) -> None:
    """Completes a checkpoint of the files of all ranks, or those of a host unless it `is_whole`:
    writes index, state and manifest. `parts` are the accounts of `write_share`, read before: they
    are deleted, and a repeated call needs them."""
    entries = (entry for part in parts for entry in part["index"])
    index = merge_entries(entries, is_whole=is_whole)
    files: dict[str, FileRecord] = {}
    for part in parts:
        files |= part["files"]
    # By rank 0 alone: it has the digests of all files from their accounts, and reads none again.
    files["index.json"] = write_json(temporary / "index.json", {"tensors": index})
    files["state.json"] = write_text(temporary / "state.json", state)
    # The manifest comes last: without it a folder is not a whole checkpoint.
    write_json(temporary / MANIFEST_FILE, {"format": FORMAT, "save": save, "files": files})
    for path in temporary.glob("*.part"):
        path.unlink()
    # Before the folder gets its name, or a crash could lose files out of a named checkpoint.
    sync(temporary)


def publish(temporary: Path, step: int) -> None:
    """Gives a complete folder its name; a kill at any point leaves a whole checkpoint to find."""
    root = temporary.parent
    final = root / str(step)
    replaced = root / f"{step}.replaced"
    if temporary.exists():  # else an earlier attempt has renamed it
        if final.exists():  # a rename cannot replace a directory with content
            os.rename(final, replaced)
        os.rename(temporary, final)
    # The new name is durable before the old checkpoint goes and before `latest` tells of it.
    sync(root)
    if replaced.exists():
        remove(replaced)
    # In one step: a reader finds the old text or the new one.
    temporary_latest = root / "latest.tmp"
    write_text(temporary_latest, f"{step}\n")
    os.replace(temporary_latest, root / "latest")
    # Also before `drop_others`, or a crash could leave a `latest` that names a dropped one.
    sync(root)


def drop_others(
    root: Path,
    step: int,
    keep: int,
    pinned: Collection[int] = (),
    *,
    keep_best: bool = False,
    retention: Retention | None = None,
) -> None:
    """Removes checkpoints newer than `step`, and those older than the newest `keep` whole ones, or
    of the whole ones those that `retention` says, but not those of steps `pinned` if they are not
    newer, nor the best of the rest if `keep_best`."""
    folders = step_folders(root)
    newer = [folder for folder in folders if step_of(folder) > step]
    for folder in newer:
        logger.warning("%s: removed, because the run has gone back to step %d", folder, step)
        remove(folder)
    rest = folders[len(newer) :]
    # By their sizes. Damaged ones do not count, or they would push the last whole one out. An
    # unreadable one counts as damaged: one too many then stays.
    whole = []
    for folder in rest:
        with contextlib.suppress(InfrastructureError):
            if not damage(folder, with_digests=False):
                whole.append(folder)
    if retention is not None:
        stored = stored_checkpoints(root, whole, pinned=pinned, keep_best=keep_best)
        dropped = steps_to_drop(retention, stored)
        kept = {each.step for each in stored if each.step not in dropped}.union(pinned)
        for folder in rest:
            # Damaged ones, of which the rule is not told, go with the older of the others.
            is_older = bool(dropped) and step_of(folder) < min(kept)
            if step_of(folder) in dropped or is_older:
                remove(folder)
        return
    rest = [folder for folder in rest if step_of(folder) not in pinned]
    whole = [folder for folder in whole if step_of(folder) not in pinned]
    if len(whole) >= keep:
        best = best_checkpoint(root) if keep_best else None
        for folder in rest[rest.index(whole[keep - 1]) + 1 :]:
            if best is None or step_of(folder) != best.step:
                remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint; a kill in the middle leaves no half of it under its name."""
    # A name that `prepare` clears away, should the deletion below not come to its end.
    doomed = folder.with_name(f"{folder.name}.tmp-removed")
    try:
        os.rename(folder, doomed)
    except OSError as error:
        logger.warning("%s: could not be removed: %s", folder, error.strerror)
    else:
        _delete(doomed)


def _delete(folder: Path) -> None:
    """Deletes a folder that is not, or no longer, a checkpoint; the next save deletes the rest."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s: could not be deleted: %s", error.filename or folder, error.strerror)
