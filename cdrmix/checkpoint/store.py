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

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.checkpoint.folder import is_step_folder, step_folders, step_of
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.manifest import damage, is_checkpoint
from cdrmix.checkpoint.ranks import THIS_RUN, Ranks, together
from cdrmix.checkpoint.saver import Saved, Saver
from cdrmix.errors import NoUsableStateError


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, and the newer ones that do not: (name, why)."""

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
        with contextlib.suppress(OSError, ValueError):
            yield json.loads((folder / "state.json").read_text(encoding="utf-8"))


def find(
    path: Path, *copies: Path, before: int | None = None, ranks: Ranks = THIS_RUN
) -> Found | None:
    """The newest checkpoint under `path` whose every file has the size and digest written down.

    Every rank calls this and gets the same answer; the digests are shared out among them.

    Args:
        path: a run directory, its `checkpoints` folder, or one checkpoint.
        copies: other folders of checkpoints of the same run, for what `path` lacks.
        before: only of steps before this one.
        ranks: who verifies together.
    Returns:
        None when there is no checkpoint at all.
    Raises:
        NoUsableStateError: when there are checkpoints and every one of them is damaged.
    """
    is_first = ranks.rank() == 0
    folders = together(ranks, lambda: _candidates(path, copies) if is_first else [])[0]
    if before is not None:
        folders = [folder for folder in folders if step_of(folder) < before]
    skipped: list[tuple[str, str]] = []
    for folder in folders:
        share = damage(folder, part=ranks.rank(), parts=ranks.world_size())
        reasons = [reason for share in ranks.all_gather_object(share) for reason in share]
        if not reasons:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return Found(folder, state["step"], tuple(skipped))
        name = str(folder) if folder.parent in copies else folder.name
        skipped.append((name, "; ".join(dict.fromkeys(reasons))))
    if not skipped:
        return None
    listed = "\n".join(f"  {name}: {why}" for name, why in skipped)
    raise NoUsableStateError(
        f"{path}: every checkpoint is damaged:\n{listed}\nTry restoring one of them from a copy, "
        "or start again in a new run directory"
    )


def _candidates(path: Path, copies: Sequence[Path]) -> list[Path]:
    """Folders that are checkpoints by their name, newest first, copies after the one copied."""
    folders = [*_candidates_in(path), *(folder for root in copies for folder in step_folders(root))]
    return sorted(folders, key=lambda folder: -step_of(folder)) if copies else folders


def _candidates_in(path: Path) -> list[Path]:
    inside = path / "checkpoints"
    if inside.is_dir():
        return step_folders(inside)
    is_named_like_one = path.is_dir() and is_step_folder(path)
    return [path] if is_checkpoint(path) or is_named_like_one else step_folders(path)
