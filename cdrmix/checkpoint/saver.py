"""Saves of a run: the state is copied and written while training goes on.

The copy is made during the next step's forward and backward passes, which do not change the state;
before the optimizer does, training waits for the rest of the copy (`wait_for_copy`).

A save has two phases. In the first each rank writes its share, in the second rank 0 completes the
folder and gives it its name. A phase ends when every rank is done with it, which the main threads
find out in a collective: with `votes` and `advance` in one that training needs anyway, or in
`wait`. The writing thread takes part in none, so that it cannot come between those of the training.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from cdrmix import runtime
from cdrmix.checkpoint import folder
from cdrmix.checkpoint.candidates import step_folders
from cdrmix.checkpoint.failed_writes import (
    FAILED_WRITES,
    Failure,
    as_failure,
    described,
    of_all_ranks,
)
from cdrmix.checkpoint.files import save_number
from cdrmix.checkpoint.fragments import Fragment
from cdrmix.checkpoint.held_out import (
    Score,
    ScoredCheckpoint,
    best_checkpoint,
    manifest_digest,
    record_score,
)
from cdrmix.checkpoint.host_memory import HostMemory
from cdrmix.checkpoint.retention import Retention
from cdrmix.errors import InfrastructureError, StateError
from cdrmix.log import get_logger

T = TypeVar("T")
logger = get_logger(__name__)
# Pauses before a failed write is repeated: a file server that is busy or moves is mostly back.
RETRY_SECONDS = (1.0, 4.0)


@dataclass(frozen=True)
class Saved:
    """A finished save: its folder, the bytes of all ranks, and its duration."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """State of this rank at a step, copied while training goes on."""

    step: int  # optimizer steps done
    number: int  # of the save, counted through all starts and rollbacks
    began: float  # start on the monotonic clock
    stalled: float  # `Saver.stall_seconds` at that time
    state: str  # text of state.json
    rank_state: Mapping[str, Any]
    listed: list[Fragment]
    copy: Future[list[torch.Tensor]]  # of this rank's values; done once the state may change


@dataclass
class Save:
    """A save under way on this rank."""

    snapshot: Snapshot
    roots: Sequence[Path]  # where it is written
    score: Score | None  # of this state, if it was evaluated
    before: Callable[[], None]  # rank 0 runs it before the checkpoint gets its name
    after: Callable[[], None]  # and this one after it
    temporary: str  # name of the folder in each root while it is written
    job: Future[list[Failure]]  # work of this rank in this phase; a result for each root
    problems: list[Failure]  # those of all ranks, for each root
    fault: BaseException | None = None  # a failure of this rank that is not a failed write
    is_named: bool = False  # true in the second phase

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.snapshot.step


class Saver:
    """Writes the checkpoints of a run on this rank, one at a time. Every rank creates one, with the
    same arguments, and calls the same methods in the same order."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        keep: int | Sequence[int],
        background: bool,
        ranks: Sequence[int] | None = None,
        pinned: int | None = None,
        keep_best: bool = False,
        retention: Retention | None = None,
        saved: Callable[[int, Path], None] = lambda *_: None,
    ) -> None:
        """Collective.

        Args:
            roots: folders of checkpoints, shared by all ranks. A failed write is an error in the
                first one and a warning in the others.
            keep: number of whole checkpoints to keep in each (>= 1), besides that of step `pinned`;
                one for all, or one for each.
            background: copy to memory and write from a thread; otherwise `start` itself writes.
            ranks: those that write into these folders, of which the first completes and names
                checkpoints; None: all.
            pinned: a step whose checkpoint is not dropped.
            keep_best: record scores beside the checkpoints, and keep the one with the best besides
                the newest.
            retention: a user's rule for those that stay, in place of `keep`.
            saved: called on every rank with step and folder once a checkpoint has its name, by
                the thread that calls `advance` or `wait`.
        """
        # Newest checkpoint in the first root, and that save, on rank 0 and if this saver made it.
        self.saved_step: int | None = None
        self.last: Saved | None = None
        self._stalled = 0.0
        self._stalled_since: float | None = None
        self._roots = tuple(roots)
        self._ranks = range(runtime.world_size()) if ranks is None else ranks
        self._is_first = runtime.rank() == self._ranks[0]
        keeps = [keep] * len(roots) if isinstance(keep, int) else keep
        self._keep = dict(zip(self._roots, keeps, strict=True))
        self._pinned = pinned
        self._keep_best = keep_best
        self._retention = retention
        self._saved = saved
        # Another process of this run may still be writing: its temporary folders have other names.
        own = uuid4().hex[:8], self._number_in_roots() if self._is_first else 0
        tokens, numbers = zip(*runtime.all_gather_object(own), strict=True)
        self._token = tokens[0]
        # Alike on all ranks, which count their saves in the same order.
        self._last_number = max(numbers)
        # A single thread keeps the copy, the write and the naming of a save in order.
        self._memory = HostMemory() if background else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._save: Save | None = None

    @property
    def stall_seconds(self) -> float:
        """Time spent in `start`, `wait_for_copy` and `wait` so far."""
        since = self._stalled_since
        return self._stalled + (0.0 if since is None else time.monotonic() - since)

    @property
    def newest_number(self) -> int:
        """Number of the newest save, counted through all starts and rollbacks."""
        return self._last_number

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
        score: Score | None = None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save the present state, after the save under way has ended; collective.

        Args:
            fragments: parts of tensors on this rank; over all ranks each element exactly once. In
                the background their values must not change before `wait_for_copy` returns.
            state: JSON, the same on all ranks (rank 0's is written), readable at any layout.
            rank_state: JSON of this rank alone, not to be changed afterwards.
            score: of this state; None: not evaluated.
            before: run by rank 0, on the thread, before the checkpoint gets its name.
            after: likewise, once it has it in the first root; a failed write there is a warning.
        Raises:
            StateError, Exception: of the save under way, as `advance` does.
        """
        self.wait()
        with self._stall():
            self._last_number += 1
            self._begin(
                self.snapshot(step, fragments, state, rank_state, self._last_number),
                *(self._roots, score, before, after),
            )

    def snapshot(
        self,
        step: int,
        fragments: Iterable[Fragment],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        number: int,
    ) -> Snapshot:
        """Begins to copy the present state."""
        stalled = self.stall_seconds
        began = time.monotonic()
        contents = {**state, "step": step, "world_size": runtime.world_size()}
        # As text, because it is written by another thread, when the run has changed the values.
        text = json.dumps(contents, indent=1) + "\n"
        listed: list[Fragment] = []
        try:
            listed += fragments
            data = [fragment.values for fragment in folder.in_file_order(listed)]
            # Without a thread the state cannot change before it is written: no copy is needed.
            copied = (lambda: data) if self._memory is None else self._memory.copier(data)
        except Exception as error:  # reported to the other ranks with the outcome of the save
            copy = Future[list[torch.Tensor]]()
            copy.set_exception(error)
        else:
            copy = self._run(copied)
        return Snapshot(step, number, began, stalled, text, rank_state, listed, copy)

    def _begin(
        self,
        snapshot: Snapshot,
        roots: Sequence[Path],
        score: Score | None,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        """Begins the first phase of a save to some of the roots."""
        temporary = f"{snapshot.step}.tmp-{self._token}"

        def write(root: Path, values: list[torch.Tensor]) -> None:
            folder.prepare(root / temporary, clears_leftovers=self._is_first)
            folder.write_share(
                *(root / temporary, runtime.rank(), snapshot.listed, values, snapshot.rank_state)
            )

        def write_all() -> list[Failure]:
            values = snapshot.copy.result()  # outside: a failed copy is not tried again
            return [
                _problem(partial(self._check_room, root, values))
                or _problem(partial(_retried, snapshot.step, partial(write, root, values)))
                if root in roots
                else None
                for root in self._roots
            ]

        self._save = Save(
            *(snapshot, roots, score, before, after, temporary, self._run(write_all)),
            problems=[None] * len(self._roots),
        )

    def _check_room(self, root: Path, values: list[torch.Tensor]) -> None:
        """Raises OSError or StateError where a folder is not to be written, which no other attempt
        mends; a full disk tells so itself."""

    @property
    def is_copying(self) -> bool:
        """True while the state must not change."""
        return self._save is not None and not self._save.snapshot.copy.done()

    def wait_for_copy(self) -> None:
        """Waits until the state may change; on this rank alone."""
        if self._save is not None and self.is_copying:
            with self._stall():
                self._save.snapshot.copy.exception()  # waits, and raises nothing: `advance` does

    def votes(self) -> list[float]:
        """Numbers to be summed over all ranks for `advance`: 1 if this rank is at work in this
        phase, else 0; then 1 for each root where it failed."""
        if self._save is None or not self._save.job.done():
            return [float(self._save is not None), *(0.0 for _ in self._roots)]
        # One number per root, so that a failed replica does not fail the save in the run directory.
        return [0.0, *(float(problem is not None) for problem in self._problems_here(self._save))]

    def advance(self, votes: Sequence[float]) -> None:
        """Begins the next phase, or ends the save, once the sum of all ranks' votes says that no
        rank is at work; collective.

        Raises StateError on every rank if any of them could not write to the first root in any
        attempt (InfrastructureError if the file system may recover): the older checkpoints and
        `latest` are then as before, and nothing of this one remains there. A defect of this program
        is raised itself.
        """
        save = self._save
        at_work, *failed = votes
        if save is None or at_work:
            return
        if any(failed):  # the usual save needs no collective of objects
            of_ranks = runtime.all_gather_object(self._problems_here(save))
            for number, of_root in enumerate(zip(*of_ranks, strict=True)):
                # A root that failed in the first phase gets no name in the second.
                save.problems[number] = save.problems[number] or of_all_ranks(of_root)
            error = save.job.exception()
            if error is not None and not isinstance(error, FAILED_WRITES):
                save.fault = error
        if save.is_named:
            self._save = None
            self._conclude(save)
        else:
            save.is_named = True
            none: list[Failure] = [None] * len(self._roots)
            # The folder is shared: a second rank's rename would find nothing to rename.
            save.job = self._run(lambda: self._name(save) if self._is_first else none)

    def wait(self) -> None:
        """Waits for the end of a save under way; collective. Raises as `advance` does."""
        with self._stall():
            # At most twice: once for each phase of the save.
            while self._save is not None:
                self._save.job.exception()  # waits, and raises nothing
                # No step follows whose collective could carry the votes.
                votes = runtime.all_gather_object(self.votes())
                self.advance([sum(of_one_kind) for of_one_kind in zip(*votes, strict=True)])

    def close(self, *, waits: bool = True) -> None:
        """Ends the thread of this rank alone; a save under way may remain without its name. Waits
        for the job at work, or has the thread end after it while this returns."""
        if self._thread is not None:
            self._thread.shutdown(wait=waits, cancel_futures=not waits)

    def evaluated(self, score: Score) -> None:
        """Records the score of the newest checkpoint, which may make another one the best; on rank
        0 alone, between two saves. A failed write is a warning."""
        step = self.saved_step
        assert self._save is None, "a save is under way"
        if step is None:
            return
        for root in self._roots:
            try:
                self._record(root, step, root / str(step), score)
            except (OSError, StateError, InfrastructureError) as error:
                logger.warning("warning: checkpoint of step %d: %s", step, described(error))
            else:
                self._drop_others(root, step)

    def best(self) -> ScoredCheckpoint | None:
        """Best checkpoint of the first root; None if none was evaluated, or none is looked for."""
        return best_checkpoint(self._roots[0]) if self._keep_best else None

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        self._stalled_since = time.monotonic()
        try:
            yield
        finally:
            self._stalled = self.stall_seconds
            self._stalled_since = None

    def _run(self, action: Callable[[], T]) -> Future[T]:
        """Runs `action` on the writer thread, or inline when saving synchronously."""
        if self._thread is not None:
            return self._thread.submit(action)
        job = Future[T]()
        try:
            # A failure is stored here, too: all ranks must reach the collective that reports it.
            job.set_result(action())
        except Exception as error:
            job.set_exception(error)
        return job

    def _name(self, save: Save) -> list[Failure]:
        """Second phase: names the folders that are whole, and deletes the others."""
        problems = []
        for root, earlier in zip(self._roots, save.problems, strict=True):
            try:
                is_left_out = earlier or root not in save.roots
                problems.append(
                    None if is_left_out else _problem(partial(self._name_in, root, save))
                )
            finally:
                # Nothing stays of a failed save; of a named one nothing is left under this name.
                shutil.rmtree(root / save.temporary, ignore_errors=True)
        return problems

    def _name_in(self, root: Path, save: Save) -> None:
        step, number, state = save.step, save.snapshot.number, save.snapshot.state
        temporary = root / save.temporary
        _retried(step, save.before)
        is_whole = len(self._ranks) == runtime.world_size()
        # Two attempts, not one: `complete` deletes the accounts that are read here.
        accounts = [temporary / f"rank-{n:05d}.part" for n in self._ranks]
        parts = _retried(step, lambda: [json.loads(each.read_text("utf-8")) for each in accounts])
        complete = partial(folder.complete, temporary, parts, state, is_whole=is_whole)
        _retried(step, lambda: complete(save=number))
        # Before the name: a kill between the two leaves no checkpoint without its score.
        _retried(step, lambda: self._record(root, step, temporary, save.score))
        _retried(step, lambda: folder.publish(temporary, step))
        if root == self._roots[0]:
            num_bytes = sum(file["bytes"] for part in parts for file in part["files"].values())
            seconds = time.monotonic() - save.snapshot.began
            self.last = Saved(root / str(step), num_bytes, seconds)
            if problem := _problem(save.after):  # the checkpoint has its name, and is whole
                logger.warning("checkpoint of step %d: %s", step, problem)
        self._drop_others(root, step)

    def _record(self, root: Path, step: int, checkpoint: Path, score: Score | None) -> None:
        """Records the score of a folder that is complete, if it may be the best."""
        if self._keep_best and score is not None and math.isfinite(score.value):
            manifest = manifest_digest(checkpoint)
            if manifest is not None:  # a replica may lack it
                record_score(root, ScoredCheckpoint(step, manifest, score))

    def _number_in_roots(self) -> int:
        """Number of the newest save in the roots, of earlier starts and of steps that a rollback
        has left behind."""
        numbers = [0]
        for each in self._roots:
            # A root that does not answer is left out; the others have every save that it has.
            with contextlib.suppress(OSError, InfrastructureError):
                numbers += [save_number(path) or 0 for path in step_folders(each)]
        return max(numbers)

    def _pinned_steps(self) -> frozenset[int]:
        """Steps whose checkpoints are not dropped."""
        return frozenset() if self._pinned is None else frozenset({self._pinned})

    def _drop_others(self, root: Path, step: int) -> None:
        try:
            folder.drop_others(
                *(root, step, self._keep[root], self._pinned_steps()),
                keep_best=self._keep_best,
                retention=self._retention,
            )
        except (OSError, StateError, InfrastructureError) as error:
            logger.warning("%s: old checkpoints cannot be dropped: %s", root, described(error))

    def _conclude(self, save: Save) -> None:
        """Reports the end of a save; raises if it failed in the first root."""
        if save.fault is not None:
            raise save.fault
        first, *others = save.problems
        if first is not None:
            advice = "Start again with --resume auto when the file system answers"
            if isinstance(first, StateError):
                advice = (
                    "Try freeing space, a smaller checkpoint.keep, or a --run-dir elsewhere that "
                    "every rank can write"
                )
            raise type(first)(
                f"the checkpoint of step {save.step} was not saved: {first}. The older ones are as "
                f"they were. {advice}"
            )
        self.saved_step = save.step
        if runtime.rank() == 0:
            for root, problem in zip(self._roots[1:], others, strict=True):
                if problem:
                    where = (root, save.step, problem)
                    logger.warning("warning: %s: has no checkpoint of step %d: %s", *where)
            assert self.last is not None, "the second phase has set it"
            logger.info(
                "saved %s: %.1f MB in %.2f s, for %.3f s of which training waited",
                *(self.last.path, self.last.bytes / 1e6, self.last.seconds),
                self.stall_seconds - save.snapshot.stalled,
            )
        self._saved(save.step, self._roots[0] / str(save.step))

    def _problems_here(self, save: Save) -> list[Failure]:
        """Problems of this rank in this phase, whose job is done, for each root."""
        error = save.job.exception()
        return [as_failure(error) for _ in self._roots] if error else save.job.result()


def _problem(action: Callable[[], None]) -> Failure:
    """Runs `action`, and returns the failed write that ended it, or None."""
    try:
        action()
    except FAILED_WRITES as error:
        return as_failure(error)
    return None


def _retried(step: int, action: Callable[[], T]) -> T:
    """Calls `action`, again after pauses while writes fail, and returns its result."""
    for seconds in RETRY_SECONDS:
        try:
            return action()
        except FAILED_WRITES as error:
            text = "checkpoint of step %d: %s; tried again in %.0f s"
            logger.warning(text, step, described(error), seconds)
            time.sleep(seconds)
    # The last attempt: its failure is that of the save.
    return action()
