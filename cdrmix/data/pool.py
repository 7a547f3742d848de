"""Jobs on processes of this machine, such that a killed one loses nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from tqdm import tqdm

from cdrmix import log
from cdrmix.errors import DataError

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
