"""Finds the rank that caused a stall, from the watchdogs' reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cdrmix.cluster.messages import printable

# Where a rank stands that waits for the others rather than making them wait.
_WAITING = ("torch/distributed/", "deepspeed/comm/")
_OURS = "cluster/heartbeat.py"
_LINES_SHOWN = 30
_CHARACTERS_SHOWN = 200
_RANKS_SHOWN = 3
# What a watchdog reports, and as what.
_REPORTED: dict[str, type | tuple[type, ...]] = {
    "left": int,
    "died": bool,
    "step": int,
    "phase": str,
    "quiet_seconds": (int, float),
    "stuck_seconds": (int, float),
    "allowed_seconds": (int, float),
    "stack": str,
    "state": str,
}


@dataclass
class Peer:
    """A rank as the head knows it.

    Attributes:
        rank: global rank, and `host` its host's name once it has called.
        step: optimizer steps done, in `phase`.
        code: exit code it has announced, or None.
        has_died: it ended without a word.
        has_hung_up: its connection ended without a word.
        unheard_seconds: since its watchdog was heard.
        quiet_seconds: since its watchdog heard the rank.
        stuck_seconds: since the rank got any further; `allowed_seconds` is how long it may take.
        stack, state: what it answered when asked where it stands; state of its process.
    """

    rank: int
    host: str = ""
    step: int = 0
    phase: str = "starting"
    code: int | None = None
    has_died: bool = False
    has_hung_up: bool = False
    unheard_seconds: float = 0.0
    quiet_seconds: float = 0.0
    stuck_seconds: float = 0.0
    allowed_seconds: float = float("inf")
    stack: str | None = None
    state: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it has not said that it ends."""
        return self.code is None

    @property
    def is_lost(self) -> bool:
        """Whether it ended, or its watchdog did, without a word."""
        return self.is_running and (self.has_died or self.has_hung_up)

    @property
    def name(self) -> str:
        """Rank and host, for messages."""
        return f"rank {self.rank} on {_shown(self.host) or 'a host that never called'}"

    @property
    def place(self) -> str:
        """How far it was, for messages."""
        return f"step {self.step} ({_shown(self.phase)})"

    def note(self, message: dict[str, Any]) -> None:
        """Take in a report of its watchdog.

        Raises:
            ValueError: if a value is of a wrong type.
        """
        reported = {name: message[name] for name in _REPORTED if name in message}
        for name, value in reported.items():
            if not isinstance(value, _REPORTED[name]):
                raise ValueError(f"{name} of rank {self.rank} is {type(value).__name__}")
        self.unheard_seconds = 0.0
        self.code = reported.pop("left", self.code)
        self.has_died = reported.pop("died", False) or self.has_died
        for name, value in reported.items():
            setattr(self, name, value)


def is_suspicious(peers: list[Peer], *, deadline_seconds: float) -> bool:
    """Whether something is wrong with any of the ranks."""
    late = any(
        max(peer.unheard_seconds, peer.quiet_seconds) > deadline_seconds
        for peer in peers
        if peer.is_running
    )
    return late or any(peer.is_lost for peer in peers) or bool(_stuck(peers))


def _stuck(peers: list[Peer]) -> list[Peer]:
    """Ranks that get no further, though no rank of the run may take so long.

    What one of them may take, such as rank 0 to write its log, all may take: they wait for it.
    """
    running = [peer for peer in peers if peer.is_running]
    allowed_seconds = max((peer.allowed_seconds for peer in running), default=0.0)
    return [peer for peer in running if peer.stuck_seconds > allowed_seconds]


def accuse(peers: list[Peer], *, deadline_seconds: float) -> str:
    """Who holds the run up and how, in one message; the gravest kind only, for the rest follows.

    Args:
        peers: all ranks, of which at least one is suspect.
        deadline_seconds: silence after which a rank is lost.
    """
    running = [peer for peer in peers if peer.is_running]
    dead = [peer for peer in running if peer.has_died]
    if dead:
        return _each(f"{peer.name} died at {peer.place}" for peer in dead)
    lost = [p for p in running if p.has_hung_up or p.unheard_seconds > deadline_seconds]
    if lost:
        return _each(f"{peer.name} {_lost(peer)}, last seen at {peer.place}" for peer in lost)
    silent = [peer for peer in running if peer.quiet_seconds > deadline_seconds]
    if silent:
        return _each(
            f"{peer.name} is silent for {peer.quiet_seconds:.0f} s at {peer.place}{_where(peer)}"
            for peer in silent
        )
    stuck = _stuck(peers)
    guilty = _holding_up(stuck, running)
    text = _each(
        f"{peer.name} is stuck for {peer.stuck_seconds:.0f} s at {peer.place}{_where(peer)}"
        for peer in guilty[:_RANKS_SHOWN]
    )
    if len(guilty) > _RANKS_SHOWN:
        text = f"{text}\nand {len(guilty) - _RANKS_SHOWN} more"
    if len(guilty) == len(stuck) > 1 and not _busy(guilty):
        text = f"{text}\nAll {len(stuck)} ranks wait for each other"
    return text


def _each(sentences: Iterable[str]) -> str:
    return "; ".join(sentences)


def _lost(peer: Peer) -> str:
    if peer.has_hung_up:
        return "is gone with its watchdog"
    return f"cannot be reached for {peer.unheard_seconds:.0f} s"


def _shown(text: str) -> str:
    """One line of a report as it may stand in a log or a terminal."""
    return printable(text).replace("\n", "?")[:_CHARACTERS_SHOWN]


def _where(peer: Peer) -> str:
    if peer.state == "T":
        return ": its process is stopped (state T), so that it cannot show its stack"
    if not peer.stack:
        state = f" (state {_shown(peer.state)})" if peer.state else ""
        return f": its process{state} does not answer when asked for its stack"
    lines = [line for block in threads(peer.stack) for line in block][:_LINES_SHOWN]
    # indented, so that no line of a report can pass for one of the log's
    return ", in\n" + "\n".join(f"  {_shown(line)}" for line in lines)


def threads(stack: str) -> list[list[str]]:
    """The lines of each thread in a stack by faulthandler, main thread first, ours left out."""
    blocks: list[list[str]] = []
    for line in stack.splitlines():
        if "hread 0x" in line:
            blocks.append([])
        if blocks and line.strip():
            blocks[-1].append(line)
    return [block for block in reversed(blocks) if _OURS not in "".join(block)]


def _holding_up(stuck: list[Peer], running: list[Peer]) -> list[Peer]:
    """Ranks that do not wait in a collective; else those that stand where fewest do.

    Args:
        stuck: ranks that are beyond their time, at least one.
        running: all that run; one that does not wait may be within its time by a moment.
    """
    busy = _busy(stuck)
    if not busy:
        busy = _busy([peer for peer in running if peer.stack])
    if busy and len(busy) < len(running):
        return busy
    counts = Counter(_main_thread(peer) for peer in stuck)
    fewest = min(counts.values())
    return [peer for peer in stuck if counts[_main_thread(peer)] == fewest]


def _busy(peers: list[Peer]) -> list[Peer]:
    """Ranks whose main thread is not in a collective."""
    return [p for p in peers if not any(mark in _main_thread(p) for mark in _WAITING)]


def _main_thread(peer: Peer) -> str:
    blocks = threads(peer.stack or "")
    return "\n".join(blocks[0][1:]) if blocks else ""
