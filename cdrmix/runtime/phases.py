"""Phases of a step, which a profiler and the account of memory attend. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation")
Phase = Literal["data", "forward", "backward", "optimizer", "checkpoint", "evaluation"]
# Makes a context of a phase's name, entered on the thread that trains.
Watcher = Callable[[str], AbstractContextManager[Any]]

_watchers: list[Watcher] = []
_UNWATCHED = contextlib.nullcontext()


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Context of a phase, for those who watch; they may nest, as a wait for a checkpoint's copy in
    the optimizer does."""
    if not _watchers:
        return _UNWATCHED
    if len(_watchers) == 1:
        return _watchers[0](name)
    return _watched(name)


@contextlib.contextmanager
def _watched(name: Phase) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for watcher in _watchers:
            stack.enter_context(watcher(name))
        yield


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Has a watcher attend the phases that begin while the context lasts."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
