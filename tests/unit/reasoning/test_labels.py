"""Labels of lessons follow from the segments that are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from cdrmix.config.reasoning import StageBTraining
from cdrmix.planning.lesson_sizes import DRILLS_PER_TASK
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.tasks import KINDS, TRAINED
from tests.unit.reasoning.small_reader import tokenizer

NUM_TEXTS = 24


def _said(forms: Sequence[str], first: str, second: str, text: str) -> list[tuple[str, str]]:
    """Pairs of words that stand at two places of a statement, in any of its forms."""
    named = {first: rf"(?P<{first}>\w+)", second: rf"(?P<{second}>\w+)"}
    return [
        (match[first], match[second])
        for form in forms
        for match in re.finditer(rf"\b{form.replace('.', chr(92) + '.').format(**named)}", text)
    ]


def codes(text: str, question: str) -> set[str]:
    """Codes of the keys that are asked for."""
    keys = re.findall(r"\w+", question)
    found = _said(TRAINED.needles, "word", "digits", text)
    return {code for key, code in found if key in keys}


def holders(text: str, question: str) -> set[str]:
    """Variables that hold a value."""
    holding = {re.search(r"\d+", question)[0]}  # type: ignore[index]
    copies = _said(TRAINED.copies, "new", "old", text)
    while True:
        more = {name for name, source in copies if source in holding} - holding
        if not more:
            return {name for name in holding if not name.isdigit()}
        holding |= more


def commonest(text: str, question: str) -> set[str]:
    """Words that are listed most often."""
    counts = Counter(re.findall(r"Listed: (\w+)\.", text))
    return {word for word, _ in counts.most_common(int(re.search(r"\d+", question)[0]))}  # type: ignore[index]


def city(text: str, question: str) -> set[str]:
    """City of somebody's friend."""
    person = re.search(r"friend of (\w+)", question)[1]  # type: ignore[index]
    friends = dict(re.findall(r"The friend of (\w+) is (\w+)\.", text))
    cities = dict(re.findall(r"(\w+) lives in (\w+)\.", text))
    return {cities.get(friends.get(person, ""), "")}


def total(text: str, question: str) -> set[str]:
    """Value of the last of a chain."""
    values = {name: int(value) for name, value in re.findall(r"(\w+) is (\d+)\.", text)}
    steps = re.findall(r"(\w+) is (\w+) (plus|minus) (\d+)\.", text)
    for _ in steps:  # in any order
        for name, before, sign, amount in steps:
            if before in values:
                values[name] = values[before] + (1 if sign == "plus" else -1) * int(amount)
    return {str(values.get(question.split()[2].rstrip("?")))}


def holds(text: str, question: str) -> set[str]:
    """Whether something follows from what is said to hold."""
    known = set(re.findall(r"It holds that (\w+)\.", text))
    rules = re.findall(r"If (\w+) then (\w+)\.", text)
    for _ in rules:
        known |= {b for a, b in rules if a in known}
    return {"yes" if question.split()[1] in known else "no"}


def held(text: str, question: str) -> set[str]:
    """What a register holds at the end."""
    values = dict(re.findall(r"Set (\w+) to (\d+)\.", text))
    return {values.get(question.split()[2], "")}


SOLVERS: dict[str, Callable[[str, str], set[str]]] = {
    "needle_keys": codes,
    "needle_values": codes,
    "needle_queries": codes,
    "variable_tracking": holders,
    "common_words": commonest,
    "look_up": city,
    "arithmetic": total,
    "logic": holds,
    "needle_decoys": codes,
    "needle_haystack": codes,
    "registers": held,
}


def lessons(task: str, window_tokens: int, *, drills: bool = False) -> Lessons:
    training = StageBTraining(tasks=(task,), texts_per_lesson=NUM_TEXTS)  # type: ignore[arg-type]
    return Lessons(training, 0, window_tokens, tokenizer(), drills=drills)


def test_every_task_has_a_solver() -> None:
    assert set(SOLVERS) == set(KINDS)


@pytest.mark.parametrize("window_tokens", [64, 512, 4096])
@pytest.mark.parametrize("task", SOLVERS)
def test_a_label_follows_from_what_is_read(task: str, window_tokens: int) -> None:
    assert wrong_labels(task, window_tokens, 0) == []


def wrong_labels(task: str, window_tokens: int, number: int) -> list[str]:
    """Questions of a lesson whose segments lead to another answer than the label, or to more."""
    lesson = lessons(task, window_tokens).lesson("joint", number)
    wrong = []
    for row, example in enumerate(lesson.examples):
        count = lesson.texts.tokens.shape[1]
        ids = [id for place in range(count) for id in lesson.texts.segment(row, place)]
        text = tokenizer().decode(ids)
        found = SOLVERS[task](text, example.question)
        learned = tokenizer().decode(list(lesson.answers[row][:-1]))
        if found != set(example.answers) or found != set(re.findall(r"\w+", learned)):
            wrong.append(example.question)
    return wrong


@pytest.mark.parametrize("window_tokens", [64, 512])
@pytest.mark.parametrize("task", SOLVERS)
def test_a_drill_is_answered_from_its_window_alone(task: str, window_tokens: int) -> None:
    made = lessons(task, window_tokens, drills=True)
    lesson = made.lesson("joint", 0)
    for window, answer in lesson.drills:
        parts: list[list[int]] = [[]]
        for id in window[:-1]:
            if id == made.marks.memory:
                parts.append([])
            else:
                parts[-1].append(id)
        *segments, question = (tokenizer().decode(part) for part in parts)
        wanted = tokenizer().decode(list(answer[:-1]))
        found = SOLVERS[task]("".join(segments), question)
        assert found == set(re.findall(r"\w+", wanted)), question
    # of others nothing that fits into so few tokens is the whole of what they ask for
    if task in ("needle_keys", "variable_tracking", "needle_haystack") and window_tokens == 512:
        assert len(lesson.drills) == DRILLS_PER_TASK * NUM_TEXTS
