"""The side of a tracker that gives: a bounded queue in front of the tracker's process.

Nothing here waits for the process but `close_feeds`, which has a limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from cdrmix.tracking.writer import IGNORED, Job

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); import cdrmix.tracking.writer as w; w.main()"
)
_MOST_LINES = 1_000  # that wait: a MB or two, and hours of a run
_SECONDS_BETWEEN_LOOKS = 0.01


class Feed:
    """Lines of metrics on their way to the process of one tracker."""

    def __init__(self, job: Job, *, name: str, most_lines: int | None = _MOST_LINES) -> None:
        """Starts the process; `most_lines` may wait for it, None: any number."""
        self.name = name
        self.dropped = 0  # lines that the tracker has not written, and will not
        self.why: str | None = None  # the first trouble
        self.written = 0
        self._most_lines = most_lines
        self._num_open = 0  # lines given and neither written nor dropped
        self._queue: deque[bytes] = deque()
        self._reports = b""
        root = str(Path(__file__).resolve().parents[2])
        # The process inherits the mask, and takes it off once it ignores these signals.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = subprocess.Popen(
                # -P: no file in the present folder stands in for a package
                [sys.executable, "-P", "-c", _PROGRAM, root],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._input = cast("IO[bytes]", self._process.stdin)
        self._output = cast("IO[bytes]", self._process.stdout)
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._put(asdict(job))

    def write(self, values: Mapping[str, float], *, at: float | None = None) -> None:
        """Hands over a line of metrics of a time (Unix seconds; None: now), or drops it where too
        many wait."""
        self._look()
        if self._output.closed:
            self._drop(1, "its process has ended")
        elif self._most_lines is not None and len(self._queue) >= self._most_lines:
            self._drop(1, f"{self._most_lines} lines wait for it")
        else:
            self._num_open += 1
            self._put({"time": time.time() if at is None else at, "line": values})

    def rewind(self, step: int) -> None:
        """Tells that the run has gone back to a step."""
        self._put({"rewind": step})

    @property
    def num_waiting(self) -> int:
        """Lines that wait here."""
        return len(self._queue)

    def end(self) -> None:
        """Has the process end once it has written all that waits."""
        # Not by closing the pipe, behind which it has a limit: the rank is there, and waits.
        self._put({"end": True})

    def is_over(self) -> bool:
        """Hands over what waits, and tells if the process has ended."""
        self._look()
        return self._output.closed and self._process.poll() is not None

    def close(self, *, kills: bool) -> None:
        """Closes the pipes. A process that has not ended is killed, or writes on for a while what
        it has got; what it has not reported is dropped."""
        if not self.is_over() and kills:
            self._process.kill()
            self._process.wait()
        self._drop(self._num_open, "it was too slow for the end of the run")
        self._num_open = 0
        for pipe in (self._input, self._output):
            pipe.close()
        if self._process.returncode is None:
            self._process.returncode = 0  # it outlives this process on purpose: no ResourceWarning

    def _put(self, message: Any) -> None:
        if not self._output.closed:
            self._queue.append(json.dumps(message).encode() + b"\n")
            self._look()

    def _look(self) -> None:
        """Reads reports, and writes what the pipe takes."""
        if self._output.closed:
            return
        self._read_reports()
        try:
            while self._queue and not self._input.closed:
                num_bytes = self._input.write(self._queue[0])
                if num_bytes is None:  # the pipe is full
                    return
                rest = self._queue.popleft()[num_bytes:]
                if rest:
                    self._queue.appendleft(rest)
        except BrokenPipeError:
            self._read_reports()
            self._lose_process()

    def _read_reports(self) -> None:
        while piece := self._output.read(2**16):
            *lines, self._reports = (self._reports + piece).split(b"\n")
            for report in map(json.loads, lines):
                self._num_open -= report.get("written", 0) + report.get("lost", 0)
                self.written += report.get("written", 0)
                if "why" in report:
                    self._drop(report["lost"], report["why"], even_none=True)
        if piece == b"":  # None: no report yet
            self._lose_process()

    def _lose_process(self) -> None:
        self._output.close()
        self._queue.clear()
        self._drop(self._num_open, "its process has ended")
        self._num_open = 0

    def _drop(self, num_lines: int, why: str, *, even_none: bool = False) -> None:
        self.dropped += num_lines
        if self.why is None and (num_lines or even_none):
            self.why = why


def close_feeds(feeds: Sequence[Feed], *, seconds: float | None) -> None:
    """Waits until the trackers have written all, at most so many seconds (None: any time), and ends
    their processes. With 0 it does not wait, and they write on for a while what they have got."""
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    for feed in feeds:
        feed.end()
    # A list: each of them is looked after in each turn.
    while not all([feed.is_over() for feed in feeds]) and time.monotonic() < deadline:  # noqa: C419
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for feed in feeds:
        feed.close(kills=seconds != 0)
