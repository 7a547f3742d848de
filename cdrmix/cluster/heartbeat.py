"""Beats of a rank: its progress, and the time that its present phase may take.

A thread beats as long as Python runs; the training loop reports every step. A rank that beats
without progress is stuck, one that does not beat is silent, one whose process ends is lost.
"""

import contextlib
import faulthandler
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, cast

from cdrmix.cluster import head, watchdog
from cdrmix.cluster.messages import Clock, encode
from cdrmix.log import get_logger
from cdrmix.network import family_of

logger = get_logger(__name__)

# A step that is four times as long as the one before is no reason to end a run.
_SLOWER_STEP = 4.0
_LONGEST_INTERVAL_SECONDS = 1.0
# Waiting calls; a caller beyond them tries again only after a second.
_BACKLOG = 1024
# Phase after which a restart resumes from a newer checkpoint than this start did.
_SAVING = "saving"
# TERM, INT, HUP, USR1 and USR2 have meanings of their own (engines/supervision.py).
_STACK_SIGNAL = signal.SIGRTMIN + 1 if sys.platform == "linux" else signal.SIGQUIT
# -I and -S: a start in 30 ms, whatever the site's packages do; cdrmix is all that it needs.
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main()"


@dataclass(frozen=True)
class Meeting:
    """Address and port of the head, and the secret of the run."""

    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class Limits:
    """Longest silence or step of a rank, and longest other phase (seconds)."""

    deadline_seconds: float
    phase_seconds: float

    @property
    def interval_seconds(self) -> float:
        """Time between two beats: a tenth of the deadline, at most a second."""
        return min(_LONGEST_INTERVAL_SECONDS, self.deadline_seconds / 10)


@dataclass(frozen=True)
class StartedHead:
    """A running head, and the pipe that only rank 0's process can write to."""

    meeting: Meeting
    pipe: FileIO


def start_head(
    address: str, limits: Limits, *, world_size: int, folder: Path | None
) -> StartedHead:
    """Starts the head of this run beside rank 0.

    Args:
        address: of this host, as the other hosts know it.
        folder: launch folder of this start, or None.
    """
    family = family_of(address)
    backlog = max(_BACKLOG, world_size)
    try:
        listener = socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError:  # other hosts' address of this one is translated (NAT), so it cannot be bound
        listener = socket.create_server(("", 0), family=family, backlog=backlog)
    meeting = Meeting(address, listener.getsockname()[1], secrets.token_hex(16))
    settings = head.HeadSettings(
        listener=listener.fileno(),
        token=meeting.token,
        world_size=world_size,
        interval_seconds=limits.interval_seconds,
        deadline_seconds=limits.deadline_seconds,
        folder=str(folder.resolve()) if folder else None,
    )
    pipe = _start(head.__name__, settings, listener.fileno())
    listener.close()  # the head has inherited it, and calls must end when the head does
    return StartedHead(meeting, pipe)


class Heartbeat:
    """Beats to this rank's watchdog, from construction to `leave`."""

    def __init__(
        self, meeting: Meeting, limits: Limits, *, rank: int, head_pipe: FileIO | None = None
    ) -> None:
        """Starts this rank's watchdog and the thread that beats.

        Args:
            meeting: result of `start_head` on rank 0.
            head_pipe: to the head, on the rank that started it; None on the others.
        """
        self._limits = limits
        self._head_pipe = head_pipe
        self._changed = threading.Lock()
        self._beat: dict[str, Any] = {}
        self._stuck_seconds = 0.0
        self._step_began: float | None = None
        self._step_seconds: float | None = None  # of the last step, or of the longest if uneven
        self._are_uneven = False
        self._has_saved = False
        read_end, self._stacks = os.pipe()
        os.set_blocking(self._stacks, False)  # a full pipe must not block the rank
        # first ignored, because faulthandler.unregister in `leave` restores this handler: a request
        # for the stack that comes too late must not end the rank
        signal.signal(_STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(_STACK_SIGNAL, file=self._stacks, all_threads=True)
        settings = watchdog.WatchdogSettings(
            rank=rank,
            host=socket.gethostname(),
            process=os.getpid(),
            **asdict(meeting),
            interval_seconds=limits.interval_seconds,
            deadline_seconds=limits.deadline_seconds,
            stacks=read_end,
            stack_signal=_STACK_SIGNAL,
        )
        self._pipe = _start(watchdog.__name__, settings, read_end)
        os.close(read_end)
        self._enter("starting", limits.phase_seconds, step=0)
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._thread.start()

    def step_done(self, step: int) -> None:
        """Reports that optimizer step `step` is done; the next may take about as long."""
        now = time.monotonic()
        if self._step_began is not None:
            longest = (self._step_seconds or 0.0) if self._are_uneven else 0.0
            self._step_seconds = max(now - self._step_began, longest)
        self._step_began = now
        allowed = self._limits.phase_seconds  # until a step of this kind was measured
        if self._step_seconds is not None and (self._has_saved or not self._are_uneven):
            allowed = max(self._limits.deadline_seconds, _SLOWER_STEP * self._step_seconds)
        self._enter("training", allowed, step=step)

    def forget_step(self, *, are_uneven: bool = False) -> None:
        """Reports that the next steps are of another kind: the first may take a phase's time.

        Where they are uneven (they may differ by more than four times), each may take that long
        until this start has saved. Else a long step that ends a start would end every restart too,
        which resumes and meets it before its first save.
        """
        self._are_uneven = are_uneven
        self._step_began = time.monotonic()
        self._step_seconds = None
        self._enter("training", self._limits.phase_seconds)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context in which the rank does `name`, which has no steps."""
        before = self._beat
        began = time.monotonic()
        self._enter(name, self._limits.phase_seconds)
        try:
            yield
        finally:
            # the phase is no part of the step around it, whose duration limits the next steps
            if self._step_began is not None:
                self._step_began += time.monotonic() - began
            self._has_saved = self._has_saved or name == _SAVING
            self._enter(before["phase"], before["allowed_seconds"])

    def log_to(self, path: Path, *, go_on: str) -> None:
        """Sends the path of the run's log to the head, which writes there when ranks no longer can,
        and the command that goes on with the run.

        Only on the rank that started the head, because the head takes no path from the network.
        """
        assert self._head_pipe is not None, "rank 0 started the head"
        with contextlib.suppress(OSError):  # a head that is gone is noticed by the watchdogs
            self._head_pipe.write(encode({"log": str(path.resolve()), "go_on": go_on}))

    def leave(self, code: int) -> None:
        """Announces the exit code of this rank, which ends soon."""
        self._has_left.set()
        self._thread.join()  # a beat after the exit code would count as a sign of life
        self._send({**self._beat, "left": code})
        with contextlib.suppress(OSError):
            self._pipe.close()
        if self._head_pipe is not None:
            self._head_pipe.close()
        faulthandler.unregister(_STACK_SIGNAL)
        os.close(self._stacks)

    def _enter(self, phase: str, allowed_seconds: float, **more: Any) -> None:
        progress = {"phase": phase, "allowed_seconds": allowed_seconds, "stuck_seconds": 0.0}
        with self._changed:
            beat = {**self._beat, **more, **progress}
            self._beat = beat
            self._stuck_seconds = 0.0
        self._send(beat)

    def _beat_on(self) -> None:
        clock = Clock(self._limits.interval_seconds, time.monotonic())
        while True:
            with self._changed:
                self._stuck_seconds += clock.advance(time.monotonic())
                beat = {**self._beat, "stuck_seconds": self._stuck_seconds}
            self._send(beat)
            if self._has_left.wait(self._limits.interval_seconds):
                return

    def _send(self, beat: dict[str, Any]) -> None:
        try:
            self._pipe.write(encode(beat))
        except OSError:
            # The head ends the other ranks for the same reason; this one would wait for them
            # without a watchdog.
            logger.error("error: the watchdog of this rank is gone: the rank ends")
            os.kill(os.getpid(), signal.SIGKILL)


def _start(
    module: str, settings: head.HeadSettings | watchdog.WatchdogSettings, descriptor: int
) -> FileIO:
    """Starts a head or watchdog, writes its settings, and returns the pipe to it.

    The settings are not on the command line, where every user could read the token.
    """
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM.format(module=module), root],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
    )
    process.returncode = 0  # it survives this process on purpose: no ResourceWarning
    pipe = cast(FileIO, process.stdin)
    pipe.write(encode(asdict(settings)))
    os.set_blocking(pipe.fileno(), False)  # beats are dropped while the program is suspended
    return pipe
