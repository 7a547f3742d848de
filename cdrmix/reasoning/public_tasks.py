"""Readers of published question-answering files, which make rows of `task_files` of them.

SQuAD 1.1 and 2.0 (1606.05250, 1806.03822), HotpotQA (1809.09600), MuSiQue (2108.00573), BABILong
(2406.10149) and RULER (2404.06654), each as its authors publish it, from a local file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.errors import DataError
from cdrmix.reasoning.answers import holds
from cdrmix.reasoning.task_files import parse_row
from cdrmix.reasoning.tasks import Example

# A guess before there is a tokenizer: English text in tokens of a large vocabulary.
_CHARACTERS_PER_TOKEN = 4
_SENTENCE = re.compile(r"[^.?!\n]*[.?!\n]+[\"')\]]*\s*|[^.?!\n]+$")
# Instructions that end a text of RULER: the question stands behind the last of them.
_ASKED = re.compile(r"\n\s*Question:\s*")
_ANSWERED = re.compile(r"\s*\bAnswer:.*$", re.DOTALL)


class Converted(NamedTuple):
    """Rows of a published file."""

    examples: list[Example]
    num_unanswerable: int  # questions left out, as nothing answers them


class _Found(NamedTuple):
    place: str  # of the row in the file, for messages
    row: dict[str, Any] | None  # None for a question without an answer


def convert(
    kind: str, path: Path, *, window_tokens: int | None = None, limit: int | None = None
) -> Converted:
    """Reads a published file.

    Args:
        kind: a key of `READERS`.
        path: local file.
        window_tokens: `length_ratio` is the length of a text in such windows, at four characters a
            token, as the next power of two; None: 1.
        limit: most rows.
    Raises:
        DataError: naming file and row, if the file or a row is not of that format.
    """
    examples: list[Example] = []
    unanswerable = 0
    for place, row in READERS[kind](path):
        if len(examples) == limit:
            break
        if row is None:
            unanswerable += 1
            continue
        tokens = len(row["text"]) / _CHARACTERS_PER_TOKEN
        windows = 1 if window_tokens is None else -(-int(tokens) // window_tokens)
        row["length_ratio"] = 1 << max(windows - 1, 0).bit_length()
        try:
            examples.append(parse_row(row))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: {place}: {error}") from None
    if not examples:
        raise DataError(f"{path}: no questions with an answer")
    return Converted(examples, unanswerable)


class _Reader:
    """Access to the values of a row, with the row in the message where one is not as expected."""

    def __init__(self, path: Path, place: str, row: object) -> None:
        self.path = path
        self.place = place
        self.row = row

    def get(self, key: str, kind: type, *, default: Any = None) -> Any:
        """Value of a key, of a type; raises DataError if it is missing or of another type."""
        if not isinstance(self.row, dict):
            raise self.error(f"is {type(self.row).__name__}, not an object")
        value = self.row.get(key, default)
        if not isinstance(value, kind):
            what = "is missing" if key not in self.row else f"is {value!r:.60}, not {kind.__name__}"
            raise self.error(f"{key} {what}")
        return value

    def each(self, key: str) -> Iterator[_Reader]:
        """The objects of a list under a key."""
        for number, value in enumerate(self.get(key, list), 1):
            yield _Reader(self.path, f"{self.place}, {key} {number}", value)

    def error(self, reason: str) -> DataError:
        """An error about this row."""
        return DataError(f"{self.path}: {self.place}: {reason}")


def _squad(path: Path) -> Iterator[_Found]:
    for article in _Reader(path, "the file", _json(path)).each("data"):
        for paragraph in article.each("paragraphs"):
            context = paragraph.get("context", str)
            for asked in paragraph.each("qas"):
                if asked.get("is_impossible", bool, default=False):
                    yield _Found(asked.place, None)
                    continue
                answers = []
                evidence = []
                for answer in asked.each("answers"):
                    text = answer.get("text", str)
                    start = answer.get("answer_start", int)
                    if context[start : start + len(text)] != text:
                        raise answer.error(f"{text!r} does not stand at answer_start = {start}")
                    answers.append(text)
                    evidence.append(_sentence_at(context, start))
                # One is enough to answer: raters marked the same one, or others that say it too.
                question = asked.get("question", str)
                row = _row("squad", context, question, answers, evidence[:1])
                yield _Found(asked.place, row)


def _hotpot(path: Path) -> Iterator[_Found]:
    for each in _rows(path):
        paragraphs = _pairs(each, "context", "title", "sentences")
        facts = _pairs(each, "supporting_facts", "title", "sent_id")
        by_title: dict[str, list[str]] = {}
        for title, sentences in paragraphs:
            if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
                raise each.error(f"context has no list of sentences for {title!r}")
            by_title[title] = sentences
        evidence = []
        for title, number in facts:
            sentences = by_title.get(title)
            # Published rows name sentences beyond the end of a paragraph now and then.
            if sentences is not None and isinstance(number, int) and 0 <= number < len(sentences):
                evidence.append(sentences[number].strip())
            elif sentences is None:
                raise each.error(f"supporting_facts name {title!r}, which context does not have")
        text = "\n".join(f"{title}. {''.join(lines).strip()}" for title, lines in by_title.items())
        question = each.get("question", str)
        answers = [each.get("answer", str)]
        yield _Found(each.place, _row("hotpotqa", text, question, answers, evidence))


def _musique(path: Path) -> Iterator[_Found]:
    for each in _rows(path):
        if not each.get("answerable", bool, default=True):
            yield _Found(each.place, None)
            continue
        paragraphs: dict[int, str] = {}
        titles = []
        supporting = []
        for place, paragraph in enumerate(each.each("paragraphs")):
            number = paragraph.get("idx", int, default=place)
            paragraphs[number] = paragraph.get("paragraph_text", str).strip()
            titles.append(paragraph.get("title", str))
            if paragraph.get("is_supporting", bool, default=False):
                supporting.append(number)
        evidence = []
        is_decomposed = bool(each.get("question_decomposition", list, default=[]))
        for hop in each.each("question_decomposition") if is_decomposed else ():
            number = hop.get("paragraph_support_idx", int)
            if number not in paragraphs:
                raise hop.error(f"paragraph_support_idx is {number}, which no paragraph has")
            evidence.append(_sentence_with(paragraphs[number], hop.get("answer", str)))
        evidence = evidence or [paragraphs[number] for number in supporting]
        text = "\n".join(
            f"{title}. {line}" for title, line in zip(titles, paragraphs.values(), strict=True)
        )
        answers = [each.get("answer", str), *each.get("answer_aliases", list, default=[])]
        yield _Found(
            each.place, _row("musique", text, each.get("question", str), answers, evidence)
        )


def _babilong(path: Path) -> Iterator[_Found]:
    for each in _rows(path):
        target = each.get("target", str)
        words = [word.strip() for word in target.split(",")]
        match = "all" if all(re.fullmatch(r"\w+", word) for word in words) else "exact"
        answers = words if match == "all" else [target]
        text, question = (each.get(key, str) for key in ("input", "question"))
        # data/qa1/4k.json
        name = path.parent.name if re.fullmatch(r"qa\d+", path.parent.name) else "babilong"
        yield _Found(each.place, _row(name, text, question, answers, [], match))


def _ruler(path: Path) -> Iterator[_Found]:
    for each in _rows(path):
        outputs = each.get("outputs", list)
        words = all(isinstance(word, str) and re.fullmatch(r"\w+", word) for word in outputs)
        text, question = _split_question(each.get("input", str).rstrip())
        if not text:
            raise each.error("input has no text before its question")
        # The question's text of RULER is itself the instruction; its answer may be any of `outputs`
        # where these are phrases, and is all of them where they are words.
        is_any = words and "qa" in path.parent.name
        match = "any" if is_any else "all" if words else "exact"
        name = path.parent.name if path.stem in ("validation", "test", "train") else path.stem
        yield _Found(each.place, _row(name or "ruler", text, question, outputs, [], match))


def _split_question(text: str) -> tuple[str, str]:
    """Text and question of an input of RULER; without a question at its end the text is empty."""
    *_, last = [None, *_ASKED.finditer(text)]
    if last is not None:
        return text[: last.start()].strip(), _ANSWERED.sub("", text[last.end() :]).strip()
    before, _, line = text.rpartition("\n")
    # The beginning of the answer may stand behind the question, in the same line.
    asked, mark, _ = line.partition("?")
    return (before.strip(), (asked + mark).strip()) if mark else ("", text)


READERS: dict[str, Callable[[Path], Iterator[_Found]]] = {
    "squad": _squad,
    "hotpotqa": _hotpot,
    "musique": _musique,
    "babilong": _babilong,
    "ruler": _ruler,
}


def _row(
    task: str,
    text: str,
    question: str,
    answers: list[str],
    evidence: list[str],
    match: str = "f1",
) -> dict[str, Any]:
    """Row of a file of tasks, without its length."""
    return {
        "task": task,
        "text": text.strip(),
        "question": question.strip(),
        "answers": list(dict.fromkeys(answers)),
        "match": match,
        "evidence": list(dict.fromkeys(evidence)),
    }


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: {_reason(error)}") from None


def _rows(path: Path) -> Iterator[_Reader]:
    """Rows of a list in JSON, or of a file with a JSON object per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {_reason(error)}") from None
    if text.lstrip().startswith("["):
        for number, row in enumerate(_json(path), 1):
            yield _Reader(path, f"row {number}", row)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (RecursionError, json.JSONDecodeError) as error:
                raise DataError(f"{path}: line {number}: {_reason(error)}") from None
            yield _Reader(path, f"line {number}", row)


def _reason(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        case OSError():
            return error.strerror or "cannot be read"
        case RecursionError():
            return "nested too deeply"
    return "not UTF-8"


def _pairs(each: _Reader, key: str, *names: str) -> list[tuple[Any, Any]]:
    """Pairs of HotpotQA: a list of pairs as published, or columns as of Hugging Face's copy."""
    value = each.row.get(key) if isinstance(each.row, dict) else None
    if isinstance(value, dict) and all(isinstance(value.get(name), list) for name in names):
        return list(zip(*(value[name] for name in names), strict=False))
    pairs = each.get(key, list)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise each.error(f"{key} is no list of pairs ({', '.join(names)})")
    return [tuple(pair) for pair in pairs]


def _sentences(text: str) -> list[str]:
    return _SENTENCE.findall(text)


def _sentence_at(text: str, start: int) -> str:
    """Sentence of a text around a character."""
    sentences = _sentences(text)
    ends = accumulate(map(len, sentences))
    return next((s.strip() for s, end in zip(sentences, ends, strict=True) if start < end), text)


def _sentence_with(text: str, answer: str) -> str:
    """First sentence of a text that holds an answer; all of it where none does."""
    return next((each.strip() for each in _sentences(text) if holds(each, answer)), text)
