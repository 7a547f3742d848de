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

from collections.abc import Iterable, Iterator, Sequence

from cdrmix.evaluation.sandbox.levels import LevelState, available_levels, require_level
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
        PlanError: the machine does not have the level.
        DataError: a package of the limits is not installed.
    """
    raise NotImplementedError


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
    """
    raise NotImplementedError


def self_test(level: LevelName = "kernel") -> LevelState:
    """Runs a right program and eight that try to leave the sandbox; takes about 0.2 s.

    Raises:
        PlanError: the machine does not have the level, or a program did what it must not.
    """
    raise NotImplementedError
