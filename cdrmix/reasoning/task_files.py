"""Files of reasoning tasks: a JSON object per line, of ours and of a user's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, get_args

from cdrmix.errors import DataError
from cdrmix.monitoring.sinks import write_text_atomic
from cdrmix.reasoning.answers import normalised
from cdrmix.reasoning.tasks import Example, Match


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Writes one JSON object per line; raises StateError if the file cannot be written."""
    rows = [json.dumps(dataclasses.asdict(example)) + "\n" for example in examples]
    write_text_atomic(path, "".join(rows))


class Row(NamedTuple):
    """Example of a file, with the number of its line."""

    line: int
    example: Example


def read_examples(
    path: Path, *, check: Callable[[Example], None] = lambda example: None
) -> list[Example]:
    """Reads the examples of `read_rows`."""
    return [row.example for row in read_rows(path, check=check)]


def read_rows(path: Path, *, check: Callable[[Example], None] = lambda example: None) -> list[Row]:
    """Reads a file of `write_examples`, or one of the user's of the same form.

    `check` raises ValueError for an example that the caller cannot use.

    Raises:
        DataError: naming the line, if the file or a row cannot be used.
    """
    try:
        # not splitlines, which also splits at separators of Unicode that JSON strings may hold
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{path}: {reason}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            example = parse_row(json.loads(line))
            check(example)
        except (ValueError, TypeError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg} at column {error.colno}"
            keys = ", ".join(field.name for field in dataclasses.fields(Example))
            raise DataError(
                f"{path}:{number}: {reason}. A row is a JSON object with {keys}"
            ) from None
        rows.append(Row(number, example))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def parse_row(row: object) -> Example:
    """Example of a row; raises TypeError or ValueError for what is not as it should be."""
    if not isinstance(row, dict):
        raise TypeError(f"a row is {type(row).__name__}, not an object")
    kinds = {"task": str, "length_ratio": int, "text": str, "question": str, "answers": list}
    kinds["match"] = str
    for name, kind in kinds.items():
        if name not in row:
            raise ValueError(f"{name} is missing")
        # not isinstance, by which True would be a number
        if type(row[name]) is not kind:
            raise TypeError(f"{name} is {row[name]!r}, not {kind.__name__}")
    if unknown := sorted(row.keys() - kinds.keys() - {"evidence"}):
        raise ValueError(f"unknown keys {unknown}")
    for name in ("task", "text", "question"):
        if not row[name].strip():
            raise ValueError(f"{name} is empty")
    if row["length_ratio"] < 1:
        raise ValueError(f"length_ratio is {row['length_ratio']}; allowed is a number from 1")
    if row["match"] not in get_args(Match):
        raise ValueError(f"match is {row['match']!r}; allowed are {', '.join(get_args(Match))}")
    evidence = row.get("evidence", [])
    if not isinstance(evidence, list) or not all(type(line) is str for line in evidence):
        raise TypeError(f"evidence is {evidence!r}, not a list of sentences")
    answers = row["answers"]
    if not answers or not all(type(word) is str and word for word in answers):
        raise ValueError(f"answers are {answers!r}; at least one word is needed")
    for word in answers:
        _check_answer(word, row["match"])
    return Example(**{**row, "answers": tuple(answers), "evidence": tuple(evidence)})


def _check_answer(answer: str, match: Match) -> None:
    """Raises ValueError for an answer that no text could ever equal by `score`."""
    if match in ("exact", "f1"):
        if not normalised(answer):
            raise ValueError(
                f"answer {answer!r} is empty without case, punctuation and articles, which are not "
                "compared"
            )
    elif not re.fullmatch(r"\w+", answer):
        raise ValueError(
            f"answer {answer!r} is no single word of letters and digits, as they are compared; "
            "give each word of it as an answer of its own, or match exact or f1 for phrases"
        )
