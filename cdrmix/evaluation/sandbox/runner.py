"""One program in its own process: guards put on, the text compiled and run, the outcome told.

Runs in a process that the zygote forked. Nothing here is safe from the program, which shares the
process: only the guards hold, and what the host compares itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from cdrmix.evaluation.sandbox.landlock import forbid_new_privileges, restrict_to
from cdrmix.evaluation.sandbox.seccomp import install_filter
from cdrmix.evaluation.sandbox.values import NotPlain, encode_value

ANSWER_MODULE = "answer"
_STACK_BYTES = 64 << 20
_LONGEST_MESSAGE = 200
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_REFUSED_TEXT = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)

GUARDS = ("limits", "capabilities", "landlock", "seccomp")


def put_on_guards(names: list[str], limits: dict[str, int], rules: int) -> None:
    """Takes from this process, for good, what a program must not do.

    Args:
        names: of GUARDS; `landlock` is missing where another level does without it.
        limits: fields of `Limits`.
        rules: descriptor of the Landlock ruleset.

    Raises:
        OSError: the kernel refuses one of them; the program must not run then.
    """
    forbid_new_privileges()
    if "limits" in names:
        _limit_resources(limits)
    if "capabilities" in names:
        _drop_capabilities()
    if "landlock" in names:
        restrict_to(rules)
    if "seccomp" in names:
        install_filter()


def _limit_resources(limits: dict[str, int]) -> None:
    cpu = limits["cpu_seconds"]
    # The soft limit sends SIGXCPU, which tells it from a process that was out of memory.
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_STACK, _STACK_BYTES, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        if most == resource.RLIM_INFINITY:
            most = hard
        resource.setrlimit(kind, (min(soft, most), min(hard, most)))


def _drop_capabilities() -> None:
    """Makes root an ordinary user in all that does not go by the owner of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    if libc.capset(header, ctypes.create_string_buffer(24)):
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


class Report:
    """Lines to the host, each behind a nonce that a program does not know unless it searches."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._nonce = nonce.encode()
        # Kept here, as a program may put others in their places.
        self._write, self._leave, self._encode = os.write, os._exit, json.JSONEncoder().encode
        # Made while there is memory.
        self._out_of_memory = self._line({"kind": "memory", "error": "MemoryError"})

    def _line(self, content: dict[str, Any]) -> bytes:
        return self._nonce + self._encode(content).encode() + b"\n"

    def add(self, content: dict[str, Any]) -> int:
        """Writes a line and returns its length (bytes)."""
        line = self._line(content)
        rest = memoryview(line)
        while rest:
            rest = rest[self._write(self._descriptor, rest) :]
        return len(line)

    def end(self, kind: str, error: BaseException | None = None) -> NoReturn:
        """Writes the last line and ends the process, without what a program put to its end."""
        try:
            self.add({"kind": kind, **_described(error)})
        except MemoryError:
            self.end_without_memory()
        self._leave(0)
        raise SystemExit  # not reached

    def end_without_memory(self) -> NoReturn:
        """Ends the process with a line that was made before."""
        self._write(self._descriptor, self._out_of_memory)
        self._leave(0)
        raise SystemExit  # not reached


def _described(error: BaseException | None) -> dict[str, str]:
    """Name and first words of an exception, whose methods are the program's own."""
    if error is None:
        return {}
    name = type.__dict__["__name__"].__get__(type(error))
    try:
        message = str(error)[:_LONGEST_MESSAGE]
    except MemoryError:
        raise
    except BaseException:
        message = ""
    return {"error": name, "message": message}


def run_program(job: dict[str, Any], report: Report, most_bytes: int) -> NoReturn:
    """Runs one program and ends the process.

    Args:
        job: setup, source, tests, expressions.
        most_bytes: of all answers.
    """
    module = types.ModuleType(ANSWER_MODULE)
    sys.modules[ANSWER_MODULE] = module  # dataclasses and pickle look there
    names = module.__dict__
    try:
        answer = _compiled(job["source"], "<answer>", "exec")
    except _REFUSED_TEXT as error:
        report.end("not_compiled", error)
    except SystemExit as error:
        report.end("escaped_exit", error)
    run = exec

    def run_all() -> None:
        run(_compiled(job["setup"], "<setup>", "exec"), names)
        # Compiled first: a program may put another function in the place of `compile`.
        tests = _compiled(job["tests"], "<tests>", "exec")
        questions = [_question(text) for text in job["expressions"]]
        run(answer, names)
        run(tests, names)
        left = most_bytes
        for question in questions:
            left -= _tell_value(question, names, report, left)

    _end_of(run_all, report)


def _end_of(run_all: Callable[[], None], report: Report) -> NoReturn:
    try:
        run_all()
    except MemoryError:
        report.end_without_memory()
    except SystemExit as error:
        report.end("escaped_exit", error)
    except AssertionError as error:
        report.end("wrong", error)
    except BaseException as error:
        report.end("error", error)
    report.end("done")


def _compiled(text: str, name: str, mode: str) -> types.CodeType:
    # Without dont_inherit it would take over this file's `from __future__`.
    code: types.CodeType = compile(text, name, mode, dont_inherit=True)
    return code


def _question(text: str) -> types.CodeType:
    return _compiled(text.strip(), "<question>", "eval")


def _tell_value(
    question: types.CodeType, names: dict[str, Any], report: Report, most_bytes: int
) -> int:
    """Evaluates an expression and tells its value; returns the length of the line (bytes)."""
    try:
        content = {"value": encode_value(eval(question, names))}
        if len(report._line(content)) > most_bytes:
            raise NotPlain("too long")
    except SystemExit:
        raise
    except RecursionError:
        content = {"error": "RecursionError"}
    except NotPlain as error:
        content = {"error": "NotPlain", "message": str(error)}
    except BaseException as error:
        content = _described(error)
    return report.add(content)
