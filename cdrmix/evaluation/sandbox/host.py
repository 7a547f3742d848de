"""Runs programs that a model wrote, in a sandbox of the kernel's, many at a time.

A program with `tests` is judged inside its own process: that stops accidents and simple cheats, not
a program that looks for the judge in its own memory. A program with `cases` only computes values
there, which are compared here (two-process mode).

    level = "kernel"
    self_test(level)
    for program, verdict in zip(programs, run_programs(programs, level=level)):
        ...
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from cdrmix.errors import DataError
from cdrmix.evaluation.sandbox.levels import (
    LevelState,
    available_levels,
    interpreter_reach,
    require_level,
)
from cdrmix.evaluation.sandbox.probes import PROBE_LIMITS, check_probes
from cdrmix.evaluation.sandbox.program import (
    Answer,
    Case,
    Kind,
    LevelName,
    Limits,
    Program,
    Verdict,
    equal_values,
)
from cdrmix.evaluation.sandbox.worker import Worker

_WALL_PER_CPU, _WALL_BESIDE_SECONDS = 10, 2.0
# Programs per worker that wait for it, so that one slow program lets the others go on.
_AHEAD = 8

__all__ = [
    "Answer",
    "Case",
    "Kind",
    "LevelName",
    "LevelState",
    "Limits",
    "Program",
    "Verdict",
    "available_levels",
    "equal_values",
    "require_level",
    "run_programs",
    "self_test",
    "values_of",
]


def run_programs(
    programs: Iterable[Program],
    *,
    level: LevelName = "kernel",
    limits: Limits | None = None,
    workers: int | None = None,
) -> Iterator[Verdict]:
    """Runs programs and yields their verdicts, in the order of the programs.

    Programs are taken from the iterable as workers become free. Verdicts do not depend on the
    number of workers.

    Args:
        limits: of each program; None: the default ones.
        workers: programs at a time; None: one less than the cores that this process may use.

    Raises:
        PlanError: the machine does not have the level, or the kernel refuses a guard.
        DataError: a package of the limits is not installed.
        InfrastructureError: the process that forks those of the programs was lost twice.
    """
    require_level(level)
    limits = limits or Limits()
    interpreter_reach(limits.packages)  # tells of a missing package here, not at the first verdict
    return _verdicts(programs, level, limits, workers or max(1, _cores() - 1))


def _verdicts(
    programs: Iterable[Program], level: LevelName, limits: Limits, workers: int
) -> Iterator[Verdict]:
    wall_seconds = wall_limit(limits, workers)
    free: SimpleQueue[Worker] = SimpleQueue()
    started: list[Worker] = []

    def run_one(program: Program) -> Verdict:
        worker = free.get()
        try:
            return worker.run(program, wall_seconds)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
    try:
        # In this thread: bubblewrap ends with the thread that started it.
        for _ in range(workers):
            started.append(Worker(level, limits))
            free.put(started[-1])
        waiting: deque[Future[Verdict]] = deque()
        for program in programs:
            waiting.append(pool.submit(run_one, program))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.close()
        pool.shutdown()


def wall_limit(limits: Limits, workers: int) -> float:
    """Seconds on the clock that a program may take: far more than its processor time needs.

    The machine's load counts, as a program that waits for a core must not fail for it.
    """
    if limits.wall_seconds is not None:
        return limits.wall_seconds
    crowd = max(1.0, (os.getloadavg()[0] + workers) / _cores())
    return (_WALL_PER_CPU * limits.cpu_seconds + _WALL_BESIDE_SECONDS) * crowd


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def values_of(
    source: str,
    expressions: Sequence[str],
    *,
    setup: str = "",
    level: LevelName = "kernel",
    limits: Limits | None = None,
) -> tuple[Answer, ...]:
    """Values of expressions in the names of a program, computed in the sandbox.

    For a trusted source, such as a task's right solution, from which expected values are made.

    Returns:
        one answer for each expression.

    Raises:
        DataError: the program did not come to its end, with the kind of its verdict.
        PlanError: as of `run_programs`.
    """
    cases = tuple(Case(expression) for expression in expressions)
    program = Program(source, setup=setup, cases=cases)
    (verdict,) = run_programs([program], level=level, limits=limits, workers=1)
    if len(verdict.answers) != len(expressions):
        raise DataError(
            f"sandbox: a program gave {len(verdict.answers)} of {len(expressions)} values: "
            f"{verdict.kind} {verdict.error} {verdict.message}"
        )
    return verdict.answers


def self_test(level: LevelName = "kernel") -> LevelState:
    """Runs a right program and eight that try to leave the sandbox; takes about 0.2 s.

    Raises:
        PlanError: the machine does not have the level, or a program did what it must not.
    """
    state = require_level(level)
    worker = Worker(level, PROBE_LIMITS)
    try:
        check_probes(worker, wall_limit(PROBE_LIMITS, 1))
    finally:
        worker.close()
    return state
