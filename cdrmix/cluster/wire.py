"""Messages between a rank, its watchdog and the head: JSON objects, one to a line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def encode(message: dict[str, Any]) -> bytes:
    """One message as it travels."""
    return json.dumps(message).encode() + b"\n"


def say(text: str) -> None:
    """Write to stderr; whoever read it may be gone, and what follows must be done all the same."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def read_line(descriptor: int) -> bytes:
    """One line, and no byte beyond it: what follows is for whoever reads on."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


class Inbox:
    """What arrived on one stream, cut into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes.

        Raises:
            ValueError: if a line is no JSON object: the other end is none of ours.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that is no JSON object")
        return messages


class Clock:
    """Seconds between two looks, without those in which this process itself did not run.

    A process that was suspended, or starved on a crowded host, could hear nobody: it must not take
    the silence for theirs.
    """

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._most = 2 * interval_seconds
        self._last = now

    def advance(self, now: float) -> float:
        """Seconds since the last call, at most two intervals."""
        elapsed, self._last = now - self._last, now
        return min(elapsed, self._most)
