"""Folders that may be checkpoints of a run, by their names and manifests; a checkpoint's
configuration beside a run's. No torch: a start is checked by these before it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.checkpoint.files import MANIFEST_FILE, retried, save_number
from cdrmix.config.resuming import changes_between
from cdrmix.config.resuming_rules import rule_of
from cdrmix.config.schema import Config
from cdrmix.errors import NoUsableStateError, StateError

# Names of checkpoints. `.replaced` is one that `publish` is replacing: whole until the new one has
# its name, and all that a kill between its two renames leaves.
STEP_FOLDER = re.compile(r"(\d+)(\.replaced)?")


def step_folders(root: Path) -> list[Path]:
    """Folders in `root` that are checkpoints by their name, newest first."""
    if not root.is_dir():
        return []
    folders = [folder for folder in root.iterdir() if STEP_FOLDER.fullmatch(folder.name)]
    # Of one step the replacement first: it was saved later than `<step>.replaced`.
    return sorted(folders, key=lambda folder: (-step_of(folder), folder.suffix))


def step_of(folder: Path) -> int:
    """Step in a checkpoint's name."""
    return int(folder.name.removesuffix(".replaced"))


def candidates(path: Path, copies: Sequence[Path] = (), nearer: Sequence[Path] = ()) -> list[Path]:
    """Folders for `find_newest`, whole or damaged, the last one saved first: after a rollback, a
    lower step may be newer. One without a readable manifest counts as the newest that its step
    allows, so that it is checked and its damage reported. Raises as `save_number` does.

    Of equal ones those in `nearer` come first, and those in `copies` last."""
    inside = path / "checkpoints"
    folders: list[Path] = []
    if retried(inside.is_dir, path):
        copies = (inside, *copies)
    elif retried((path / MANIFEST_FILE).exists, path) or (
        # One without a manifest, too: it is damaged, and is to be reported as such.
        retried(path.is_dir, path) and STEP_FOLDER.fullmatch(path.name)
    ):
        folders.append(path)
    else:
        copies = (path, *copies)
    for root in (*nearer, *copies):
        folders += retried(partial(step_folders, root), root)
    numbers = {folder: save_number(folder) for folder in folders}
    if len(numbers) < 2:  # a single one may have any name
        return list(numbers)
    known = [(step_of(folder), number) for folder, number in numbers.items() if number is not None]
    ranks = {}
    for folder, number in numbers.items():
        step = step_of(folder)
        newest = max((saved for at, saved in known if at <= step), default=0)
        ranks[folder] = (-(newest if number is None else number), -step)
    # The sort is stable: of equal checkpoints the nearest comes first.
    return sorted(numbers, key=ranks.__getitem__)


def all_damaged(path: Path, skipped: Sequence[tuple[str, str]]) -> NoUsableStateError:
    """Error of a place whose checkpoints are all damaged: `skipped` has name and reason of each."""
    listed = "\n".join(f"  {name}: {why}" for name, why in skipped)
    return NoUsableStateError(
        f"{path}: every checkpoint is damaged:\n{listed}\nTry restoring one of them from a copy, "
        "or start again in a new run directory"
    )


def nothing_to_resume(resume: str) -> StateError:
    """Error of a --resume PATH without a checkpoint."""
    return StateError(
        f"--resume {resume}: no checkpoint there. Try a run directory or one of its "
        "checkpoints/<step> folders, or --resume auto with --run-dir"
    )


def check_same_model(checkpoint: Path, saved: dict[str, Any], config: Config) -> None:
    """Raises StateError if a checkpoint's configuration, `saved`, is of another model."""
    changes = changes_between(saved, config.model_dump(mode="json"))
    model = [
        f"{key}: {old} -> {new}"
        for key, old, new in changes
        if key.startswith("model.") and rule_of(key).kind != "free"
    ]
    if model:
        raise StateError(
            f"{checkpoint}: was trained with another model. Changed: "
            f"{'; '.join(model)}. Try the saved values, or a new run directory"
        )
