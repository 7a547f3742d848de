"""Rules of a user's for the checkpoints that stay: what they are told, and which answers count.

A rule is asked after each save, about each folder of checkpoints. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from cdrmix.checkpoint.candidates import step_of
from cdrmix.checkpoint.files import MANIFEST_FILE
from cdrmix.checkpoint.held_out import best_checkpoint, recorded_scores
from cdrmix.config.checkpoint import CheckpointConfig
from cdrmix.hooks.plugin import make_plugin
from cdrmix.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A whole checkpoint in a folder, as a rule sees it.

    Attributes:
        step: optimizer steps done.
        saved_at: time of the save (seconds since 1970).
        num_bytes: size of its files.
        score: by evaluation.best_by; None if this step was not evaluated, or `keep_best` is off.
        is_newest, is_best, is_pinned: it stays, whatever the rule says: the last one, the one with
            the best score under `keep_best`, and one that the run stands on or that is being read,
            such as Stage A's last in Stage B, or one that is copied to an archive.
    """

    step: int
    saved_at: float
    num_bytes: int
    score: float | None = None
    is_newest: bool = False
    is_best: bool = False
    is_pinned: bool = False

    @property
    def stays(self) -> bool:
        """True if no rule can drop it."""
        return self.is_newest or self.is_best or self.is_pinned


class Retention(ABC):
    """Base class of rules for the checkpoints that stay.

    With a class attribute `Options`, a pydantic model, its instance is made of the configured
    options, `Name(options)`; without, options are refused, and it is made as `Name()`. It runs on
    rank 0, in the thread that writes: a slow rule delays the next save, not the training.
    """

    Options: ClassVar[type[BaseModel] | None] = None

    @abstractmethod
    def drop(self, checkpoints: Sequence[StoredCheckpoint]) -> Iterable[int]:
        """Returns the steps of checkpoints to remove.

        A rule whose answer has another step, or one that stays, drops nothing, with a warning; so
        does one that raises.

        Args:
            checkpoints: all that are whole by the sizes of their files, newest first.
        """


def configured_retention(config: CheckpointConfig) -> Retention | None:
    """Makes the rule that a configuration names; None: it names none. Raises ConfigError."""
    if config.retention is None:
        return None
    return make_plugin(config.retention, Retention, where="checkpoint.retention")


def stored_checkpoints(
    root: Path, whole: Sequence[Path], *, pinned: Collection[int], keep_best: bool
) -> list[StoredCheckpoint]:
    """Describes the whole checkpoints of a folder, in the order given: newest first."""
    best = best_checkpoint(root) if keep_best else None
    scores = {}
    if best is not None:
        measured = [each for each in recorded_scores(root) if each.score.by == best.score.by]
        scores = {each.step: each.score.value for each in measured}
    return [
        StoredCheckpoint(
            step=step_of(folder),
            # The manifest is written last.
            saved_at=(folder / MANIFEST_FILE).stat().st_mtime,
            num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
            score=scores.get(step_of(folder)),
            is_newest=folder == whole[0],
            is_best=best is not None and step_of(folder) == best.step,
            is_pinned=step_of(folder) in pinned,
        )
        for folder in whole
    ]


def steps_to_drop(rule: Retention, checkpoints: Sequence[StoredCheckpoint]) -> set[int]:
    """Asks a rule; none, with a warning, where its answer is wrong."""
    name = type(rule).__qualname__
    try:
        answer = set(rule.drop(checkpoints))
    except Exception as error:  # any that code of a user's may raise
        problem = f"{type(error).__name__}: {error}"
    else:
        staying = {each.step for each in checkpoints if each.stays}
        unknown = answer - {each.step for each in checkpoints}
        if not unknown and not answer & staying:
            return answer
        problem = "it drops " + "; ".join(
            f"{what}: {', '.join(sorted(map(str, steps)))}"
            for what, steps in (
                ("steps without a checkpoint", unknown),
                ("the newest, the best or one in use", answer & staying),
            )
            if steps
        )
    logger.warning("warning: checkpoint.retention: %s: %s; nothing is dropped", name, problem)
    return set()
