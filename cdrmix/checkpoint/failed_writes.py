"""Failed writes of checkpoints, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

from cdrmix import runtime
from cdrmix.checkpoint.files import is_passing
from cdrmix.errors import InfrastructureError, StateError, TrainingError

T = TypeVar("T")
# A full disk fails all ranks alike: an error message names this many of them.
_NAMED_RANKS = 4
# Failures that a disk can cause, and another attempt can mend.
FAILED_WRITES = (OSError, StateError, InfrastructureError)
# A failed write, by file and reason, which may pass by itself (InfrastructureError); None: written.
Failure: TypeAlias = InfrastructureError | StateError | None


def agree_on_failures(action: Callable[[], T]) -> list[T]:
    """Results of `action` on all ranks; if it fails on one, all ranks raise instead of waiting.

    They raise a StateError that names each failing rank, its file and its reason, or an
    InfrastructureError if all may recover by waiting. A defect of this program is raised itself.
    """
    # Result and failure travel in one collective: a rank that failed must not miss it.
    result = None
    cause = None
    failure: Failure = None
    try:
        result = action()
    except Exception as error:  # the others wait in the collective below
        cause = error
        passes = isinstance(error, InfrastructureError) or is_passing(error)
        failure = (InfrastructureError if passes else StateError)(described(error))
    outcomes = runtime.all_gather_object((result, failure))
    if cause is not None and not isinstance(cause, OSError | TrainingError):
        raise cause
    if failure := of_all_ranks([each for _, each in outcomes]):
        raise failure from cause
    return [cast(T, value) for value, _ in outcomes]


def described(error: BaseException) -> str:
    """Error in one line, with file and reason if it concerns a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"


def of_all_ranks(failures: Sequence[Failure]) -> Failure:
    """Failures of all ranks as one, by rank, in one line, which lasts if any does; or None."""
    if not any(failures):
        return None
    named = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
    if len(named) > _NAMED_RANKS:
        named[_NAMED_RANKS:] = [f"and {len(named) - _NAMED_RANKS} more ranks"]
    lasts = any(isinstance(failure, StateError) for failure in failures)
    return (StateError if lasts else InfrastructureError)("; ".join(named))


def as_failure(error: BaseException) -> Failure:
    """Failed write that an error stands for."""
    # Rights to write do not come by waiting, as those to read may while a ticket is renewed.
    passes = is_passing(error) and not isinstance(error, PermissionError)
    is_state = not passes and not isinstance(error, InfrastructureError)
    return (StateError if is_state else InfrastructureError)(described(error))
