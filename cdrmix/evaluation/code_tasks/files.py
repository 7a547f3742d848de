"""Files of code tasks: our own form, and those in which HumanEval, MBPP and EvalPlus are published.

    read_sets(None)          # the tasks that come with CDRmix
    read_sets(Path("DIR"))   # each *.jsonl, *.jsonl.gz and *.json file is a set, and all *.yaml one

The form of a row is told by its fields.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.yaml_text import parse_yaml
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.code_tasks.task import CodeTask
from cdrmix.evaluation.sandbox.program import Case

OWN_TASKS = Path(__file__).parent / "tasks"
OWN_SET = "cdrmix"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".yaml")
_DEFAULT_TOLERANCE = 1e-6  # of floats, where EvalPlus names none
GRADES = (1, 2, 3, 4)

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskSet:
    """Tasks whose score is told together.

    Attributes:
        digest: sha256 of the files, hex.
    """

    name: str
    tasks: list[CodeTask]
    digest: str

    def limited(self, most: int | None) -> TaskSet:
        """Returns the set with up to `most` tasks, spread evenly over it and so over grades."""
        count = len(self.tasks)
        if most is None or most >= count:
            return self
        chosen = [self.tasks[number * count // most] for number in range(most)]
        return TaskSet(self.name, chosen, self.digest)


@dataclass(frozen=True)
class _Form:
    """A form of rows.

    Attributes:
        fields: that each row has; of a tuple of names one.
        only: fields that tell it from other forms.
    """

    name: str
    fields: tuple[str | tuple[str, ...], ...]
    only: tuple[str, ...]
    read: Callable[[Row, str], CodeTask]

    def likeness(self, row: Row) -> tuple[bool, float]:
        """Tells how much a row looks like this form, for comparison with other forms."""
        share = sum(_has(row, field) for field in self.fields) / len(self.fields)
        return any(name in row for name in self.only), share


def read_sets(path: Path | None, *, limit: int | None = None) -> list[TaskSet]:
    """Reads a file of tasks, or a folder of such files.

    Args:
        path: None: the tasks that come with CDRmix.
        limit: most tasks of a set (count), spread evenly over it; None: all.
    Raises:
        DataError: if there are none, a row lacks a field or is of no known form, or two tasks of
            the folder have one name.
    """
    where = path or OWN_TASKS
    files = _files(where)
    sets = []
    if graded := [file for file in files if file.suffix == ".yaml"]:
        name = OWN_SET if path is None else where.stem
        tasks = [task for file in graded for task in _tasks(file)]
        sets.append(TaskSet(name, _by_grade(tasks), _digest(graded)))
    sets += [
        TaskSet(file.name.partition(".")[0], list(_tasks(file)), _digest([file]))
        for file in files
        if file.suffix != ".yaml"
    ]
    _refuse_twice(sets)
    return [each.limited(limit) for each in sets]


def _files(where: Path) -> list[Path]:
    """Files of tasks at a path, by name."""
    if where.is_file():
        if not where.name.endswith(_SUFFIXES):
            raise DataError(
                f"{where}: is no file of code tasks, which ends with {', '.join(_SUFFIXES)}. "
                "Give --tasks with such a file, or a folder of them"
            )
        return [where]
    files = sorted(file for file in where.glob("*") if file.name.endswith(_SUFFIXES))
    if not files:
        problem = "holds no file of code tasks" if where.is_dir() else "is not there"
        raise DataError(
            f"{where}: {problem}. Give --tasks with a file of HumanEval, MBPP, EvalPlus or tasks "
            f"of your own ({', '.join(_SUFFIXES)}), or with a folder of them"
        )
    return files


def _digest(files: list[Path]) -> str:
    """Sha256 of the contents of files, hex."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _by_grade(tasks: list[CodeTask]) -> list[CodeTask]:
    return sorted(tasks, key=lambda task: (task.grade or 0, task.name))


def _refuse_twice(sets: list[TaskSet]) -> None:
    """Raises DataError if two tasks, or two sets, have one name."""
    places: dict[str, str] = {}
    for each in sets:
        for task in each.tasks:
            if task.name in places:
                raise DataError(
                    f"{task.place}: the task {task.name!r} stands in {places[task.name]} too, and "
                    "results name tasks alone. Rename one, or put the files into folders of their "
                    "own and give --tasks with one of them"
                )
            places[task.name] = task.place
    names = [each.name for each in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"two files of tasks are called {twice[0]!r}, and rows of a result have that name. "
            "Rename one of them"
        )


def _tasks(file: Path) -> Iterator[CodeTask]:
    """Tasks of one file, in its order. Raises DataError."""
    count = 0
    for place, row in _rows(file):
        if not isinstance(row, dict):
            raise DataError(f"{place}: is no JSON object with the fields of a task")
        form = _form_of(row, place)
        try:
            yield form.read(row, place)
        except (TypeError, ValueError, SyntaxError, AttributeError) as error:
            raise DataError(
                f"{place}: is no task of {form.name}'s form ({type(error).__name__}: {error})"
            ) from error
        count += 1
    if not count:
        raise DataError(f"{file}: is empty. Give a file with one task or more")


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Rows of one file, each with its place."""
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    if file.suffix == ".yaml":
        try:
            yield str(file), parse_yaml(text, place=str(file))
        except ConfigError as error:
            raise DataError(str(error)) from error
        return
    try:
        if file.name.removesuffix(".gz").endswith(".json"):
            for number, row in enumerate(json.loads(text), 1):
                yield f"{file}, task {number}", row
            return
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: is no JSON array of tasks ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: is no JSON ({error})") from error
        yield place, row


def _form_of(row: Row, place: str) -> _Form:
    """Form of a row. Raises DataError if a field of it is missing."""
    form = max(_FORMS, key=lambda each: each.likeness(row))
    if form.likeness(row) == (False, 0):
        known = "; ".join(f"{each.name}: {_named(each.fields)}" for each in _FORMS)
        raise DataError(f"{place}: has the fields of no known form of code tasks ({known})")
    for field in form.fields:
        if not _has(row, field):
            raise DataError(
                f"{place}: has no field {_named((field,))!r}, which a task of {form.name}'s form "
                f"needs ({_named(form.fields)})"
            )
    return form


def _has(row: Row, field: str | tuple[str, ...]) -> bool:
    return any(name in row for name in (field if isinstance(field, tuple) else (field,)))


def _named(fields: tuple[str | tuple[str, ...], ...]) -> str:
    return ", ".join(each if isinstance(each, str) else " or ".join(each) for each in fields)


def _human_eval(row: Row, place: str) -> CodeTask:
    """HumanEval: `test` defines check(candidate); so does EvalPlus's form with a field `test`."""
    entry_point = _text(row["entry_point"])
    return CodeTask(
        name=str(row["task_id"]),
        place=place,
        prompt=_text(row["prompt"]),
        entry_point=entry_point,
        solution=_text(row["prompt"]) + _text(row["canonical_solution"]),
        tests=f"{_text(row['test'])}\n\ncheck({entry_point})\n",
    )


def _eval_plus(row: Row, place: str) -> CodeTask:
    """HumanEval+ as EvalPlus's own files have it: inputs, to which the solution has the answers.

    Contracts, which say what inputs are valid, are not needed: these are.
    """
    name = str(row["task_id"])
    if name.lower().startswith("mbpp"):
        raise DataError(
            f"{place}: MBPP+ in EvalPlus's own file has inputs that only EvalPlus's code makes "
            "tuples and sets of. Use the data set evalplus/mbppplus instead, as JSONL: its field "
            "`test` is a whole program"
        )
    entry_point = _text(row["entry_point"])
    inputs = [*row["base_input"], *row["plus_input"]]
    return CodeTask(
        name=name,
        place=place,
        prompt=_text(row["prompt"]),
        entry_point=entry_point,
        solution=_text(row["prompt"]) + _text(row["canonical_solution"]),
        setup=_numbers(inputs),
        calls=tuple(_call(entry_point, arguments) for arguments in inputs),
        tolerance=float(row["atol"]) or _DEFAULT_TOLERANCE,
    )


def _mbpp(row: Row, place: str) -> CodeTask:
    """MBPP: a sentence and asserts, which the prompt shows. MBPP+ has a program in `test` too."""
    code = _text(row["code"])
    asserts = [_text(each).strip() for each in row["test_list"]]
    sentence = _text(row["prompt"] if "prompt" in row else row["text"]).strip()
    shown = "\n".join(asserts)
    tests = _text(row.get("test") or shown)
    imports = [_text(each) for each in row.get("test_imports") or []]
    cases = () if row.get("test") else _cases_of(asserts)
    return CodeTask(
        name=f"MBPP/{row['task_id']}",
        place=place,
        prompt=f'"""\n{sentence}\n{shown}\n"""\n',
        entry_point=_tested_name(code, asserts),
        solution=code,
        setup="\n".join([*imports, _text(row.get("test_setup_code") or "")]).strip(),
        tests="" if cases else tests,
        cases=cases,
    )


def _own(row: Row, place: str) -> CodeTask:
    """Our own form: cases of arguments and the answer, which are values of JSON."""
    given = row["cases"]
    cases = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    entry_point = _text(row["entry_point"])
    grade = row.get("grade")
    if grade is not None and grade not in GRADES:
        raise ValueError(f"grade is {grade!r} and not 1, 2, 3 or 4")
    if not cases:
        raise ValueError("it has no cases")
    return CodeTask(
        name=str(row["name"]),
        place=place,
        prompt=_text(row["prompt"]),
        entry_point=entry_point,
        solution=_text(row["solution"]),
        setup=_numbers(cases),
        cases=tuple(Case(_call(entry_point, arguments), answer) for arguments, answer in cases),
        grade=grade,
        wrong=tuple(_text(each) for each in row.get("wrong") or ()),
    )


# Of several that are equally like a row, the first one counts.
_FORMS = (
    _Form("CDRmix", ("name", "prompt", "entry_point", "solution", "cases"), ("cases",), _own),
    _Form(
        "EvalPlus",
        (
            *("task_id", "prompt", "entry_point", "canonical_solution"),
            *("base_input", "plus_input", "atol"),
        ),
        ("base_input", "plus_input"),
        _eval_plus,
    ),
    _Form(
        "MBPP",
        ("task_id", ("text", "prompt"), "code", "test_list"),
        ("test_list",),
        _mbpp,
    ),
    _Form(
        "HumanEval",
        ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
        (),
        _human_eval,
    ),
)


def _text(value: Any) -> str:
    """The text of a field, with the line ends of Unix. Raises TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value.replace("\r\n", "\n")


def _call(entry_point: str, arguments: Any) -> str:
    if not isinstance(arguments, list):
        raise TypeError(f"{arguments!r:.60} is no list of arguments")
    return f"{entry_point}({', '.join(map(repr, arguments))})"


def _numbers(value: Any) -> str:
    """Setup that knows the numbers which Python writes as names: inf and nan."""
    text = json.dumps(value)
    return "from math import inf, nan" if "Infinity" in text or "NaN" in text else ""


def _tested_name(code: str, asserts: list[str]) -> str:
    """Name of the function of a solution that the first assert calls."""
    defined = [n.name for n in ast.parse(code).body if isinstance(n, ast.FunctionDef)]
    called = {n.id for n in ast.walk(ast.parse(asserts[0])) if isinstance(n, ast.Name)}
    for name in defined:
        if name in called:
            return name
    raise ValueError(f"its first test {asserts[0]!r:.60} calls no function of its code")


def _cases_of(asserts: list[str]) -> tuple[Case, ...]:
    """Asserts `EXPRESSION == LITERAL` as cases; none if one has another form."""
    cases = []
    for text in asserts:
        match ast.parse(text).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                try:
                    cases.append(Case(ast.unparse(left), ast.literal_eval(right)))
                except ValueError:
                    return ()
            case _:
                return ()
    return tuple(cases)
