"""Answers of many words: normalisation, exact match and F1 as SQuAD's evaluation has them."""

import json
from pathlib import Path

import pytest

from cdrmix.errors import DataError
from cdrmix.reasoning.answers import exact_match, holds, normalised, token_f1
from cdrmix.reasoning.task_files import read_examples
from cdrmix.reasoning.tasks import Example, score


def of(match: str, *answers: str) -> Example:
    return Example("contracts", 1, "text", "question?", answers, match)


def test_case_punctuation_articles_and_blanks_do_not_count() -> None:
    assert normalised("  The U.S.  Army, an  `A` team! ") == "us army team"
    assert normalised("another theatre") == "another theatre", "articles are whole words"


def test_exact_match_takes_any_of_the_right_answers_as_a_whole() -> None:
    example = of("exact", "New York", "the Big Apple")
    assert score(example, "new york.") == score(example, "Big Apple") == 1
    assert score(example, "New York City") == score(example, "York") == score(example, "") == 0
    assert exact_match(["12"], "twelve") == 0


def test_f1_counts_words_as_often_as_they_come_and_takes_the_best_answer() -> None:
    assert score(of("f1", "New York"), "New York City") == pytest.approx(2 * 2 / (2 + 3))
    assert score(of("f1", "New York"), "york york york") == pytest.approx(2 * 1 / (2 + 3))
    assert score(of("f1", "Ada Lovelace", "Ada"), "Ada") == 1
    assert score(of("f1", "Ada"), "Grace") == score(of("f1", "Ada"), "the") == 0
    assert token_f1(["to be or not to be"], "to be") == pytest.approx(2 * 2 / (6 + 2))


def test_a_text_holds_an_answer_word_by_word() -> None:
    assert holds("It was The Big, Apple.", "big apple")
    assert not holds("It was bigger.", "big") and not holds("Apple big", "big apple")


@pytest.mark.parametrize(
    ("match", "answer", "message"),
    [
        ("exact", "The ...", "answer 'The ...' is empty without case, punctuation and articles"),
        ("f1", "?", r"answer '\?' is empty without case"),
        (
            "any",
            "New York",
            "answer .New York. is no single word of letters and digits.*or match exact or f1",
        ),
    ],
)
def test_answers_that_nothing_could_equal_are_named(
    tmp_path: Path, match: str, answer: str, message: str
) -> None:
    row = {"task": "t", "length_ratio": 1, "text": "a", "question": "b", "match": match}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row | {"answers": [answer]}))
    with pytest.raises(DataError, match=f"tasks.jsonl:1: {message}"):
        read_examples(path)
    path.write_text(json.dumps(row | {"answers": ["New York"], "match": "exact"}))
    assert read_examples(path)[0].answers == ("New York",)
