"""Programs to be run in the sandbox, their limits, and what is found about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

LevelName = Literal["kernel", "bwrap"]
Kind = Literal[
    "passed",
    "wrong",
    "error",
    "not_compiled",
    "timeout_cpu",
    "timeout_wall",
    "memory",
    "killed",
    "escaped_exit",
]


@dataclass(frozen=True)
class Case:
    """Question to a program and the answer that is right; for the two-process mode.

    Attributes:
        expression: Python, evaluated in the program's own names: "add(1, 2)". Cases of a program
            are evaluated in their order, one after the other, in one process.
        expected: the right value, made of None, bool, int, float, str, bytes, list, tuple, set,
            frozenset and dict. It never enters the sandbox.
        tolerance: floats within it, absolute or relative, are equal (ratio); 0: equal exactly.
        raises: name of the type of exception that is right instead of a value; "": a value is.
    """

    expression: str
    expected: Any = None
    tolerance: float = 0.0
    raises: str = ""

    def is_right(self, answer: Answer) -> bool:
        """True if an answer is the right one; called outside of the sandbox."""
        if self.raises or answer.error:
            return answer.error == self.raises
        return equal_values(answer.value, self.expected, self.tolerance)


@dataclass(frozen=True)
class Program:
    """Python that a model wrote, and what asks whether it is right.

    Names are shared: `setup`, then `source`, then the tests run in one module whose `__name__` is
    "answer", so that what stands below `if __name__ == "__main__"` does not run.

    Attributes:
        source: the model's text, not trusted; compiled by itself first.
        setup: trusted Python before it, such as imports that the task allows.
        tests: trusted Python after it, in the same process; AssertionError: the answer is wrong.
        cases: instead of `tests`, the two-process mode: the sandbox computes the values alone,
            they cross as JSON, and are compared outside, where no program can patch `==`.
        name: for messages and for the caller: task and sample.

    Raises:
        ValueError: both tests and cases are given, or neither.
    """

    source: str
    setup: str = ""
    tests: str = ""
    cases: tuple[Case, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if bool(self.tests) == bool(self.cases):
            raise ValueError(f"program {self.name!r}: give it either tests or cases")


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        cpu_seconds: processor time of all its threads, which decides; whole seconds.
        wall_seconds: time on the clock, a backstop for programs that sleep; None: ten times
            cpu_seconds and 2 s, times the processes per core where those are more than one.
        memory_bytes: address space; numpy needs 4 GiB.
        file_bytes: size of a file that it writes.
        folder_bytes: sum of its files, looked at ten times a second.
        open_files: file descriptors (count).
        threads: looked at ten times a second (count).
        answer_bytes: JSON of all values of the two-process mode.
        packages: installed packages that programs may import beside the standard library, such
            as ("numpy",).

    Raises:
        ValueError: a limit is not positive, or cpu_seconds not whole.
    """

    cpu_seconds: int = 3
    wall_seconds: float | None = None
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    folder_bytes: int = 1 << 26
    open_files: int = 32
    threads: int = 64
    answer_bytes: int = 1 << 20
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "packages"}
        for name, value in numbers.items():
            if value is not None and value <= 0:
                raise ValueError(f"limits: {name} is {value}; it has to be more than 0")
        # The kernel takes whole seconds, and a fraction would be cut off without a word.
        if self.cpu_seconds != int(self.cpu_seconds):
            raise ValueError(f"limits: cpu_seconds is {self.cpu_seconds}, not whole seconds")


@dataclass(frozen=True)
class Answer:
    """Value that a program gave for an expression, or the type of the exception it raised.

    Attributes:
        value: of built-in types alone, decoded from JSON; None if there is an error.
        error: name of the exception's type, "NotPlain" for a value of another type; "": none.
    """

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """Outcome of one program.

    Attributes:
        kind: passed; wrong (AssertionError, or a value that is not the expected one); error
            (another exception); not_compiled; timeout_cpu; timeout_wall; memory (MemoryError);
            killed (by a signal); escaped_exit (it ended before its tests did, whatever its exit
            status).
        error: type of the exception, or name of the signal; "" if there is none.
        message: first line of what the program said about it, printable, at most 200 characters;
            not trusted.
        cpu_seconds, wall_seconds: that it took.
        answers: of its cases, in their order, as far as it came.
    """

    kind: Kind
    error: str = ""
    message: str = ""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    answers: tuple[Answer, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the answer is right."""
        return self.kind == "passed"


def equal_values(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compares plain values as Python's == does, floats within a tolerance, NaN equal to NaN.

    Args:
        value, expected: nested built-in types; a list is not equal to a tuple.
        tolerance: absolute or relative, whichever is wider (ratio).
    """
    if isinstance(value, float) or isinstance(expected, float):
        if not isinstance(value, (int, float)) or not isinstance(expected, (int, float)):
            return False
        if value == expected or (value != value and expected != expected):
            return True
        # A Python int may be too large for a float, which math.isclose would make of it.
        if not tolerance or max(abs(value), abs(expected)) > 1e300:
            return False
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    for kind in (list, tuple):
        if isinstance(value, kind) and isinstance(expected, kind):
            return len(value) == len(expected) and all(
                equal_values(one, other, tolerance)
                for one, other in zip(value, expected, strict=True)
            )
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(
            equal_values(value[key], expected[key], tolerance) for key in expected
        )
    if isinstance(value, Set) and isinstance(expected, Set):
        return value == expected
    return (
        type(value) is type(expected) and bool(value == expected) or _equal_numbers(value, expected)
    )


def _equal_numbers(value: Any, expected: Any) -> bool:
    """True for 1 and True, which are equal in Python's tests too."""
    return isinstance(value, int) and isinstance(expected, int) and value == expected
