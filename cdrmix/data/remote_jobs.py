"""Jobs of a build on machines that share its file system, started by an engine of others.

A job's result says by itself that it is there, so an engine may lose, repeat or kill what it runs:
after each round, what has no result is run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from cdrmix import errors, log
from cdrmix.data.shards import write_file
from cdrmix.errors import DataError, TrainingError

# Rounds in a row without a result that end a build.
_MAX_ROUNDS = 3

_logger = log.get_logger(__name__)


class Job(Protocol):
    """What one call of a job's function works on; picklable."""

    def is_done(self) -> bool:
        """Whether the result is in place, whole."""
        ...


J = TypeVar("J", bound=Job)


class Engine(Protocol):
    """What runs the jobs of a build; a context, whose end ends what still runs."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exception: object) -> None: ...

    def run_all(
        self,
        function: Callable[[J], None],
        jobs: Sequence[J],
        *,
        what: str,
        blame: Callable[[J], bool] | None = None,
    ) -> None:
        """Run `function(job)` for every job, in any order; see `cdrmix.data.pool.Pool`."""
        ...


@dataclass(frozen=True)
class Call:
    """A job on its way to another process.

    Attributes:
        function: of module level.
        folder: where relative paths of recipe and build begin.
    """

    function: Callable[[Any], None]
    job: Any
    folder: Path

    def run(self) -> TrainingError | OSError | None:
        """Do the job; what a user can mend is given back rather than raised."""
        try:
            with contextlib.chdir(self.folder):
                self.function(self.job)
        except (TrainingError, OSError) as error:
            return error
        return None


def pack(function: Callable[[J], None], job: J) -> bytes:
    """A job as bytes, for `unpack` in a process of another machine."""
    return pickle.dumps(Call(function, job, Path.cwd()))


def unpack(content: bytes) -> Call:
    """The job in what `pack` gave."""
    call: Call = pickle.loads(content)
    return call


def run_in_rounds(
    run_round: Callable[[Sequence[J], Callable[[], None]], None],
    jobs: Sequence[J],
    *,
    what: str,
    logs: str,
    blame: Callable[[J], bool] | None = None,
) -> None:
    """Run all jobs that are not done, and again those that a round leaves without a result.

    Args:
        run_round: starts the given jobs, each in a process of its own, and waits for their end;
            calls its second argument now and then, to show what is done.
        what: name of the jobs in messages.
        logs: where the engine's own messages are.
        blame: told of each job that two rounds in a row have left without a result; True if it
            will leave out what did it.
    Raises:
        DataError: if nothing comes of three rounds.
    """
    remaining = _unfinished(jobs)
    failures = 0
    suspects: list[J] = []
    with tqdm(total=len(jobs), desc=what, disable=None, leave=False) as progress:

        def show() -> None:
            progress.update(len(jobs) - len(_unfinished(remaining)) - progress.n)

        while remaining:
            run_round(remaining, show)
            show()
            left = _unfinished(remaining)
            failures = failures + 1 if len(left) == len(remaining) else 0
            again = [job for job in left if job in suspects]
            blamed = [job for job in again if blame is not None and blame(job)]
            suspects = [job for job in left if job not in blamed]
            failures = 0 if blamed else failures
            if failures == _MAX_ROUNDS:
                raise DataError(
                    f"{what}: {len(left)} jobs ended {failures} times without a result: killed, "
                    f"most likely for want of memory or time, or broken. See {logs}. What is done "
                    "stays: start again to go on."
                )
            if left:
                _logger.warning("%s: %d jobs ended without a result; again", what, len(left))
            remaining = left


def _unfinished(jobs: Sequence[J]) -> list[J]:
    return [job for job in jobs if not job.is_done()]


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can look into, as what lies there is executed."""
    folder.mkdir(parents=True, mode=0o700)


def write_calls(folder: Path, function: Callable[[J], None], jobs: Sequence[J]) -> None:
    """Write each job to a file of its own, so that whoever runs one need not read them all."""
    make_private(folder)
    for number, job in enumerate(jobs):
        write_file(folder / f"{number}.job", pack(function, job))


def run_call(folder: Path, number: int) -> None:
    """Run a job that `write_calls` wrote; an error of the user's is also kept beside it.

    Raises:
        DataError: if others than this user could have written there.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise DataError(
            f"{folder}: must be a folder of user {os.geteuid()} that nobody else can use (mode "
            f"0700): its jobs are code. It is of user {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Delete it and start the build again."
        )
    error = unpack((folder / f"{number}.job").read_bytes()).run()
    if error is not None:
        write_file(folder / f"{number}.error", error_as_json(error))
        raise error


def errors_in(folder: Path) -> Iterator[TrainingError | OSError]:
    """The errors that `run_call` kept."""
    for path in sorted(folder.glob("*.error")):
        yield error_from_json(path.read_bytes())


def error_as_json(error: TrainingError | OSError) -> bytes:
    """An error of the user's, for a process of another machine."""
    values: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, OSError):
        filename = None if error.filename is None else os.fsdecode(error.filename)
        numbered = [error.errno, error.strerror, filename]
        values = {"kind": "OSError", "arguments": [str(error)] if error.errno is None else numbered}
    return json.dumps(values).encode()


def error_from_json(content: bytes) -> TrainingError | OSError:
    """The error in what `error_as_json` gave; a DataError where its class is not one of ours."""
    values = json.loads(content)
    if values["kind"] == "OSError":
        return OSError(*values["arguments"])
    kind = getattr(errors, values["kind"], DataError)
    is_ours = isinstance(kind, type) and issubclass(kind, TrainingError)
    error: TrainingError = (kind if is_ours else DataError)(values["text"])
    return error
