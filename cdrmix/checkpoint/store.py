"""Finds the newest whole checkpoint of a run, and keeps damaged ones out of the way.

    checkpoints/<step>/rank-00000.safetensors   fragments of rank 0 (float32 masters, moments)
                       rank-00000.json          small state of rank 0 (random states)
                       index.json               logical name -> kind -> files of its fragments
                       state.json               step, world size, and entries of the caller
                       manifest.json            number of the save, size and sha256 of each file
    checkpoints/latest                          the newest step, for people and scripts
    checkpoints/<step>.set-aside-<n>            passed over by a start; never removed

A checkpoint is written under a temporary name, made durable, and renamed; then `latest` changes.
Nothing here trusts `latest`: only verified files count. No file holds a pickle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import runtime
from cdrmix.checkpoint.candidates import all_damaged, candidates, step_folders, step_of
from cdrmix.checkpoint.failed_writes import agree_on_failures
from cdrmix.checkpoint.files import damage, read_json
from cdrmix.data.folders import sync
from cdrmix.errors import InfrastructureError, StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint that verifies, and the newer ones that do not."""

    path: Path
    step: int  # optimizer steps done
    skipped: tuple[tuple[str, str], ...]  # name and reason of each newer one
    skipped_paths: tuple[Path, ...] = ()


def find_newest(
    path: Path, *copies: Path, before: int | None = None, nearer: Sequence[Path] = ()
) -> FoundCheckpoint | None:
    """Finds the checkpoint saved last under `path` whose files all match the manifest; collective.

    Only damage leads to an older one: reading is repeated while the file system fails, and the
    failure is raised in the end. Each rank verifies its part of the files, and all get one answer,
    which is None when there is no checkpoint at all.

    Args:
        path: a run directory, its `checkpoints` folder, or one checkpoint.
        copies: other folders of checkpoints of the same run, for those that `path` lacks.
        before: limits the search to steps before this one.
        nearer: as `copies`, which are taken before those of `path` where both have a save.
    Raises:
        NoUsableStateError: when there are checkpoints and every one of them is damaged.
        InfrastructureError: on every rank, if the file system does not answer on one of them.
    """
    # Rank 0 lists the folders for all: NFS may show other ranks an older directory.
    is_first = runtime.rank() == 0
    folders = agree_on_failures(lambda: candidates(path, copies, nearer) if is_first else [])[0]
    if before is not None:
        folders = [folder for folder in folders if step_of(folder) < before]
    skipped: list[tuple[str, str]] = []
    skipped_paths: list[Path] = []
    share = partial(damage, part=runtime.rank(), parts=runtime.world_size())
    unreadable: tuple[str, InfrastructureError] | None = None
    for folder in folders:
        # An unreadable checkpoint is not passed over for an older one, only for a copy of it.
        if unreadable is not None and folder.name != unreadable[0]:
            break
        try:
            reasons = sum(agree_on_failures(partial(share, folder)), start=[])
        except InfrastructureError as error:
            # No evidence of damage: going back would cost the steps of a checkpoint that is whole.
            unreadable = unreadable or (folder.name, error)
            continue
        # Each rank has verified its part alone: the checkpoint is whole if all parts are.
        if not reasons:
            state = agree_on_failures(partial(_state_of, folder))[0]
            return FoundCheckpoint(folder, state["step"], tuple(skipped), tuple(skipped_paths))
        name = str(folder) if folder.parent in (*copies, *nearer) else folder.name
        # Every rank reads the manifest, and reports the same damage of it: once is enough.
        skipped.append((name, "; ".join(dict.fromkeys(reasons))))
        skipped_paths.append(folder)
    if unreadable is not None:
        raise unreadable[1]
    if not skipped:
        return None
    raise all_damaged(path, skipped)


def set_aside(start: FoundCheckpoint, roots: Sequence[Path], *, newer: bool) -> None:
    """Renames damaged checkpoints in `roots` that were passed over for `start`, so that no save
    removes them; those of `newer` steps, too, if a run goes back behind them by request. Called by
    rank 0 alone, once it is certain that the run continues from there."""
    for folder in [folder for root in roots for folder in step_folders(root)]:
        if folder not in start.skipped_paths and not (newer and step_of(folder) > start.step):
            continue
        rename_aside(folder)


def rename_aside(folder: Path) -> None:
    """Renames a checkpoint that is passed over; if that fails, with a warning."""
    # Never over an earlier one: all that was set aside stays for people to look at.
    number = 1
    while (aside := folder.with_name(f"{step_of(folder)}.set-aside-{number}")).exists():
        number += 1
    try:
        os.rename(folder, aside)
        sync(folder.parent)
    except OSError as error:
        logger.warning("%s: cannot be set aside: %s", folder, error.strerror)
    else:
        logger.warning("%s: passed over, and now called %s", folder, aside.name)


def _state_of(folder: Path) -> dict[str, Any]:
    """Content of a verified checkpoint's state.json; StateError if no save can have written it."""
    try:
        state = read_json(folder / "state.json")
        if isinstance(state["step"], int) and isinstance(state["world_size"], int):
            return dict(state)
        reason = "step and world_size must be numbers"
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise StateError(
        f"{folder / 'state.json'}: not the state of a checkpoint ({reason}). Give a checkpoint "
        "that this package has saved"
    )
