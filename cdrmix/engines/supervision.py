"""Signals to a run, and its supervision from the meeting of its ranks to the exit code of each.

TERM, INT, USR1 and HUP save and stop, USR2 saves and goes on. During training a handler only sets a
flag; the loop polls it once per step and agrees with the other ranks, because a launcher may signal
one rank only. Before and after training nothing is unsaved, and a signal ends the rank at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cdrmix import runtime
from cdrmix.cluster.heartbeat import Heartbeat, Limits, start_head
from cdrmix.cluster.messages import await_outcome, stop_reason
from cdrmix.config.launch import SupervisionConfig
from cdrmix.errors import EXIT_FAULT, EXIT_STOPPED_BY_SIGNAL, TrainingError

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Requests:
    """Requests that reached this rank as signals."""

    def __init__(self) -> None:
        self.stop: str | None = None  # name of the signal, or who asked for it
        self.save = False  # since the last `poll`
        self._deferred = False
        # Process id of the `deepspeed` command above this rank's launch.py, if that is our parent.
        # Killed, it cannot end launch.py, which would go on supervising ranks that nobody sees.
        self._launcher: int | None = None
        parent = os.getppid()
        above = _parent(parent)
        with contextlib.suppress(OSError):  # bytes: the arguments of any command may be no text
            theirs, before = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (parent, above))
            if b"deepspeed.launcher.launch" in theirs and b"deepspeed" in before:
                self._launcher = above

    def listen(self) -> None:
        """Install the handlers, and ask the kernel for SIGTERM when the launcher dies."""

        # Flags alone: a handler may interrupt a collective, or whoever holds the lock of the log.
        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGUSR2:
                self.save = True
                return
            self.stop = signal.Signals(number).name
            if not self._deferred:
                raise SystemExit(EXIT_STOPPED_BY_SIGNAL)

        for number in (*_STOPPING, signal.SIGUSR2):
            # nohup ignores SIGHUP, so that a run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, on_signal)
        runtime.end_with_launcher(signal.SIGTERM)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep a request to stop for `poll`; outside of this it ends the process."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def poll(self) -> tuple[bool, bool]:
        """Returns (stop, save) of this rank; clears the request to save, not the one to stop."""
        # Orphaned, launch.py goes on under another parent.
        if self.stop is None and self._launcher and _parent(os.getppid()) != self._launcher:
            self.stop = "end of the deepspeed launcher"
        folder = runtime.launch_folder()
        if self.stop == signal.SIGUSR1.name and folder is not None:
            # As this signal a watchdog passes on what `cdrmix launch` or a batch script was told.
            self.stop = stop_reason(folder) or self.stop
        save = self.save
        self.save = False
        return self.stop is not None, save


def _parent(process: int) -> int:
    try:
        # The command's name, in parentheses, may hold blanks and parentheses of its own.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])


# Heartbeats until the head has surely noticed that a rank is gone.
_INTERVALS_FOR_THE_HEAD = 3
_SECONDS_FOR_OUTCOME = 2.0
# A little longer than the head waits for the other ranks.
_SECONDS_TO_BE_FOLLOWED = 12.0


class LostAlone(SystemExit):
    """A rank ends, its error logged, while the others wait in a collective."""


def supervised(config: SupervisionConfig, action: Callable[[Heartbeat], int]) -> int:
    """Run `action`, the work of this rank, while every rank sends heartbeats; collective.

    Returns its exit code, after the head has received it.
    """
    limits = Limits(config.deadline_seconds, config.phase_seconds)
    folder = runtime.launch_folder()
    head = None
    if runtime.rank() == 0:
        address = runtime.master_address()
        head = start_head(address, limits, world_size=runtime.world_size(), folder=folder)
    meeting = runtime.broadcast_object(head.meeting if head else None)
    assert meeting is not None, "rank 0 made it"
    pipe = head.pipe if head else None
    heartbeat = Heartbeat(meeting, limits, rank=runtime.rank(), head_pipe=pipe)
    code = EXIT_FAULT
    try:
        code = action(heartbeat)
    except TrainingError as error:
        code = error.exit_code
        raise
    except RuntimeError:
        # Where a collective broke because another rank ended, the head says so and ends this one
        # before a traceback here, and in all other ranks, hides it.
        time.sleep(_INTERVALS_FOR_THE_HEAD * limits.interval_seconds)
        raise
    except SystemExit as end:  # of a signal outside of training
        code = end.code if isinstance(end.code, int) else EXIT_FAULT
        raise
    finally:
        # Before this process ends, which would count as a lost rank.
        heartbeat.leave(code)
        if isinstance(sys.exception(), LostAlone) and runtime.world_size() > 1:
            # The connections stay until the head has ended the other ranks: each would log an
            # error of a connection that closed.
            time.sleep(_SECONDS_TO_BE_FOLLOWED)
        if folder is not None and runtime.rank() == 0:
            # srun ends the head with the last rank, before the head has written the outcome.
            await_outcome(folder, _SECONDS_FOR_OUTCOME)
    return code
