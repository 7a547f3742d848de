"""Jobs on processes of this machine, such that a killed one loses nothing.

Jobs of a build on machines that share its file system, started by an engine of others.

A job's result says by itself that it is there, so an engine may lose, repeat or kill what it runs:
after each round, what has no result is run again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tqdm import tqdm

from cdrmix import errors, log
from cdrmix.data.shards import write_file
from cdrmix.errors import DataError, TrainingError

Job = TypeVar("Job")
# Deaths of worker processes in a row, without a job done between them, that end a build.
_MAX_DEATHS = 3
# Deaths of the worker that had a job for itself, after which the job is to blame.
_DEATHS_TO_BLAME = 2
_logger = log.get_logger(__name__)


class Pool:
    """Worker processes, begun with the first jobs; leaving the context ends them.

    Args:
        workers: processes; with one, jobs run in this process.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._pipe: tuple[Connection, Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def run_all(
        self,
        function: Callable[[Job], None],
        jobs: Sequence[Job],
        *,
        what: str,
        blame: Callable[[Job], bool] | None = None,
    ) -> None:
        """Run `function(job)` for every job, in any order.

        A job whose process was killed runs again, so it must put its result in place at once and
        leave a result alone that is there.

        Args:
            function: of module level, as are its jobs' classes.
            what: name of the jobs in messages.
            blame: told of a job that has killed its process, alone, twice; True if the job will
                leave out what did it.
        Raises:
            DataError: if workers keep dying; and what a job raises, after which no job begins.
        """
        with tqdm(total=len(jobs), desc=what, disable=None, leave=False) as progress:
            # What may kill its process gets one, even where it is the only job.
            if self._workers == 1 or (len(jobs) == 1 and blame is None):
                for job in jobs:
                    function(job)
                    progress.update()
                return
            remaining = dict(enumerate(jobs))
            deaths = 0
            while remaining:
                num_before = len(remaining)
                if not self._run_until_a_death(function, remaining, progress):
                    continue
                deaths = deaths + 1 if len(remaining) == num_before else 1
                _tell_of_death(deaths, what, len(remaining))
                # Workers take jobs in order, so these are what they had. One at a time they show
                # which of them did it, if it was not all of them together.
                for number in list(remaining)[: self._workers]:
                    deaths_alone = 0
                    while self._run_until_a_death(function, {number: jobs[number]}, progress):
                        deaths_alone += 1
                        if deaths_alone == _DEATHS_TO_BLAME and blame and blame(jobs[number]):
                            deaths = deaths_alone = 0
                            continue
                        deaths += 1
                        _tell_of_death(deaths, what, len(remaining))
                    del remaining[number]
                    deaths = 0

    def _run_until_a_death(
        self, function: Callable[[Job], None], remaining: dict[int, Job], progress: tqdm
    ) -> bool:
        """Run the remaining jobs and take out those that are done; True if a process died."""
        futures: dict[Future[None], int] = {}
        try:
            executor = self._executor or self._begin()
            for number, job in remaining.items():
                futures[executor.submit(function, job)] = number
            for future in as_completed(futures):
                future.result()
                del remaining[futures[future]]
                progress.update()
        except BrokenProcessPool:
            self._end()
            for future, number in futures.items():
                if number in remaining and future.done() and future.exception() is None:
                    del remaining[number]
                    progress.update()
            return True
        except BaseException:
            self._end()  # what is half done is of no use: do not wait for it
            raise
        return False

    def _begin(self) -> ProcessPoolExecutor:
        # Forked workers would inherit the locks of threads that they do not have.
        context = multiprocessing.get_context("spawn")
        self._pipe = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            self._workers, context, _end_with_build, (self._pipe[0],)
        )
        return self._executor

    def _end(self) -> None:
        """End the workers at once."""
        if self._executor is None or self._pipe is None:
            return
        theirs, ours = self._pipe
        ours.close()
        self._executor.shutdown(cancel_futures=True)
        theirs.close()
        self._executor = self._pipe = None


def _tell_of_death(deaths: int, what: str, num_remaining: int) -> None:
    if deaths >= _MAX_DEATHS:
        raise DataError(
            f"{what}: a worker process was killed {deaths} times without a task done between; "
            "most likely the machine ran out of memory. What is done stays: start again with "
            "fewer --workers."
        )
    _logger.warning("%s: a worker was killed; %d tasks are left", what, num_remaining)


def _end_with_build(lifeline: Connection) -> None:
    """Begin a worker: it ends as soon as the build closes its end of the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build hears it too, and closes the pipe
    log.configure()

    def wait() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


# Rounds in a row without a result that end a build.
_MAX_ROUNDS = 3


class RemoteJob(Protocol):
    """What one call of a job's function works on; picklable."""

    def is_done(self) -> bool:
        """Whether the result is in place, whole."""
        ...


J = TypeVar("J", bound=RemoteJob)


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
        """Run `function(job)` for every job, in any order; see `cdrmix.corpus.remote_jobs.Pool`."""
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


def pack_object(function: Callable[[J], None], job: J) -> bytes:
    """A job as bytes, for `unpack` in a process of another machine."""
    return pickle.dumps(Call(function, job, Path.cwd()))


def unpack_object(content: bytes) -> Call:
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
        write_file(folder / f"{number}.job", pack_object(function, job))


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
    error = unpack_object((folder / f"{number}.job").read_bytes()).run()
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
