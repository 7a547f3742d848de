"""`cdrmix launch` as a process of a test: its output, its ranks, and nothing left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.harness import RANK_ENVIRONMENT, ROOT, rank_environment, tail

_FOLDER = "CDRMIX_LAUNCH_FOLDER"


def launch_beside(
    run_dir: Path, args: Sequence[str], *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `cdrmix launch` to its end in a directory where another one may be at work."""
    return subprocess.run(
        _command(run_dir, args),
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


class SupervisedLaunch:
    """`cdrmix launch` under way; leaving the context ends all that it started."""

    def __init__(self, run_dir: Path, args: Sequence[str], *, prefix: Sequence[str] = ()) -> None:
        """Start `cdrmix launch --run-dir run_dir *args` on CPU ranks, in the checkout's root.

        Args:
            run_dir: run directory.
            args: further flags.
            prefix: a command that starts ours in its turn, on a host of the test's.
        """
        self._run_dir = run_dir
        self._output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*prefix, *_command(run_dir, args)],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._output.close()

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return tail(self._output)

    def processes(self) -> list[psutil.Process]:
        """What its starts left running on this machine, launchers, ranks and watchdogs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                folder = process.environ().get(_FOLDER, "")
                is_ours = Path(folder).is_relative_to(self._run_dir) if folder else False
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank_process(self, rank: int) -> psutil.Process:
        """The process of a living rank."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                is_script = "train.py" in " ".join(process.cmdline()[:3])
                if is_script and process.environ().get("RANK") == str(rank):
                    return process
        raise AssertionError(f"rank {rank} does not run: {self.output}")

    def wait_until(self, happened: Callable[[], bool], *, timeout: float = 150) -> None:
        """Wait until `happened()`.

        Raises:
            AssertionError: if the command ends before, or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not happened():
            has_ended = self.process.poll() is not None
            assert not has_ended and time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def wait(self, *, timeout: float = 200) -> int:
        """Exit code; fails where a process is left."""
        code = self.process.wait(timeout)
        deadline = time.monotonic() + 45  # the launcher gives ranks 30 s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left {left}: {self.output}"
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Signal the command itself."""
        self.process.send_signal(number)


def _command(run_dir: Path, args: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cdrmix.cli", "launch", "--run-dir", str(run_dir), *args]


def _environment() -> dict[str, str]:
    """The test's own variables, for CPU ranks, should it run under a launcher itself."""
    of_ranks = rank_environment(0, 1, 0)
    inherited = {name: value for name, value in os.environ.items() if name not in of_ranks}
    return {**inherited, **RANK_ENVIRONMENT}
