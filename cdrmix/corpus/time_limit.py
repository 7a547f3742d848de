"""The most processor time that one document may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Self

from cdrmix.data.document import Document

# The slowest steps read some hundred kB of ordinary text a second, and documents have 32 MiB at
# most unless a recipe allows more.
DOCUMENT_SECONDS = 300.0


class TooSlow(Exception):
    """A document took longer than allowed; raised at any place in the code."""


class TimeLimit:
    """Passes documents on, leaves out slow ones, and raises `TooSlow` at one that takes too long.

    Limits the time as a context manager only. Counts processor time of this process, so a busy
    machine or a slow disk changes nothing. Python delivers signals to its main thread only: there
    is no limit in another thread.
    """

    def __init__(self, slow: Collection[str], seconds: float = DOCUMENT_SECONDS) -> None:
        self.now: str | None = None  # id of the document in the steps
        self._slow = slow
        self._seconds = seconds
        self._is_usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        def raise_too_slow(number: int, frame: FrameType | None) -> None:
            raise TooSlow(f"more than {self._seconds:g} s of processor time")

        if self._is_usable:
            self._before = signal.signal(signal.SIGVTALRM, raise_too_slow)
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def _begin(self) -> None:
        """Starts the time of the next document."""
        if self._is_usable:
            # Repeated: Python ignores an exception that is raised in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, self._seconds)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if document.id not in self._slow:
                self.now = document.id
                self._begin()
                yield document
                # Too much time from here on is that of reading, which `Task.read` sets aside.
                self.now = None
            # Also before the next one is read, which has a limit of its own.
            self._begin()
