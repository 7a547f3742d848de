"""The process of one tracker: reads lines of metrics from its input and has the tracker write them.

A tracker's package takes seconds to import, starts threads, listens to signals, prints, and may
block or crash. In a process of its own none of it reaches a rank. The process ends when its input
does, also because the rank was killed.

Input, one JSON object a line: `Job` first, then {"line": {...}, "time": ...} or {"rewind": step},
and {"end": true}.
Output, likewise: {"written": n}, or {"lost": n, "why": ...}, for n lines.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from cdrmix.config.redaction import redacted_text
from cdrmix.config.tracking import TrackerConfig
from cdrmix.tracking.tracker import Line, TrackedRun, Tracker

# A signal to all processes of a job is the run's to answer: the input ends when the run does.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Of one input: what waits meanwhile is written together.
_BYTES_AT_ONCE = 2**20
_LINES_AT_ONCE = 1_000
# Behind the end of the input. Training, or the whole run, is over: it must not last.
_SECONDS_TO_END = 30
_OURS = {
    "tensorboard": "cdrmix.tracking.tensorboard_tracker:TensorBoardTracker",
    "wandb": "cdrmix.tracking.wandb_tracker:WandbTracker",
    "mlflow": "cdrmix.tracking.mlflow_tracker:MlflowTracker",
}
# Files in a tracker's folder: the last step that was written, and what its package prints.
LAST_STEP = "last_step"
WRITER_LOG = "writer.log"


@dataclass(frozen=True)
class Job:
    """Work of a writer, which it is told first."""

    use: str  # as in TrackerConfig
    options: dict[str, Any]
    directory: str  # of the run
    folder: str  # of the tracker
    place: str  # of that folder in the end
    step: int  # from which the run goes on
    config: dict[str, Any]  # without secrets
    is_copy: bool
    sys_path: list[str]  # where a class of a user's is found


def job_of(
    tracker: TrackerConfig,
    run_dir: Path,
    folder: Path,
    *,
    config: dict[str, Any],
    step: int = -1,
    place: Path | None = None,
) -> Job:
    """Describes the work of a tracker; with a `place` for its folder it is to copy a whole run.

    Args:
        config: of the run, without secrets.
        step: from which the run goes on; -1: it begins.
    """
    return Job(
        use=tracker.use,
        options=tracker.options,
        directory=str(run_dir.absolute()),
        folder=str(folder.absolute()),
        place=str((place or folder).absolute()),
        step=step,
        config=config,
        is_copy=place is not None,
        sys_path=[os.path.abspath(each) for each in sys.path],
    )


def main() -> None:
    """Runs the writer that the process was started as."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    os.nice(5)  # training first; more would starve it where all cores are busy
    source = open(0, "rb", buffering=0)  # noqa: SIM115  as long as the process
    job = Job(**json.loads(_first_line(source)))
    sys.path += [each for each in job.sys_path if each not in sys.path]
    if not job.is_copy:
        threading.Thread(target=_end_behind_input, daemon=True).start()
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        _print_to(Path(job.folder) / WRITER_LOG)
        with locked(Path(job.folder), waits=True):
            writer = _Writer(job, reports)
            for messages in _inputs(source):
                writer.take(messages)
            writer.close()
        reports.flush()
        # Not by way of what a package has registered for the end of the process.
        os._exit(0)


def _first_line(source: IO[bytes]) -> bytes:
    """Reads up to a line break and not beyond, as what follows is read without a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        piece = source.read(1)
        if not piece:
            os._exit(0)  # the rank is gone
        line += piece
    return line


def _end_behind_input() -> None:
    """Ends the process a while behind the end of the input, whatever the tracker does."""
    poll = select.poll()
    poll.register(0, 0)  # a closed pipe is told in any case
    poll.poll()
    time.sleep(_SECONDS_TO_END)
    os._exit(1)


def _print_to(log: Path) -> None:
    """Sends what a package prints to a file, or nowhere if it cannot be opened."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


@contextmanager
def locked(folder: Path, *, waits: bool) -> Iterator[bool]:
    """Holds a tracker's folder for this process; False if another one has it and is not waited for.

    The writer of an earlier start may have a moment left. A file system without locks has none.
    """
    mode = fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB)
    is_ours = True
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            is_ours = False
        except OSError:
            pass
        # A copy that was made anew may have come into its place meanwhile.
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            break
        os.close(descriptor)
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def _inputs(source: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages of the input, as many as there are at a time."""
    rest = b""
    while piece := source.read(_BYTES_AT_ONCE):
        *lines, rest = (rest + piece).split(b"\n")
        messages = [json.loads(line) for line in lines]
        is_end = bool(messages) and "end" in messages[-1]
        yield messages[:-1] if is_end else messages
        if is_end:
            return


class _Writer:
    """A tracker, and an account of what it has written."""

    def __init__(self, job: Job, reports: IO[str]) -> None:
        """Opens the tracker of a job, and writes what an earlier start has not come to."""
        self._reports = reports
        self._folder = Path(job.folder)
        self._tracker: Tracker | None = None
        directory = Path(job.directory)
        step = job.step if job.is_copy else min(job.step, self._last_step())
        run = TrackedRun(
            name=directory.resolve().name,
            directory=directory,
            folder=self._folder,
            place=Path(job.place),
            step=step,
            config=job.config,
            is_copy=job.is_copy,
        )
        try:
            tracker = make_tracker(TrackerConfig(use=job.use, options=job.options))
            tracker.open(run)
            self._tracker = tracker
        except Exception as error:
            self._why = _told(error)
            self._report(lost=0, why=self._why)
            return
        if step < job.step:
            missing = run.lines(after=step, up_to=job.step)
            for first in range(0, len(missing), _LINES_AT_ONCE):
                self._write(missing[first : first + _LINES_AT_ONCE], counts=False)

    def take(self, messages: Sequence[dict[str, Any]]) -> None:
        """Carries out messages in their order, lines that follow each other in one call."""
        for are_lines, group in groupby(messages, key=lambda message: "line" in message):
            if are_lines:
                lines = [Line(each["time"], each["line"]) for each in group]
                for first in range(0, len(lines), _LINES_AT_ONCE):
                    self._write(lines[first : first + _LINES_AT_ONCE])
                continue
            for message in group:
                self._rewind(message["rewind"])

    def close(self) -> None:
        """Closes the tracker."""
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._report(lost=0, why=_told(error))

    def _write(self, lines: Sequence[Line], *, counts: bool = True) -> None:
        num_lines = len(lines) if counts else 0
        if self._tracker is None:
            self._report(lost=num_lines, why=self._why)
            return
        try:
            self._tracker.write(lines)
        except Exception as error:
            self._report(lost=num_lines, why=_told(error))
            return
        with suppress(OSError):  # a full disk: the lines are written again at the next start
            (self._folder / LAST_STEP).write_text(str(lines[-1].step))
        self._report(written=num_lines)

    def _rewind(self, step: int) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.rewind(step)
        except Exception as error:
            self._report(lost=0, why=_told(error))

    def _last_step(self) -> int:
        try:
            return int((self._folder / LAST_STEP).read_text())
        except (OSError, ValueError):
            return -1

    def _report(self, **report: int | str) -> None:
        with suppress(OSError):  # the rank is gone
            self._reports.write(json.dumps(report) + "\n")


def make_tracker(config: TrackerConfig) -> Tracker:
    """Makes a tracker of its configuration. Raises ConfigError for a class of a user's as
    `make_plugin` does."""
    from cdrmix.hooks.plugin import make_plugin

    path = _OURS.get(config.use)
    if path is None:
        return make_plugin(config, Tracker, where=f"monitoring.trackers, {config.use}")
    module, _, name = path.partition(":")
    kind: Any = getattr(importlib.import_module(module), name)
    made: Tracker = kind(kind.Options.model_validate(config.options))
    return made


def _told(error: Exception) -> str:
    """Describes an error in a line, and prints its traceback to the log."""
    traceback.print_exc()
    first = next(iter(str(error).splitlines()), "")
    return redacted_text(f"{type(error).__name__}: {first}"[:300])
