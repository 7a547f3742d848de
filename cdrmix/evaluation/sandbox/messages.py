"""Messages between the host and a zygote: JSON behind its length."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

_LENGTH_BYTES = 8


class Ended(Exception):
    """The other side has closed its end, or did not answer in time."""


def send_message(descriptor: int, message: dict[str, Any]) -> None:
    """Writes a message to a pipe, whole.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    text = json.dumps(message).encode()
    data = memoryview(len(text).to_bytes(_LENGTH_BYTES, "big") + text)
    while data:
        data = data[os.write(descriptor, data) :]


def receive_message(descriptor: int, seconds: float | None = None) -> dict[str, Any]:
    """Reads a message from a pipe.

    Args:
        seconds: to wait, at most, for the whole of it; None: without an end.

    Raises:
        Ended: there is none.
    """
    until = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(_read_exactly(descriptor, _LENGTH_BYTES, until), "big")
    message: dict[str, Any] = json.loads(_read_exactly(descriptor, length, until))
    return message


def _read_exactly(descriptor: int, count: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if until is not None:
            left = max(0.0, until - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise Ended("no answer in time")
        part = os.read(descriptor, min(count - len(data), 1 << 20))
        if not part:
            raise Ended("closed")
        data += part
    return bytes(data)
