"""Which rank is to blame when a run stands still, from what all watchdogs say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Where a rank stands that waits for the others rather than making them wait.
_WAITING = ("torch/distributed/", "deepspeed/comm/")
_OURS = "cluster/heartbeat.py"
_LINES_SHOWN = 30
_TOLD = frozenset(
    ("step", "phase", "quiet_seconds", "stuck_seconds", "allowed_seconds", "stack", "state", "log")
)


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
        log: path of the run's log, known to rank 0.
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
    log: str | None = None

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
        return f"rank {self.rank} on {self.host or 'a host that never called'}"

    @property
    def place(self) -> str:
        """How far it was, for messages."""
        return f"step {self.step} ({self.phase})"

    def note(self, message: dict[str, Any]) -> None:
        """Take in what its watchdog says."""
        self.unheard_seconds = 0.0
        if "left" in message:
            self.code = message["left"]
        self.has_died = self.has_died or "died" in message
        for name in _TOLD.intersection(message):
            setattr(self, name, message[name])

    def is_suspect(self, deadline_seconds: float) -> bool:
        """Whether something is wrong with it."""
        silent_seconds = max(self.unheard_seconds, self.quiet_seconds)
        is_late = silent_seconds > deadline_seconds or self.stuck_seconds > self.allowed_seconds
        return self.is_lost or (self.is_running and is_late)


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
    stuck = [peer for peer in running if peer.stuck_seconds > peer.allowed_seconds]
    guilty = _holding_up(stuck)
    told = _each(
        f"{peer.name} is stuck for {peer.stuck_seconds:.0f} s at {peer.place}{_where(peer)}"
        for peer in guilty[:3]
    )
    if len(guilty) == len(stuck) > 1:
        return f"{told}\nAll {len(stuck)} ranks wait for each other"
    return told


def _each(sentences: Iterable[str]) -> str:
    return "; ".join(sentences)


def _lost(peer: Peer) -> str:
    if peer.has_hung_up:
        return "is gone with its watchdog"
    return f"cannot be reached for {peer.unheard_seconds:.0f} s"


def _where(peer: Peer) -> str:
    if peer.state == "T":
        return ": its process is stopped (state T), so that it cannot show its stack"
    if not peer.stack:
        state = f" (state {peer.state})" if peer.state else ""
        return f": its process{state} does not answer when asked for its stack"
    lines = [line for block in threads(peer.stack) for line in block][:_LINES_SHOWN]
    return ", in\n" + "\n".join(lines)


def threads(stack: str) -> list[list[str]]:
    """The lines of each thread in a stack by faulthandler, main thread first, ours left out."""
    blocks: list[list[str]] = []
    for line in stack.splitlines():
        if "hread 0x" in line:
            blocks.append([])
        if blocks and line.strip():
            blocks[-1].append(line)
    return [block for block in reversed(blocks) if _OURS not in "".join(block)]


def _holding_up(stuck: list[Peer]) -> list[Peer]:
    """Those that do not wait in a collective; else those that stand where fewest do."""
    places = {peer.rank: _main_thread(peer) for peer in stuck}
    busy = [p for p in stuck if not any(mark in places[p.rank] for mark in _WAITING)]
    if busy and len(busy) < len(stuck):
        return busy
    counts = Counter(places.values())
    fewest = min(counts.values())
    return [peer for peer in stuck if counts[places[peer.rank]] == fewest]


def _main_thread(peer: Peer) -> str:
    blocks = threads(peer.stack or "")
    return "\n".join(blocks[0][1:]) if blocks else ""
