"""Jobs of a build on machines that share its file system, started by an engine of others.

A job's result says by itself that it is there, so an engine may lose, repeat or kill what it runs:
after each round, what has no result is run again.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from cdrmix import log
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

    def run_all(self, function: Callable[[J], None], jobs: Sequence[J], *, what: str) -> None:
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
) -> None:
    """Run all jobs that are not done, and again those that a round leaves without a result.

    Args:
        run_round: starts the given jobs and waits for their end; calls its second argument now
            and then, to show what is done.
        what: name of the jobs in messages.
        logs: where the engine's own messages are.
    Raises:
        DataError: if nothing comes of three rounds.
    """
    remaining = _unfinished(jobs)
    failures = 0
    with tqdm(total=len(jobs), desc=what, disable=None, leave=False) as progress:

        def show() -> None:
            progress.update(len(jobs) - len(_unfinished(remaining)) - progress.n)

        while remaining:
            run_round(remaining, show)
            show()
            left = _unfinished(remaining)
            failures = failures + 1 if len(left) == len(remaining) else 0
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


def write_calls(folder: Path, function: Callable[[J], None], jobs: Sequence[J]) -> None:
    """Each job in a file of its own, so that whoever runs one need not read them all."""
    folder.mkdir(parents=True)
    for number, job in enumerate(jobs):
        write_file(folder / f"{number}.job", pack(function, job))


def run_call(folder: Path, number: int) -> None:
    """Run a job that `write_calls` wrote; an error of the user's is also kept beside it."""
    error = unpack((folder / f"{number}.job").read_bytes()).run()
    if error is not None:
        write_file(folder / f"{number}.error", pickle.dumps(error))
        raise error


def errors_in(folder: Path) -> Iterator[TrainingError | OSError]:
    """What `run_call` kept."""
    for path in sorted(folder.glob("*.error")):
        yield pickle.loads(path.read_bytes())
