"""Judging of programs: right solutions first, then what a model wrote, and scores of it.

Generating stands elsewhere: samples of any origin are judged.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cdrmix.errors import DataError
from cdrmix.evaluation.code_tasks.extraction import Style, answer_of, program_of
from cdrmix.evaluation.code_tasks.files import TaskSet
from cdrmix.evaluation.code_tasks.task import CodeTask, limits_of
from cdrmix.evaluation.sandbox.host import run_programs, values_of
from cdrmix.evaluation.sandbox.program import Case, LevelName, Limits, Program, Verdict
from cdrmix.monitoring.suite_results import Row, bootstrap_interval


@dataclass(frozen=True)
class Sample:
    """Text that a model wrote for a task.

    Attributes:
        is_truncated: it was cut off at the most new tokens, and neither EOS nor a stop came.
    """

    text: str
    is_truncated: bool = False


@dataclass(frozen=True)
class JudgedSample:
    """A sample and what the sandbox found about its program.

    Attributes:
        is_empty: nothing was left of it to be run.
        is_truncated: its program was cut off; what stood behind a whole one does not count.
    """

    verdict: Verdict
    is_empty: bool
    is_truncated: bool

    @property
    def is_compiled(self) -> bool:
        """True if there was a program, and it could be compiled."""
        return not self.is_empty and self.verdict.kind != "not_compiled"


# Samples of each task, by its name.
Samples = Mapping[str, Sequence[Sample]]
JudgedSamples = Mapping[str, Sequence[JudgedSample]]

_EMPTY = Verdict("error", message="nothing was written")


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of `k` samples passes, without bias, where `passed` of all samples did.

    It is 1 - C(n - c, k) / C(n, k), as a product of factors that no number overflows.

    Args:
        samples: k or more (count).
    """
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(samples - passed + 1, samples + 1))


def checked_tasks(tasks: Sequence[CodeTask], *, level: LevelName) -> list[CodeTask]:
    """Runs each task's solution against its own tests, and fills in what solutions have to tell.

    Returns:
        the tasks, with cases in place of calls.
    Raises:
        DataError: if a solution fails.
        PlanError: the machine does not have the level.
    """
    limits = limits_of(tasks)
    ready = [_with_cases(task, level, limits) if task.calls else task for task in tasks]
    programs = [task.program(task.solution) for task in ready]
    for task, verdict in zip(
        ready, run_programs(programs, level=level, limits=limits), strict=True
    ):
        if not verdict.passed:
            raise DataError(
                f"{task.place}: the solution of {task.name} fails its own tests "
                f"({_told(verdict)}). Mend the task, or take it out of the file"
            )
    return ready


def _with_cases(task: CodeTask, level: LevelName, limits: Limits) -> CodeTask:
    """A task whose cases are the values that its solution gives for the calls."""
    try:
        answers = values_of(task.solution, task.calls, setup=task.setup, level=level, limits=limits)
    except DataError as error:
        raise DataError(f"{task.place}: the solution of {task.name} fails: {error}") from error
    cases = []
    for call, answer in zip(task.calls, answers, strict=True):
        if answer.error:
            raise DataError(
                f"{task.place}: the solution of {task.name} gives no value for {call:.80} "
                f"({answer.error}). Take the task out of the file"
            )
        cases.append(Case(call, answer.value, tolerance=task.tolerance))
    return replace(task, cases=tuple(cases), calls=())


def _told(verdict: Verdict) -> str:
    return ": ".join(part for part in (verdict.kind, verdict.error, verdict.message) if part)


def judge(
    tasks: Sequence[CodeTask],
    samples: Samples,
    *,
    style: Style = "completion",
    level: LevelName = "kernel",
    workers: int | None = None,
) -> dict[str, list[JudgedSample]]:
    """Runs the program of each sample against the tests of its task.

    Equal programs of a task run once.

    Args:
        tasks: checked ones.
        samples: of each task.
        workers: programs at a time; None: as the sandbox sees fit. Verdicts do not depend on it.
    Raises:
        PlanError: the machine does not have the level.
    """
    answers = {
        task.name: [answer_of(task, sample.text, style) for sample in samples[task.name]]
        for task in tasks
    }
    sources = {
        task.name: [program_of(task, answer, style) for answer in answers[task.name]]
        for task in tasks
    }
    distinct = list(_distinct(tasks, sources))
    programs = (program for _, program in distinct)
    found = run_programs(programs, level=level, limits=limits_of(tasks), workers=workers)
    verdicts = {
        (name, program.source): verdict
        for (name, program), verdict in zip(distinct, found, strict=True)
    }
    return {
        name: [
            JudgedSample(
                verdicts.get((name, source), _EMPTY),
                is_empty=not source,
                is_truncated=sample.is_truncated and _reaches_end(answer, sample.text),
            )
            for sample, answer, source in zip(samples[name], answers[name], of_task, strict=True)
        ]
        for name, of_task in sources.items()
    }


def _reaches_end(answer: str, text: str) -> bool:
    """Tells if nothing behind an answer was cut away from the text of a model."""
    return text.endswith(answer) if answer else not text


def _distinct(
    tasks: Sequence[CodeTask], sources: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Program]]:
    """Programs to be run, each once, with the names of their tasks."""
    for task in tasks:
        for source in dict.fromkeys(filter(None, sources[task.name])):
            yield task.name, task.program(source)


def rows_of(
    tasks: TaskSet,
    judged: Mapping[float, JudgedSamples],
    temperatures: Mapping[int, float],
    *,
    seed: int,
) -> list[Row]:
    """Scores of a set of tasks: those of the whole set, then pass@k of each grade.

    Intervals are over the tasks, as their scores are means over the tasks.

    Args:
        judged: samples by their temperature.
        temperatures: of the samples for pass@k, by k.
        seed: of the bootstrap.
    """
    every = [
        list(itertools.chain.from_iterable(each[task.name] for each in judged.values()))
        for task in tasks.tasks
    ]
    rows = _pass_rows(tasks.name, tasks.tasks, judged, temperatures, seed)
    shares = {
        "compile_rate": [[s.is_compiled for s in own] for own in every],
        "empty": [[s.is_empty for s in own] for own in every],
        "truncated": [[s.is_truncated for s in own] for own in every],
    }
    rows += [
        _row(tasks.name, metric, [sum(own) / len(own) for own in values], seed)
        for metric, values in shares.items()
    ]
    for grade in sorted({task.grade for task in tasks.tasks if task.grade is not None}):
        of_grade = [task for task in tasks.tasks if task.grade == grade]
        rows += _pass_rows(f"{tasks.name} grade {grade}", of_grade, judged, temperatures, seed)
    return rows


def _pass_rows(
    name: str,
    tasks: Sequence[CodeTask],
    judged: Mapping[float, JudgedSamples],
    temperatures: Mapping[int, float],
    seed: int,
) -> list[Row]:
    rows = []
    for k, temperature in temperatures.items():
        own = [judged[temperature][task.name] for task in tasks]
        passed = [sum(sample.verdict.passed for sample in samples) for samples in own]
        scores = [pass_at_k(len(s), c, k) for s, c in zip(own, passed, strict=True)]
        rows.append(_row(name, f"pass@{k}", scores, seed))
    return rows


def _row(name: str, metric: str, of_tasks: Sequence[float], seed: int) -> Row:
    low, high = bootstrap_interval(of_tasks, seed=seed)
    return Row(name, metric, sum(of_tasks) / len(of_tasks), low, high, len(of_tasks))


def counted(judged: Mapping[float, JudgedSamples]) -> dict[str, int]:
    """Verdicts of all samples by kind, empty ones by that name (count)."""
    samples = itertools.chain.from_iterable(
        itertools.chain.from_iterable(each.values()) for each in judged.values()
    )
    kinds = Counter("empty" if s.is_empty else s.verdict.kind for s in samples)
    return {str(kind): count for kind, count in kinds.most_common()}
