"""The head: one small process beside rank 0 that hears all watchdogs and ends the run as a whole.

It judges what no single rank can: which rank is lost, silent or stuck while the others wait for it.
It reports that once, writes the outcome for `cdrmix launch`, and makes every watchdog end its rank.
Standard library only; started by heartbeat.py.

The main thread, which hears the watchdogs, touches no file: while a file server hangs, it must not
look as if the ranks did.
"""

import contextlib
import datetime
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cdrmix import errors
from cdrmix.cluster import messages
from cdrmix.cluster.messages import GREETING_BYTES, MET, STOP, Channel, Clock, Inbox, Outcome
from cdrmix.cluster.verdict import Peer, accuse, is_suspicious

# Ranks that end by agreement do so together; one that failed alone leaves the others waiting.
_SECONDS_TO_FOLLOW = 10.0
_SECONDS_FOR_STACKS = 3.0
_SECONDS_FOR_MORE_NEWS = 0.2
# Longest wait for the reason to be written before the ranks are ended, and after that: longer than
# the restart of a file server (NFSv4: 90 s).
_SECONDS_TO_WRITE_FIRST = 3.0
_SECONDS_TO_WRITE = 120.0
_SECONDS_TO_HANG_UP = 1.0
# For a stranger, a caller that is not yet authenticated; a watchdog takes milliseconds.
_SECONDS_FOR_A_STRANGER = 5.0
_MOST_STRANGERS = 64
_CALLS_AT_ONCE = 32
# Of several exit codes the first of this order counts: what a restart cannot mend, then faults
# (1 and all others), then stopping as asked.
_WEIGHTS = {
    errors.EXIT_USER_ERROR: 0,
    errors.EXIT_NO_USABLE_STATE: 0,
    errors.EXIT_STOPPED_BY_SIGNAL: 2,
    errors.EXIT_DONE: 3,
}


@dataclass(frozen=True)
class HeadSettings:
    """Settings of a head, sent to it when it starts."""

    listener: int  # file descriptor of the socket on which watchdogs call
    token: str  # secret of the run, which authenticates watchdogs
    world_size: int
    interval_seconds: float  # time between two beats
    deadline_seconds: float  # silence after which a rank counts as lost
    folder: str | None  # launch folder of this start


@dataclass(eq=False)
class _Line:
    """Connection of a caller; `peer` and `channel` are set once it is authenticated."""

    connection: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())
    began: float = field(default_factory=time.monotonic)
    inbox: Inbox = field(default_factory=partial(Inbox, GREETING_BYTES))
    peer: Peer | None = None
    channel: Channel | None = None


class Head:
    """Server of all watchdogs, and judge of their ranks."""

    def __init__(self, settings: HeadSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder) if settings.folder else None
        self._have_met = threading.Event()
        self._stop_is_asked = threading.Event()
        self._log: str | None = None
        self._go_on = "--resume auto"  # the whole command, once rank 0 has sent it
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

        def share(folder: Path) -> None:
            """Notes in the launch folder that all ranks have met, and sees the request to stop."""
            is_noted = False
            while not (is_noted and self._stop_is_asked.is_set()):
                if self._have_met.is_set() and not is_noted:
                    with contextlib.suppress(OSError):  # tried again an interval later
                        (folder / MET).touch()
                        is_noted = True
                if messages.is_listed(folder, STOP):
                    self._stop_is_asked.set()
                time.sleep(settings.interval_seconds)

        if self._folder:  # a thread of its own, as the folder's file server may hang
            threading.Thread(target=share, args=(self._folder,), daemon=True).start()

    def run(self) -> None:
        """Watches until all ranks have left, or one of them makes the others end."""
        peers = self._peers.values()
        while True:
            for key, _ in self._selector.select(max(0.0, self._due - time.monotonic())):
                key.data()
            # Slow strangers go, and the oldest of too many. The limit grows by the watchdogs that
            # have not called yet, so that all may call at once.
            strangers = [line for line in self._lines if line.peer is None]
            most = _MOST_STRANGERS + sum(not peer.host for peer in peers)
            patience = min(_SECONDS_FOR_A_STRANGER, self._settings.deadline_seconds)
            latest = time.monotonic() - patience
            for place, line in enumerate(strangers):
                if line.began < latest or place < len(strangers) - most:
                    self._hang_up(line)
            if any(peer.is_lost or not peer.is_running for peer in peers):
                # judge soon, with time for the news of the ranks that ended with this one
                self._due = min(self._due, time.monotonic() + _SECONDS_FOR_MORE_NEWS)
            if time.monotonic() < self._due:
                continue
            self._due = time.monotonic() + self._settings.interval_seconds
            elapsed = self._clock.advance(time.monotonic())
            for peer in peers:
                if peer.is_running:
                    peer.unheard_seconds += elapsed
            if any(peer.code for peer in peers):  # errors.EXIT_DONE is 0
                self._one_left_seconds += elapsed
            self._tell({"alive": True})
            is_asked = self._stop_is_asked.is_set()
            # once, and to all: a request that comes early waits for the last rank's call
            have_all_called = all(peer.host for peer in peers)
            if is_asked and have_all_called and not self._has_asked_to_stop:
                self._has_asked_to_stop = True
                self._tell({"stop": True})
            outcome = self._judge()
            if outcome is not None:
                self._finish(outcome)
                return

    def _answer(self) -> None:
        """Accepts waiting calls, a few at a time, because the watchdogs too must be heard."""
        for _ in range(_CALLS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no call waits, or no file descriptor is free until a stranger goes
                return
            connection.settimeout(0.5)  # one that does not read must not hold up the others
            line = _Line(connection)
            self._lines.append(line)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, line))
            try:
                connection.sendall(line.nonce + b"\n")
            except OSError:
                self._hang_up(line)

    def _hear(self, line: _Line) -> None:
        """Takes a watchdog's reports, or authenticates a stranger by its greeting."""
        if line.connection.fileno() < 0:
            return  # closed after `select` returned it
        try:
            data = line.connection.recv(65536 if line.channel else GREETING_BYTES)
            if not data:
                raise ConnectionResetError
            if line.channel is not None and line.peer is not None:
                for message in line.channel.take(data):
                    line.peer.note(message)
                return
            greetings = line.inbox.lines(data)
            if not greetings:
                return  # until all of it has arrived
            channel, greeting = messages.answer(self._settings.token, line.nonce, greetings[0])
            rank = greeting.get("rank")
            host = greeting.get("host")
            peer = self._peers.get(rank) if isinstance(rank, int) else None
            # `peer.host`: a second watchdog of a rank could report in the first one's name
            if peer is None or peer.host or not host or not isinstance(host, str):
                raise ValueError("a rank that is not awaited")
            line.connection.sendall(channel.encode({"alive": True}))
        except (OSError, ValueError):  # an invalid line ends its connection, not the head
            self._hang_up(line)
            return
        line.channel = channel
        line.peer = peer
        peer.host = host
        peer.unheard_seconds = 0.0
        if all(each.host for each in self._peers.values()):
            self._have_met.set()

    def _hear_rank_0(self) -> None:
        """Reads the run's log, and the command to go on, from the pipe that rank 0 alone holds."""
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            self._selector.unregister(sys.stdin.fileno())
        for message in self._rank_0.take(data):
            self._log = str(message["log"])
            self._go_on = str(message.get("go_on", self._go_on))

    def _hang_up(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()
        self._lines.remove(line)
        if line.peer is not None and line.peer.is_running:
            line.peer.has_hung_up = True

    def _tell(self, message: dict[str, Any]) -> None:
        for line in list(self._lines):
            if line.channel is None:
                continue
            try:
                line.connection.sendall(line.channel.encode(message))
            except OSError:
                self._hang_up(line)

    def _judge(self) -> Outcome | None:
        """Outcome of the run, once that is clear."""
        peers = list(self._peers.values())
        deadline_seconds = self._settings.deadline_seconds
        step = max(peer.step for peer in peers)
        codes = {peer.code for peer in peers if peer.code is not None}
        worst = min(codes, key=lambda code: (_WEIGHTS.get(code, 1), code), default=errors.EXIT_DONE)
        if not any(peer.is_running for peer in peers):
            return Outcome(worst, "", step)
        if self._one_left_seconds > min(_SECONDS_TO_FOLLOW, deadline_seconds):
            names = ", ".join(peer.name for peer in peers if peer.code)
            why = f"{names} ended with exit code {worst} and the others did not follow"
            return Outcome(worst, why, step)
        is_lost = any(peer.is_lost for peer in peers)
        if codes - {errors.EXIT_DONE} and not is_lost:
            return None  # the others wait in a collective for the one that left, or end with it
        if not is_suspicious(peers, deadline_seconds=deadline_seconds):
            self._stacks_due = None
            return None
        if self._stacks_due is None:
            # the stacks show who waits in a collective, and who holds it up
            self._stacks_due = time.monotonic() + _SECONDS_FOR_STACKS
            for peer in peers:
                peer.stack = None
            self._tell({"stack": True})
        is_answered = all(line.peer.stack is not None for line in self._lines if line.peer)
        if not is_lost and not is_answered and time.monotonic() < self._stacks_due:
            return None
        return Outcome(errors.EXIT_FAULT, accuse(peers, deadline_seconds=deadline_seconds), step)

    def _finish(self, outcome: Outcome) -> None:
        """Reports the reason, writes it down, then ends the remaining ranks.

        In this order, because a step of SLURM ends the head with its rank. The files are written
        by a thread, so that a file server that hangs delays the end only for a moment.
        """

        def write() -> None:
            if outcome.reason:
                text = f"error: {outcome.reason}\nAll ranks end. Go on with: {self._go_on}"
                messages.say(text)
                now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
                with contextlib.suppress(OSError):  # stderr has it
                    if self._log is not None:
                        with open(self._log, "a", encoding="utf-8") as file:
                            file.write(f"{now} ERROR {text}\n")
            if self._folder:
                headline = outcome.reason.partition("\n")[0]
                messages.write_outcome(self._folder, replace(outcome, reason=headline))

        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(_SECONDS_TO_WRITE_FIRST)
        self._tell({"end": True})
        # Read on until the watchdogs hang up, for a moment: closing a connection with unread data
        # resets it, and the order to end would be lost on the way.
        ends = time.monotonic() + _SECONDS_TO_HANG_UP
        for line in self._lines:
            with contextlib.suppress(OSError):
                while line.channel and (seconds := ends - time.monotonic()) > 0:
                    line.connection.settimeout(seconds)
                    if not line.connection.recv(65536):
                        break
            line.connection.close()
        writing.join(_SECONDS_TO_WRITE)


def main() -> None:
    """Runs the head by the HeadSettings that arrive on stdin."""
    settings = HeadSettings(**messages.begin_program())
    # a connection for each rank of the run: the usual limit of 1,024 files is soon reached
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Head(settings).run()
