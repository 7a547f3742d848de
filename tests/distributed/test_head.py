"""The head as a process, called by watchdogs of the tests and by strangers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cdrmix.cluster.heartbeat import Limits, Meeting, StartedHead, start_head
from cdrmix.cluster.messages import (
    MET,
    STOP,
    Channel,
    await_outcome,
    call,
    encode,
    is_listed,
)
from tests.silent_server import silent_server

pytestmark = pytest.mark.usefixtures("leaves_nothing")

DEADLINE_SECONDS = 2.0


class Watchdog:
    """A watchdog of the test's, in this process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.connection = socket.create_connection((meeting.address, meeting.port), timeout=10)
        greeting = {"rank": rank, "host": f"host-{rank}"}
        self.channel = call(self.connection, meeting.token, greeting)

    def send(self, **message: Any) -> None:
        self.connection.sendall(self.channel.encode(message))

    def orders(self) -> list[dict[str, Any]]:
        """Orders up to now."""
        self.connection.settimeout(0.01)
        try:
            return self.channel.take(self.connection.recv(65536))
        except TimeoutError:
            return []
        finally:
            self.connection.settimeout(10)


@pytest.fixture
def started() -> Iterator[Callable[..., StartedHead]]:
    """Starts a head; ends it after the test, whatever became of it."""
    heads: list[StartedHead] = []

    def start(
        folder: Path,
        *,
        address: str = "127.0.0.1",
        world_size: int = 2,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> StartedHead:
        limits = Limits(deadline_seconds, phase_seconds=100.0)
        heads.append(start_head(address, limits, world_size=world_size, folder=folder))
        return heads[-1]

    before = set(psutil.Process().children())
    yield start
    for head in heads:
        head.pipe.close()
    programs = [each for each in psutil.Process().children() if each not in before]
    _, alive = psutil.wait_procs(programs, timeout=5)
    for program in alive:
        program.kill()
        program.wait()


def beat(watchdogs: list[Watchdog], seconds: float, until: str | None = None) -> list[str]:
    """Beat for so many seconds, or until an order of that name has come; names of the orders."""
    names: list[str] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and until not in names:
        for watchdog in watchdogs:
            names += [name for order in watchdog.orders() for name in order]
            if "end" not in names:
                watchdog.send(phase="training", step=3, quiet_seconds=0.0, allowed_seconds=100.0)
        time.sleep(0.05)
    return names


def outcome_of(folder: Path) -> dict[str, Any]:
    assert await_outcome(folder, 10) is not None
    return json.loads((folder / "outcome.json").read_text())


def write(data: bytes) -> Callable[[Meeting], None]:
    """A stranger who sends `data`, reads what comes, and hangs up."""

    def act(meeting: Meeting) -> None:
        with socket.create_connection((meeting.address, meeting.port), timeout=10) as stranger:
            try:
                stranger.sendall(data)
                while stranger.recv(65536):
                    pass
            except OSError:  # hung up while it wrote
                return

    return act


def greet(rank: Any, host: Any = "evil", token: str | None = None) -> Callable[[Meeting], None]:
    """A stranger who keeps to the protocol, and is refused."""

    def act(meeting: Meeting) -> None:
        address = (meeting.address, meeting.port)
        refused = pytest.raises((OSError, ValueError))
        with socket.create_connection(address, timeout=10) as stranger, refused:
            call(stranger, token or meeting.token, {"rank": rank, "host": host})

    return act


def repeat_a_greeting(meeting: Meeting) -> None:
    """A stranger who has overheard a watchdog, sends the same, and then an end in its name."""
    overheard: list[bytes] = []

    class Overheard(socket.socket):
        def sendall(self, data: Any, *flags: Any) -> None:
            overheard.append(bytes(data))
            super().sendall(data, *flags)

    with Overheard(socket.AF_INET) as caller:
        caller.connect((meeting.address, meeting.port))
        with pytest.raises(OSError):
            call(caller, meeting.token, {"rank": 99, "host": "evil"})
    assert meeting.token.encode() not in b"".join(overheard)
    write(overheard[0] + encode({"left": 1}))(meeting)


STRANGERS = {
    "a web browser": write(b"GET / HTTP/1.1\r\n\r\n"),
    "deep nesting": write(b"[" * 100_000 + b"\n"),
    "a line without end": write(b"x" * 5_000_000),
    "noise": write(random.Random(0).randbytes(200_000)),
    "a message in the clear": write(encode({"rank": 0, "host": "evil", "left": 1})),
    "an empty line": write(b"\n"),
    "another token": greet(0, token="0" * 32),
    "a rank that does not exist": greet(99),
    "a rank of another type": greet([0]),
    "a host of another type": greet(1, host={"a": 1}),
    "a rank that has called": greet(0),
    "a repeated greeting": repeat_a_greeting,
}


def test_strangers_are_hung_up_and_the_run_goes_on(
    started: Callable[..., StartedHead], tmp_path: Path
) -> None:
    deadline_seconds = 4.0
    meeting = started(tmp_path, deadline_seconds=deadline_seconds).meeting
    # of all children, which forked ranks have as well
    (program,) = (
        child
        for child in psutil.Process().children()
        if "cdrmix.cluster.head" in " ".join(child.cmdline())
    )
    first = Watchdog(meeting, 0)
    for name, stranger in STRANGERS.items():
        stranger(meeting)
        assert program.is_running(), name
    with contextlib.ExitStack() as silent:
        for _ in range(251):
            silent.enter_context(socket.create_connection((meeting.address, meeting.port)))
        beat([first], 0.2)
        assert program.num_fds() < 90, "the oldest strangers are hung up"
        second = Watchdog(meeting, 1)  # is heard all the same
        assert set(beat([first, second], deadline_seconds + 1.0)) == {"alive"}
        assert program.num_fds() < 20, "strangers are hung up in time"
    for watchdog in (first, second):
        watchdog.send(left=0, step=8)
    assert outcome_of(tmp_path) == {"exit_code": 0, "reason": "", "step": 8}


def test_a_report_of_wrong_types_costs_its_rank_and_no_line_of_the_log_is_forged(
    started: Callable[..., StartedHead], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head, log, forged = started(tmp_path), tmp_path / "train.log", tmp_path / "forged.log"
    head.pipe.write(encode({"log": str(log), "go_on": "cdrmix launch --run-dir here"}))
    first, second = (Watchdog(head.meeting, rank) for rank in range(2))
    second.send(log=str(forged), phase="x\n2026-01-01 ERROR forged\x1b[2J")
    beat([first], 0.5)
    second.send(step="three")
    assert "end" in beat([first], 5, until="end")
    assert "rank 1 on host-1 is gone" in outcome_of(tmp_path)["reason"]
    text = log.read_text()
    assert "(x?2026-01-01 ERROR forged?[2J)" in text
    assert "All ranks end. Go on with: cdrmix launch --run-dir here" in text
    assert "\x1b" not in text + capfd.readouterr().err
    assert not forged.exists()


@pytest.mark.compiler
def test_a_silent_file_server_ends_no_run_that_needs_no_file(
    started: Callable[..., StartedHead],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    flag = elsewhere / "flag"
    environment = silent_server(tmp_path, flag, build=elsewhere)
    with monkeypatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        head = started(tmp_path)
    watchdogs = [Watchdog(head.meeting, rank) for rank in range(2)]
    ends = time.monotonic() + 10
    while not is_listed(tmp_path, MET):
        beat(watchdogs, 0.1)
        assert time.monotonic() < ends
    flag.touch()
    (tmp_path / STOP).touch()
    for _ in range(2):  # each time it is heard anew
        assert set(beat(watchdogs, DEADLINE_SECONDS)) == {"alive"}
    flag.unlink()
    assert "stop" in beat(watchdogs, 10, until="stop")
    flag.touch()  # and again at the end of the run
    watchdogs[1].send(died=True)
    assert "end" in beat(watchdogs, 10, until="end"), "the ranks do not wait for the server"
    assert not (tmp_path / "outcome.json").exists()
    flag.unlink()
    assert "rank 1 on host-1 died" in outcome_of(tmp_path)["reason"]


def test_a_log_that_cannot_be_written_now_holds_no_rank_up(
    started: Callable[..., StartedHead], tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    os.mkfifo(log)  # opening it waits for a reader
    head = started(tmp_path)
    head.pipe.write(encode({"log": str(log)}))
    watchdogs = [Watchdog(head.meeting, rank) for rank in range(2)]
    beat(watchdogs, 0.3)
    watchdogs[1].send(died=True)
    assert "end" in beat(watchdogs, 10, until="end")
    assert "rank 1 on host-1 died" in log.read_text()
    assert outcome_of(tmp_path)["exit_code"] == 1


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        (({"left": 75}, {"left": 1}), 1),
        (({"left": 75}, {"died": True}), 1),
        (({"left": 75}, {"left": 2}), 2),
        (({"left": 75}, {"left": 69}), 69),
        (({"left": 75}, {"left": 75}), 75),
        (({"left": 75}, {"left": 0}), 75),
    ],
)
def test_of_a_stop_and_an_end_at_once_the_graver_counts(
    reports: tuple[dict[str, Any], ...],
    code: int,
    started: Callable[..., StartedHead],
    tmp_path: Path,
) -> None:
    meeting = started(tmp_path).meeting
    watchdogs = [Watchdog(meeting, rank) for rank in range(2)]
    (tmp_path / STOP).touch()
    for watchdog, report in zip(watchdogs, reports, strict=True):
        watchdog.send(step=5, **report)
    assert outcome_of(tmp_path)["exit_code"] == code


def test_an_order_to_stop_and_one_to_end_reach_the_rank_that_is_left(
    started: Callable[..., StartedHead], tmp_path: Path
) -> None:
    meeting = started(tmp_path).meeting
    (tmp_path / STOP).touch()
    watchdogs = [Watchdog(meeting, rank) for rank in range(2)]
    watchdogs[1].send(died=True, step=4)
    names = beat(watchdogs[:1], 10, until="end")
    assert names.index("stop") < names.index("end") if "stop" in names else "end" in names
    assert outcome_of(tmp_path)["exit_code"] == 1, "lost, and not stopped as asked"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_a_head_listens_at_an_address_of_ipv6(
    started: Callable[..., StartedHead], tmp_path: Path
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    meeting = started(tmp_path, address="::1").meeting
    for rank in range(2):
        Watchdog(meeting, rank).send(left=0)
    assert outcome_of(tmp_path)["exit_code"] == 0


def test_the_head_proves_itself_to_a_watchdog() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        impostor, _ = listener.accept()
        impostor.sendall(b"0" * 32 + b"\n")
        nothing = Channel("guessed", head_nonce=b"0" * 32, caller_nonce=b"1" * 32, is_head=True)
        impostor.sendall(nothing.encode({"alive": True}))
        with pytest.raises(ValueError, match="not the next one of the other side"):
            call(caller, "token", {"rank": 0, "host": "a"})
        caller.close()
        impostor.close()
