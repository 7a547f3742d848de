"""Messages of one start: files shared with `cdrmix launch`, and lines on pipes and sockets.

The launch folder holds the outcome of the start, the request to stop, and a note that all ranks
have met. It is needed because DeepSpeed's launcher replaces the ranks' exit codes and passes no
signals on. Reader and writer may be on different hosts. An NFS client remembers for up to a minute
that a name did not exist, so no file is opened by name before the folder's listing has it. The
listing is cached too (acdirmin, acdirmax: 30 to 60 s), but a change of its own makes the client ask
the server anew: `await_outcome`, whose answer is final, makes one.

A rank, its watchdog and the head exchange JSON objects, one to a line. Local pipes carry them as
they are. On the network each line is authenticated, in both directions:

    head -> caller   NONCE
    caller -> head   NONCE MAC {"rank": 3, "host": "node2"}
    head -> caller   MAC {"alive": true}
    both             MAC {...}

A MAC is an HMAC-SHA256 under a key made of the run's token and both nonces, over the direction, the
number of the message (both sides count; TCP keeps the order) and its text. The token itself is
never sent, and a line recorded from another connection, from the other direction or from earlier is
refused, with a ValueError. Nothing is encrypted.

Standard library only: the head and the watchdogs import this.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Folder in the run directory, which holds one folder for each start under way.
LAUNCH_FOLDER = "launch"
# Held by `cdrmix launch` while its start lasts.
LAUNCHER_LOCK = "launcher.lock"
# Beginning of the name of a run's folder in a tier of a host; file in it that names the run.
TIER_PREFIX = "cdrmix-"
TIER_OWNER = "run.json"
_OUTCOME = "outcome.json"
# Asks the ranks to save and stop, and holds for whom, in a line for people; may be empty.
STOP = "stop"
# Empty: notes that all ranks have met.
MET = "met"
# Empty: notes that a start that was stopped is the last one, as the run's own code wants it.
ENOUGH = "enough"
_MOST_LETTERS = 200
_POLL_SECONDS = 0.1

# Longest line of a caller before it is authenticated, and after.
GREETING_BYTES = 4 * 2**10
MESSAGE_BYTES = 2**20
_NONCE = re.compile(rb"[0-9a-f]{32}")
# stderr may be a file on a server that hangs, or a pipe that nobody empties.
_SECONDS_TO_SAY = 2.0


@dataclass(frozen=True)
class Outcome:
    """End of a start."""

    exit_code: int  # as in cdrmix.errors; 1 is a fault
    reason: str  # for people; empty where the ranks gave it themselves
    step: int  # the last that any rank reached


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Writes the outcome atomically. A folder that is gone has no reader."""
    # by process, because rank 0 and the head may both write one
    temporary = folder / f"{_OUTCOME}.{os.getpid()}"
    with contextlib.suppress(OSError):  # its reader takes a missing outcome for a fault
        temporary.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        os.replace(temporary, folder / _OUTCOME)


def read_outcome(folder: Path) -> Outcome | None:
    """Reads the outcome in `folder`; None if there is none yet."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if is_listed(folder, _OUTCOME):
            return Outcome(**json.loads((folder / _OUTCOME).read_text(encoding="utf-8")))
    return None


def await_outcome(folder: Path, seconds: float) -> Outcome | None:
    """Waits for the outcome at most so many seconds; None if it does not come."""
    deadline = time.monotonic() + seconds
    probe = folder / f"look.{os.getpid()}"
    while (outcome := read_outcome(folder)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # a change, so that an NFS client drops the old listing
            probe.touch()
            probe.unlink()
    return outcome


def is_listed(folder: Path, name: str) -> bool:
    """True once a file of the launch folder, such as STOP or MET, is seen."""
    with contextlib.suppress(OSError):
        return name in os.listdir(folder)
    return False


def ask_to_stop(folder: Path, reason: str) -> None:
    """Asks the ranks to save and stop; `reason` completes "stopped by ..."."""
    (folder / STOP).write_text(reason, encoding="utf-8")


def stop_reason(folder: Path) -> str | None:
    """Reads for whom the ranks were asked to stop; None where nothing says so."""
    with contextlib.suppress(OSError):
        text = (folder / STOP).read_text(encoding="utf-8", errors="replace")[:_MOST_LETTERS]
        return "".join(filter(str.isprintable, text)).strip() or None
    return None


def want_no_more_starts(folder: Path) -> None:
    """Keeps a batch script from starting the run again behind this start, which is stopped."""
    with contextlib.suppress(OSError):  # the folder is gone, and with it who would read it
        (folder / ENOUGH).touch()


def say(text: str) -> None:
    """Writes to stderr within two seconds or gives up: what follows must happen all the same."""

    def write() -> None:
        rest = f"{text}\n".encode(errors="replace")
        with contextlib.suppress(OSError):  # its reader is gone
            while rest:
                # not print: a thread stuck in it would hold a lock that the interpreter's end needs
                rest = rest[os.write(2, rest) :]

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_SECONDS_TO_SAY)


def encode(message: dict[str, Any]) -> bytes:
    """Encodes a message for a local pipe."""
    return json.dumps(message).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except RecursionError:  # deep nesting is as invalid as any other text
        message = None
    if not isinstance(message, dict):
        raise ValueError("a line that is no JSON object")
    return message


def read_line(read: Callable[[int], bytes], most_bytes: int = MESSAGE_BYTES) -> bytes:
    """Reads one line and no byte beyond it; shorter and without its end where the stream ends."""
    # byte by byte, because what follows the line belongs to the next reader of the stream
    line = b""
    while not line.endswith(b"\n") and (byte := read(1)):
        line += byte
        if len(line) > most_bytes:
            raise ValueError(f"a line of more than {most_bytes} bytes")
    return line


def begin_program() -> dict[str, Any]:
    """Begins a head or watchdog: returns its settings, a JSON object in the first line of stdin."""
    # launchers and SLURM signal whole process groups; these programs must see the ranks' end first
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    return _decode(read_line(partial(os.read, sys.stdin.fileno())))


class Inbox:
    """Splits one stream into lines of at most `most_bytes`."""

    def __init__(self, most_bytes: int = MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Lines that `data` completes, without their ends; refuses one before it is complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > self._most_bytes:
            raise ValueError(f"a line of more than {self._most_bytes} bytes")
        return lines

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Messages of a local pipe that `data` completes."""
        return [_decode(line) for line in self.lines(data)]


class Channel:
    """Authenticated messages over one connection, in both directions."""

    def __init__(self, token: str, *, head_nonce: bytes, caller_nonce: bytes, is_head: bool):
        self._key = hmac.digest(token.encode(), head_nonce + caller_nonce, "sha256")
        self._sending, self._receiving = (b"head", b"call") if is_head else (b"call", b"head")
        self._num_sent = 0
        self._num_received = 0
        self._inbox = Inbox()

    def encode(self, message: dict[str, Any]) -> bytes:
        """Encodes the next message to the other side."""
        line = encode(message)
        mac = self._mac(self._sending, self._num_sent, line[:-1])
        self._num_sent += 1
        return mac + b" " + line

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Messages that `data` completes."""
        return [self.open(line) for line in self._inbox.lines(data)]

    def open(self, line: bytes) -> dict[str, Any]:
        """Decodes the next line; nothing of it is parsed before its MAC is checked."""
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._receiving, self._num_received, text)):
            raise ValueError("a line that is not the next one of the other side")
        self._num_received += 1
        return _decode(text)

    def _mac(self, direction: bytes, number: int, text: bytes) -> bytes:
        signed = direction + number.to_bytes(8, "big") + text
        return hmac.digest(self._key, signed, "sha256").hex().encode()


def answer(token: str, nonce: bytes, line: bytes) -> tuple[Channel, dict[str, Any]]:
    """Opens the head's side of a channel; returns it and the greeting.

    Args:
        nonce: sent to this caller.
        line: first line of the caller, refused if it does not know the token.
    """
    caller_nonce, _, signed = line.partition(b" ")
    if not _NONCE.fullmatch(caller_nonce):
        raise ValueError("a greeting without a nonce")
    channel = Channel(token, head_nonce=nonce, caller_nonce=caller_nonce, is_head=True)
    return channel, channel.open(signed)


def call(connection: socket.socket, token: str, greeting: dict[str, Any]) -> Channel:
    """Opens a caller's side of a channel, and waits for the welcome of this run's head.

    Raises OSError if the other end does not answer, or hangs up.
    """
    nonce = read_line(connection.recv, GREETING_BYTES).rstrip(b"\n")
    if not nonce:
        raise ConnectionResetError("hung up without a word")
    if not _NONCE.fullmatch(nonce):
        raise ValueError("no head of a run answers there")
    caller_nonce = secrets.token_hex(16).encode()
    channel = Channel(token, head_nonce=nonce, caller_nonce=caller_nonce, is_head=False)
    connection.sendall(caller_nonce + b" " + channel.encode(greeting))
    welcome = read_line(connection.recv, GREETING_BYTES)
    if not welcome:
        raise ConnectionResetError("hung up after the greeting")
    channel.open(welcome.rstrip(b"\n"))
    return channel


class Clock:
    """Time between two looks, without the time in which this process itself did not run.

    A process that was suspended, or starved on a crowded host, could hear nobody: it must not take
    the silence for theirs.
    """

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._most = 2 * interval_seconds
        self._last = now

    def advance(self, now: float) -> float:
        """Seconds since the last call, at most two intervals."""
        elapsed = now - self._last
        self._last = now
        return min(elapsed, self._most)
