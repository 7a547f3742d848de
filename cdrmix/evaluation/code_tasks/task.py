"""A task that asks for a program, and the programs that judge an answer to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cdrmix.evaluation.sandbox.program import Case, Limits, Program

_NUMPY = re.compile(r"^\s*(?:import|from)\s+numpy\b", re.MULTILINE)


@dataclass(frozen=True)
class CodeTask:
    """One task of a file.

    An answer is judged by `tests`, in the process of the answer, or by `cases`, whose values are
    compared outside of it. `calls` become cases by the values that the solution gives.

    Attributes:
        place: file, and line of a JSONL file, for messages.
        prompt: text that a model continues.
        entry_point: name of the function that is asked for.
        solution: whole program that is right.
        setup: Python before the answer, such as imports.
        calls: expressions in place of cases.
        tolerance: of floats in the values of calls (ratio, or absolute).
        grade: difficulty from 1 to 4; None: not graded.
        wrong: whole programs that must fail.
    """

    name: str
    place: str
    prompt: str
    entry_point: str
    solution: str
    setup: str = ""
    tests: str = ""
    cases: tuple[Case, ...] = ()
    calls: tuple[str, ...] = ()
    tolerance: float = 0.0
    grade: int | None = None
    wrong: tuple[str, ...] = ()

    @property
    def preamble(self) -> str:
        """Text of the prompt before the function asked for, such as imports and helpers."""
        match = self._header(self.prompt)
        return self.prompt[: match.start()] if match else ""

    @property
    def is_open(self) -> bool:
        """True if the prompt ends inside of the function that is asked for."""
        return self._header(self.prompt) is not None

    def is_defined_in(self, text: str) -> bool:
        """Tells if a program defines the function that is asked for."""
        return self._header(text) is not None

    def _header(self, text: str) -> re.Match[str] | None:
        header = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(self.entry_point)}[ \t]*\("
        return re.search(header, text, re.MULTILINE)

    def program(self, source: str) -> Program:
        """Makes the program that judges an answer, a whole program itself."""
        return Program(source, setup=self.setup, tests=self.tests, cases=self.cases, name=self.name)


def limits_of(tasks: Sequence[CodeTask]) -> Limits:
    """Limits of the programs of a file: its tests may need numpy."""
    needs_numpy = any(_NUMPY.search(task.tests + "\n" + task.setup) for task in tasks)
    # Values of thousands of cases cross at once.
    if needs_numpy:
        return Limits(memory_bytes=4 << 30, answer_bytes=1 << 24, packages=("numpy",))
    return Limits(answer_bytes=1 << 24)
