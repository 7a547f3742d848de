"""Signals become requests, asked for between steps."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdrmix.cluster.messages import ask_to_stop
from cdrmix.engines import supervision
from cdrmix.engines.supervision import Requests
from cdrmix.errors import EXIT_STOPPED_BY_SIGNAL

PR_SET_PDEATHSIG = 1
STOPPING = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


@pytest.fixture
def requests() -> Iterator[Requests]:
    """A listening rank; the test's own handlers are put back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    listening = Requests()
    listening.listen()
    yield listening
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def test_nothing_is_asked_for_without_a_signal(requests: Requests) -> None:
    assert requests.poll() == (False, False)


@pytest.mark.parametrize("name", STOPPING)
def test_a_request_to_stop_stays_and_is_named(requests: Requests, name: str) -> None:
    with requests.deferred():
        os.kill(os.getpid(), signal.Signals[name])
        assert requests.poll() == (True, False)
        assert requests.poll() == (True, False)
        assert requests.stop == name


@pytest.mark.parametrize(
    ("written", "told"),
    [("an interrupt (SIGINT)", "an interrupt (SIGINT)"), ("", "SIGUSR1"), ("a\nb\x1b[0m", "ab[0m")],
)
def test_a_stop_that_a_watchdog_passes_on_names_who_asked_for_it(
    requests: Requests,
    written: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CDRMIX_LAUNCH_FOLDER", str(tmp_path))
    ask_to_stop(tmp_path, written)
    with requests.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.poll() == (True, False)
        assert requests.stop == told


def test_a_hangup_that_nohup_has_ignored_stays_ignored(requests: Requests) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert requests.poll() == (False, False)


@pytest.mark.parametrize("name", STOPPING)
def test_before_and_after_the_loop_a_rank_ends_at_once(requests: Requests, name: str) -> None:
    with requests.deferred():
        pass
    with pytest.raises(SystemExit) as caught:
        os.kill(os.getpid(), signal.Signals[name])
    assert caught.value.code == EXIT_STOPPED_BY_SIGNAL


def test_a_request_to_save_is_answered_once(requests: Requests) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert requests.poll() == (False, True)
    assert requests.poll() == (False, False)


def test_a_command_above_whose_arguments_are_no_text_stops_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sh", "-c", "read _", b"caf\xe9"], stdin=subprocess.PIPE) as above:
        monkeypatch.setattr(supervision, "_parent", lambda _: above.pid)
        assert Requests().poll() == (False, False)


def test_the_kernel_is_asked_for_a_signal_when_the_launcher_dies(requests: Requests) -> None:
    if sys.platform != "linux":
        pytest.skip("prctl is Linux's")
    number, pr_get_pdeathsig = ctypes.c_int(), 2
    ctypes.CDLL(None).prctl(pr_get_pdeathsig, ctypes.byref(number))
    assert number.value == signal.SIGTERM
