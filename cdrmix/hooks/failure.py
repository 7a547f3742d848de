"""Errors that hooks raise, as they travel between ranks and as they are told."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from cdrmix import errors
from cdrmix.errors import HookError, TrainingError

_OURS = Path(__file__).parents[1]


class Failure(NamedTuple):
    """An error that a hook raised on one rank. Its text alone travels: the classes of a user's
    exceptions need not."""

    event: str
    rank: int
    kind: type[TrainingError]  # what all ranks raise
    why: str
    traceback: str  # of the hook's own frames; empty of an error that says all

    @property
    def told(self) -> str:
        """Event, rank and reason, for people."""
        return f"{self.event} failed on rank {self.rank}: {self.why}"


def failure_of(error: Exception, *, event: str, rank: int) -> Failure:
    """Describes an error that was caught in the frame that called a hook."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without that of ours
    if isinstance(error, TrainingError):
        # The first of its classes that every rank knows.
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return Failure(event, rank, kind, str(error), "")
    why = f"{type(error).__name__}: {error}{_place(frames)}"
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(event, rank, HookError, why, text)


def _place(frames: TracebackType | None) -> str:
    """Line of the hook's own file that an error came from, in parentheses."""
    listed = traceback.extract_tb(frames)
    own = [each for each in listed if each.filename == listed[0].filename]
    if not own or Path(own[0].filename).is_relative_to(_OURS):
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"
