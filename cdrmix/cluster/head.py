"""The head: one small process beside rank 0 that hears all watchdogs and ends the run as a whole.

It judges what one rank alone cannot: which rank is lost, silent or stuck while the others wait for
it. It says so once, writes the outcome for `cdrmix launch`, and tells every watchdog to end its
rank. Standard library only; started by heartbeat.py.
"""

from __future__ import annotations

import datetime
import json
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cdrmix.cluster.outcome import Outcome, note_meeting, stop_is_asked, write_outcome
from cdrmix.cluster.verdict import Peer, accuse
from cdrmix.cluster.wire import Clock, Inbox, encode, read_line, say
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


@dataclass(frozen=True)
class Settings:
    """What the head is told when it starts.

    Attributes:
        listener: file descriptor of the socket on which watchdogs call.
        token: what a watchdog has to know.
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


@dataclass
class _Line:
    """A connection; `peer` is known once it has given the token."""

    connection: socket.socket
    inbox: Inbox = field(default_factory=Inbox)
    peer: Peer | None = None


class Head:
    """All ranks as their watchdogs tell of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder) if settings.folder else None
        self._clock = Clock(settings.interval_seconds, time.monotonic())
        self._listener = socket.socket(fileno=settings.listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
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
                self._hear(key.data) if key.data else self._answer()
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
        connection, _ = self._listener.accept()
        connection.settimeout(0.5)
        line = _Line(connection)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: _Line) -> None:
        try:
            data = line.connection.recv(65536)
            messages = line.inbox.take(data)
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            if line.peer is not None:
                line.peer.note(message)
            elif message.get("token") == self._settings.token:
                line.peer = self._peers[message["rank"]]
                line.peer.host = message["host"]
                if self._folder and self._all_have_called():
                    note_meeting(self._folder)
            else:
                data = b""
        if not data:
            self._hang_up(line)

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
            try:
                line.connection.sendall(encode(message))
            except OSError:
                self._hang_up(line)

    def _all_have_called(self) -> bool:
        return all(peer.host for peer in self._peers.values())

    def _pass_on_stop(self) -> None:
        """Once, and to all: a wish that came while the ranks started waits for the last of them."""
        if self._has_asked_to_stop or not self._folder or not self._all_have_called():
            return
        if stop_is_asked(self._folder):
            self._has_asked_to_stop = True
            self._tell({"stop": True})

    def _judge(self) -> Outcome | None:
        """How the run ends, once that is clear."""
        peers = list(self._peers.values())
        codes = self._codes()
        worst = min(codes, key=_weight, default=EXIT_DONE)
        if not any(peer.is_running for peer in peers):
            return Outcome(worst, "", _last_step(peers))
        if self._one_left_seconds > min(_SECONDS_TO_FOLLOW, self._settings.deadline_seconds):
            left = [peer.name for peer in peers if peer.code]
            why = f"{', '.join(left)} ended with exit code {worst} and the others did not follow"
            return Outcome(worst, why, _last_step(peers))
        is_lost = any(peer.is_lost for peer in peers)
        if codes - {EXIT_DONE} and not is_lost:
            return None  # those that do not follow yet wait for the one that left
        if not any(peer.is_suspect(self._settings.deadline_seconds) for peer in peers):
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
        head with its rank."""
        if outcome.reason:
            text = f"error: {outcome.reason}\nAll ranks end. Go on with --resume auto"
            say(text)
            _append(text, (peer.log for peer in self._peers.values()))
        if self._folder:
            headline = outcome.reason.partition("\n")[0]
            write_outcome(self._folder, replace(outcome, reason=headline))
        self._tell({"end": True})
        for line in self._lines:
            line.connection.close()


def _weight(code: int) -> int:
    """What a restart cannot mend first, faults next, then stopping as asked."""
    if code in (EXIT_USER_ERROR, EXIT_NO_USABLE_STATE):
        return 0
    return {EXIT_STOPPED_BY_SIGNAL: 2, EXIT_DONE: 3}.get(code, 1)


def _last_step(peers: list[Peer]) -> int:
    return max(peer.step for peer in peers)


def _append(text: str, logs: Iterable[str | None]) -> None:
    """Write to the run's log, where its path is known."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    for log in filter(None, logs):
        try:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{now} ERROR {text}\n")
        except OSError:  # stderr has it
            continue


def main() -> None:
    """Watch the run that the first line of stdin, Settings as JSON, tells of."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # a connection for each rank of the run: the usual limit of 1,024 files is soon reached
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Head(Settings(**json.loads(read_line(sys.stdin.fileno())))).run()
