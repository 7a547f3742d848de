"""What the training loop shows on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdrmix import log
from cdrmix.engines import loop
from cdrmix.engines.run import Observer, Run
from cdrmix.engines.run_directory import METRICS
from cdrmix.hooks.dispatch import Hooks


def read_terminal(master: int) -> str:
    """All that was written to the terminal; its end reads as an error, EIO."""
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 65536):
            shown += chunk
    os.close(master)
    return shown.decode()


def stopped_run(folder: Path) -> Run[Any, Any]:
    observer = Observer()
    observer.open(folder, step=0, num_steps=400)
    observer.step_done(7, 0.5, waited=0.0)
    return cast(
        "Run[Any, Any]",
        SimpleNamespace(
            engine=None,
            observer=observer,
            requests=SimpleNamespace(stop="SIGINT"),
            hooks=Hooks(),
            step=7,
            command=["cdrmix", "train"],
            directory=SimpleNamespace(path=folder),
        ),
    )


def test_the_command_to_go_on_is_the_last_that_a_terminal_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, instead in (
        ("before_each_step", lambda *_: contextlib.nullcontext()),
        ("_train", lambda _: True),
        ("settle", lambda _: None),
    ):
        monkeypatch.setattr(loop, name, instead)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr(logging.getLogger("cdrmix"), "handlers", [])
        log.configure()
        run = stopped_run(tmp_path)
        assert loop.train(run)
        run.observer.close()
    shown = read_terminal(master).replace("\r", "\n").split("\n")
    *above, last = (line for line in shown if line.strip())
    assert "stopped by SIGINT after step 7" in last and "--resume auto" in last
    assert any("7/400 |" in line for line in above)
    assert (tmp_path / METRICS).exists()
