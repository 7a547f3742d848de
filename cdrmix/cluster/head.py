"""The head: one small process beside rank 0 that hears all watchdogs and ends the run as a whole.

It judges what one rank alone cannot: which rank is lost, silent or stuck while the others wait for
it. It says so once, writes the outcome for `cdrmix launch`, and tells every watchdog to end its
rank. Standard library only; started by heartbeat.py.

The thread that hears the watchdogs touches no file: a file server that stands still must not look
like ranks that do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix.cluster.messages import (
    GREETING_BYTES,
    Channel,
    Clock,
    Inbox,
    Outcome,
    answer,
    new_nonce,
    note_meeting,
    read_line,
    say,
    stop_is_asked,
    write_outcome,
)
from cdrmix.cluster.verdict import Peer, accuse, is_suspicious
from cdrmix.errors import (
    EXIT_DONE,
    EXIT_FAULT,
    EXIT_NO_USABLE_STATE,
    EXIT_STOPPED_BY_SIGNAL,
    EXIT_USER_ERROR,
)

# Ranks that end by agreement do so together; one that failed alone leaves the others waiting.
_SECONDS_TO_FOLLOW = 10.0
_SECONDS_FOR_STACKS = 3.0
_SECONDS_FOR_MORE_NEWS = 0.2
# How long the ranks' end waits for the reason to be written, and how long this process then does:
# longer than a server takes that starts anew (NFSv4: 90 s).
_SECONDS_TO_WRITE_FIRST = 3.0
_SECONDS_TO_WRITE = 120.0
_SECONDS_TO_HANG_UP = 1.0
# A caller that has not shown that it knows the token; a watchdog takes milliseconds.
_SECONDS_FOR_A_STRANGER = 5.0
_MOST_STRANGERS = 64
_CALLS_AT_ONCE = 32


@dataclass(frozen=True)
class HeadSettings:
    """What the head is told when it starts.

    Attributes:
        listener: file descriptor of the socket on which watchdogs call.
        token: secret of the run, which a watchdog has to know.
        world_size: number of ranks.
        interval_seconds: time between two beats.
        deadline_seconds: silence after which a rank counts as lost.
        folder: where `cdrmix launch` looks for the outcome, or None.
    """

    listener: int
    token: str
    world_size: int
    interval_seconds: float
    deadline_seconds: float
    folder: str | None


@dataclass(eq=False)
class _Line:
    """A connection; its `peer` and `channel` are there once it has shown that it knows the token.

    Attributes:
        nonce: the head's, for this connection.
        began: time of the call, of the monotonic clock.
        inbox: of its first line.
    """

    connection: socket.socket
    nonce: bytes = field(default_factory=new_nonce)
    began: float = field(default_factory=time.monotonic)
    inbox: Inbox = field(default_factory=partial(Inbox, GREETING_BYTES))
    peer: Peer | None = None
    channel: Channel | None = None


class _LaunchFolder:
    """Wishes and news that the head shares with `cdrmix launch`, on a thread of its own.

    Attributes:
        have_met: set by the head when all ranks have called.
        stop_is_asked: set here, once it is.
    """

    def __init__(self, folder: Path, interval_seconds: float) -> None:
        self.have_met = threading.Event()
        self.stop_is_asked = threading.Event()
        self._folder = folder
        self._interval_seconds = interval_seconds
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        is_noted = False
        while not (is_noted and self.stop_is_asked.is_set()):
            if self.have_met.is_set() and not is_noted:
                is_noted = note_meeting(self._folder)
            if stop_is_asked(self._folder):
                self.stop_is_asked.set()
            time.sleep(self._interval_seconds)


class Head:
    """All ranks as their watchdogs tell of them."""

    def __init__(self, settings: HeadSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder) if settings.folder else None
        self._shared: _LaunchFolder | None = None
        if self._folder:
            self._shared = _LaunchFolder(self._folder, settings.interval_seconds)
        self._log: str | None = None
        self._rank_0 = Inbox()
        self._clock = Clock(settings.interval_seconds, time.monotonic())
        self._listener = socket.socket(fileno=settings.listener)
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)  # a caller may be gone before it is accepted
        self._selector.register(self._listener, selectors.EVENT_READ, self._answer)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._hear_rank_0)
        self._lines: list[_Line] = []
        self._peers = {rank: Peer(rank) for rank in range(settings.world_size)}
        self._stacks_due: float | None = None
        self._one_left_seconds = 0.0
        self._has_asked_to_stop = False
        self._due = 0.0

    def run(self) -> None:
        """Watch until all ranks have left, or one of them makes the others end."""
        while True:
            for key, _ in self._selector.select(max(0.0, self._due - time.monotonic())):
                key.data()
            self._hang_up_on_strangers()
            self._hurry()
            if time.monotonic() < self._due:
                continue
            self._due = time.monotonic() + self._settings.interval_seconds
            self._count(self._clock.advance(time.monotonic()))
            self._tell({"alive": True})
            self._pass_on_stop()
            outcome = self._judge()
            if outcome is not None:
                self._finish(outcome)
                return

    def _hurry(self) -> None:
        """Judge soon where a rank has ended, with time for the news of those that went with it."""
        if any(peer.is_lost or not peer.is_running for peer in self._peers.values()):
            self._due = min(self._due, time.monotonic() + _SECONDS_FOR_MORE_NEWS)

    def _answer(self) -> None:
        """Take the calls that wait, not more at once than a few: the watchdogs too are heard."""
        for _ in range(_CALLS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none is left, or no file descriptor is: strangers go in time
                return
            connection.settimeout(0.5)
            line = _Line(connection)
            self._lines.append(line)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, line))
            try:
                connection.sendall(line.nonce + b"\n")
            except OSError:
                self._hang_up(line)

    def _hang_up_on_strangers(self) -> None:
        """Hang up on callers that take too long to show that they know the token, and on the oldest
        of too many. Watchdogs that all call at once are not too many."""
        strangers = [line for line in self._lines if line.peer is None]
        most = _MOST_STRANGERS + sum(not peer.host for peer in self._peers.values())
        patience = min(_SECONDS_FOR_A_STRANGER, self._settings.deadline_seconds)
        latest = time.monotonic() - patience
        for place, line in enumerate(strangers):
            if line.began < latest or place < len(strangers) - most:
                self._hang_up(line)

    def _hear(self, line: _Line) -> None:
        if line.connection.fileno() < 0:
            return  # hung up since it was seen to have something
        try:
            data = line.connection.recv(65536 if line.channel else GREETING_BYTES)
            if not data:
                raise ConnectionResetError
            if line.channel is None:
                self._greet(line, data)
            elif line.peer is not None:
                for message in line.channel.take(data):
                    line.peer.note(message)
        except (OSError, ValueError):
            self._hang_up(line)

    def _greet(self, line: _Line, data: bytes) -> None:
        """Take a stranger for a watchdog once its greeting is there.

        Raises:
            ValueError: if it does not know the token, or is no rank of which a watchdog is awaited.
        """
        greetings = line.inbox.lines(data)
        if not greetings:
            return
        channel, greeting = answer(self._settings.token, line.nonce, greetings[0])
        rank = greeting.get("rank")
        host = greeting.get("host")
        peer = self._peers.get(rank) if isinstance(rank, int) else None
        if peer is None or peer.host or not host or not isinstance(host, str):
            raise ValueError("a rank that is not awaited")
        line.connection.sendall(channel.encode({"alive": True}))
        line.channel = channel
        line.peer = peer
        peer.host = host
        peer.unheard_seconds = 0.0
        if self._shared and self._all_have_called():
            self._shared.have_met.set()

    def _hear_rank_0(self) -> None:
        """Take the path of the run's log from rank 0, over the pipe that only its process holds."""
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            self._selector.unregister(sys.stdin.fileno())
        for message in self._rank_0.take(data):
            self._log = str(message["log"])

    def _hang_up(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()
        self._lines.remove(line)
        if line.peer is not None and line.peer.is_running:
            line.peer.has_hung_up = True

    def _count(self, elapsed: float) -> None:
        running = [peer for peer in self._peers.values() if peer.is_running]
        for peer in running:
            peer.unheard_seconds += elapsed
        if len(running) < len(self._peers) and self._codes() - {EXIT_DONE}:
            self._one_left_seconds += elapsed

    def _codes(self) -> set[int]:
        return {peer.code for peer in self._peers.values() if peer.code is not None}

    def _tell(self, message: dict[str, Any]) -> None:
        for line in list(self._lines):
            if line.channel is None:
                continue
            try:
                line.connection.sendall(line.channel.encode(message))
            except OSError:
                self._hang_up(line)

    def _all_have_called(self) -> bool:
        return all(peer.host for peer in self._peers.values())

    def _pass_on_stop(self) -> None:
        """Once, and to all: a wish that came while the ranks started waits for the last of them."""
        if self._has_asked_to_stop or not self._shared or not self._all_have_called():
            return
        if self._shared.stop_is_asked.is_set():
            self._has_asked_to_stop = True
            self._tell({"stop": True})

    def _judge(self) -> Outcome | None:
        """How the run ends, once that is clear."""
        peers = list(self._peers.values())
        codes = self._codes()
        worst = min(codes, key=lambda code: (_weight(code), code), default=EXIT_DONE)
        if not any(peer.is_running for peer in peers):
            return Outcome(worst, "", _last_step(peers))
        if self._one_left_seconds > min(_SECONDS_TO_FOLLOW, self._settings.deadline_seconds):
            left = [peer.name for peer in peers if peer.code]
            why = f"{', '.join(left)} ended with exit code {worst} and the others did not follow"
            return Outcome(worst, why, _last_step(peers))
        is_lost = any(peer.is_lost for peer in peers)
        if codes - {EXIT_DONE} and not is_lost:
            return None  # those that do not follow yet wait for the one that left
        if not is_suspicious(peers, deadline_seconds=self._settings.deadline_seconds):
            self._stacks_due = None
            return None
        if self._stacks_due is None:
            self._stacks_due = time.monotonic() + _SECONDS_FOR_STACKS
            self._ask_for_stacks()
        if not is_lost and self._stacks_due > time.monotonic() and self._wait_for_stacks():
            return None
        why = accuse(peers, deadline_seconds=self._settings.deadline_seconds)
        return Outcome(EXIT_FAULT, why, _last_step(peers))

    def _ask_for_stacks(self) -> None:
        for peer in self._peers.values():
            peer.stack = None
        self._tell({"stack": True})

    def _wait_for_stacks(self) -> bool:
        return any(line.peer and line.peer.stack is None for line in self._lines)

    def _finish(self, outcome: Outcome) -> None:
        """Say why, leave it in writing, end what is left. In this order: a step of SLURM ends the
        head with its rank. A file server that stands still holds none of it up for long."""
        writing = threading.Thread(target=self._write_down, args=(outcome,), daemon=True)
        writing.start()
        writing.join(_SECONDS_TO_WRITE_FIRST)
        self._tell({"end": True})
        self._await_hang_ups()
        writing.join(_SECONDS_TO_WRITE)

    def _await_hang_ups(self) -> None:
        """Read what still comes until the watchdogs hang up, for a moment: closing a connection
        with something unread resets it, and the order to end would be lost on the way."""
        ends = time.monotonic() + _SECONDS_TO_HANG_UP
        for line in self._lines:
            with contextlib.suppress(OSError):
                while line.channel and (seconds := ends - time.monotonic()) > 0:
                    line.connection.settimeout(seconds)
                    if not line.connection.recv(65536):
                        break
            line.connection.close()

    def _write_down(self, outcome: Outcome) -> None:
        if outcome.reason:
            text = f"error: {outcome.reason}\nAll ranks end. Go on with --resume auto"
            say(text)
            if self._log is not None:
                _append(text, self._log)
        if self._folder:
            headline = outcome.reason.partition("\n")[0]
            write_outcome(self._folder, replace(outcome, reason=headline))


def _weight(code: int) -> int:
    """What a restart cannot mend first, faults next, then stopping as asked."""
    if code in (EXIT_USER_ERROR, EXIT_NO_USABLE_STATE):
        return 0
    return {EXIT_STOPPED_BY_SIGNAL: 2, EXIT_DONE: 3}.get(code, 1)


def _last_step(peers: list[Peer]) -> int:
    return max(peer.step for peer in peers)


def _append(text: str, log: str) -> None:
    """Write to the run's log."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    try:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{now} ERROR {text}\n")
    except OSError:  # stderr has it
        return


def main() -> None:
    """Watch the run that the first line of stdin, Settings as JSON, tells of."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # a connection for each rank of the run: the usual limit of 1,024 files is soon reached
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    read = partial(os.read, sys.stdin.fileno())
    Head(HeadSettings(**json.loads(read_line(read)))).run()
