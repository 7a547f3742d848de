"""Saving checkpoints so that none is ever half there, and finding the newest whole one.

    checkpoints/<step>/rank-00000.safetensors   fragments of rank 0 (float32 masters, moments)
                       rank-00000.json          small state of rank 0 (random states)
                       index.json               logical name -> kind -> where its fragments lie
                       state.json               step, world size, and what the caller adds
                       manifest.json            size and sha256 of every file above
    checkpoints/latest                          the newest step, for people and scripts

A checkpoint is written beside its final name, made durable, and renamed. `latest` changes after
that. Nothing here trusts `latest`: what verifies counts. No file holds a pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from uuid import uuid4

from cdrmix import runtime
from cdrmix.checkpoint.files import (
    FileRecord,
    replace_text,
    sync_directory,
    write_json,
    write_tensors,
)
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.index import index_entry, merge_entries
from cdrmix.checkpoint.manifest import damage, is_checkpoint, write_manifest
from cdrmix.errors import NoUsableStateError, StateError
from cdrmix.log import get_logger

T = TypeVar("T")
logger = get_logger(__name__)

_STEP_FOLDER = re.compile(r"(\d+)(\.replaced)?")


class Ranks(Protocol):
    """Who writes together. `cdrmix.runtime` is all ranks of the run."""

    def rank(self) -> int:
        """Number of this rank, from 0."""

    def world_size(self) -> int:
        """How many ranks there are."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in rank order; waits for all of them."""


_THIS_RUN: Ranks = runtime


@dataclass(frozen=True)
class Saved:
    """A finished save: its folder, what all ranks wrote, and how long it took."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, and the newer ones that do not: (folder name, why)."""

    path: Path
    step: int
    skipped: tuple[tuple[str, str], ...]


def save(
    root: Path,
    step: int,
    fragments: Iterable[Fragment],
    *,
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    keep: int,
    ranks: Ranks = _THIS_RUN,
) -> Saved:
    """Write checkpoint `step` into `root`, then point `latest` at it, then drop the oldest.

    Every rank calls this. When it returns, the checkpoint is durable. A checkpoint of the same
    step is replaced, and newer ones are dropped: the run has gone back behind them.

    Args:
        root: the run's `checkpoints` folder, seen by all ranks.
        step: optimizer steps done.
        fragments: what this rank holds; over all ranks each element exactly once.
        state: JSON, the same on all ranks (rank 0's is written), readable at any layout.
        rank_state: JSON of this rank alone.
        keep: number of whole checkpoints to keep (>= 1).
        ranks: who writes together.
    Raises:
        StateError: on every rank, if any of them could not write. The older checkpoints and
            `latest` are then as before, and nothing of this one is left.
    """
    started = time.monotonic()
    is_first = ranks.rank() == 0
    temporary = root / f"{step}.tmp-{ranks.all_gather_object(uuid4().hex[:8])[0]}"
    contents = {**state, "step": step, "world_size": ranks.world_size()}
    try:
        _together(ranks, lambda: _prepare(temporary) if is_first else None)
        shares = _together(ranks, lambda: _write_share(temporary, ranks, fragments, rank_state))
        _together(ranks, lambda: _finish(temporary, step, shares, contents) if is_first else None)
    except StateError as error:
        raise StateError(
            f"the checkpoint of step {step} was not saved: {error}. The older ones are as they "
            "were. Try freeing space, a smaller checkpoint.keep, or a --run-dir elsewhere that "
            "every rank can write"
        ) from error
    finally:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    if is_first:
        _drop_others(root, step, keep)
    num_bytes = sum(record["bytes"] for share in shares for record in share.files.values())
    saved = Saved(root / str(step), num_bytes, time.monotonic() - started)
    megabytes = num_bytes / 1e6
    if is_first:
        logger.info(
            "saved %s: %.1f MB in %.2f s (%.0f MB/s)",
            saved.path,
            megabytes,
            saved.seconds,
            megabytes / saved.seconds,
        )
    return saved


def find(path: Path, *, before: int | None = None, ranks: Ranks = _THIS_RUN) -> Found | None:
    """The newest checkpoint under `path` whose every file has the size and digest written down.

    Every rank calls this and gets the same answer; the digests are shared out among them.

    Args:
        path: a run directory, its `checkpoints` folder, or one checkpoint.
        before: only of steps before this one.
        ranks: who verifies together.
    Returns:
        None when there is no checkpoint at all.
    Raises:
        NoUsableStateError: when there are checkpoints and every one of them is damaged.
    """
    folders = _together(ranks, lambda: _candidates(path) if ranks.rank() == 0 else [])[0]
    if before is not None:
        folders = [folder for folder in folders if _step(folder) < before]
    skipped: list[tuple[str, str]] = []
    for folder in folders:
        share = damage(folder, part=ranks.rank(), parts=ranks.world_size())
        reasons = [reason for share in ranks.all_gather_object(share) for reason in share]
        if not reasons:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return Found(folder, state["step"], tuple(skipped))
        skipped.append((folder.name, "; ".join(dict.fromkeys(reasons))))
    if not skipped:
        return None
    listed = "\n".join(f"  {name}: {why}" for name, why in skipped)
    raise NoUsableStateError(
        f"{path}: every checkpoint is damaged:\n{listed}\nTry restoring one of them from a copy, "
        "or start again in a new run directory"
    )


@dataclass(frozen=True)
class _Share:
    """What one rank wrote: its files, and where in them its fragments lie."""

    files: dict[str, FileRecord]
    index: list[dict[str, Any]]


def _together(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Every rank's result of `action`; if it fails on one, all ranks raise instead of waiting.

    Raises:
        StateError: naming each failing rank, its file and its reason.
        Exception: on a rank whose failure is a fault of ours, that failure itself.
    """
    result, failure, problem = None, None, ""
    try:
        result = action()
    except Exception as error:  # the others wait in the collective below and must be told
        failure, problem = error, f"rank {ranks.rank()}: {_described(error)}"
    outcomes = ranks.all_gather_object((result, problem))
    problems = [text for _, text in outcomes if text]
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    if problems:
        raise StateError("; ".join(problems)) from failure
    return [cast(T, value) for value, _ in outcomes]


def _described(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _prepare(temporary: Path) -> None:
    """Remove what dead saves left, and make the folder to write into."""
    root = temporary.parent
    root.mkdir(parents=True, exist_ok=True)
    sync_directory(root.parent)
    for folder in root.glob("*.tmp-*"):
        _delete(folder)
    for replaced in root.glob("*.replaced"):
        final = replaced.with_suffix("")
        if final.exists():
            _remove(replaced)
        else:  # killed between the two renames of `_publish`
            os.rename(replaced, final)
    temporary.mkdir()


def _write_share(
    folder: Path, ranks: Ranks, fragments: Iterable[Fragment], rank_state: Mapping[str, Any]
) -> _Share:
    name = f"rank-{ranks.rank():05d}"
    tensor_file, json_file = f"{name}.safetensors", f"{name}.json"
    held = [(f"{fragment.kind}/{fragment.name}", fragment) for fragment in fragments]
    files = {
        tensor_file: write_tensors(folder / tensor_file, [(key, f.values) for key, f in held]),
        json_file: write_json(folder / json_file, dict(rank_state)),
    }
    return _Share(files, [index_entry(tensor_file, key, fragment) for key, fragment in held])


def _finish(temporary: Path, step: int, shares: list[_Share], state: dict[str, Any]) -> None:
    """Rank 0, when every rank's files are durable: index, manifest, rename, `latest`."""
    index = merge_entries(entry for share in shares for entry in share.index)
    files = {name: record for share in shares for name, record in share.files.items()}
    files["index.json"] = write_json(temporary / "index.json", {"tensors": index})
    files["state.json"] = write_json(temporary / "state.json", state)
    write_manifest(temporary, files)
    sync_directory(temporary)
    root = temporary.parent
    _publish(temporary, root / str(step))
    replace_text(root / "latest", f"{step}\n")


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its final name; a kill at any point leaves a whole one to find."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_directory(final.parent)
    if replaced.exists():
        _remove(replaced)


def _drop_others(root: Path, step: int, keep: int) -> None:
    """Remove checkpoints newer than `step`, and those older than the newest `keep` whole ones."""
    folders = _step_folders(root)
    newer = [folder for folder in folders if _step(folder) > step]
    for folder in newer:
        logger.warning("%s: removed, because the run has gone back to step %d", folder, step)
        _remove(folder)
    rest = folders[len(newer) :]
    whole = [folder for folder in rest if not damage(folder, with_digests=False)]
    if len(whole) >= keep:
        for folder in rest[rest.index(whole[keep - 1]) + 1 :]:
            _remove(folder)


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


def _candidates(path: Path) -> list[Path]:
    """Folders under `path` that are checkpoints by their name, newest first."""
    inside = path / "checkpoints"
    if inside.is_dir():
        return _step_folders(inside)
    is_named_like_one = path.is_dir() and _STEP_FOLDER.fullmatch(path.name)
    return [path] if is_checkpoint(path) or is_named_like_one else _step_folders(path)


def _step_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    folders = [folder for folder in root.iterdir() if _STEP_FOLDER.fullmatch(folder.name)]
    return sorted(folders, key=lambda folder: (-_step(folder), folder.suffix))


def _step(folder: Path) -> int:
    return int(folder.name.removesuffix(".replaced"))
