"""Runs under the real deepspeed launcher, as a user starts them, for integration tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import psutil

from tests.harness import RANK_ENVIRONMENT, ROOT, rank_environment, reserved_port, tail

# The launcher looks at its ranks once a second; ranks that lost it save before they end.
_SECONDS_TO_FOLLOW = 30.0
_SECONDS_TO_DIE = 5.0  # by SIGKILL, on a loaded machine

# Ranks meet over the loopback interface, which a new network namespace has, but switched off.
# Debian's minimal image has no `ip` to switch it on.
_WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
os.execvp(sys.argv[1], sys.argv[1:])
"""
# Only root may make a network namespace; others are root in a user namespace of their own.
_AS_ROOT = () if os.geteuid() == 0 else ("--map-root-user",)
# Prefix of a command that has no network but the loopback interface.
NO_NETWORK = ("unshare", "--net", *_AS_ROOT, sys.executable, "-c", _WITH_LOOPBACK)


def launch(
    args: Sequence[str | Path],
    *,
    nproc: int,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str | Path] = (),
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run the deepspeed launcher to its end; `Launch` describes the arguments.

    Raises:
        AssertionError: if it is not over after `timeout` seconds, or leaves processes behind.
    """
    with Launch(args, nproc=nproc, env=env, prefix=prefix) as run:
        return run.wait(timeout=timeout)


class Launch:
    """A run in progress, with a port and a process group of its own; leaving the context ends it.

    `process` is the launcher itself.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        *,
        nproc: int,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str | Path] = (),
    ) -> None:
        """Start `deepspeed --num_gpus nproc *args` on CPU ranks, in the checkout's root.

        Args:
            args: the script and its flags.
            nproc: number of ranks.
            env: variables added to the test's own, or replacing them.
            prefix: a command that starts the launcher in its turn, such as unshare.
        """
        folder = Path(sys.executable).parent
        self._held = contextlib.ExitStack()
        port = self._held.enter_context(reserved_port())
        self._stdout = self._held.enter_context(tempfile.TemporaryFile())
        self._stderr = self._held.enter_context(tempfile.TemporaryFile())
        flags = ["--num_gpus", nproc, "--master_port", port]
        self.args = [str(word) for word in (*prefix, folder / "deepspeed", *flags, *args)]
        self.process = subprocess.Popen(
            self.args,
            cwd=ROOT,
            env={**_inherited(), "PATH": _path(folder), **RANK_ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._held.close()

    def rank_pids(self) -> list[int]:
        """Process ids of the living ranks, in rank order."""
        pids: dict[int, int] = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                rank = process.environ().get("RANK")
                if rank is not None:
                    # What a rank starts has its variables too, and a later creation.
                    pids.setdefault(int(rank), process.pid)
        return [pids[rank] for rank in sorted(pids)]

    def wait_until(self, happened: Callable[[], bool], *, timeout: float = 120) -> None:
        """Wait until `happened()`.

        Raises:
            AssertionError: if the run ends before, or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not happened():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"what the test waits for did not happen: {self._report()}")
            time.sleep(0.02)

    def wait(self, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for the launcher and all that it started; gives its exit code and output.

        Raises:
            AssertionError: if it is not over after `timeout` seconds, or leaves processes behind.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"not over after {timeout} s: {self._report()}") from None
        left_behind = self._living_after(_SECONDS_TO_FOLLOW)
        self.end()
        assert not left_behind, f"left {left_behind} behind: {self._report()}"
        return subprocess.CompletedProcess(
            self.args, code, _text(self._stdout), _text(self._stderr)
        )

    def end(self) -> None:
        """Kill every process of the run and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._living_after(_SECONDS_TO_DIE)

    def _living_after(self, seconds: float) -> list[psutil.Process]:
        """Processes of the run that have not ended within so many seconds."""
        deadline = time.monotonic() + seconds
        while (processes := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return processes

    def _processes(self) -> list[psutil.Process]:
        """The run's living processes in order of creation, orphans too: they keep its session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) != self.process.pid:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found, key=lambda entry: entry[:2])]

    def _report(self) -> str:
        return (
            f"{' '.join(self.args)}\n--- stdout\n{tail(self._stdout)}\n"
            f"--- stderr\n{tail(self._stderr)}"
        )


def _inherited() -> dict[str, str]:
    """The test's own variables without a rank's, should it run under a launcher itself."""
    of_ranks = rank_environment(0, 1, 0)
    return {name: value for name, value in os.environ.items() if name not in of_ranks}


def _path(folder: Path) -> str:
    """PATH with the interpreter's programs (ninja, for one) in front, activated or not."""
    return os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
