"""Programs out of the texts that models write.

`completion`: the model continues the prompt, and its text ends where another definition or plain
statements begin. `fenced`: it answers in words, with the program in a Markdown fence.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Literal

from cdrmix.evaluation.code_tasks.task import CodeTask

Style = Literal["completion", "fenced"]
STYLES: tuple[Style, ...] = ("completion", "fenced")

_FENCE = re.compile(r"^```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
# Behind the body of a function: those of the harness's HumanEval.
_AFTER_BODY = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# Behind a whole program, which may have several functions and comments between them.
_AFTER_PROGRAM = ("\nclass", "\nassert", '\n"""', "\nif", "\nprint")
# Lines at the margin that still belong to a body: brackets that are closed.
_CLOSING = (")", "]", "}")


def stops_of(task: CodeTask, style: Style) -> tuple[str, ...]:
    """Texts at which an answer ends, left out themselves; () if it ends with EOS alone."""
    if style == "fenced":
        return ()
    return _AFTER_BODY if task.is_open else _AFTER_PROGRAM


def asked(task: CodeTask, style: Style) -> str:
    """Text that a model is given."""
    if style == "completion":
        return task.prompt
    return (
        "Write a Python program for this task. Answer with the whole program in one fence of "
        f"Markdown, ```python.\n\n```python\n{task.prompt.rstrip()}\n```\n\nAnswer:\n"
    )


def answer_of(task: CodeTask, text: str, style: Style) -> str:
    """Cuts the answer out of the text of a model: a body, or a whole program."""
    return _completion(task, text) if style == "completion" else _fenced(text)


def program_of(task: CodeTask, answer: str, style: Style) -> str:
    """Puts what the prompt has before an answer.

    Returns:
        the whole program, or "" if the answer is blank.
    """
    if not answer.strip():
        return ""
    if style == "fenced" and task.is_defined_in(answer):
        return task.preamble + answer
    return task.prompt + answer if task.is_open else answer


def _completion(task: CodeTask, text: str) -> str:
    """Text up to the first stop, and of a body up to its first line at the margin."""
    starts = [text.find(stop) for stop in stops_of(task, "completion")]
    text = text[: min((start for start in starts if start >= 0), default=None)]
    if not task.is_open:
        return text
    lines = text.split("\n")
    # The first line goes on with the last one of the prompt, if that has no end.
    first = 0 if task.prompt.endswith("\n") else 1
    for number, line in enumerate(lines[first:], first):
        if line.strip() and not line[0].isspace() and not line.startswith(_CLOSING):
            return "\n".join(lines[:number])
    return text


def _fenced(text: str) -> str:
    """The first fence of Python that parses, or else the whole text."""
    for fence in _FENCE.finditer(text):
        if fence[1].lower() in _PYTHON and _parses(fence[2]):
            return fence[2]
    return text


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():  # of escapes such as "\d"
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
