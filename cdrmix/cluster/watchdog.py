"""The watchdog of one rank: a small process of its own, so that it survives what befalls the rank.

It reads the rank's beats from a pipe and reports them to the head (head.py), which watches all
ranks. It kills its rank when the head orders it, or when the head falls silent: a host that is cut
off ends its own ranks. Standard library only; started by heartbeat.py.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.cluster.messages import Clock, Inbox, begin_program, call, say

# faulthandler writes within milliseconds, in C, unless the process is stopped.
_SECONDS_FOR_STACK = 1.0
_SECONDS_BETWEEN_CALLS = 0.2
# The end, where faulthandler puts the main thread; as JSON it fits into a message.
_STACK_BYTES = 2**16
# Between the end of a process's pipes and its own end.
_SECONDS_TO_END = 0.05


@dataclass(frozen=True)
class WatchdogSettings:
    """Settings of a watchdog, sent to it when it starts."""

    rank: int
    host: str  # name of the rank's host, for messages
    process: int  # id of the rank's process, the watchdog's parent
    address: str  # of the head, as is `port`
    port: int
    token: str  # secret of the run, by which head and watchdogs authenticate each other
    interval_seconds: float  # time between two beats
    deadline_seconds: float  # silence of rank or head after which it counts as lost
    stacks: int  # file descriptor on which the rank's stacks arrive
    stack_signal: int  # makes the rank write them


class Watchdog:
    """Reports the rank's beats to the head, and kills the rank where nothing else can."""

    def __init__(self, settings: WatchdogSettings) -> None:
        """Calls the head; raises OSError if it does not answer within the deadline."""
        self._settings = settings
        self._clock = Clock(settings.interval_seconds, time.monotonic())
        self._beat: dict[str, Any] = {}
        self._quiet_seconds = 0.0
        self._unheard_seconds = 0.0
        self._stack = b""
        self._stack_due = 0.0
        self._is_over = False
        self._due = 0.0
        self._beats = Inbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "rank")
        self._selector.register(settings.stacks, selectors.EVENT_READ, "stacks")
        ends = time.monotonic() + settings.deadline_seconds
        greeting = {"rank": settings.rank, "host": settings.host}
        head = (settings.address, settings.port)
        while True:
            seconds = max(0.1, ends - time.monotonic())
            self._head = socket.create_connection(head, timeout=seconds)
            try:
                self._channel = call(self._head, settings.token, greeting)
                break
            except (OSError, ValueError) as error:
                self._head.close()
                if time.monotonic() > ends:
                    raise OSError(str(error)) from error
                # while many strangers call, the head may hang up on a watchdog too, which is one of
                # them until it is authenticated
                time.sleep(_SECONDS_BETWEEN_CALLS)
        self._head.settimeout(2)  # for sends; reads happen only when data has arrived
        self._selector.register(self._head, selectors.EVENT_READ, "head")

    def run(self) -> None:
        """Watches until the rank is gone."""
        while not self._is_over:
            ready = self._selector.select(max(0.0, self._due - time.monotonic()))
            # if both arrived together, the rank's announced end counts before the head's
            for key, _ in sorted(ready, key=lambda each: each[0].data != "rank"):
                self._hear(key.data, key.fd)
            if self._is_over:
                return
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + self._settings.interval_seconds
                elapsed = self._clock.advance(time.monotonic())
                if os.getppid() != self._settings.process:  # orphans get another parent
                    self._is_over = True
                    self._send({**self._beat, "died": True})
                else:
                    self._quiet_seconds += elapsed
                    self._unheard_seconds += elapsed
                    self._send({**self._beat, "quiet_seconds": self._quiet_seconds})
                    silence = self._unheard_seconds
                    if silence > self._settings.deadline_seconds:
                        self._end_rank(f"nothing heard from the host of rank 0 for {silence:.0f} s")
            if self._stack_due and time.monotonic() >= self._stack_due:
                state = ""
                with contextlib.suppress(OSError):  # it has ended, or this is not Linux
                    text = Path(f"/proc/{self._settings.process}/stat").read_text()
                    state = text.rpartition(")")[2].split()[0]  # such as T for stopped
                self._send({"stack": self._stack.decode(errors="replace"), "state": state})
                self._stack = b""
                self._stack_due = 0.0

    def _hear(self, sender: str, descriptor: int) -> None:
        if self._is_over:
            return  # the rank's end arrived together with this, and nothing after it matters
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # a broken connection is an ended one
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            # the pipes of a dying rank close before its process is gone: look again then
            self._due = time.monotonic() + _SECONDS_TO_END
            if sender == "head":
                self._end_rank("the connection to the host of rank 0 broke")
        elif sender == "stacks":
            self._stack = (self._stack + data)[-_STACK_BYTES:]
        elif sender == "rank":
            for beat in self._beats.take(data):
                self._quiet_seconds = 0.0
                if "left" in beat:  # it is out of the run, and may take its time to end
                    self._send(beat)
                    self._is_over = True
                self._beat = beat
        else:
            try:
                orders = self._channel.take(data)
            except ValueError as error:
                self._end_rank(f"on the connection to the head arrived {error}")
                return
            for order in orders:
                self._unheard_seconds = 0.0
                if "stack" in order:
                    self._signal(self._settings.stack_signal)
                    self._stack_due = time.monotonic() + _SECONDS_FOR_STACK
                if "stop" in order:
                    self._signal(signal.SIGUSR1)
                if "end" in order:
                    self._signal(signal.SIGKILL)
                    self._is_over = True

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a head that is gone is noticed where it is read
            self._head.sendall(self._channel.encode(message))

    def _end_rank(self, why: str) -> None:
        settings = self._settings
        step = self._beat.get("step", 0)
        say(f"error: rank {settings.rank} on {settings.host}, step {step}: {why}; the rank ends")
        self._signal(signal.SIGKILL)
        self._is_over = True

    def _signal(self, number: int) -> None:
        if os.getppid() == self._settings.process:  # else another process may have its id by now
            os.kill(self._settings.process, number)


def main() -> None:
    """Runs the watchdog by the WatchdogSettings that arrive on stdin."""
    settings = WatchdogSettings(**begin_program())
    try:
        watchdog = Watchdog(settings)
    except OSError as error:
        # a refused start may be over before this program is under way: then the rank has announced
        # its end in what it wrote up to now, or has closed the pipe
        has_left = True
        beats = b""
        os.set_blocking(sys.stdin.fileno(), False)
        try:
            while data := os.read(sys.stdin.fileno(), 65536):
                beats += data
        except BlockingIOError:
            has_left = any("left" in beat for beat in Inbox().take(beats))
        if has_left:
            return
        say(
            f"error: rank {settings.rank} on {settings.host}: the watchdog cannot reach "
            f"{settings.address}:{settings.port} ({error}); the rank ends. Is there a firewall "
            "between the hosts?"
        )
        os.kill(settings.process, signal.SIGKILL)
        return
    watchdog.run()
