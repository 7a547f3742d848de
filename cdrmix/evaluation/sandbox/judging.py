"""Verdicts: made of the zygote's account of a process and of the lines that the process told."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from cdrmix.evaluation.sandbox.program import Answer, Kind, Limits, Program, Verdict
from cdrmix.evaluation.sandbox.values import NotPlain, decode_value

_LONGEST_NAME, _LONGEST_MESSAGE = 80, 200
_TOLD: dict[str, Kind] = {
    "wrong": "wrong",
    "error": "error",
    "memory": "memory",
    "not_compiled": "not_compiled",
    "escaped_exit": "escaped_exit",
}
_BEYOND = {
    "folder": "its files took more than allowed",
    "threads": "it had more threads than allowed",
    "output": "its answers were longer than allowed",
}
# What reading hostile JSON can raise.
_UNREADABLE = (ValueError, RecursionError)


def lines_of(report: str, nonce: str) -> list[dict[str, Any]]:
    """Lines of a report that carry the nonce; anything else was written by the program."""
    lines = []
    for line in report.split("\n")[:-1]:
        if not line.startswith(nonce):
            continue
        try:
            content = json.loads(line[len(nonce) :])
        except _UNREADABLE:
            continue
        if isinstance(content, dict):
            lines.append(content)
    return lines


def verdict_of(
    program: Program, limits: Limits, reply: dict[str, Any], lines: list[dict[str, Any]]
) -> Verdict:
    """Verdict about a program that has ended.

    Args:
        reply: of the zygote: `status` (of wait), `ended_by`, `cpu_seconds`, `wall_seconds`.
        lines: of the program's process, with the nonce.
    """
    answers = tuple(_answer_of(line) for line in lines if "kind" not in line)
    kind, error, message = _outcome(limits, reply, lines)
    if kind == "passed" and program.cases:
        kind, error, message = _compared(program, answers)
    return Verdict(
        kind=kind,
        error=_printable(error, _LONGEST_NAME),
        message=_printable(message, _LONGEST_MESSAGE),
        cpu_seconds=reply["cpu_seconds"],
        wall_seconds=reply["wall_seconds"],
        answers=answers,
    )


def _outcome(
    limits: Limits, reply: dict[str, Any], lines: list[dict[str, Any]]
) -> tuple[Kind, object, object]:
    """Kind, error and message, before values are compared."""
    status, ended_by = reply["status"], reply["ended_by"]
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    # Whatever else it says: a program that catches the signal has used the time all the same.
    if by_signal == signal.SIGXCPU or reply["cpu_seconds"] >= limits.cpu_seconds:
        return "timeout_cpu", "", f"more than {limits.cpu_seconds} s of processor time"
    if ended_by == "wall":
        return "timeout_wall", "", f"{reply['wall_seconds']:.1f} s on the clock"
    if ended_by in _BEYOND:
        return "killed", ended_by, _BEYOND[ended_by]
    if by_signal:
        name = signal.Signals(by_signal).name if by_signal in _SIGNALS else str(by_signal)
        return "killed", name, signal.strsignal(by_signal) or ""
    last = lines[-1] if lines else {}
    if last.get("kind") == "done" and status == 0:
        return "passed", "", ""
    if kind := _TOLD.get(str(last.get("kind"))):
        return kind, last.get("error", ""), last.get("message", "")
    return "escaped_exit", "", f"exit status {os.waitstatus_to_exitcode(status)} before its tests"


_SIGNALS = {int(each) for each in signal.Signals}


def _compared(program: Program, answers: tuple[Answer, ...]) -> tuple[Kind, object, object]:
    """Outcome of a program that came to its end, by the values that it gave."""
    if len(answers) != len(program.cases):
        return "escaped_exit", "", f"{len(answers)} answers to {len(program.cases)} questions"
    for case, answer in zip(program.cases, answers, strict=True):
        if case.is_right(answer):
            continue
        if answer.error == "MemoryError":
            return "memory", answer.error, f"for {case.expression}"
        if answer.error:
            return "error", answer.error, f"for {case.expression}"
        return "wrong", "", f"{case.expression} is {_shown(answer.value)}"
    return "passed", "", ""


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_LONGEST_NAME]
    except ValueError:  # Python does not write integers of more than 4,300 digits
        return "an integer too long to be shown"


def _answer_of(line: dict[str, Any]) -> Answer:
    if "error" in line:
        return Answer(error=_printable(line["error"], _LONGEST_NAME) or "Exception")
    try:
        return Answer(decode_value(line.get("value")))
    except (NotPlain, RecursionError):
        return Answer(error="NotPlain")


def _printable(text: object, most: int) -> str:
    """First line of a text of the program's, safe to print on a terminal."""
    lines = str(text)[: 4 * most].splitlines() or [""]
    return "".join(letter if letter.isprintable() else "?" for letter in lines[0])[:most]
