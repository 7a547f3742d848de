"""Data of well-known tasks in the files in which they are published, as lm-eval's definitions read
them. No torch.

Prompts and metrics are lm-eval's own: its definitions of these tasks, with the rows of a local file
in place of a data set of the hub.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.errors import DataError

Row = dict[str, Any]

SUFFIXES = frozenset((".jsonl", ".ndjson", ".json", ".parquet", ".csv"))
_LETTERS = "ABCD"
# Words of a file's name that say which part of a task it has.
_PARTS = {
    "test": {"test", "tests"},
    "validation": {"val", "valid", "validation", "dev"},
    "train": {"train"},
}


class _Missing(Exception):
    """A field that a row lacks, or that has another type: its name, and what it should be."""


class Format(NamedTuple):
    """Form in which a task is published.

    Attributes:
        task: name in lm-eval; of MMLU, before the subject.
        definition: lm-eval's file of it, in its folder of tasks.
        words: sets of words; a path that has all of one set is of this task.
        part: part of the task that lm-eval judges, as of `_PARTS`.
        published: names of the files, for a person.
        read: makes a row for lm-eval of one as published.
    """

    task: str
    definition: str
    words: tuple[frozenset[str], ...]
    part: str
    published: str
    read: Callable[[Row], Row]


class Data(NamedTuple):
    """Rows of one task, ready for its definition in lm-eval."""

    task: str
    definition: str
    files: tuple[Path, ...]
    rows: list[Row]


def _value(row: Row, name: str, *kinds: type) -> Any:
    """Takes a field of one of the given types; errors as `_Missing`."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise _Missing(f"has no field '{name}'")
        value = value[part]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise _Missing(f"its field '{name}' is of type {type(value).__name__}, and not {wanted}")
    return value


def _whole(value: Any, name: str, allowed: Iterable[int]) -> int:
    """Reads a number that may be written as text; errors as `_Missing`."""
    if str(value) not in map(str, allowed):
        raise _Missing(f"its field '{name}' is {value!r}, and not one of {list(allowed)}")
    return int(value)


def _texts(row: Row, name: str) -> list[str]:
    values = _value(row, name, list)
    if not values or not all(isinstance(each, str) for each in values):
        raise _Missing(f"its field '{name}' is no list of texts")
    return list(values)


def _lambada(row: Row) -> Row:
    text = _value(row, "text", str)
    if " " not in text.strip():
        raise _Missing("its field 'text' is a single word, and the last one is to be told")
    return {"text": text}


def _hellaswag(row: Row) -> Row:
    endings = _texts(row, "endings")
    label = _whole(_value(row, "label", int, str), "label", range(len(endings)))
    names = ("activity_label", "ctx_a", "ctx_b")
    return {name: _value(row, name, str) for name in names} | {"endings": endings, "label": label}


def _science(row: Row, stem: str) -> Row:
    """A question of ARC and OpenBookQA, nested as in the files of its authors or flat."""
    if isinstance(row.get("question"), dict):
        question = _value(row, "question.stem", str)
        choices = _value(row, "question.choices", list)
        text = [_value(choice, "text", str) for choice in choices]
        label = [_value(choice, "label", str) for choice in choices]
    else:
        question = _value(row, stem, str)
        text, label = _texts(row, "choices.text"), _texts(row, "choices.label")
    answer = _value(row, "answerKey", str).strip()
    if answer not in label:
        raise _Missing(f"its field 'answerKey' is {answer!r}, and its choices are {label}")
    return {stem: question, "choices": {"text": text, "label": label}, "answerKey": answer}


def _piqa(row: Row) -> Row:
    label = _whole(_value(row, "label", int, str), "label", (0, 1))
    return {name: _value(row, name, str) for name in ("goal", "sol1", "sol2")} | {"label": label}


def _winogrande(row: Row) -> Row:
    if "answer" not in row and "label" in row:  # of a file of labels
        row = row | {"answer": row["label"]}
    answer = str(_whole(_value(row, "answer", int, str), "answer", (1, 2)))
    fields = {name: _value(row, name, str) for name in ("sentence", "option1", "option2")}
    if "_" not in fields["sentence"]:
        raise _Missing("its field 'sentence' has no '_' for the options")
    return fields | {"answer": answer}


def _boolq(row: Row) -> Row:
    name = "answer" if "answer" in row else "label"
    fields = {each: _value(row, each, str) for each in ("passage", "question")}
    return fields | {"label": int(_value(row, name, bool, int))}


def _mmlu(row: Row) -> Row:
    choices = _texts(row, "choices")
    if len(choices) != len(_LETTERS):
        raise _Missing(f"its field 'choices' has {len(choices)} texts, and not {len(_LETTERS)}")
    answer = _value(row, "answer", int, str)
    if isinstance(answer, str) and answer.strip() in tuple(_LETTERS):
        answer = _LETTERS.index(answer.strip())
    number = _whole(answer, "answer", range(len(_LETTERS)))
    subject = row.get("subject")
    return {"question": _value(row, "question", str), "choices": choices, "answer": number} | (
        {"subject": subject} if isinstance(subject, str) and subject else {}
    )


def _arc(row: Row) -> Row:
    return _science(row, "question")


def _openbookqa(row: Row) -> Row:
    return _science(row, "question_stem")


def _named(*groups: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(group.split()) for group in groups)


MMLU = Format(
    "mmlu",
    "mmlu/default/mmlu_{}.yaml",
    _named("mmlu"),
    "test",
    "SUBJECT_test.csv, or .jsonl and .parquet with question, choices, answer, subject",
    _mmlu,
)
FORMATS = (
    Format(
        "lambada_openai",
        "lambada/lambada_openai.yaml",
        _named("lambada"),
        "test",
        "lambada_test.jsonl with text",
        _lambada,
    ),
    MMLU,
    Format(
        "hellaswag",
        "hellaswag/hellaswag.yaml",
        _named("hellaswag"),
        "validation",
        "hellaswag_val.jsonl",
        _hellaswag,
    ),
    Format(
        "arc_easy",
        "arc/arc_easy.yaml",
        _named("arc easy"),
        "test",
        "ARC-Easy-Test.jsonl",
        _arc,
    ),
    Format(
        "arc_challenge",
        "arc/arc_challenge.yaml",
        _named("arc challenge"),
        "test",
        "ARC-Challenge-Test.jsonl",
        _arc,
    ),
    Format(
        "piqa",
        "piqa/piqa.yaml",
        _named("piqa", "physicaliqa"),
        "validation",
        "piqa/valid.jsonl and piqa/valid-labels.lst",
        _piqa,
    ),
    Format(
        "winogrande",
        "winogrande/default.yaml",
        _named("winogrande"),
        "validation",
        "winogrande/dev.jsonl",
        _winogrande,
    ),
    Format(
        "boolq",
        "super_glue/boolq/default.yaml",
        _named("boolq"),
        "validation",
        "boolq/dev.jsonl",
        _boolq,
    ),
    Format(
        "openbookqa",
        "openbookqa/openbookqa.yaml",
        _named("openbookqa", "obqa"),
        "test",
        "openbookqa/test.jsonl",
        _openbookqa,
    ),
)


def format_of(path: Path, folder: Path) -> Format | None:
    """Tells the format of a file by its path in a folder of tasks, or by the folder's name.

    Raises DataError if it may be several.
    """
    for text in (str(path.relative_to(folder)), folder.absolute().name):
        words = _words(text)
        found = [each for each in FORMATS if any(group <= words for group in each.words)]
        if len(found) > 1:
            names = " or ".join(each.task for each in found)
            raise DataError(f"{path}: may be of {names} by its name. Rename it")
        if found:
            return found[0]
    return MMLU if path.suffix == ".csv" and _part(path) == "test" else None


def judged_files(kind: Format, paths: Iterable[Path]) -> list[Path]:
    """Takes those files of a task that have the part which is judged.

    Raises DataError if several have, where one is enough.
    """
    parts = {path: _part(path) for path in paths}
    for part in (kind.part, ""):  # one whose name does not say so, where none does
        found = [path for path, each in parts.items() if each == part]
        if len(found) > 1 and kind != MMLU:
            names = ", ".join(str(path) for path in found)
            raise DataError(f"{kind.task}: stands twice among the tasks: {names}. Leave one there")
        if found:
            return found
    return []


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def _part(path: Path) -> str:
    """Part of a task that a file has by its name; empty if that does not say."""
    words = re.findall(r"[a-z]+", path.stem.lower())
    return next((name for word in words[::-1] for name, of in _PARTS.items() if word in of), "")


def read_published(kind: Format, path: Path) -> list[Data]:
    """Reads a file of a task; one of MMLU has a task for each of its subjects.

    Raises:
        DataError: if it cannot be read, or a row lacks a field; the message has the place.
    """
    labels = _labels(path)
    given = list(_rows(path, kind))
    if not given:
        raise DataError(f"{path}: holds no rows of {kind.task}. Copy it again")
    if labels:
        if len(labels) != len(given):
            raise DataError(
                f"{_labels_path(path)}: has {len(labels):,} labels for {len(given):,} rows of "
                f"{path.name}. Copy both again"
            )
        given = [{"label": label} | row for label, row in zip(labels, given, strict=True)]
    rows: list[Row] = []
    for number, row in enumerate(given, 1):
        try:
            rows.append(kind.read(row))
        except _Missing as error:
            beside = ""
            if "label" in str(error) and not labels:
                beside = f", or put {_labels_path(path).name} beside it"
            raise DataError(
                f"{path}, row {number}: {error}. Give {kind.task} as published "
                f"({kind.published}){beside}"
            ) from None
    files = (path, _labels_path(path)) if labels else (path,)
    if kind != MMLU:
        return [Data(kind.task, kind.definition, files, rows)]
    return _by_subject(path, rows)


def _by_subject(path: Path, rows: list[Row]) -> list[Data]:
    """Tasks of MMLU: by the field `subject`, or by the name of the file."""
    named = re.sub(r"[_-]?(test|mmlu)[_-]?", "", path.stem.lower())
    subjects: dict[str, list[Row]] = {}
    for number, row in enumerate(rows, 1):
        subject = row.pop("subject", named)
        if not re.fullmatch(r"[a-z_]+", subject):
            raise DataError(
                f"{path}, row {number}: names no subject of MMLU, and neither does the file: "
                f"{subject!r}. Name the file SUBJECT_test{path.suffix}, such as anatomy_test.csv"
            )
        subjects.setdefault(subject, []).append(row)
    return [
        Data(f"mmlu_{name}", MMLU.definition.format(name), (path,), of)
        for name, of in subjects.items()
    ]


def _labels_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-labels.lst")


def _labels(path: Path) -> list[str]:
    """Labels in the list beside a file; none if there is no list."""
    try:
        return _labels_path(path).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"{_labels_path(path)}: cannot be read: {error}") from error


def _rows(path: Path, kind: Format) -> Iterator[Row]:
    """Rows of a file as published."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            yield from parquet.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            yield from _csv_rows(path, kind)
        else:
            yield from _json_rows(path)
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}: {error}). Copy it again"
        ) from error


def _csv_rows(path: Path, kind: Format) -> Iterator[Row]:
    """Rows of MMLU: question, four choices and a letter, without a header."""
    if kind != MMLU:
        raise ValueError(f"of {kind.task}, .jsonl and .parquet are read, and no .csv")
    with path.open(encoding="utf-8", newline="") as file:
        for number, cells in enumerate(csv.reader(file), 1):
            if len(cells) != 2 + len(_LETTERS):
                raise ValueError(f"row {number} has {len(cells)} cells, and not 6")
            yield {"question": cells[0], "choices": cells[1:-1], "answer": cells[-1]}


def _json_rows(path: Path) -> Iterator[Row]:
    """Rows of a file with one JSON object in a line, or with a list of them."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        yield from _objects(enumerate(json.loads(text), 1), "entry")
        return
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    yield from _objects(((number, _parsed(number, line)) for number, line in lines), "line")


def _parsed(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _objects(values: Iterable[tuple[int, Any]], place: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{place} {number} is no JSON object")
        yield value
