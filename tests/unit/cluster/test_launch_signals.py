"""Signals to `cdrmix launch`."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdrmix.cluster.launch import _Signals
from cdrmix.cluster.messages import STOP, is_listed, stop_reason
from cdrmix.errors import EXIT_FAULT, EXIT_STOPPED_BY_SIGNAL

STOPPING = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


@pytest.fixture
def signals() -> Iterator[_Signals]:
    """The command's signals; the test's own handlers are put back."""
    numbers = [signal.Signals[name] for name in STOPPING]
    handlers = [signal.getsignal(number) for number in numbers]
    yield _Signals()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("name", STOPPING)
def test_a_signal_asks_the_ranks_to_stop_and_a_second_one_ends_them(
    name: str, signals: _Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    signals.folder = tmp_path
    assert not is_listed(tmp_path, STOP)
    os.kill(os.getpid(), signal.Signals[name])
    assert is_listed(tmp_path, STOP)
    assert capfd.readouterr().err == (
        f"{name}: asking the ranks to save and stop; once more ends them\n"
    )
    told = stop_reason(tmp_path)
    assert told is not None
    assert name in told
    assert ("an interrupt" in told) == (name == "SIGINT")
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.Signals[name])
    assert end.value.code == EXIT_FAULT


def test_between_two_starts_a_signal_ends_the_command(signals: _Signals) -> None:
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == EXIT_STOPPED_BY_SIGNAL


def test_a_hangup_that_nohup_has_ignored_stays_ignored(signals: _Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    again = _Signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert again.name is None


class _Interrupted(io.RawIOBase):
    """A terminal on which each write is interrupted by a signal."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return len(bytes(data))  # type: ignore[call-overload]


def test_a_signal_that_interrupts_the_writing_of_a_line_is_heard(
    signals: _Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.folder = tmp_path
    terminal = io.TextIOWrapper(io.BufferedWriter(_Interrupted()), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    from cdrmix import log

    log.configure()
    try:
        log.get_logger(__name__).info("a line")
    finally:
        monkeypatch.undo()
        log.configure()
    assert is_listed(tmp_path, STOP)
