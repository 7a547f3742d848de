"""Outcome of one start of a run, in a file that `cdrmix launch` reads, and its wish to stop.

DeepSpeed's launcher makes its own exit code of those of the ranks, and none of their signals.

Reader and writer may be on different hosts. An NFS client remembers for up to a minute that a name
did not exist, so nothing here asks for a file by its name before the folder's listing has it. The
listing too is cached (acdirmin, acdirmax: 30 to 60 s), but what this client changes in the folder
makes it ask the server anew: `await_outcome`, whose answer is final, does so.
"""

from __future__ import annotations

import contextlib
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
    """Write the file in one step, so that no reader sees half of it.

    A folder that is gone has no reader.
    """
    temporary = folder / f"{_OUTCOME}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.replace(temporary, folder / _OUTCOME)
    except OSError:  # whoever reads it finds none, and takes that for a fault
        return


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome in `folder`, or None."""
    if not _is_listed(folder, _OUTCOME):
        return None
    try:
        return Outcome(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def await_outcome(folder: Path, seconds: float) -> Outcome | None:
    """The outcome, waited for no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while (outcome := read_outcome(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        _forget_listing(folder)
    return outcome


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks of this start to save and stop."""
    (folder / _STOP).touch()


def stop_is_asked(folder: Path) -> bool:
    """Whether they were asked."""
    return _is_listed(folder, _STOP)


def note_meeting(folder: Path) -> bool:
    """Note that all ranks have met; False where the folder cannot be written now."""
    try:
        (folder / _MET).touch()
    except OSError:
        return False
    return True


def have_met(folder: Path) -> bool:
    """Whether they have."""
    return _is_listed(folder, _MET)


def _is_listed(folder: Path, name: str) -> bool:
    try:
        return name in os.listdir(folder)
    except OSError:
        return False


def _forget_listing(folder: Path) -> None:
    """Make an NFS client drop what it remembers of the folder, by a change of its own there."""
    probe = folder / f"look.{os.getpid()}"
    with contextlib.suppress(OSError):
        probe.touch()
        probe.unlink()
