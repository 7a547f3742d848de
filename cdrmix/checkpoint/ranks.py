"""Who saves and finds together: all ranks of a run, or threads that stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from cdrmix import runtime
from cdrmix.checkpoint.files import is_passing
from cdrmix.errors import InfrastructureError, StateError, TrainingError

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


def together(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Every rank's result of `action`; if it fails on one, all ranks raise instead of waiting.

    Raises:
        InfrastructureError: naming each failing rank, if the file system fails for now on all of
            them.
        StateError: naming each failing rank, its file and its reason.
        Exception: on a rank whose failure is a fault of ours, that failure itself.
    """
    result, failure, problem = None, None, ""
    try:
        result = action()
    except Exception as error:  # the others wait in the collective below and must be told
        failure, problem = error, described(error)
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
