"""Reasoning tasks: laws of the generators, the checker, and broken files."""

import dataclasses
import json
import random
import re
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest

from cdrmix.config.reasoning import ReasoningTask
from cdrmix.errors import DataError
from cdrmix.reasoning.task_files import read_examples, write_examples
from cdrmix.reasoning.tasks import (
    HELD_OUT,
    KINDS,
    RECALL,
    TRAINED,
    Example,
    Wording,
    arithmetic,
    generate_examples,
    logic,
    look_up,
    score,
    variable_tracking,
)

WINDOW = 200


def count_words(text: str) -> int:
    return len(text.split())


def make(
    task: str, number: int = 0, *, seed: int = 0, ratio: int = 4, wording: Wording = TRAINED
) -> Example:
    return generate_examples(
        task,
        number=number,
        seed=seed,
        length_ratio=ratio,
        window_tokens=WINDOW,
        count_tokens=count_words,
        wording=wording,
    )


@pytest.mark.parametrize("task", KINDS)
def test_equal_seeds_give_equal_examples_and_others_do_not(task: str) -> None:
    assert make(task, 3, seed=5) == make(task, 3, seed=5)
    others = {make(task, 4, seed=5).text, make(task, 3, seed=6).text, make(task, 3, seed=5).text}
    assert len(others) == 3


@pytest.mark.parametrize("task", KINDS)
def test_held_out_wording_is_the_same_task_in_names_and_fillers_of_its_own(task: str) -> None:
    def words(wording: Wording) -> set[str]:
        """Words of a few texts and their questions."""
        made = [make(task, number, wording=wording) for number in range(5)]
        texts = " ".join(f"{each.text} {each.question}" for each in made)
        return set(re.findall(r"[a-z]+", texts.lower()))

    trained, held_out = words(TRAINED), words(HELD_OUT)
    assert len(trained - held_out) > 20 and len(held_out - trained) > 20
    # what both have is of the task itself
    assert {word for word in trained & held_out if len(word) > 5} <= {"listed", "friend", "letters"}
    told, other = make(task), make(task, wording=HELD_OUT)
    assert told.match == other.match and len(told.evidence) == len(other.evidence)


def test_nothing_of_held_out_wording_is_in_that_of_training() -> None:
    names = [set(islice(each.words(random.Random(0)), 1000)) for each in (TRAINED, HELD_OUT)]
    assert len(names[0]) == len(names[1]) == 1000 and not names[0] & names[1]
    shapes = [
        {"".join("ao"[letter in "aeiou"] for letter in name) for name in each} for each in names
    ]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 8
    for ours, theirs in zip(TRAINED[1:], HELD_OUT[1:], strict=True):
        assert ours and theirs and not {*ours} & {*theirs}  # type: ignore[misc]


def test_statements_of_training_have_either_part_first() -> None:
    # who learns from one order does not read the other, whatever the words are
    new_first = [form.index("{new}") < form.index("{old}") for form in TRAINED.copies]
    assert 0.4 <= sum(new_first) / len(new_first) <= 0.6
    code_first = [form.lower().index("code") < form.index("{digits}") for form in TRAINED.needles]
    assert 0.25 <= sum(code_first) / len(code_first) <= 0.75


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("ratio", [1, 2, 16])
def test_texts_fill_their_length_and_never_exceed_it(task: str, ratio: int) -> None:
    length = count_words(make(task, ratio=ratio).text)
    assert ratio * WINDOW - 8 <= length <= ratio * WINDOW


def test_a_haystack_is_of_needles_and_decoys_are_none_of_them() -> None:
    haystack = make("needle_haystack")
    sentences = re.findall(r"[^.]+\.", haystack.text)
    forms = "|".join(TRAINED.needles).replace(".", r"\.").format(word=r"\w+", digits=r"\d{4}")
    assert all(re.fullmatch(rf" ?(?:{forms})", each) for each in sentences)
    assert len(sentences) > 100 and haystack.text.count(haystack.answers[0]) == 1
    decoys = make("needle_decoys")
    told = re.findall(r"[^.]+\.", decoys.text)
    others = [each for each in told if not re.fullmatch(rf" ?(?:{forms})", each)]
    assert len(re.findall(r"\d{4}", " ".join(others))) > 10
    assert not any(answer in each for answer in decoys.answers for each in others)


def test_a_register_holds_what_it_was_set_to_last() -> None:
    example = make("registers")
    name = example.question.split()[2]
    values = re.findall(rf"Set {name} to (\d+)\.", example.text)
    assert [values[-1]] == list(example.answers) and len(values) > 1
    assert example.evidence == (f"Set {name} to {values[-1]}.",)


@pytest.mark.parametrize("task", KINDS)
def test_the_last_window_alone_says_nothing(task: str) -> None:
    for number in range(10):
        example = make(task, number, ratio=2)
        last = " ".join(example.text.split()[-WINDOW:])
        said = f"{example.question} {' '.join(example.answers)}"
        telling = set(re.findall(r"\b(?:[A-Za-z]{6}|\d+)\b", said))  # made-up words and numbers
        assert telling and not telling & set(re.findall(r"\w+", last)), (said, last)


@pytest.mark.parametrize("task", KINDS)
def test_the_right_answer_scores_one_and_any_other_nothing(task: str) -> None:
    for number in range(10):
        example = make(task, number)
        assert score(example, " and ".join(example.answers)) == 1
        assert score(example, "Yes." if example.answers == ("yes",) else "nothing") in (0, 1)
        assert score(example, "nothing of the kind") == 0
        assert score(example, "") == 0


def of(answers: tuple[str, ...], match: str) -> Example:
    return Example("needle_keys", 1, "text", "question?", answers, match)


def test_all_counts_shares_and_any_needs_one() -> None:
    assert score(of(("12", "34"), "all"), "It is 34.") == 0.5
    assert score(of(("12", "34"), "any"), "It is 34.") == 1
    assert score(of(("Rome",), "any"), "ROME!") == 1


def test_words_are_compared_whole() -> None:
    assert score(of(("12",), "all"), "123") == 0


def test_listing_everything_earns_no_more_than_its_beginning() -> None:
    assert score(of(("12",), "all"), " ".join(str(number) for number in range(100))) == 0


def test_every_hop_of_a_chain_is_stated_before_it_is_needed() -> None:
    for seed in range(20):
        puzzle = variable_tracking(random.Random(seed), TRAINED, hops=3)
        places = [puzzle.statements.index(line) for line in puzzle.evidence]
        for line, name in zip(puzzle.evidence, puzzle.answers, strict=True):
            assert re.search(rf"\b{name}\b", line)
        assert places == sorted(places) and len(set(places)) == 4


def test_arithmetic_is_right() -> None:
    for seed in range(20):
        puzzle = arithmetic(random.Random(seed), TRAINED, steps=4)
        known: dict[str, int] = {}
        for line in puzzle.statements:
            name, _, what = line.rstrip(".").partition(" is ")
            parts = what.replace("plus", "+").replace("minus", "-").split()
            known[name] = eval(" ".join(str(known.get(part, part)) for part in parts))
        assert puzzle.answers == [str(known[puzzle.question[8:-1]])]


def test_logic_follows_from_what_is_said_and_half_of_it_holds() -> None:
    told = []
    for seed in range(200):
        puzzle = logic(random.Random(seed), TRAINED, steps=3)
        rules = [re.fullmatch(r"If (\w+) then (\w+)\.", line) for line in puzzle.statements]
        (start,) = re.findall(r"It holds that (\w+)\.", " ".join(puzzle.statements))
        holds = {start}
        for _ in puzzle.statements:
            holds |= {rule[2] for rule in rules if rule and rule[1] in holds}
        asked = re.fullmatch(r"Does (\w+) hold\?", puzzle.question)
        assert puzzle.answers == ["yes" if asked[1] in holds else "no"]
        told.append(puzzle.answers[0] == "yes")
    assert 70 <= sum(told) <= 130


def test_a_look_up_takes_two_facts() -> None:
    puzzle = look_up(random.Random(0), TRAINED)
    asked = re.fullmatch(r"Where does the friend of (\w+) live\?", puzzle.question)[1]
    text = " ".join(puzzle.statements)
    (friend,) = re.findall(rf"The friend of {asked} is (\w+)\.", text)
    assert re.findall(rf"{friend} lives in (\w+)\.", text) == puzzle.answers


def test_an_unknown_task_and_a_text_too_short_are_refused() -> None:
    with pytest.raises(DataError, match="'needle_key' is no reasoning task. Did you mean 'needle"):
        make("needle_key")
    with pytest.raises(
        DataError, match=r"take \d+ tokens, but a text of 1 x 10 tokens has room for fewer"
    ):
        generate_examples(
            "look_up",
            number=0,
            seed=0,
            length_ratio=1,
            window_tokens=10,
            count_tokens=count_words,
        )


def test_examples_survive_a_file(tmp_path: Path) -> None:
    examples = [make(task) for task in KINDS]
    write_examples(tmp_path / "tasks.jsonl", examples)
    assert read_examples(tmp_path / "tasks.jsonl") == examples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, r"answers are \[\]; at least one word is needed"),
        ({"answers": "one"}, "answers is 'one', not list"),
        ({"match": "some"}, "match is 'some'; allowed are all, any"),
        ({"length_ratio": True}, "length_ratio is True, not int"),
        ({"text": None}, "text is None, not str"),
        ({"text": " "}, "text is empty"),
        ({"length_ratio": 0}, "length_ratio is 0; allowed is a number from 1"),
        ({"answers": ["New York"]}, "answer 'New York' is no single word of letters and digits"),
        ({"answers": [""]}, r"answers are \[''\]; at least one word is needed"),
        ({"evidence": "It is."}, "evidence is 'It is.', not a list of sentences"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    write_examples(path, [make("logic")] * 2)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(
        DataError, match=rf"tasks.jsonl:2: {message}.*\. A row is a JSON object with task, length_r"
    ):
        read_examples(path)


def test_rows_may_lack_evidence_and_nothing_else(tmp_path: Path) -> None:
    path, row = tmp_path / "tasks.jsonl", dataclasses.asdict(make("logic"))
    for name in row:
        path.write_text(json.dumps({key: value for key, value in row.items() if key != name}))
        if name == "evidence":
            assert read_examples(path) == [dataclasses.replace(make("logic"), evidence=())]
            continue
        with pytest.raises(DataError, match=f"tasks.jsonl:1: {name} is missing"):
            read_examples(path)


def test_a_row_that_its_reader_cannot_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_examples(path, [make("logic", ratio=1), make("logic", ratio=4)])

    def check(example: Example) -> None:
        if example.length_ratio == 4:
            raise ValueError("too long")

    with pytest.raises(DataError, match=r"tasks.jsonl:2: too long\. A row is"):
        read_examples(path, check=check)


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    examples = [dataclasses.replace(make("logic"), text="One.\u2028Two.\x85Three.")] * 2
    rows = [json.dumps(dataclasses.asdict(each), ensure_ascii=False) for each in examples]
    path.write_text("\r\n".join(rows), encoding="utf-8", newline="")
    assert read_examples(path) == examples


def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with pytest.raises(DataError, match="No such file"):
        read_examples(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        read_examples(path)
    path.write_text('{"task": \n')
    with pytest.raises(DataError, match="tasks.jsonl:1: Expecting value at column 10"):
        read_examples(path)


def test_the_configuration_knows_every_task() -> None:
    assert set(get_args(ReasoningTask)) == {*KINDS, RECALL}
