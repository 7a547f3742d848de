"""Process that forks one process for each program, and looks after it.

It has imported Python once, so that a program starts in a millisecond. It never reads a program:
the forked process takes the text from the host's pipe itself, so that no program finds anything of
another one. It runs in an interpreter of its own without site-packages, started by `worker.py`.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from cdrmix.evaluation.sandbox.folder import empty_folder, is_folder_larger
from cdrmix.evaluation.sandbox.landlock import READ_DIR, READ_FILE, WRITE_FILE, Ruleset
from cdrmix.evaluation.sandbox.messages import Ended, receive_message, send_message
from cdrmix.evaluation.sandbox.runner import Report, put_on_guards, run_program

# Descriptors of the zygote, out of the way of those that pipes get.
_INPUT, _OUTPUT, _RULES, _REPORT = 100, 101, 102, 103
_REPORT_OF_PROGRAM = 3
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_SECONDS_BETWEEN_LOOKS = 0.1
_MOST_FILES = 1000
# Imported once for all programs: those that tasks use most.
_USUAL_MODULES = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "sys", "typing",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A program to run, known to the process that was forked for it.

    Attributes:
        limits: fields of `Limits`.
        guards: names of those to put on.
    """

    limits: dict[str, Any]
    guards: list[str]
    zygote: int


class Zygote:
    """Serves one program after the other.

    Attributes:
        settings: first message of the host: `guards`, `landlock` (ABI version), `folder`,
            `files` and `folders` to read, `listed` folders, `paths` to import from.
    """

    def __init__(self) -> None:
        os.dup2(0, _INPUT, inheritable=False)
        os.dup2(1, _OUTPUT, inheritable=False)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1):  # errors of the zygote itself go where the host reads them
            os.dup2(null, standard)
        os.close(null)
        self.settings = receive_message(_INPUT)
        self._folder: str = self.settings["folder"]
        os.chdir(self._folder)
        self._make_rules()
        for name in _USUAL_MODULES:
            import_module(name)
        sys.path[:] = self.settings["paths"]
        sys.argv[:] = [""]
        _go_first_when_memory_is_short()
        # Its memory and descriptors are then closed to others, whoever they are.
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
        send_message(_OUTPUT, {"ready": True})

    def _make_rules(self) -> None:
        if "landlock" not in self.settings["guards"]:
            return
        rules = Ruleset(self.settings["landlock"])
        rules.allow(self.settings["folders"], READ_DIR | READ_FILE)
        rules.allow(self.settings["files"], READ_FILE)
        rules.allow(self.settings["listed"], READ_DIR)
        rules.allow(["/dev/null"], READ_FILE | WRITE_FILE)
        rules.allow_own_folder(self._folder)
        os.dup2(rules.descriptor, _RULES, inheritable=False)
        os.close(rules.descriptor)

    def serve(self) -> Turn | None:
        """Forks a process for the next program and waits for it; returns None then.

        Returns in the forked process too, with its turn.
        """
        try:
            limits = receive_message(_INPUT)
        except Ended:
            limits = {}
        if not limits:
            self._end()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        own = os.getpid()
        process = os.fork()
        if not process:
            os.dup2(writer, _REPORT)
            return Turn(limits, self.settings["guards"], own)
        os.close(writer)
        began = time.monotonic()
        watch = Watch(process, reader, limits, self._folder)
        try:
            ended_by = watch.wait()
        finally:
            status, used = _kill_and_reap(process)
        wall_seconds = time.monotonic() - began
        report = watch.rest_of_report()
        os.close(reader)
        empty_folder(self._folder)
        if ended_by == "host":
            self._end()
        reply = {
            "status": status,
            "ended_by": ended_by,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "wall_seconds": wall_seconds,
            "report": report.decode("latin-1"),
        }
        send_message(_OUTPUT, reply)
        return None

    def _end(self) -> NoReturn:
        """Removes its folder, which the host cannot do if it was killed."""
        empty_folder(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)  # the mount of another level stays
        os._exit(0)


class Watch:
    """Wait for a program's end: it goes beyond no limit for longer than a tenth of a second."""

    def __init__(self, process: int, reader: int, limits: dict[str, Any], folder: str) -> None:
        self._process, self._reader, self._limits, self._folder = process, reader, limits, folder
        self._report = bytearray()
        self._ended = os.pidfd_open(process)

    def wait(self) -> str:
        """Returns "" if the program ended by itself, else by what it has to be ended."""
        poll = select.poll()
        for descriptor in (self._ended, self._reader):
            poll.register(descriptor, select.POLLIN)
        poll.register(_INPUT, 0)  # tells that the host is gone
        now = time.monotonic()
        until, look_at = now + self._limits["wall_seconds"], now + _SECONDS_BETWEEN_LOOKS
        while True:
            pause = max(0.0, min(until, look_at) - time.monotonic())
            ready = dict(poll.poll(pause * 1000 + 1))
            if _INPUT in ready:
                return "host"
            if self._reader in ready and not self._read():
                poll.unregister(self._reader)
            if len(self._report) > self._most_bytes:
                return "output"
            if self._ended in ready:
                return ""
            now = time.monotonic()
            if now >= until:
                return "wall"
            if now >= look_at:
                if beyond := self._beyond_limit():
                    return beyond
                look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS

    @property
    def _most_bytes(self) -> int:
        """Bytes of a report: answers, a nonce on each line, the last line."""
        return 2 * int(self._limits["answer_bytes"]) + (1 << 16)

    def _read(self) -> bool:
        """Takes what is in the pipe; False at its end."""
        try:
            part = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return True
        self._report += part
        return bool(part)

    def _beyond_limit(self) -> str:
        if is_folder_larger(self._folder, self._limits["folder_bytes"], _MOST_FILES):
            return "folder"
        try:
            threads = len(os.listdir(f"/proc/{self._process}/task"))
        except OSError:  # it has just ended
            return ""
        return "threads" if threads > self._limits["threads"] else ""

    def rest_of_report(self) -> bytes:
        """All that was written; called once the program has ended."""
        os.close(self._ended)
        while len(self._report) <= self._most_bytes:
            before = len(self._report)
            if not self._read() or len(self._report) == before:
                break
        return bytes(self._report[: self._most_bytes])


def _kill_and_reap(process: int) -> tuple[int, Any]:
    """Ends a program's process and group; returns its wait status and what it used."""
    # Until it is reaped its number is its own. It may not have come to make its group yet.
    for end in (os.killpg, os.kill):
        try:
            end(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _, status, used = os.wait4(process, 0)
    return status, used


def _go_first_when_memory_is_short() -> None:
    """Lets the kernel end this process before those of a training run."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def become_program(turn: Turn) -> NoReturn:
    """Turns a forked process into a program's: its own session, nothing inherited, guards."""
    os.setsid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != turn.zygote:
        os._exit(1)
    job = receive_message(_INPUT)
    os.dup2(0, 2)
    os.dup2(_REPORT, _REPORT_OF_PROGRAM)
    os.closerange(_REPORT_OF_PROGRAM + 1, _RULES)
    report = Report(_REPORT_OF_PROGRAM, job.pop("nonce"))
    try:
        put_on_guards(turn.guards, turn.limits, _RULES)
    except (OSError, ValueError) as error:
        report.end("fault", error)
    os.closerange(_RULES, _REPORT + 1)
    random.seed(0)  # the same for all processes, so that verdicts are
    for name in [name for name in sys.modules if name.partition(".")[0] == "cdrmix"]:
        del sys.modules[name]
    run_program(job, report, turn.limits["answer_bytes"])


def main() -> NoReturn:
    """Serves until the host closes its pipe."""
    zygote = Zygote()
    while True:
        turn = zygote.serve()
        if turn is not None:
            break
    del zygote
    become_program(turn)
