"""Tasks of a user's own that Stage B trains on: read, checked, and a share of them held out.

Which row a lesson takes, and which rows are held out, follows from the file and the lesson's number
alone, so that resuming and other numbers of ranks meet the same rows.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdrmix.config.reasoning import StageBTraining
from cdrmix.errors import DataError
from cdrmix.planning.lesson_sizes import question_head, segment_tokens
from cdrmix.reasoning.answers import holds
from cdrmix.reasoning.task_files import Row, read_rows
from cdrmix.reasoning.tasks import Example

Encode = Callable[[str], Sequence[int]]
_HELD_OUT_SHARE = 0.1
# Of few rows at least so many are held out, though at most half of all.
_LEAST_HELD_OUT = 4


@dataclass(frozen=True)
class OwnTasks:
    """Rows of a file of tasks, as Stage B uses them."""

    path: Path
    digest: str  # sha256 of the file, hex
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]  # never trained on
    warnings: tuple[str, ...]  # about rows that are used all the same

    def row(self, place: int, key: str) -> Example:
        """Row at a place in the order of `key`, in which each round over all rows is another."""
        turn, place = divmod(place, len(self.train))
        return self.train[_order(len(self.train), f"{key}/{turn}")[place]]


@functools.lru_cache(maxsize=8)  # a lesson takes rows of one or two rounds, its drills as well
def _order(size: int, key: str) -> tuple[int, ...]:
    return tuple(random.Random(key).sample(range(size), size))


def read_own_tasks(
    training: StageBTraining, *, window_tokens: int, encode: Encode | None
) -> OwnTasks | None:
    """Reads and checks `task_file`; None if the run has none.

    Args:
        training: section of the run.
        window_tokens: tokens that the reader reads at a time.
        encode: tokens of a text; None leaves out what depends on them.
    Raises:
        DataError: naming the line, if the file or a row cannot be used.
    """
    if training.task_file is None:
        return None
    path = Path(training.task_file)
    rows = read_rows(path)
    if len(rows) < 2:
        raise DataError(f"{path}: has a single row, and one is held out. Give two or more")
    if encode is not None:
        _check_lengths(path, rows, training, window_tokens, encode)
    held_out = _held_out([row.example for row in rows])
    return OwnTasks(
        path=path,
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        train=tuple(row.example for row, out in zip(rows, held_out, strict=True) if not out),
        held_out=tuple(row.example for row, out in zip(rows, held_out, strict=True) if out),
        warnings=tuple(_warnings(path, rows)),
    )


def target(example: Example) -> str:
    """Answer that a reader learns to give: all words, or the first of several that are right."""
    return " ".join(example.answers) if example.match == "all" else example.answers[0]


def _check_lengths(
    path: Path, rows: Sequence[Row], training: StageBTraining, window_tokens: int, encode: Encode
) -> None:
    """Refuses rows whose answer or question has no room in a window."""
    room = window_tokens - training.answer_tokens - 2
    segment = segment_tokens(window_tokens, training.segment_tokens) + 1
    answers = [len(encode(target(row.example))) + 1 for row in rows]
    too_long = [place for place, length in enumerate(answers) if length > training.answer_tokens]
    if too_long:
        first = too_long[0]
        raise DataError(
            f"{path}:{rows[first].line}: the answer takes {answers[first]} tokens with its stop, "
            f"and a window has room for stage_b.training.answer_tokens = {training.answer_tokens}. "
            f"So it is with {len(too_long)} of {len(rows)} rows. Try "
            f"stage_b.training.answer_tokens={max(answers)}, or shorter answers"
        )
    head = question_head(window_tokens) - 2
    is_first = training.question == "first"
    for row in rows:
        length = len(encode(row.example.question))
        if is_first and length > head:
            raise DataError(
                f"{path}:{row.line}: the question takes {length} tokens, and read before each "
                f"segment at most {head}. Try stage_b.training.question=last, or a shorter one"
            )
        if room - length < segment:
            raise DataError(
                f"{path}:{row.line}: the question takes {length} tokens; beside a segment of the "
                f"text and the answer, a window of {window_tokens} tokens has room for "
                f"{max(room - segment, 0)}. Try a larger stage_b.training.window_tokens, or a "
                "shorter question"
            )


def _held_out(examples: Sequence[Example]) -> list[bool]:
    """True for rows that are held out, by a hash of what is asked, so that rows that ask the same
    of one text stay together."""
    hashes = [_hash(example) for example in examples]
    least = sorted(set(hashes))
    # In every file of many rows the same ones, whatever stands beside them.
    most = max(_HELD_OUT_SHARE * 2**64, least[min(_LEAST_HELD_OUT, len(least) // 2) - 1] + 1)
    chosen = [each < most for each in hashes]
    # A file that asks one question of one text has nothing else to hold out.
    return chosen if not all(chosen) else [place == 0 for place in range(len(examples))]


def _hash(example: Example) -> int:
    asked = f"{example.question}\0{example.text}".encode()
    return int.from_bytes(hashlib.sha256(asked).digest()[:8], "big")


def _warnings(path: Path, rows: Sequence[Row]) -> list[str]:
    """Warnings about evidence that is missing from its text, and answers that nothing supports."""
    astray = [row for row in rows if any(e not in row.example.text for e in row.example.evidence)]
    unsupported = [row for row in rows if not _is_supported(row.example)]
    warnings = []
    if astray:
        warnings.append(
            f"{path}: in {len(astray)} of {len(rows)} rows (first: line {astray[0].line}) evidence "
            "is not in the text word by word, and retrieval does not learn from it"
        )
    if unsupported:
        warnings.append(
            f"{path}: in {len(unsupported)} of {len(rows)} rows (first: line "
            f"{unsupported[0].line}) an answer is not in the evidence, or, without any, not in the "
            "text: it can only be inferred, or is wrong"
        )
    return warnings


def _is_supported(example: Example) -> bool:
    support = " ".join(example.evidence) or example.text
    found = [holds(support, answer) for answer in example.answers]
    return all(found) if example.match == "all" else any(found)
