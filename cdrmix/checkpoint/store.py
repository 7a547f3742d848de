"""Saving checkpoints so that none is ever half there, and finding the newest whole one.

    checkpoints/<step>/rank-00000.safetensors   fragments of rank 0 (float32 masters, moments)
                       rank-00000.json          small state of rank 0 (random states)
                       index.json               logical name -> kind -> where its fragments lie
                       state.json               step, world size, and what the caller adds
                       manifest.json            number of the save, size and sha256 of each file
    checkpoints/latest                          the newest step, for people and scripts
    checkpoints/<step>.set-aside-<n>            passed over by a start; nothing here removes it

A checkpoint is written beside its final name, made durable, and renamed. `latest` changes after
that. Nothing here trusts `latest`: what verifies counts. No file holds a pickle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.checkpoint import folder as folders_of_steps
from cdrmix.checkpoint.files import damage, is_checkpoint, read_json, retried
from cdrmix.checkpoint.folder import in_order_of_saves, is_step_folder, step_folders, step_of
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.saver import THIS_RUN, Ranks, Saved, Saver, agree_on_failures
from cdrmix.errors import InfrastructureError, NoUsableStateError, StateError
from cdrmix.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint that verifies, and the newer ones that do not.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        skipped: (name, reason) of each newer one.
        skipped_paths: their folders.
    """

    path: Path
    step: int
    skipped: tuple[tuple[str, str], ...]
    skipped_paths: tuple[Path, ...] = ()


def save_checkpoint(
    root: Path,
    step: int,
    fragments: Iterable[Fragment],
    *,
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    keep: int,
    ranks: Ranks = THIS_RUN,
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
    saver = Saver([root], keep=keep, background=False, ranks=ranks)
    saver.start(step, fragments, state=state, rank_state=rank_state)
    saver.wait()
    saved = ranks.all_gather_object(saver.last)[0]
    assert saved is not None, "rank 0 gave it its name"
    return saved


def has_checkpoints(path: Path) -> bool:
    """Whether there is anything under `path` that `find` would look at, good or damaged."""
    return bool(_candidates(path, ()))


def readable_states(path: Path) -> Iterator[dict[str, Any]]:
    """What state.json says in each checkpoint that `find` would look at, newest first, where it can
    be read; nothing is verified."""
    for folder in _candidates(path, ()):
        with contextlib.suppress(OSError, ValueError, InfrastructureError):
            state = read_json(folder / "state.json")
            if isinstance(state, dict):
                yield state


def find_newest(
    path: Path, *copies: Path, before: int | None = None, ranks: Ranks = THIS_RUN
) -> FoundCheckpoint | None:
    """The newest checkpoint under `path` whose every file has the size and digest written down.

    The newest is the one saved last. Only damage makes an older one be taken: what cannot be read
    for now is read again, and then raised. Every rank calls this and gets the same answer; the
    digests are shared out among them.

    Args:
        path: a run directory, its `checkpoints` folder, or one checkpoint.
        copies: other folders of checkpoints of the same run, for what `path` lacks.
        before: only of steps before this one.
        ranks: who verifies together.
    Returns:
        None when there is no checkpoint at all.
    Raises:
        NoUsableStateError: when there are checkpoints and every one of them is damaged.
        InfrastructureError: on every rank, if the file system fails for now on one of them.
    """
    is_first = ranks.rank() == 0
    folders = agree_on_failures(ranks, lambda: _candidates(path, copies) if is_first else [])[0]
    if before is not None:
        folders = [folder for folder in folders if step_of(folder) < before]
    skipped: list[tuple[str, str]] = []
    skipped_paths: list[Path] = []
    part = ranks.rank()
    parts = ranks.world_size()
    unreadable: tuple[str, InfrastructureError] | None = None
    for folder in folders:
        if unreadable is not None and folder.name != unreadable[0]:
            break
        try:
            shares = agree_on_failures(ranks, lambda: damage(folder, part=part, parts=parts))  # noqa: B023
        except InfrastructureError as error:  # a copy of the same step gives nothing up
            unreadable = unreadable or (folder.name, error)
            continue
        reasons = [reason for share in shares for reason in share]
        if not reasons:
            state = agree_on_failures(ranks, lambda: _state_of(folder))[0]  # noqa: B023
            return FoundCheckpoint(folder, state["step"], tuple(skipped), tuple(skipped_paths))
        name = str(folder) if folder.parent in copies else folder.name
        skipped.append((name, "; ".join(dict.fromkeys(reasons))))
        skipped_paths.append(folder)
    if unreadable is not None:
        raise unreadable[1]
    if not skipped:
        return None
    listed = "\n".join(f"  {name}: {why}" for name, why in skipped)
    raise NoUsableStateError(
        f"{path}: every checkpoint is damaged:\n{listed}\nTry restoring one of them from a copy, "
        "or start again in a new run directory"
    )


def set_aside(found: FoundCheckpoint, roots: Sequence[Path], *, newer: bool) -> None:
    """Rename damaged checkpoints that were passed over for `found`, so that no save removes them.

    Called by rank 0 alone, once it is certain that the run goes on from there.

    Args:
        found: what the run goes on from.
        roots: the run's folders of checkpoints; nothing elsewhere is renamed.
        newer: also rename whole ones of later steps, which a run that was told to go on from an
            older one leaves behind.
    Raises:
        OSError: if a folder cannot be listed.
    """
    for folder in [folder for root in roots for folder in step_folders(root)]:
        if folder not in found.skipped_paths and not (newer and step_of(folder) > found.step):
            continue
        try:
            aside = folders_of_steps.set_aside(folder)
        except OSError as error:
            logger.warning("%s: cannot be set aside: %s", folder, error.strerror)
        else:
            logger.warning("%s: passed over, and now called %s", folder, aside.name)


def _state_of(folder: Path) -> dict[str, Any]:
    """Content of a verified checkpoint's state.json; StateError if it is none that was saved."""
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


def _candidates(path: Path, copies: Sequence[Path]) -> list[Path]:
    """Folders that are checkpoints by their name, the last one saved first, copies after the one
    copied."""
    listed = [*retried(lambda: _candidates_in(path), path)]
    for root in copies:
        listed += retried(lambda root=root: step_folders(root), root)  # type: ignore[misc]
    return in_order_of_saves(listed)


def _candidates_in(path: Path) -> list[Path]:
    inside = path / "checkpoints"
    if inside.is_dir():
        return step_folders(inside)
    is_named_like_one = path.is_dir() and is_step_folder(path)
    return [path] if is_checkpoint(path) or is_named_like_one else step_folders(path)
