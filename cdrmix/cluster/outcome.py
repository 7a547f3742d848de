"""How one start of a run ended, in a file that `cdrmix launch` reads, and its wish to stop.

DeepSpeed's launcher makes its own exit code of those of the ranks, and none of their signals.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# Beside the files of a run, while `cdrmix launch` watches it.
LAUNCH_FOLDER = "launch"
# Held by `cdrmix launch` while its start lasts.
LAUNCHER_LOCK = "launcher.lock"
_OUTCOME = "outcome.json"
_STOP = "stop"
_MET = "met"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a start ended.

    Attributes:
        exit_code: as in cdrmix.errors; 1 is a fault.
        reason: why, for people; empty where the ranks said it themselves.
        step: the last optimizer step that any rank reached.
    """

    exit_code: int
    reason: str
    step: int


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write it at once, so that no reader sees half of it; a folder that is gone is nobody's."""
    temporary = folder / f"{_OUTCOME}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.replace(temporary, folder / _OUTCOME)
    except OSError:  # whoever reads it finds none, and takes that for a fault
        return


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome in `folder`, or None."""
    try:
        return Outcome(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def await_outcome(folder: Path, seconds: float) -> Outcome | None:
    """The outcome, waited for no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while (found := read_outcome(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks of this start to save and stop."""
    (folder / _STOP).touch()


def stop_is_asked(folder: Path) -> bool:
    """Whether they were asked."""
    return (folder / _STOP).exists()


def note_meeting(folder: Path) -> None:
    """Note that all ranks have met."""
    (folder / _MET).touch()


def have_met(folder: Path) -> bool:
    """Whether they have."""
    return (folder / _MET).exists()
