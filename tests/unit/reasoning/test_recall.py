"""`recall`: tasks from plain text, whose answer stands a window or more before the question."""

import itertools
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from cdrmix.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.errors import DataError
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.recall import Samples, _missing, _question, recall
from cdrmix.reasoning.tasks import Example, score
from cdrmix.stage_b.long_context import suite
from tests.unit.reasoning.small_reader import small_config

WINDOW = 64
LENGTH = 50  # of a sample


def prose() -> str:
    """A text in which pairs of names come back after a window and more, up to three times in eight
    windows, among names that come once."""
    names = [first + last for first in ("Bal", "Ven", "Tyl") for last in ("dor", "kan", "mi", "no")]
    once = map(
        "".join, itertools.product(("Gra", "Fel", "Os", "Ub"), ("dam", "lic"), *2 * ("pqrst",))
    )
    filler = ["The rain fell on the long road.", "They ate bread."]
    lines = []
    for turn in range(40):
        for number in range(0, len(names), 2):
            lines.append(f"They saw {names[number]} {names[number + 1]} from the hill.")
            other = (number // 2 + turn) % 3
            lines.append(filler[other] if other < 2 else f"Nobody came to {next(once)}.")
    return " ".join(lines)


@pytest.fixture(scope="module")
def made() -> tuple[Tokenizer, Samples]:
    with tempfile.TemporaryDirectory() as folder:
        # All words but the names, which have several pieces.
        text = "Which word is missing: ____ They saw it from the hill. In the morning they came. "
        text += "The rain fell on the long road. Nobody came to the old house. They ate bread. "
        (Path(folder) / TOKENIZER_FILE).write_text(train_tokenizer([text * 50], 400).to_str())
        tokenizer = load_tokenizer(Path(folder))
    ids = np.array([*tokenizer.encode(prose()), tokenizer.eos_id], dtype=np.int64)
    count = (len(ids) - 1) // LENGTH
    rows = Samples(
        lambda numbers: np.stack([ids[n * LENGTH : n * LENGTH + LENGTH + 1] for n in numbers]),
        count,
    )
    return tokenizer, rows


def make(
    made: tuple[Tokenizer, Samples],
    number: int,
    ratio: int = 8,
    seed: int = 0,
    *,
    swaps: bool = False,
) -> Example:
    tokenizer, samples = made
    return recall(
        samples,
        tokenizer,
        number=number,
        seed=seed,
        length_ratio=ratio,
        window_tokens=WINDOW,
        answer_tokens=14,
        swaps=swaps,
    )


def test_the_word_stands_a_window_or_more_before_the_question(
    made: tuple[Tokenizer, Samples],
) -> None:
    tokenizer, _ = made
    for number in range(12):
        example = make(made, number)
        (word,) = example.answers
        assert example.question.startswith("Which word is missing: ")
        assert example.question.count("____") == 1 and word not in example.question
        ids = tokenizer.encode(example.text)
        assert len(ids) <= 8 * WINDOW + 8
        assert word in re.findall(r"\w+", example.text), "an earlier use is to be remembered"
        assert word.lower() not in tokenizer.decode(ids[-WINDOW:]).lower()
        assert score(example, word) == 1
        (evidence,) = example.evidence
        assert evidence in example.text and word in evidence
        others = set(re.findall(r"\w+", evidence)) - {word}
        assert others & set(re.findall(r"\w+", example.question)), "a word that tells it"


def test_equal_numbers_give_equal_examples_and_others_do_not(
    made: tuple[Tokenizer, Samples],
) -> None:
    assert make(made, 3) == make(made, 3)
    assert len({make(made, 3), make(made, 4), make(made, 3, seed=1)}) == 3


def test_a_text_without_a_window_before_the_last_has_none(made: tuple[Tokenizer, Samples]) -> None:
    with pytest.raises(DataError, match="recall: no rare word .* a window of 64"):
        make(made, 0, ratio=1)


def test_lessons_train_on_the_corpus_and_the_suite_reads_what_is_held_out(
    made: tuple[Tokenizer, Samples],
) -> None:
    tokenizer, samples = made
    training = small_config(tasks=("recall", "logic")).stage_b.training
    read: list[str] = []

    def noted(which: str) -> Samples:
        def rows(numbers: np.ndarray) -> np.ndarray:
            read.append(which)
            return samples.rows(numbers)

        return Samples(rows, samples.num_rows)

    train = noted("train")
    lessons = Lessons(
        training, 0, WINDOW, tokenizer, train.rows, train.num_rows, held_out=noted("held out")
    )
    lesson = lessons.lesson("memory", 0)
    assert [example.task for example in lesson.examples] == ["recall", "logic"] * 2
    assert set(read) == {"train"}
    for row in (0, 2):  # what is to be fetched is labelled
        places = lesson.evidence[row]
        assert places and not lesson.candidates[row]
        lengths = lesson.texts.lengths[row]
        held = [lesson.texts.tokens[row, each, : lengths[each]].tolist() for each in places]
        assert lesson.examples[row].evidence[0] in "".join(map(tokenizer.decode, held))
    read.clear()
    examples = suite(lessons, ["recall"], length_ratios=(1, 4), num_examples=2)
    assert [example.length_ratio for example in examples] == [4, 4] and set(read) == {"held out"}
    bare = Lessons(training, 0, WINDOW, tokenizer)
    assert suite(bare, ["recall"], length_ratios=(4,), num_examples=2) == []


def test_another_word_takes_the_place_of_the_missing_one_where_the_text_has_it(
    made: tuple[Tokenizer, Samples],
) -> None:
    other = set()
    for number in range(8):
        plain, swapped = (make(made, number, swaps=swaps) for swaps in (False, True))
        assert swapped.question == plain.question
        (word,), (put) = plain.answers, swapped.answers[0]
        other.add(put)
        assert word not in re.findall(r"\w+", swapped.text) and put not in plain.text
        assert swapped.text == re.sub(rf"\b{word}\b", put, plain.text)
        assert swapped.evidence[0] in swapped.text and put in swapped.evidence[0]
    assert len(other) > 1


def test_a_word_of_the_last_window_is_not_asked_for(made: tuple[Tokenizer, Samples]) -> None:
    tokenizer, _ = made
    sentence = "In the morning they saw Baldor from the hill."
    far = ["It is far from Baldor."]
    assert _missing(sentence, far, ["Nobody came."], tokenizer) == [("Baldor", "from Baldor")]
    assert _missing(sentence, far, ["Nobody came to baldor."], tokenizer) == []
    assert _missing(sentence, ["It is far."], ["Nobody came."], tokenizer) == []
    assert _missing(sentence, far * 4, ["Nobody came."], tokenizer) == [], "not rare"


def test_a_word_is_asked_for_if_a_rare_one_beside_it_tells_it(
    made: tuple[Tokenizer, Samples],
) -> None:
    tokenizer, _ = made
    sentence = "They ate with old Venkan near the Balmi road."
    # Both names have been used, but beside Balmi alone stands a word that does so here.
    far = ["Venkan came. ", "Balmi came. ", "Nobody saw the Balmi road. ", "They ate. "]
    assert _missing(sentence, far, ["It rained."], tokenizer) == [("Balmi", "the Balmi road")]
    # Words that are not rare tell nothing: they stand beside many others.
    common = [*far, "The road. " * 3]
    assert _missing(sentence, common, ["It rained."], tokenizer) == []
    # In a text of a thousand words four uses are few.
    found = _missing(sentence, [*common, "It rained. " * 500], ["It rained."], tokenizer)
    assert ("Balmi", "the Balmi road") in found


def test_of_a_long_sentence_what_stands_around_the_word_is_asked(
    made: tuple[Tokenizer, Samples],
) -> None:
    tokenizer, _ = made
    sentence = "They ate bread, and they saw Baldor from the hill, and nobody came to the house."
    whole = f"Which word is missing: {sentence.replace('Baldor', '____')}?"
    assert _question(sentence, "Baldor", tokenizer, most=100) == whole
    cut = _question(sentence, "Baldor", tokenizer, most=24)
    assert cut is not None and "saw ____ from" in cut and cut[23:-1] in whole
    assert len(tokenizer.encode(cut)) <= 24
    assert _question(sentence, "Baldor", tokenizer, most=5) is None
