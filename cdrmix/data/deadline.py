"""A limit on the processor time that one document may take."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

# The slowest steps read some hundred kB of ordinary text a second, and documents have 32 MiB at
# most unless a recipe allows more.
DOCUMENT_SECONDS = 300.0


class TooSlow(Exception):
    """A document took longer than allowed; raised wherever the process is then."""


class Deadline:
    """Raises `TooSlow` where too much time passes between two calls of `begin`; a context.

    Time of the processor in this process, so that a busy machine and a slow disk change nothing.
    Python hears signals in its main thread alone: in another one there is no limit.
    """

    def __init__(self, seconds: float = DOCUMENT_SECONDS) -> None:
        self._seconds = seconds
        self._is_usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_usable:
            self._before = signal.signal(signal.SIGVTALRM, self._raise)
            self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def begin(self) -> None:
        """Begin the next document."""
        if self._is_usable:
            # Again and again: an exception raised in a destructor is lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, self._seconds)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {self._seconds:g} s of processor time")
