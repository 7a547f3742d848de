"""Runs the jobs of a data build, in processes of this machine or of many that share its files.

Each job makes a result that shows by itself that it exists. An engine may therefore lose, repeat
or kill jobs: those without a result run again in the next round.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from tqdm import tqdm

from cdrmix import errors, log
from cdrmix.config.plugin_folder import plugin_folder, use_plugin_folder
from cdrmix.data.shards import write_file
from cdrmix.errors import DataError, TrainingError

EngineName = Literal["local", "slurm", "ray"]
# Deaths of worker processes in a row, without a job done between them, that end a build.
_MAX_DEATHS = 3
# Deaths of the worker that had a job for itself, after which the job is to blame.
_DEATHS_TO_BLAME = 2
# Rounds in a row without a result that end a build.
_MAX_ROUNDS = 3
_logger = log.get_logger(__name__)


class RemoteJob(Protocol):
    """Argument of one call of a job's function; picklable."""

    def is_done(self) -> bool:
        """Returns True if the result exists as a whole."""
        ...


J = TypeVar("J", bound=RemoteJob)
Function = Callable[[J], None]
# Called with a job that ended alone, twice, without a result; returns True if the job will leave
# out the input that caused it.
Blame = Callable[[J], bool]


@dataclass(frozen=True)
class Amounts:
    """Size of each job, for the progress: jobs differ too much for their number to tell the rest.

    Attributes:
        unit: B for bytes, or a word such as tokens.
        of_jobs: in the order of the jobs.
    """

    unit: str
    of_jobs: Sequence[int]

    @classmethod
    def of_number(cls, num_jobs: int) -> Amounts:
        """Returns equal amounts, where no size is known: the progress counts tasks."""
        return cls("tasks", [1] * num_jobs)

    def bar(self, what: str) -> tqdm:
        """Returns a progress bar over all jobs; none is shown where stderr is not a terminal."""
        # tqdm writes the unit right after the number: 1.2MB, but 1.2M tokens.
        unit = self.unit if self.unit == "B" else f" {self.unit}"
        return tqdm(
            total=sum(self.of_jobs),
            desc=what,
            unit=unit,
            unit_scale=self.unit != "tasks",
            disable=None,
            leave=False,
        )


class Engine(ABC):
    """Runs the jobs of a build; a context manager, whose end ends all running jobs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    @abstractmethod
    def end(self) -> None:
        """Ends all running jobs at once."""

    @abstractmethod
    def run_all(
        self,
        function: Function[J],
        jobs: Sequence[J],
        *,
        what: str,
        blame: Blame[J] | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        """Runs `function(job)` for every job, in any order.

        A job whose process was killed runs again, so its result must appear at once, and a second
        run must leave an existing result alone.

        Args:
            function: of module level, as are its jobs' classes.
            what: name of the jobs in messages.
            amounts: sizes of the jobs for the progress; None: it counts jobs.
        Raises:
            DataError: if jobs end again and again without a result; and all that a job raises,
                after which no job starts.
        """


class Pool(Engine):
    """Worker processes of this machine, started with the first jobs.

    Args:
        workers: processes; with one, jobs run in this process.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._pipe: tuple[Connection, Connection] | None = None

    def end(self) -> None:
        """Ends the workers at once."""
        if self._executor is None or self._pipe is None:
            return
        workers_end, own_end = self._pipe
        # Closing this end is what ends the workers, so it comes before the wait for them.
        own_end.close()
        self._executor.shutdown(cancel_futures=True)
        workers_end.close()
        self._executor = self._pipe = None

    def run_all(
        self,
        function: Function[J],
        jobs: Sequence[J],
        *,
        what: str,
        blame: Blame[J] | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        """Runs all jobs, with or without a result."""
        amounts = amounts or Amounts.of_number(len(jobs))
        with amounts.bar(what) as progress:

            def done(number: int) -> None:
                progress.update(amounts.of_jobs[number])

            # A job that may kill its process gets a worker, even if it is the only one.
            if self._workers == 1 or (len(jobs) == 1 and blame is None):
                for number, job in enumerate(jobs):
                    function(job)
                    done(number)
                return
            remaining = dict(enumerate(jobs))
            deaths = 0
            while remaining:
                num_before = len(remaining)
                if not self._run_until_a_death(function, remaining, done):
                    continue
                deaths = deaths + 1 if len(remaining) == num_before else 1
                _report_death(deaths, what, len(remaining))
                # Workers take jobs in order, so they had the first of these. Run one at a time,
                # they show which of them was the cause, unless it was all of them together.
                for number in list(remaining)[: self._workers]:
                    deaths_alone = 0
                    while self._run_until_a_death(function, {number: jobs[number]}, done):
                        deaths_alone += 1
                        if deaths_alone == _DEATHS_TO_BLAME and blame and blame(jobs[number]):
                            deaths = deaths_alone = 0
                            continue
                        deaths += 1
                        _report_death(deaths, what, len(remaining))
                    del remaining[number]
                    deaths = 0

    def _run_until_a_death(
        self, function: Function[J], remaining: dict[int, J], done: Callable[[int], None]
    ) -> bool:
        """Runs the remaining jobs and removes finished ones; returns True if a process died.

        Args:
            done: called with the number of each job that has ended.
        """
        futures: dict[Future[None], int] = {}
        try:
            if self._executor is None:
                # Forked workers would inherit the locks of threads that they do not have.
                context = multiprocessing.get_context("spawn")
                self._pipe = context.Pipe(duplex=False)
                self._executor = ProcessPoolExecutor(
                    self._workers, context, _begin_worker, (self._pipe[0], plugin_folder())
                )
            for number, job in remaining.items():
                futures[self._executor.submit(function, job)] = number
            for future in as_completed(futures):
                future.result()
                del remaining[futures[future]]
                done(futures[future])
        except BrokenProcessPool:
            self.end()
            # One death breaks all futures that are open, but some were done and not yet removed.
            for future, number in futures.items():
                if number in remaining and future.done() and future.exception() is None:
                    del remaining[number]
                    done(number)
            return True
        except BaseException:
            self.end()  # half a result is of no use: do not wait for it
            raise
        return False


def _report_death(deaths: int, what: str, num_remaining: int) -> None:
    if deaths >= _MAX_DEATHS:
        raise DataError(
            f"{what}: a worker process was killed {deaths} times without a task done between; "
            "most likely the machine ran out of memory. Finished work stays: start again with "
            "fewer --workers."
        )
    _logger.warning("%s: a worker was killed; %d tasks are left", what, num_remaining)


def _begin_worker(lifeline: Connection, plugins: Path | None) -> None:
    """Prepares a worker: it imports from the folder of plug-ins, and ends as soon as the build
    closes its end of the pipe, or dies."""
    use_plugin_folder(plugins)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the build receives it too, and closes the pipe
    log.configure()

    def wait() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    # A thread, since the worker's main thread waits for jobs and runs them.
    threading.Thread(target=wait, name="lifeline", daemon=True).start()


class RoundsEngine(Engine):
    """Runs all jobs without a result, and again those that a round leaves without one."""

    logs: str  # place of the engine's own messages

    @abstractmethod
    def run_round(self, function: Function[J], jobs: Sequence[J], show: Callable[[], None]) -> None:
        """Runs each job in a process of its own; calls `show` now and then, to show the progress.

        Raises:
            TrainingError, OSError: raised by a job.
        """

    def run_all(
        self,
        function: Function[J],
        jobs: Sequence[J],
        *,
        what: str,
        blame: Blame[J] | None = None,
        amounts: Amounts | None = None,
    ) -> None:
        """Runs all jobs without a result; three rounds in a row without any end a build."""
        remaining = [job for job in jobs if not job.is_done()]
        failures = 0
        suspects: list[J] = []
        amounts = amounts or Amounts.of_number(len(jobs))
        amount_of = dict(zip(map(id, jobs), amounts.of_jobs, strict=True))
        with amounts.bar(what) as progress:

            def show() -> None:
                still_open = sum(amount_of[id(job)] for job in remaining if not job.is_done())
                progress.update(sum(amounts.of_jobs) - still_open - progress.n)

            while remaining:
                self.run_round(function, remaining, show)
                show()
                unfinished = [job for job in remaining if not job.is_done()]
                failures = failures + 1 if len(unfinished) == len(remaining) else 0
                # A first failure says little: queues lose and preempt jobs.
                again = [job for job in unfinished if job in suspects]
                culprits = [job for job in again if blame is not None and blame(job)]
                suspects = [job for job in unfinished if job not in culprits]
                failures = 0 if culprits else failures
                if failures == _MAX_ROUNDS:
                    raise DataError(
                        f"{what}: {len(unfinished)} jobs ended {failures} times without a result: "
                        "killed, most likely for want of memory or time, or broken. See "
                        f"{self.logs}. Finished work stays: start again to continue."
                    )
                if unfinished:
                    number = len(unfinished)
                    _logger.warning("%s: %d jobs ended without a result; again", what, number)
                remaining = unfinished


def pack_job(function: Function[J], job: J) -> bytes:
    """Returns a call as bytes, for `run_packed` in a process of another machine."""
    # Relative paths of recipe and result start at the working directory of the build.
    return pickle.dumps((function, job, Path.cwd(), plugin_folder()))


def run_packed(content: bytes) -> TrainingError | OSError | None:
    """Runs a job of `pack_job`; returns an error that a user can correct instead of raising it."""
    function, job, folder, plugins = pickle.loads(content)
    use_plugin_folder(plugins)
    try:
        with contextlib.chdir(folder):
            function(job)
    except (TrainingError, OSError) as error:
        return error
    return None


def write_calls(folder: Path, function: Function[J], jobs: Sequence[J]) -> None:
    """Writes each job to a file of its own, so that its process need not read the others."""
    # For the owner alone: the jobs are executed.
    folder.mkdir(parents=True, mode=0o700)
    for number, job in enumerate(jobs):
        write_file(folder / f"{number}.job", pack_job(function, job))


def run_call(folder: Path, number: int) -> None:
    """Runs a job that `write_calls` wrote; writes an error that a user can correct beside it.

    Raises:
        DataError: if other users than this one could have written into the folder.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise DataError(
            f"{folder}: must be a folder of user {os.geteuid()} that nobody else can use (mode "
            f"0700): its jobs are code. It is of user {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Delete it and start the build again."
        )
    error = run_packed((folder / f"{number}.job").read_bytes())
    if error is not None:
        write_file(folder / f"{number}.error", error_as_json(error))
        raise error


def error_as_json(error: TrainingError | OSError) -> bytes:
    """Returns an error as JSON, for a process of another machine."""
    # JSON rather than pickle: reading an error must not execute code of the other machine.
    values: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, OSError):
        values = {"kind": "OSError", "arguments": [str(error)]}  # pyarrow's have no number
        if error.errno is not None:
            filename = None if error.filename is None else os.fsdecode(error.filename)
            values["arguments"] = [error.errno, error.strerror, filename]
    return json.dumps(values).encode()


def error_from_json(content: bytes) -> TrainingError | OSError:
    """Returns the error of `error_as_json`; a DataError if its class is not in `cdrmix.errors`."""
    values = json.loads(content)
    if values["kind"] == "OSError":
        return OSError(*values["arguments"])
    kind = getattr(errors, values["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, TrainingError)):
        kind = DataError
    error: TrainingError = kind(values["text"])
    return error
