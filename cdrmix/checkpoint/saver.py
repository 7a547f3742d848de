"""Who saves and finds together: all ranks of a run, or threads that stand for them.

Saves of a run: the state is copied and written while training goes on.

The copy is made beside the next step's forward and backward passes, which change nothing of the
state; before the optimizer does, training waits for what is left of it (`wait_for_copy`).

A save has two phases. In the first each rank writes its share, in the second rank 0 completes the
folder and gives it its name. A phase is over when no rank is at work any more. The ranks find that
out together, in a collective of the main threads: with `votes` and `advance` in one that they have
anyway, or in `wait`. The writing thread takes part in none, so that it cannot get in the way of
those of the training.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from uuid import uuid4

from cdrmix import runtime
from cdrmix.checkpoint import folder
from cdrmix.checkpoint.files import is_passing, json_text, save_number
from cdrmix.checkpoint.folder import RankShare
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.errors import InfrastructureError, StateError, TrainingError
from cdrmix.log import get_logger

T = TypeVar("T")
# A disk that is full is full for all ranks: their reasons are told up to here.
_TOLD_RANKS = 4


class Ranks(Protocol):
    """Who acts together. `cdrmix.runtime` is all ranks of the run."""

    def rank(self) -> int:
        """Number of this rank, from 0."""

    def world_size(self) -> int:
        """How many ranks there are."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in rank order; waits for all of them."""


THIS_RUN: Ranks = runtime


def agree_on_failures(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Every rank's result of `action`; if it fails on one, all ranks raise instead of waiting.

    Raises:
        InfrastructureError: naming each failing rank, if the file system fails for now on all of
            them.
        StateError: naming each failing rank, its file and its reason.
        Exception: on a rank whose failure is a fault of ours, that failure itself.
    """
    result = None
    failure = None
    problem = ""
    try:
        result = action()
    except Exception as error:  # the others wait in the collective below and must be told
        failure = error
        problem = described(error)
    lasts = failure is not None and not isinstance(failure, InfrastructureError)
    lasts = lasts and not is_passing(failure)
    outcomes = ranks.all_gather_object((result, problem, lasts))
    problems = by_rank([text for _, text, _ in outcomes])
    if failure is not None and not isinstance(failure, OSError | TrainingError):
        raise failure
    if problems:
        kind = StateError if any(lasting for *_, lasting in outcomes) else InfrastructureError
        raise kind(problems) from failure
    return [cast(T, value) for value, *_ in outcomes]


def described(error: BaseException) -> str:
    """An error in one line: the file and its reason, where it is one of a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"


def by_rank(problems: list[str]) -> str:
    """The problems of all ranks, by rank, as one line; empty where none has one."""
    told = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    more = len(told) - _TOLD_RANKS
    return "; ".join([*told[:_TOLD_RANKS], *([f"and {more} more ranks"] if more > 0 else [])])


logger = get_logger(__name__)
# Waits before a failed write is tried again: a file server that is busy or moves is mostly back.
RETRY_SECONDS = (1.0, 4.0)
# What a disk can cause, and trying again can mend.
_FAILED_WRITES = (OSError, StateError, InfrastructureError)


@dataclass(frozen=True)
class Problem:
    """A failed write; false where there was none.

    Attributes:
        text: file and reason.
        is_passing: whether the file system may recover by itself.
    """

    text: str = ""
    is_passing: bool = False

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True)
class Saved:
    """A finished save: its folder, what all ranks wrote, and how long it took."""

    path: Path
    bytes: int
    seconds: float


@dataclass
class _Save:
    """A save under way on this rank.

    Attributes:
        step: optimizer steps done.
        began: on the monotonic clock.
        stalled: `Saver.stall_seconds` at that time.
        state: text of state.json.
        before: done by rank 0 before the checkpoint gets its name.
        after: done by rank 0 once it has it.
        taken: this rank's share, once the state may change.
        job: what this rank does in this phase; its result is a problem, or none, for each root.
        problems: of any rank, or none, for each root.
        fault: a failure of this rank that is no failed write.
        is_named: whether this is the second phase.
        number: of the save, counted through all starts and rollbacks; 0 until rank 0 names it.
    """

    step: int
    began: float
    stalled: float
    state: str
    before: Callable[[], None]
    after: Callable[[], None]
    taken: Future[RankShare]
    job: Future[list[Problem]]
    problems: list[Problem]
    fault: BaseException | None = None
    is_named: bool = False
    number: int = 0


class Saver:
    """Writes the checkpoints of a run on this rank, one at a time.

    Every rank makes one, with the same arguments, and calls the same methods in the same order.

    Attributes:
        saved_step: step of the newest checkpoint in the first root, or None.
        last: rank 0's account of it, if this saver wrote it.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        keep: int,
        background: bool,
        pinned: int | None = None,
        ranks: Ranks = THIS_RUN,
    ) -> None:
        """Collective.

        Args:
            roots: folders of checkpoints, seen by all ranks. What cannot be written is an error in
                the first one and a warning in the others.
            keep: number of whole checkpoints to keep in each (>= 1).
            background: copy to memory and write from a thread; otherwise `start` itself writes.
            pinned: step whose checkpoint stays beside those.
            ranks: who writes together.
        """
        self.saved_step: int | None = None
        self.last: Saved | None = None
        self._stalled, self._stalled_since = 0.0, time.monotonic()
        self._is_stalling = False
        self._last_number = 0
        self._roots = tuple(roots)
        self._keep = keep
        self._pinned = pinned
        self._ranks = ranks
        self._token = ranks.all_gather_object(uuid4().hex[:8])[0]
        self._memory = HostMemory() if background else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._save: _Save | None = None

    @property
    def stall_seconds(self) -> float:
        """Spent in `start`, `wait_for_copy` and `wait` so far."""
        now = time.monotonic()
        return self._stalled + (now - self._stalled_since if self._is_stalling else 0.0)

    @property
    def step(self) -> int | None:
        """Step of the save under way, or else of the newest checkpoint."""
        return self.saved_step if self._save is None else self._save.step

    def start(
        self,
        step: int,
        fragments: Iterable[Fragment],
        *,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Save step `step` as it is now, once the save under way is over; collective.

        Args:
            step: optimizer steps done.
            fragments: what this rank holds; over all ranks each element exactly once. In the
                background their values must not change before `wait_for_copy` returns.
            state: JSON, the same on all ranks (rank 0's is written), readable at any layout.
            rank_state: JSON of this rank alone, not to be changed afterwards.
            before: done by rank 0, on the thread, before the checkpoint gets its name.
            after: done by rank 0, on the thread, once it has it in the first root; a failed write
                there is a warning.
        Raises:
            StateError, Exception: of the save under way, as `advance` does.
        """
        with self._stall():
            self._wait()
            stalled = self.stall_seconds
            contents = {**state, "step": step, "world_size": self._ranks.world_size()}
            began = time.monotonic()
            text = json_text(contents)
            problems = self._no_problems()
            taken = self._take(fragments, rank_state)
            job = self._do(lambda: [self._write(r, step, taken.result()) for r in self._roots])
            self._save = _Save(step, began, stalled, text, before, after, taken, job, problems)

    @property
    def is_copying(self) -> bool:
        """Whether the state must not change yet."""
        return self._save is not None and not self._save.taken.done()

    def wait_for_copy(self) -> None:
        """Wait until the state may change; on this rank alone."""
        if self._save is not None and self.is_copying:
            with self._stall():
                self._save.taken.exception()  # waits, and raises nothing: `advance` does

    def votes(self) -> list[float]:
        """Whether this rank is at work in this phase, and for each root whether it failed there.

        To be summed over all ranks.
        """
        if self._save is None or not self._save.job.done():
            return [float(self._save is not None), *(0.0 for _ in self._roots)]
        return [0.0, *(float(bool(problem)) for problem in self._own_problems(self._save))]

    def advance(self, votes: Sequence[float]) -> None:
        """Go on to the next phase, or end the save, where no rank is at work any more; collective.

        Args:
            votes: the sum of all ranks' `votes`.
        Raises:
            StateError: on every rank, if any of them could not write to the first root, tried
                again or not. The older checkpoints and `latest` are then as before, and nothing of
                this one is left there.
            Exception: on a rank whose failure is a fault of ours, that failure itself.
        """
        save = self._save
        (at_work, *failed) = votes
        if save is None or at_work:
            return
        if any(failed):
            self._gather_problems(save)
        if save.is_named:
            self._save = None
            self._conclude(save)
        else:
            save.is_named = True
            is_first = self._ranks.rank() == 0
            save.job = self._do(lambda: self._name(save) if is_first else self._no_problems())

    def wait(self) -> None:
        """Wait until the save under way, if any, is over; collective.

        Raises:
            StateError, Exception: as `advance` does.
        """
        with self._stall():
            self._wait()

    def close(self, *, waits: bool = True) -> None:
        """End the thread of this rank alone; a save under way may stay without its name.

        Args:
            waits: until what it does is done; else it ends with that, while this process goes on.
        """
        if self._thread is not None:
            self._thread.shutdown(wait=waits, cancel_futures=not waits)

    def _wait(self) -> None:
        while self._save is not None:
            self._save.job.exception()  # waits, and raises nothing
            votes = self._ranks.all_gather_object(self.votes())
            self.advance([sum(of_one_kind) for of_one_kind in zip(*votes, strict=True)])

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        self._is_stalling, self._stalled_since = True, time.monotonic()
        try:
            yield
        finally:
            self._stalled = self.stall_seconds
            self._is_stalling = False

    def _take(self, fragments: Iterable[Fragment], state: Mapping[str, Any]) -> Future[RankShare]:
        """This rank's share as it is now: a copy by the thread, or where it lies without one."""
        try:
            share = folder.make_share(self._ranks.rank(), fragments, state)
            copy = None if self._memory is None else self._memory.copier(share.data)
        except Exception as error:  # the other ranks are told with the outcome
            failed = Future[RankShare]()
            failed.set_exception(error)
            return failed
        return self._do(lambda: share if copy is None else replace(share, data=copy()))

    def _do(self, action: Callable[[], T]) -> Future[T]:
        """Have the thread do it, or do it here if there is none."""
        if self._thread is not None:
            return self._thread.submit(action)
        job = Future[T]()
        try:
            job.set_result(action())
        except Exception as error:
            job.set_exception(error)
        return job

    def _write(self, root: Path, step: int, share: RankShare) -> Problem:
        """This rank's part of the first phase, in one root."""
        temporary = self._temporary(root, step)
        is_first = self._ranks.rank() == 0

        def write() -> None:
            folder.prepare(temporary, clears_leftovers=is_first)
            folder.write_share(temporary, share)

        return _problem(lambda: _tried(step, write))

    def _name(self, save: _Save) -> list[Problem]:
        """The second phase: the folders that are whole get their name, the others go."""
        new = self._no_problems()
        for number, (root, problem) in enumerate(zip(self._roots, save.problems, strict=True)):
            try:
                if not problem:
                    new[number] = _problem(lambda root=root: self._name_in(root, save))  # type: ignore[misc]
            finally:
                shutil.rmtree(self._temporary(root, save.step), ignore_errors=True)
        return new

    def _name_in(self, root: Path, save: _Save) -> None:
        step = save.step
        temporary = self._temporary(root, save.step)
        _tried(step, save.before)
        if save.number == 0:  # once, so that copies have the same
            save.number = 1 + _tried(step, self._newest_number)
        parts = _tried(step, lambda: folder.read_parts(temporary, self._ranks.world_size()))
        _tried(step, lambda: folder.complete(temporary, parts, save.state, save=save.number))
        _tried(step, lambda: folder.publish(temporary, step))
        if root == self._roots[0]:
            num_bytes = sum(file["bytes"] for part in parts for file in part.files.values())
            self.last = Saved(root / str(step), num_bytes, time.monotonic() - save.began)
            if problem := _problem(save.after):
                logger.warning("checkpoint of step %d: %s", step, problem.text)
        self._last_number = save.number
        try:
            folder.drop_others(root, step, self._keep, self._pinned)
        except (OSError, InfrastructureError) as error:
            logger.warning("%s: old checkpoints cannot be dropped: %s", root, described(error))

    def _newest_number(self) -> int:
        """Highest number of a save in any root: a rollback goes on counting. A root that is away
        cannot be asked; the others have had every save that it has."""
        numbers = [self._last_number]
        for root in self._roots:
            with contextlib.suppress(OSError, InfrastructureError):
                numbers += [save_number(path) or 0 for path in folder.step_folders(root)]
        return max(numbers)

    def _conclude(self, save: _Save) -> None:
        """Say how the save ended."""
        if save.fault is not None:
            raise save.fault
        problem = save.problems[0]
        if problem:
            told = (
                f"the checkpoint of step {save.step} was not saved: {problem.text}. The older ones "
            )
            if problem.is_passing:
                raise InfrastructureError(
                    f"{told}are as they were. Start again with --resume auto when the file system "
                    "answers"
                )
            raise StateError(
                f"{told}are as they were. Try freeing space, a smaller checkpoint.keep, or a "
                "--run-dir elsewhere that every rank can write"
            )
        self.saved_step = save.step
        if self._ranks.rank() == 0:
            self._tell(save)

    def _tell(self, save: _Save) -> None:
        for root, problem in zip(self._roots[1:], save.problems[1:], strict=True):
            if problem:
                logger.warning(
                    "warning: %s: has no checkpoint of step %d: %s", root, save.step, problem.text
                )
        assert self.last is not None, "it was given its name"
        logger.info(
            "saved %s: %.1f MB in %.2f s, for %.3f s of which training waited",
            *(self.last.path, self.last.bytes / 1e6, self.last.seconds),
            self.stall_seconds - save.stalled,
        )

    def _gather_problems(self, save: _Save) -> None:
        """What went wrong in this phase, from all ranks; collective."""
        of_ranks = self._ranks.all_gather_object(self._own_problems(save))
        new = [
            Problem(
                by_rank([problem.text for problem in of_root]),
                all(problem.is_passing for problem in of_root if problem),
            )
            for of_root in zip(*of_ranks, strict=True)
        ]
        save.problems = [old or fresh for old, fresh in zip(save.problems, new, strict=True)]
        error = save.job.exception()
        if error is not None and not isinstance(error, _FAILED_WRITES):
            save.fault = error

    def _own_problems(self, save: _Save) -> list[Problem]:
        error = save.job.exception()
        return save.job.result() if error is None else [_as_problem(error)] * len(self._roots)

    def _no_problems(self) -> list[Problem]:
        return [Problem()] * len(self._roots)

    def _temporary(self, root: Path, step: int) -> Path:
        return root / f"{step}.tmp-{self._token}"


def _problem(action: Callable[[], None]) -> Problem:
    """The failure that kept `action` from writing, or none."""
    try:
        action()
    except _FAILED_WRITES as error:
        return _as_problem(error)
    return Problem()


def _as_problem(error: BaseException) -> Problem:
    # rights to write do not come by waiting, as those to read may while a ticket is renewed
    passes = is_passing(error) and not isinstance(error, PermissionError)
    return Problem(described(error), passes or isinstance(error, InfrastructureError))


def _tried(step: int, action: Callable[[], T]) -> T:
    """The result of `action`, which is tried again, some time later, where a write fails."""
    for seconds in RETRY_SECONDS:
        try:
            return action()
        except _FAILED_WRITES as error:
            told = step, described(error), seconds
            logger.warning("checkpoint of step %d: %s; tried again in %.0f s", *told)
            time.sleep(seconds)
    return action()
