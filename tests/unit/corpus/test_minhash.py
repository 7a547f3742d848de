"""Signatures: shingles as they are defined, similarity as it is, candidates as theory has it."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from cdrmix.corpus.steps.minhash import (
    MAX_CHARACTERS,
    NO_KEY,
    Method,
    MinHash,
    SimHash,
    shingle_hashes,
)
from cdrmix.errors import DataError

WORDS = [f"word{number}" for number in range(3000)]


def random_text(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choices(WORDS, k=num_words))


def replaced(generator: random.Random, text: str, num_replaced: int) -> str:
    words = text.split()
    for place in generator.sample(range(len(words)), num_replaced):
        words[place] = "changed"
    return " ".join(words)


def shingle_set(text: str, num_words: int = 5) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + num_words]) for i in range(max(1, len(words) - num_words + 1))}


def hash_sets(texts: list[str], num_words: int = 5) -> list[set[int]]:
    hashes, bounds = shingle_hashes(texts, num_words)
    return [set(hashes[a:b].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def test_hashes_are_those_of_runs_of_words_within_each_text() -> None:
    generator = random.Random(1)
    words = [*"abcdefgh", "ab", "ba", "Élan", "naïve", "x_1", "42", "Straße"]
    signs = [" ", "\n", ", ", " -- ", "(", ") "]
    texts = [
        "".join(generator.choice(words) + generator.choice(signs) for _ in range(size))
        for size in [0, 1, 4, 5, 6, 50, 400, 3, 0]
    ]
    hashed = hash_sets(texts)
    wanted = [shingle_set(text) if text else set() for text in texts]
    assert [len(found) for found in hashed] == [len(runs) for runs in wanted]
    for a in range(len(texts)):
        for b in range(len(texts)):
            assert len(hashed[a] & hashed[b]) == len(wanted[a] & wanted[b])
    assert hash_sets(texts) == [hash_sets([text])[0] for text in texts]


def test_case_punctuation_and_layout_do_not_count_but_word_borders_do() -> None:
    same = hash_sets(["The quick, brown fox jumps; over", "the  quick brown\nfox (jumps) OVER."])
    assert same[0] == same[1]
    assert hash_sets(["ab c d e f"])[0] != hash_sets(["a bc d e f"])[0]


def test_scripts_without_spaces_have_a_word_per_character() -> None:
    (hashes,) = hash_sets(["我们在这里学习语言模型。"])
    assert len(hashes) == 11 - 4
    assert len(hash_sets(["Привет, как твои дела сегодня вечером"])[0]) == 2


def test_a_broken_surrogate_is_no_word_and_no_error() -> None:
    assert hash_sets(["one two \ud800 three four five"]) == hash_sets(["one two three four five"])


@pytest.mark.parametrize("method", [MinHash(), SimHash()])
def test_signatures_depend_on_the_text_alone(method: Method) -> None:
    generator = random.Random(2)
    texts = [random_text(generator, size) for size in (0, 1, 7, 300, 2000, 50)]
    together = method.sign(texts)
    for number, text in enumerate(texts):
        alone = method.sign([text])
        assert np.array_equal(alone.keys[0], together.keys[number])
        assert np.array_equal(alone.sketches[0], together.sketches[number])


@pytest.mark.parametrize("method", [MinHash(), SimHash()])
def test_a_text_without_words_has_no_keys(method: Method) -> None:
    keys = method.sign(["", " \n ... --", "word"]).keys
    assert (keys[:2] == NO_KEY).all()
    assert (keys[2] != NO_KEY).all()


@pytest.mark.parametrize("method", [MinHash(), SimHash()])
def test_a_long_text_is_signed_in_pieces_and_still_found(method: Method) -> None:
    text = random_text(random.Random(3), MAX_CHARACTERS // 3)
    assert len(text) > 2 * MAX_CHARACTERS
    signed = method.sign([text, "short", text.replace("word7 ", "", 1)])
    assert (signed.keys[0] == signed.keys[2]).any()
    assert method.agree(signed.sketches[:1], signed.sketches[2:]).all()


def test_sketches_estimate_jaccard_similarity() -> None:
    generator = random.Random(4)
    errors = []
    for num_replaced in [5, 10, 20, 40] * 20:
        text = random_text(generator, 400)
        other = replaced(generator, text, num_replaced)
        signed = MinHash().sign([text, other])
        equal = (signed.sketches[0] == signed.sketches[1]).mean()
        first, second = shingle_set(text), shingle_set(other)
        errors.append((equal - 1 / 256) / (255 / 256) - len(first & second) / len(first | second))
    # A share of 112 independent minima has a standard deviation of at most .047.
    assert abs(np.mean(errors)) < 0.02
    assert 0.02 < np.std(errors) < 0.06


def test_candidates_are_as_many_as_banding_promises() -> None:
    generator = random.Random(5)
    texts = [random_text(generator, 300) for _ in range(300)]
    others = [replaced(generator, text, 10) for text in texts]
    promised = []
    for text, other in zip(texts, others, strict=True):
        first, second = shingle_set(text), shingle_set(other)
        promised.append(1 - (1 - (len(first & second) / len(first | second)) ** 8) ** 14)
    shared = (MinHash().sign(texts).keys == MinHash().sign(others).keys).any(axis=1)
    assert abs(shared.mean() - np.mean(promised)) < 0.08


def test_simhash_of_up_to_three_changed_bits_shares_a_key() -> None:
    text = random_text(random.Random(6), 40)
    method, generator = SimHash(), random.Random(7)
    near, found = 0, 0
    for _ in range(600):
        signed = method.sign([text, replaced(generator, text, 1)])
        distance = np.unpackbits(signed.sketches[0] ^ signed.sketches[1]).sum()
        agreed = bool(method.agree(signed.sketches[:1], signed.sketches[1:])[0])
        assert agreed == (distance <= 3)
        near += agreed
        found += agreed and bool((signed.keys[0] == signed.keys[1]).any())
    assert near == found > 20


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_bands": 0, "rows_per_band": -1}, "num_bands = 0, rows_per_band = -1: allowed are 1"),
        ({"min_jaccard": 1.5}, "min_jaccard = 1.5: allowed are 0 to 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        MinHash(**settings)


def test_simhash_further_than_its_keys_reach_is_refused() -> None:
    with pytest.raises(DataError, match="max_distance = 4: allowed are 0 to 3"):
        SimHash(max_distance=4)
