"""Log lines reach stderr whatever becomes of the file."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from cdrmix import log


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The project's root logger; its handlers and level are put back."""
    logger = logging.getLogger("cdrmix")
    handlers, level = list(logger.handlers), logger.level
    logger.handlers.clear()  # lest `configure` closes those of other tests
    yield logger
    log.configure()
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_the_file_gets_what_stderr_shows(
    root: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log.configure()
    log.log_to_file(tmp_path / "train.log")
    log.get_logger("engines").info("step 1")
    assert capfd.readouterr().err == "step 1\n"
    assert (tmp_path / "train.log").read_text().endswith(" INFO step 1\n")


def test_other_ranks_warn_under_their_name_only(
    root: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    log.configure(rank=3)
    log.get_logger("engines").info("step 1")
    log.get_logger("engines").warning("late")
    assert capfd.readouterr().err == "[rank 3] late\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told_once_and_without_a_traceback(
    root: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    log.configure()
    log.log_to_file(tmp_path / "train.log")
    log.get_logger("engines").info("step 1")
    log.get_logger("engines").info("step 2")
    first, warning, second = capfd.readouterr().err.splitlines()
    assert (first, second) == ("step 1", "step 2")
    assert "train.log: cannot be written ([Errno 28] No space left on device)" in warning


def test_a_forked_process_that_is_killed_while_it_writes_holds_up_nobody() -> None:
    written = threading.Event()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        tqdm.get_lock().acquire()
        os.write(writing, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    def write() -> None:
        tqdm.write("", file=io.StringIO())
        written.set()

    threading.Thread(target=write, daemon=True).start()
    assert written.wait(5)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing about colours, on a terminal that has them."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def test_a_terminal_shows_colours_and_a_pipe_none(plain: pytest.MonkeyPatch) -> None:
    assert log.styled("error:", "error", _Terminal()) == "\x1b[1;31merror:\x1b[0m"
    assert log.styled("error:", "error", io.StringIO()) == "error:"


@pytest.mark.parametrize(
    ("environment", "terminal", "pipe"),
    [
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_the_environment_decides_about_colours(
    plain: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, pipe: bool
) -> None:
    for name, value in environment.items():
        plain.setenv(name, value)
    assert (log.styled("ok", "ok", _Terminal()) != "ok") == terminal
    assert (log.styled("ok", "ok", io.StringIO()) != "ok") == pipe


def test_warnings_and_errors_stand_out_on_a_terminal(
    root: logging.Logger, plain: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    plain.setattr("sys.stderr", terminal)
    log.configure(rank=3)
    logger = log.get_logger("engines")
    logger.warning("warning: %s", "low")
    logger.warning("late")
    logger.error("error: gone")
    log.print_error(ValueError("wrong"))
    assert terminal.getvalue() == (
        "[rank 3] \x1b[33mwarning:\x1b[0m low\n"
        "\x1b[33m[rank 3] late\x1b[0m\n"
        "\n[rank 3] \x1b[1;31merror:\x1b[0m gone\n"
        "\n\x1b[1;31merror:\x1b[0m wrong\n"
    )


def test_an_error_in_a_pipe_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.print_error(ValueError("wrong"))
    assert capsys.readouterr().err == "error: wrong\n"


def test_a_terminal_gets_lines_wrapped_between_words_but_commands_whole(
    root: logging.Logger, plain: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    plain.setenv("COLUMNS", "20")
    plain.setattr("sys.stderr", terminal)
    log.configure()
    log.get_logger("engines").info("a line of more than twenty columns")
    log.print_error(ValueError("given 7: too many\nTry cdrmix launch --resume auto"))
    assert terminal.getvalue() == (
        "a line of more than\n  twenty columns\n"
        "\n\x1b[1;31merror:\x1b[0m given 7: too\n  many\nTry cdrmix launch --resume auto\n"
    )


def test_the_width_is_that_of_the_terminal(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("COLUMNS", "90")
    assert log.columns(_Terminal()) == 90
    assert log.columns(io.StringIO()) is None
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    with open(slave, "w") as stream, open(master, "rb"):
        assert log.columns(stream) == 72


def test_wide_characters_take_two_columns(plain: pytest.MonkeyPatch) -> None:
    assert log.visible_width("\x1b[33m日本\x1b[0m") == 4
    assert log.wrapped("日本語 日本語 日本語", width=14) == ["日本語 日本語", "日本語"]


def test_an_indent_leaves_half_of_a_narrow_terminal() -> None:
    assert log.wrapped("speed 171,654 tokens per second", width=20, hang=14) == [
        "speed 171,654 tokens",
        f"{'':10}per second",
    ]
