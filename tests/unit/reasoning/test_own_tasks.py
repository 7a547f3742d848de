"""A user's own tasks: rows held out, their order, what is refused, and what is only told."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.reasoning import StageBTraining
from cdrmix.errors import DataError
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.own_tasks import OwnTasks, read_own_tasks
from tests.unit.reasoning.own_rows import row, write_rows
from tests.unit.reasoning.small_reader import (
    WINDOW_TOKENS,
    small_config,
    small_lessons,
    tokenizer,
)
from tools.benchmark.own_questions import write_notes


def training(path: Path, **changed: Any) -> StageBTraining:
    section = small_config(task_file=str(path), **changed).stage_b
    assert section is not None
    return section.training


def read(path: Path, window_tokens: int = WINDOW_TOKENS, **changed: Any) -> OwnTasks:
    own = read_own_tasks(
        training(path, **changed), window_tokens=window_tokens, encode=tokenizer().encode
    )
    assert own is not None
    return own


def lessons_of(path: Path, **changed: Any) -> Lessons:
    config = small_config(task_file=str(path), **changed)
    return dataclasses.replace(small_lessons(config), own=read(path))


def test_a_tenth_is_held_out_and_stays_so_whatever_stands_beside_it(tmp_path: Path) -> None:
    few, many = (write_rows(tmp_path / f"{n}.jsonl", n) for n in (400, 500))
    for path, count in ((few, 400), (many, 500)):
        own = read(path)
        assert len(own.train) + len(own.held_out) == count
        assert count * 0.05 < len(own.held_out) < count * 0.15
        assert not set(own.train) & set(own.held_out)
    assert set(read(few).held_out) <= set(read(many).held_out)


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (3, 1), (8, 4), (12, 4)])
def test_of_few_rows_a_few_are_held_out(tmp_path: Path, count: int, held_out: int) -> None:
    own = read(write_rows(tmp_path / "tasks.jsonl", count))
    assert len(own.held_out) >= held_out and len(own.held_out) <= count // 2


def test_the_notes_of_the_benchmark_are_rows_that_stage_b_takes(tmp_path: Path) -> None:
    file, minutes = tmp_path / "notes.jsonl", tmp_path / "minutes.txt"
    write_notes(file, minutes)
    own = read(file)
    rows = own.train + own.held_out
    assert len(rows) == 200 and 10 <= len(own.held_out) <= 30 and not own.warnings
    for example in rows:
        (evidence,) = example.evidence
        assert example.text.count(evidence) == 1 and example.answers[0] in evidence
        name = example.question.split()[3]
        assert example.text.count(f"The {name} file") == 1, "one place of each file"
    assert minutes.read_text().strip() not in {example.text for example in rows}


def test_rows_that_ask_the_same_are_held_out_together(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [row(number) | {"task": task} for number in range(10) for task in ("one", "two")]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = read(path)
    asked = [{example.text for example in part} for part in (own.train, own.held_out)]
    assert own.held_out and not asked[0] & asked[1]


def test_every_round_takes_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    own = read(write_rows(tmp_path / "tasks.jsonl", 30))
    size = len(own.train)
    rounds = [[own.row(turn * size + place, "0/joint") for place in range(size)] for turn in (0, 1)]
    assert all(set(each) == set(own.train) for each in rounds) and rounds[0] != rounds[1]
    assert [own.row(place, "1/joint") for place in range(size)] != rounds[0]
    assert [own.row(place, "0/joint") for place in range(size)] == rounds[0]


def test_lessons_take_their_share_of_rows_and_none_that_is_held_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl")
    given = {"task_file_share": 0.25, "tasks": ("logic", "needle_keys")}
    lessons = lessons_of(path, **given)
    examples = [each for number in range(8) for each in lessons.lesson("memory", number).examples]
    counts = Counter(example.task for example in examples)
    assert counts == {"keys": 8, "logic": 12, "needle_keys": 12}
    assert not set(examples) & set(read(path).held_out)
    without = small_lessons(small_config(tasks=given["tasks"]))
    plain = [each for number in range(6) for each in without.lesson("memory", number).examples]
    assert [each for each in examples if each.task != "keys"] == plain, "the others are as before"
    again = lessons_of(path, **given).lesson("joint", 5)
    assert again.examples == lessons.lesson("joint", 5).examples


def test_evidence_of_a_user_is_sought_and_may_span_segments(tmp_path: Path) -> None:
    lessons = lessons_of(write_rows(tmp_path / "one.jsonl"), task_file_share=1.0)
    lesson = lessons.lesson("memory", 0)
    assert (lesson.sought >= 0).all() and not any(lesson.candidates)
    long = [" ".join(f"Part {part} of it." for part in range(12))]
    path = write_rows(tmp_path / "long.jsonl", text=f"Nothing. {long[0]} Nothing.", evidence=long)
    rows = [len(places) for places in lessons_of(path).lesson("memory", 0).evidence]
    assert max(rows) > 1


def test_without_evidence_segments_with_the_answer_stay_and_are_candidates(tmp_path: Path) -> None:
    lessons = lessons_of(write_rows(tmp_path / "one.jsonl", evidence=None), task_file_share=1.0)
    for number in range(6):
        lesson = lessons.lesson("joint", number)
        assert (lesson.sought == -1).all()
        for place, example in enumerate(lesson.examples):
            options = lesson.candidates[place]
            assert 1 < len(options) <= 6 and not set(options) & set(lesson.found[place])
            held = [
                tokenizer().decode(lesson.texts.segment(place, segment))
                for segment in lesson.gathered[place]
            ]
            assert any(example.answers[0] in text for text in held), "the answer is to be read"
    assert not any(lessons.lesson("policy", 0).candidates)


def test_the_tasks_of_ours_without_evidence_have_no_candidates() -> None:
    lesson = small_lessons(small_config(tasks=("common_words",))).lesson("memory", 0)
    assert not any(lesson.candidates)


def test_a_row_that_does_not_fit_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    long = "one two three four five six seven eight nine ten"
    rows = [row(0), row(1) | {"answers": [long], "match": "exact"}, row(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    length = len(tokenizer().encode(long)) + 1
    with pytest.raises(DataError) as caught:
        read(path)
    said = str(caught.value)
    assert f"{path}:2: the answer takes {length} tokens with its stop" in said
    assert "1 of 3 rows" in said and f"Try stage_b.training.answer_tokens={length}" in said
    assert len(read(path, answer_tokens=length, window_tokens=256).train) == 2
    write_rows(path, question="Which key " + "of all the keys " * 12 + "is it?")
    with pytest.raises(DataError, match=r"tasks.jsonl:1: the question takes \d+ tokens; beside"):
        read(path)
    with pytest.raises(DataError, match=r"tasks.jsonl:1: .* read before each segment at most 30\."):
        read(path, question="first")


def test_the_first_of_several_right_answers_is_learned(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl", answers=["key one", "1"], match="f1")
    lessons = lessons_of(path, task_file_share=1.0)
    ids = tokenizer().encode("key one")
    assert lessons.lesson("joint", 0).answers[0] == (*ids, lessons.marks.stop)


def test_the_room_for_answers_is_the_configurations(tmp_path: Path) -> None:
    long = "one two three four five six seven"
    path = write_rows(tmp_path / "tasks.jsonl", answers=[long], match="exact")
    room = len(tokenizer().encode(long)) + 1
    assert room > 14
    config = small_config(task_file=str(path), task_file_share=1.0, answer_tokens=room)
    lessons = dataclasses.replace(small_lessons(config), own=read(path, answer_tokens=room))
    lesson = lessons.lesson("joint", 0)
    assert {len(answer) for answer in lesson.answers} == {room}
    for window, answer in lesson.drills:
        assert len(window) + len(answer) <= WINDOW_TOKENS


def test_what_nothing_supports_is_told_and_used(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [row(0), row(1) | {"answers": ["77"]}, row(2) | {"evidence": ["It is not there."]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    own = read(path)
    assert len(own.train) + len(own.held_out) == 3
    assert [warning.partition(": in ")[2][:31] for warning in own.warnings] == [
        "1 of 3 rows (first: line 3) evi",
        "2 of 3 rows (first: line 2) an ",
    ]
    assert read(write_rows(path)).warnings == ()
    assert read(write_rows(path, evidence=None)).warnings == ()


def test_a_single_row_and_no_file_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl", 1)
    with pytest.raises(DataError, match="has a single row, and one is held out"):
        read(path)
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "nowhere.jsonl")
