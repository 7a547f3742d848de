"""A rank that dies, stops or stands still ends the run within its deadline, with one message."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cdrmix.cluster.heartbeat import Heartbeat, Limits, Meeting
from cdrmix.cluster.messages import STOP, Channel, answer, encode, read_line
from tests.equal_runs import assert_equal_runs
from tests.harness import RanksFailed, rank_environment, run_ranks
from tests.small_run import STEPS, arguments, before_step, overrides, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

DEADLINE_SECONDS = 8  # a crowded machine makes a step of 0.1 s last
STEP_OF_FAULT = 5
SECONDS_TO_WRITE = 5
SECONDS_TO_BE_HEARD = 2  # watchdogs start beside the ranks; five small steps may be over before
FAULTY_RANK = 1


@dataclass(frozen=True)
class Fault:
    """What a run left: its log, its outcome, the ranks' exit codes, the seconds it took to end."""

    log: str
    outcome: dict[str, Any]
    ends: list[int]
    seconds: float


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stand_still() -> None:
    time.sleep(600)


def lose_the_host() -> None:
    lose_the_watchdog()
    die()


def raise_a_fault_of_ours() -> None:
    raise ZeroDivisionError("of this test")


def nothing() -> None:
    pass


def lose_the_watchdog() -> None:
    for child in psutil.Process().children():
        child.kill()


def start_with_fault(argv: list[str], folder: str, rank: int, fault: Callable[[], Any]) -> int:
    """What a rank does; rank 1 notes the time and has a fault before step 5."""
    os.environ.update(rank_environment(rank, 2, int(os.environ["MASTER_PORT"])))
    os.environ["CDRMIX_LAUNCH_FOLDER"] = folder

    def note_and_fail() -> None:
        time.sleep(SECONDS_TO_BE_HEARD)
        Path(folder, "began").write_text(str(time.time()))
        fault()

    if rank == FAULTY_RANK:
        before_step(STEP_OF_FAULT, note_and_fail)
    return start(argv)


def two_ranks(argv: list[str], folder: str, fault: Callable[[], Any]) -> list[int]:
    """Exit codes of two ranks, or minus the signals that ended them, in rank order.

    The ranks are children of the harness's, which would end all of them when the first one ends.
    """
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                os._exit(start_with_fault(argv, folder, rank, fault))
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    deadline = time.monotonic() + SECONDS_TO_WRITE
    while not Path(folder, "outcome.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the head ends after its rank, and the harness ends all that is left
    return ends


def run_with_fault(
    data: Path, run_dir: Path, fault: Callable[[], Any], folder: Path, *more: str
) -> Fault:
    """What became of a run on two ranks of which one has a fault before step 5."""
    settings = [f"supervision.deadline_seconds={DEADLINE_SECONDS}"]
    argv = arguments(data, run_dir, *overrides(settings), *more)
    (ends,) = run_ranks(two_ranks, 1, argv, str(folder), fault, timeout=60)
    written = folder / "outcome.json"
    return Fault(
        log=(run_dir / "train.log").read_text(),
        outcome=json.loads(written.read_text()),
        ends=ends,
        seconds=written.stat().st_mtime - float((folder / "began").read_text()),
    )


@pytest.fixture(scope="module")
def uninterrupted(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of an uninterrupted run on two ranks."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run_ranks(start, 2, arguments(small_corpus, run_dir)) == [0, 0]
    return run_dir


@pytest.mark.parametrize(
    ("fault", "message", "deadline_seconds"),
    [
        (die, r"rank 1 on HOST died at step 5 \(training\)", 0),
        (
            stop,
            r"rank 1 on HOST is silent for \d+ s at step 5 \(training\): .* is stopped",
            DEADLINE_SECONDS,
        ),
        (
            stand_still,
            r"rank 1 on HOST is stuck for \d+ s at step 5 \(training\), in",
            DEADLINE_SECONDS,
        ),
        (lose_the_host, r"rank 1 on HOST (is gone with its watchdog|died)", 0),
        (lose_the_watchdog, r"rank 1 on HOST is gone with its watchdog, last seen at step \d", 0),
    ],
)
def test_all_ranks_end_within_the_deadline_and_the_log_says_whose_fault_it_was(
    fault: Callable[[], Any],
    message: str,
    deadline_seconds: float,
    small_corpus: Path,
    run_dir: Path,
    tmp_path: Path,
    uninterrupted: Path,
) -> None:
    found = run_with_fault(small_corpus, run_dir, fault, tmp_path)
    assert found.log.count("ERROR") == 1
    assert re.search(f"ERROR error: {message.replace('HOST', socket.gethostname())}", found.log)
    assert found.outcome["exit_code"] == 1
    assert found.seconds < deadline_seconds + 5
    assert found.ends == [-signal.SIGKILL] * 2
    if fault is stand_still:
        assert "in stand_still" in found.log
        assert "heartbeat.py" not in found.log
    assert run_ranks(start, 2, [*arguments(small_corpus, run_dir), "--resume", "auto"]) == [0, 0]
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def test_a_rank_that_fails_alone_ends_the_others_by_its_exit_code(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    found = run_with_fault(small_corpus, run_dir, raise_a_fault_of_ours, tmp_path)
    assert found.outcome["exit_code"] == 1
    assert found.ends[FAULTY_RANK] == 1
    assert found.ends[0] != 0
    assert found.seconds < DEADLINE_SECONDS + 5


def test_a_healthy_run_leaves_its_exit_code_and_no_process(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    found = run_with_fault(small_corpus, run_dir, nothing, tmp_path)
    assert found.outcome == {"exit_code": 0, "reason": "", "step": 8}
    assert found.ends == [0, 0]
    assert "ERROR" not in found.log


def read_for_long() -> None:
    """From now on: the next batch comes once a store was asked again beyond the deadline."""
    from cdrmix.engines.reading import Reading

    read = Reading.next_batch

    def read_late(reading: Reading, **place: Any) -> Any:
        Reading.next_batch = read  # type: ignore[method-assign]
        time.sleep(DEADLINE_SECONDS + 3)
        return read(reading, **place)

    Reading.next_batch = read_late  # type: ignore[method-assign]


def test_a_store_that_answers_late_and_a_hook_that_sends_a_checkpoint_end_no_run(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    remote = [f"data.path=file://{small_corpus}", f"data.cache_folder={tmp_path / 'cache'}"]
    options = f"{{seconds: {DEADLINE_SECONDS + 3}, saved_step: 3}}"
    hook = f"hooks=[{{use: 'tests.noting_hooks:Resting', options: {options}}}]"
    more = overrides([*remote, hook])
    found = run_with_fault(small_corpus, run_dir, read_for_long, tmp_path, *more)
    assert found.outcome == {"exit_code": 0, "reason": "", "step": 8}
    assert found.ends == [0, 0]
    assert found.seconds > DEADLINE_SECONDS


def test_a_wish_to_stop_that_came_before_the_ranks_is_heard(
    small_corpus: Path, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / STOP).touch()
    argv = arguments(small_corpus, run_dir, "--max-steps", "1000000")
    assert run_ranks(two_ranks, 1, argv, str(tmp_path), nothing, timeout=60) == [[75, 75]]
    assert json.loads((tmp_path / "outcome.json").read_text())["exit_code"] == 75


@contextlib.contextmanager
def head_of_the_test() -> Iterator[tuple[Heartbeat, Channel, socket.socket]]:
    """A beating rank, and the head's end of the connection of its watchdog."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting("127.0.0.1", listener.getsockname()[1], "token")
        heartbeat = Heartbeat(meeting, Limits(deadline_seconds=1.0, phase_seconds=100.0), rank=0)
        connection, _ = listener.accept()
        nonce = secrets.token_hex(16).encode()
        connection.sendall(nonce + b"\n")
        channel, greeting = answer("token", nonce, read_line(connection.recv).rstrip(b"\n"))
        assert greeting == {"rank": 0, "host": socket.gethostname()}
        connection.sendall(channel.encode({"alive": True}))
        with connection:
            yield heartbeat, channel, connection


def told_after_a_long_start(seconds: float) -> list[dict[str, Any]]:
    """What the head hears of a rank that took so long to start, and then does a step."""
    with head_of_the_test() as (heartbeat, channel, connection):
        ready = time.monotonic() + seconds
        while time.monotonic() < ready:
            connection.sendall(channel.encode({"alive": True}))
            time.sleep(0.1)
        heartbeat.step_done(1)
        time.sleep(0.5)
        heartbeat.leave(0)
        time.sleep(0.2)
        return channel.take(connection.recv(1_000_000))


def test_a_step_that_is_done_ends_the_time_in_which_a_rank_got_no_further() -> None:
    (messages,) = run_ranks(told_after_a_long_start, 1, 1.5)
    stuck = {
        phase: [each["stuck_seconds"] for each in messages if each.get("phase") == phase]
        for phase in ("starting", "training")
    }
    assert max(stuck["starting"]) > 1.0
    assert max(stuck["training"]) < 1.0
    assert [each["left"] for each in messages if "left" in each] == [0]


def allowed_between_long_steps(seconds: float) -> list[float]:
    """Seconds that a rank asks for after each of four steps of so many, with a save in between."""
    with head_of_the_test() as (heartbeat, channel, connection):
        connection.sendall(channel.encode({"alive": True}))
        asked = []
        for step in range(1, 5):
            time.sleep(seconds)
            connection.sendall(channel.encode({"alive": True}))
            heartbeat.step_done(step)
            connection.sendall(channel.encode({"alive": True}))
            asked.append(heartbeat._beat["allowed_seconds"])
            if step == 2:
                with heartbeat.phase("saving"):
                    time.sleep(0.8)
                connection.sendall(channel.encode({"alive": True}))
        heartbeat.leave(0)
        return asked


def allowed_where_steps_become_slower(fast: float, slow: float) -> list[float]:
    """Seconds that a rank asks for: after two fast steps, where they end, and after two slow."""
    with head_of_the_test() as (heartbeat, channel, connection):
        asked = []
        for step, seconds in enumerate((0.0, fast, slow, slow)):
            if step == 2:
                heartbeat.forget_step()
                asked.append(heartbeat._beat["allowed_seconds"])
            connection.sendall(channel.encode({"alive": True}))
            time.sleep(seconds)
            heartbeat.step_done(step + 1)
            asked.append(heartbeat._beat["allowed_seconds"])
        heartbeat.leave(0)
        return asked


def test_the_first_step_of_another_kind_has_the_time_of_a_phase() -> None:
    (asked,) = run_ranks(allowed_where_steps_become_slower, 1, 0.01, 0.5)
    assert asked[:3] == [100.0, 1.0, 100.0]
    assert all(4 * 0.5 <= each < 100 for each in asked[3:]), "measured from its beginning on"


def test_steps_longer_than_the_deadline_are_given_their_time() -> None:
    (asked,) = run_ranks(allowed_between_long_steps, 1, 0.6)
    assert asked[0] == 100.0, "nobody knows yet how long a step takes"
    assert all(4 * 0.6 <= each < 4 * 1.3 for each in asked[1:]), "the save is no part of them"


def allowed_between_uneven_steps(seconds: list[float], save_after: int) -> list[float]:
    """Seconds that a rank asks for after each of these steps; one of them is followed by a save."""
    with head_of_the_test() as (heartbeat, channel, connection):
        heartbeat.forget_step(are_uneven=True)
        asked = []
        for step, duration in enumerate(seconds, start=1):
            connection.sendall(channel.encode({"alive": True}))
            time.sleep(duration)
            heartbeat.step_done(step)
            asked.append(heartbeat._beat["allowed_seconds"])
            if step == save_after:
                with heartbeat.phase("saving"):
                    pass
        heartbeat.leave(0)
        return asked


def test_uneven_steps_have_the_time_of_a_phase_up_to_the_first_save_then_that_of_the_longest() -> (
    None
):
    (asked,) = run_ranks(allowed_between_uneven_steps, 1, [0.5, 0.01, 0.01, 0.01], 2)
    assert asked[:2] == [100.0, 100.0]
    assert all(4 * 0.5 <= each < 100 for each in asked[2:])


def hold_up_metrics(seconds: float) -> None:
    """Have the next write to metrics.jsonl wait in the kernel, as one to a silent server does."""
    (number,) = (
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).endswith("metrics.jsonl")
    )
    file = os.dup(number)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(write_end, b"x" * 4096)
    os.set_blocking(write_end, True)
    os.dup2(write_end, number)
    os.close(write_end)

    def answer_again() -> None:
        time.sleep(seconds)
        os.dup2(file, number)  # of what is written from here on
        written = b""
        while data := os.read(read_end, 65536):
            written += data
        os.write(file, written[filled:])

    threading.Thread(target=answer_again, daemon=True).start()


def start_with_silent_metrics(argv: list[str], seconds: float) -> int:
    """What a rank does; on rank 0 the file server is silent for so long from step 5 on."""
    if os.environ["RANK"] == "0":
        before_step(STEP_OF_FAULT, functools.partial(hold_up_metrics, seconds))
    return start(argv)


def test_a_silent_file_server_ends_no_run_whose_log_waits_for_it(
    small_corpus: Path, run_dir: Path, uninterrupted: Path
) -> None:
    deadline_seconds = 4.0
    settings = overrides([f"supervision.deadline_seconds={deadline_seconds}"])
    argv = arguments(small_corpus, run_dir, *settings)
    began = time.monotonic()
    assert run_ranks(start_with_silent_metrics, 2, argv, 2 * deadline_seconds) == [0, 0]
    assert time.monotonic() - began > 2 * deadline_seconds
    assert "ERROR" not in (run_dir / "train.log").read_text()
    assert_equal_runs(run_dir, uninterrupted, steps=STEPS)


def without_a_head(leaves: bool) -> None:
    """A rank whose head is gone before its watchdog is under way."""
    meeting = Meeting("127.0.0.1", 1, "token")
    heartbeat = Heartbeat(meeting, Limits(deadline_seconds=5.0, phase_seconds=100.0), rank=0)
    (program,) = psutil.Process().children()
    program.suspend()
    if leaves:
        heartbeat.leave(2)
    program.resume()
    psutil.wait_procs([program], timeout=5)


def test_a_rank_that_has_left_is_not_told_that_its_head_is_gone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_ranks(without_a_head, 1, True)
    assert capfd.readouterr().out == ""


def test_a_rank_without_a_head_ends_with_a_word() -> None:
    with pytest.raises(RanksFailed, match=r"cannot reach 127.0.0.1:1 .* the rank ends") as failed:
        run_ranks(without_a_head, 1, False)
    assert failed.value.outcomes[0].value == "SIGKILL"


def ordered(lines: Callable[[Channel], list[bytes]]) -> None:
    """A rank whose watchdog hears these lines from the head's address."""
    with head_of_the_test() as (_, channel, connection):
        for line in lines(channel):
            connection.sendall(line)
        time.sleep(5)


def an_order_in_the_clear(channel: Channel) -> list[bytes]:
    return [encode({"end": True})]


def an_order_sent_twice(channel: Channel) -> list[bytes]:
    return [channel.encode({"alive": True})] * 2


@pytest.mark.parametrize("lines", [an_order_in_the_clear, an_order_sent_twice])
def test_an_order_that_is_not_the_heads_ends_the_rank_with_a_word(
    lines: Callable[[Channel], list[bytes]],
) -> None:
    told = r"arrived a line that is not the next one of the other side; the rank ends"
    with pytest.raises(RanksFailed, match=told) as failed:
        run_ranks(ordered, 1, lines)
    assert failed.value.outcomes[0].value == "SIGKILL"


def leave_as_the_head_ends_the_run() -> str:
    """A rank that leaves in the moment in which the head, asked to stop too, ends the run."""
    with head_of_the_test() as (heartbeat, channel, connection):
        (program,) = psutil.Process().children()
        program.suspend()
        heartbeat.leave(75)
        connection.sendall(channel.encode({"stop": True}) + channel.encode({"end": True}))
        program.resume()
        psutil.wait_procs([program], timeout=5)
        return "lives"


def test_a_rank_that_leaves_as_the_head_ends_the_run_keeps_its_exit_code() -> None:
    assert run_ranks(leave_as_the_head_ends_the_run, 1) == ["lives"]
