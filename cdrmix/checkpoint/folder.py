"""One checkpoint folder: written by all ranks beside its name, completed and named by rank 0.

What is written here can be written again over what an earlier try left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdrmix.checkpoint.files import (
    FileRecord,
    damage,
    replace_text,
    safetensors_header,
    save_number,
    sync_directory,
    write_checkpoint_manifest,
    write_json,
    write_tensors,
    write_text,
)
from cdrmix.checkpoint.fragments import Fragment, index_entry, merge_entries
from cdrmix.errors import InfrastructureError
from cdrmix.log import get_logger

logger = get_logger(__name__)

_STEP_FOLDER = re.compile(r"(\d+)(\.replaced)?")


@dataclass(frozen=True)
class RankShare:
    """What one rank adds to a checkpoint.

    Attributes:
        rank: its number.
        fragments: what it holds.
        data: their values in the order of its file, or the bytes of these, end to end.
        state: its small state, as JSON.
    """

    rank: int
    fragments: list[Fragment]
    data: list[torch.Tensor]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A share that is on the disk: its files, and where in them its fragments lie."""

    files: dict[str, FileRecord]
    index: list[dict[str, Any]]


def make_share(rank: int, fragments: Iterable[Fragment], state: Mapping[str, Any]) -> RankShare:
    """The share of this rank, its data where they are."""
    held = list(fragments)
    return RankShare(rank, held, [fragment.values for fragment in _in_file_order(held)], state)


def prepare(temporary: Path, *, clears_leftovers: bool) -> None:
    """Make the folder to write into; one rank also removes what dead saves left beside it."""
    root = temporary.parent
    root.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(exist_ok=True)
    if clears_leftovers:
        sync_directory(root.parent)
        for folder in root.glob("*.tmp-*"):
            if folder != temporary:
                _delete(folder)
        for replaced in root.glob("*.replaced"):
            _put_back(replaced)


def write_share(temporary: Path, share: RankShare) -> None:
    """Write one rank's files, and what rank 0 is to know of them."""
    name = _name(share.rank)
    tensor_file = f"{name}.safetensors"
    json_file = f"{name}.json"
    ordered = _in_file_order(share.fragments)
    header = safetensors_header([(_key(fragment), fragment.values) for fragment in ordered])
    files = {
        tensor_file: write_tensors(temporary / tensor_file, header, share.data),
        json_file: write_json(temporary / json_file, dict(share.state)),
    }
    index = [index_entry(tensor_file, _key(fragment), fragment) for fragment in share.fragments]
    write_text(temporary / f"{name}.part", json.dumps({"files": files, "index": index}))


def read_parts(temporary: Path, world_size: int) -> list[Part]:
    """What so many ranks have written."""
    files = (temporary / f"{_name(rank)}.part" for rank in range(world_size))
    return [Part(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def complete(temporary: Path, parts: list[Part], state: str, *, save: int) -> None:
    """Make the files of all ranks a checkpoint: add index, state, and a manifest with the number of
    the save."""
    index = merge_entries(entry for part in parts for entry in part.index)
    files = {name: record for part in parts for name, record in part.files.items()}
    files["index.json"] = write_json(temporary / "index.json", {"tensors": index})
    files["state.json"] = write_text(temporary / "state.json", state)
    write_checkpoint_manifest(temporary, files, save=save)
    for path in temporary.glob("*.part"):
        path.unlink()
    sync_directory(temporary)


def publish(temporary: Path, step: int) -> None:
    """Give a complete folder its name; a kill at any point leaves a whole one to find."""
    root = temporary.parent
    final = root / str(step)
    replaced = root / f"{step}.replaced"
    if temporary.exists():  # else an earlier try got further
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
    sync_directory(root)
    if replaced.exists():
        _remove(replaced)
    replace_text(root / "latest", f"{step}\n")


def drop_others(root: Path, step: int, keep: int, pinned: int | None = None) -> None:
    """Remove checkpoints newer than `step`, and those older than the newest `keep` whole ones, but
    for that of step `pinned`."""
    folders = step_folders(root)
    newer = [folder for folder in folders if step_of(folder) > step]
    for folder in newer:
        logger.warning("%s: removed, because the run has gone back to step %d", folder, step)
        _remove(folder)
    rest = [folder for folder in folders[len(newer) :] if step_of(folder) != pinned]
    whole = [folder for folder in rest if _looks_whole(folder)]
    if len(whole) >= keep:
        for folder in rest[rest.index(whole[keep - 1]) + 1 :]:
            _remove(folder)


def _looks_whole(folder: Path) -> bool:
    """False also where it cannot be read for now: one too many is then left."""
    try:
        return not damage(folder, with_digests=False)
    except InfrastructureError:
        return False


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that a run does not go on from, so that no save removes or replaces it.

    Returns:
        `<step>.set-aside-<n>` beside it, which is no checkpoint by its name.
    Raises:
        OSError: if it cannot be renamed.
    """
    number = 1
    while (aside := folder.with_name(f"{step_of(folder)}.set-aside-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    sync_directory(folder.parent)
    return aside


def in_order_of_saves(folders: Iterable[Path]) -> list[Path]:
    """Checkpoints, the last one saved first: after a rollback, one of a lower step may be newer.

    One without a readable manifest is taken for as new as its step allows, so that it is looked at
    and its damage told. Of equal ones the order stays.

    Raises:
        InfrastructureError: if the file system fails for now.
    """
    numbers = {folder: save_number(folder) for folder in folders}
    if len(numbers) < 2:  # a single one may have any name
        return list(numbers)
    known = [(step_of(folder), number) for folder, number in numbers.items() if number is not None]

    def key(folder: Path) -> tuple[int, int]:
        step = step_of(folder)
        number = numbers[folder]
        if number is None:
            number = max((saved for at, saved in known if at <= step), default=0)
        return -number, -step

    return sorted(numbers, key=key)


def is_step_folder(folder: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _STEP_FOLDER.fullmatch(folder.name) is not None


def step_folders(root: Path) -> list[Path]:
    """Folders in `root` that are checkpoints by their name, newest first."""
    if not root.is_dir():
        return []
    folders = [folder for folder in root.iterdir() if is_step_folder(folder)]
    return sorted(folders, key=lambda folder: (-step_of(folder), folder.suffix))


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(folder.name.removesuffix(".replaced"))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _key(fragment: Fragment) -> str:
    return f"{fragment.kind}/{fragment.name}"


def _in_file_order(fragments: list[Fragment]) -> list[Fragment]:
    """The widest elements first, see `write_tensors`; then by kind, because those of one kind are
    neighbours in memory and are copied at once."""
    return sorted(fragments, key=lambda f: (-f.values.element_size(), f.kind))


def _put_back(replaced: Path) -> None:
    """End what a kill between the two renames of `publish`, or after them, left."""
    final = replaced.with_suffix("")
    if final.exists():
        _remove(replaced)
    else:
        os.rename(replaced, final)


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill in the middle leaves no half of it under its name."""
    doomed = folder.with_name(f"{folder.name}.tmp-removed")
    try:
        os.rename(folder, doomed)
    except OSError as error:
        logger.warning("%s: could not be removed: %s", folder, error.strerror)
    else:
        _delete(doomed)


def _delete(folder: Path) -> None:
    """Delete what is no checkpoint (any more); the next save tries again what remains."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s: could not be deleted: %s", error.filename or folder, error.strerror)
