"""Finds the rank that caused a stall, from the watchdogs' reports."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

# Frames of a rank that waits for the others.
_WAITING = ("torch/distributed/", "deepspeed/comm/")
_HEARTBEAT = "cluster/heartbeat.py"
_LINES_SHOWN = 30
_CHARACTERS_SHOWN = 200
_RANKS_SHOWN = 3
# Fields of a watchdog's report, with their types: a report comes over the network.
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
    """State of a rank, from the reports of its watchdog."""

    rank: int
    host: str = ""  # until it has called
    step: int = 0
    phase: str = "starting"
    code: int | None = None  # exit code it has announced
    has_died: bool = False  # its process ended without an exit code
    has_hung_up: bool = False  # its watchdog's connection did
    unheard_seconds: float = 0.0  # since the last report
    quiet_seconds: float = 0.0  # between the rank's last beat and the last report
    stuck_seconds: float = 0.0  # since the rank last made progress
    allowed_seconds: float = float("inf")  # limit of `stuck_seconds`
    stack: str | None = None  # when last asked for
    state: str = ""  # letter of its process

    @property
    def is_running(self) -> bool:
        """True until the rank announces its exit code."""
        return self.code is None

    @property
    def is_lost(self) -> bool:
        """True if the rank or its watchdog ended without an exit code."""
        return self.is_running and (self.has_died or self.has_hung_up)

    @property
    def name(self) -> str:
        """Rank and host, for messages."""
        return f"rank {self.rank} on {_safe_line(self.host) or 'a host that never called'}"

    @property
    def place(self) -> str:
        """Step and phase, for messages."""
        return f"step {self.step} ({_safe_line(self.phase)})"

    def note(self, message: dict[str, Any]) -> None:
        """Takes over a watchdog's report; nothing of it, by a ValueError, if a type is wrong."""
        report = {name: message[name] for name in _REPORTED if name in message}
        for name, value in report.items():
            if not isinstance(value, _REPORTED[name]):
                raise ValueError(f"{name} of rank {self.rank} is {type(value).__name__}")
        self.unheard_seconds = 0.0
        self.code = report.pop("left", self.code)
        self.has_died = report.pop("died", False) or self.has_died
        for name, value in report.items():
            setattr(self, name, value)


def is_suspicious(peers: list[Peer], *, deadline_seconds: float) -> bool:
    """True if a rank is lost, silent or stuck."""
    late = any(
        peer.is_lost or max(peer.unheard_seconds, peer.quiet_seconds) > deadline_seconds
        for peer in peers
        if peer.is_running
    )
    return late or bool(_stuck(peers))


def accuse(peers: list[Peer], *, deadline_seconds: float) -> str:
    """Names the ranks that hold the run up, and how, in one message.

    Only the gravest kind of fault is reported, because the others follow from it. At least one of
    the ranks is suspicious.
    """
    running = [peer for peer in peers if peer.is_running]
    dead = [f"{peer.name} died at {peer.place}" for peer in running if peer.has_died]
    gone = []
    for peer in running:
        if peer.has_hung_up:
            gone.append(f"{peer.name} is gone with its watchdog, last seen at {peer.place}")
        elif peer.unheard_seconds > deadline_seconds:
            why = f"cannot be reached for {peer.unheard_seconds:.0f} s"
            gone.append(f"{peer.name} {why}, last seen at {peer.place}")
    silent = [
        f"{peer.name} is silent for {peer.quiet_seconds:.0f} s at {peer.place}{_where(peer)}"
        for peer in running
        if peer.quiet_seconds > deadline_seconds
    ]
    for sentences in (dead, gone, silent):
        if sentences:
            return "; ".join(sentences)
    stuck = _stuck(peers)
    # Those that do not wait in a collective hold the others up. If none of the stuck ranks, then
    # one that may be within its limit by a moment.
    guilty = _busy(stuck) or _busy([peer for peer in running if peer.stack])
    if not 0 < len(guilty) < len(running):
        # all wait: the many for the few that went another way, such as into a different collective
        counts = Counter(_main_thread(peer) for peer in stuck)
        fewest = min(counts.values())
        guilty = [peer for peer in stuck if counts[_main_thread(peer)] == fewest]
    text = "; ".join(
        f"{peer.name} is stuck for {peer.stuck_seconds:.0f} s at {peer.place}{_where(peer)}"
        for peer in guilty[:_RANKS_SHOWN]
    )
    if len(guilty) > _RANKS_SHOWN:
        text = f"{text}\nand {len(guilty) - _RANKS_SHOWN} more"
    if len(guilty) == len(stuck) > 1 and not _busy(guilty):
        text = f"{text}\nAll {len(stuck)} ranks wait for each other"
    return text


def _stuck(peers: list[Peer]) -> list[Peer]:
    """Ranks without progress for longer than any rank of the run may take.

    One limit for all: while rank 0 takes its time to write a log, the others wait for it.
    """
    running = [peer for peer in peers if peer.is_running]
    allowed_seconds = max((peer.allowed_seconds for peer in running), default=0.0)
    return [peer for peer in running if peer.stuck_seconds > allowed_seconds]


def _busy(peers: list[Peer]) -> list[Peer]:
    """Ranks whose main thread is not in a collective."""
    return [p for p in peers if not any(mark in _main_thread(p) for mark in _WAITING)]


def _main_thread(peer: Peer) -> str:
    blocks = threads(peer.stack or "")
    return "\n".join(blocks[0][1:]) if blocks else ""


def threads(stack: str) -> list[list[str]]:
    """Splits a faulthandler stack into threads, main thread first, the heartbeat's left out."""
    blocks: list[list[str]] = []
    for line in stack.splitlines():
        if "hread 0x" in line:  # "Thread 0x...", or "Current thread 0x..."
            blocks.append([])
        if blocks and line.strip():
            blocks[-1].append(line)
    # faulthandler writes the main thread last
    return [block for block in reversed(blocks) if _HEARTBEAT not in "".join(block)]


def _where(peer: Peer) -> str:
    if peer.state == "T":
        return ": its process is stopped (state T), so that it cannot show its stack"
    if not peer.stack:
        state = f" (state {_safe_line(peer.state)})" if peer.state else ""
        return f": its process{state} does not answer when asked for its stack"
    lines = [line for block in threads(peer.stack) for line in block][:_LINES_SHOWN]
    # indented, so that no line of a report can pass for a line of the log
    return ", in\n" + "\n".join(f"  {_safe_line(line)}" for line in lines)


def _safe_line(text: str) -> str:
    """Makes one line of a report safe for a log or a terminal."""
    # control characters of a report could rewrite what a terminal shows, or begin a line of a log
    return "".join(c if c.isprintable() else "?" for c in text)[:_CHARACTERS_SHOWN]
