"""Batches read ahead of the steps by threads, in order, within limits that may change meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

# Longest wait for the threads when reading ends.
_CLOSE_SECONDS = 5.0

Work = TypeVar("Work")
Batch = TypeVar("Batch")


class ReadLimits(NamedTuple):
    """Bounds of reading ahead."""

    batches: int  # read or being read, beside the one that is in use; 0: none is read ahead
    threads: int = 1
    max_bytes: int | None = None  # of these batches together, though one is always read; None: any
    pins: bool = False  # read into memory that a GPU copies from while it computes


class ReadFigures(NamedTuple):
    """Work of the reading threads in a span of time."""

    batches: int = 0
    seconds: float = 0.0  # wall time that they spent reading, of all threads together
    cpu_seconds: float = 0.0  # of it on a CPU: the rest is waiting for disk or network


class ReadAhead(Generic[Work, Batch]):
    """Reads batches by threads and gives them in order, whatever the number of threads.

    Args:
        coming: what to read, batch after batch, without an end; never asked by two threads at once.
        read: reads a batch; called by several threads at once.
        num_bytes: bytes of a batch, which are those of all others too.
        limits: to begin with.
    """

    def __init__(
        self,
        coming: Iterator[Work],
        read: Callable[[Work], Batch],
        *,
        num_bytes: Callable[[Batch], int],
        limits: ReadLimits,
    ) -> None:
        self._coming = coming
        self._read = read
        self._num_bytes = num_bytes
        self._limits = limits
        self._change = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._is_closed = False
        self._next = 0  # number of the batch that is given next
        self._last = 0  # of the first one that nobody has asked `coming` for
        self._work: dict[int, Work] = {}  # of batches not given yet
        self._open: list[int] = []  # of these, a heap of those that no thread has in hand
        self._ready: dict[int, Batch | Exception] = {}
        self._figures = ReadFigures()
        self.batch_bytes: int | None = None  # once a batch was read

    def next(self) -> Batch:
        """Waits for the next batch; raises the error of reading it, again at each call."""
        if self._limits.batches == 0 and self._next not in self._work:
            with self._change:
                self._next += 1
                self._last += 1
                work = next(self._coming)
            return self._read_one(work)
        with self._change:
            self._start_threads()
            self._change.wait_for(lambda: self._next in self._ready)
            batch = self._ready[self._next]
            if isinstance(batch, Exception):
                raise batch
            del self._ready[self._next], self._work[self._next]
            self._next += 1
            self._change.notify_all()
            return batch

    @property
    def limits(self) -> ReadLimits:
        """Present bounds."""
        return self._limits

    def set_limits(self, limits: ReadLimits) -> None:
        """Changes the bounds; batches beyond them are dropped, and read again when it is time."""
        with self._change:
            self._limits = limits
            beyond = self._next + max(1, self._room())
            dropped = [
                number
                for number, batch in self._ready.items()
                if number >= beyond and not isinstance(batch, Exception)
            ]
            for number in dropped:
                del self._ready[number]
                heappush(self._open, number)
            if self._threads:
                self._start_threads()
            self._change.notify_all()

    def take_figures(self) -> ReadFigures:
        """Returns the work of the threads since the last call."""
        with self._change:
            figures, self._figures = self._figures, ReadFigures()
        return figures

    def close(self) -> None:
        """Ends the threads; `next` must not be called afterwards."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
            threads = list(self._threads.values())
        # Reading may wait minutes for a file server or an object store. The threads are daemons and
        # end by themselves behind that read, so an ending run does not wait for them.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _room(self) -> int:
        """Batches that may be read or being read, beside the one in use."""
        batches, max_bytes = self._limits.batches, self._limits.max_bytes
        if max_bytes is None or batches == 0:
            return batches
        if self.batch_bytes is None:  # the first one tells
            return 1
        return max(1, min(batches, max_bytes // max(1, self.batch_bytes)))

    def _start_threads(self) -> None:
        for place in range(self._limits.threads if self._limits.batches else 1):
            if place not in self._threads:
                name = f"read-ahead-{place}"
                thread = threading.Thread(
                    target=self._work_through, args=(place,), name=name, daemon=True
                )
                self._threads[place] = thread
                thread.start()

    def _work_through(self, place: int) -> None:
        """Reads one batch after the other, while this thread is among those allowed."""
        while (taken := self._take(place)) is not None:
            number, work = taken
            result: Batch | Exception
            try:
                result = work if isinstance(work, Exception) else self._read_one(work)
            except Exception as error:  # raised where its batch would have been given
                result = error
            with self._change:
                self._ready[number] = result
                self._change.notify_all()

    def _take(self, place: int) -> tuple[int, Work | Exception] | None:
        """Waits for room for another batch; returns its number and what to read, or None where the
        thread is to end."""
        with self._change:
            while not self._is_closed and place < max(1, self._limits.threads):
                first = self._open[0] if self._open else self._last
                # The one that is waited for is read in any case.
                if first == self._next or first < self._next + self._room():
                    if self._open:
                        heappop(self._open)
                        return first, self._work[first]
                    self._last += 1
                    try:
                        self._work[first] = next(self._coming)
                    except Exception as error:
                        return first, error
                    return first, self._work[first]
                self._change.wait()
            del self._threads[place]
            return None

    def _read_one(self, work: Work) -> Batch:
        wall, cpu = time.perf_counter(), time.thread_time()
        batch = self._read(work)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        with self._change:
            done = self._figures
            self._figures = ReadFigures(
                done.batches + 1, done.seconds + wall, done.cpu_seconds + cpu
            )
            if self.batch_bytes is None:
                self.batch_bytes = self._num_bytes(batch)
        return batch
