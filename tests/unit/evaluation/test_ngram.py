import math
from collections import Counter

import numpy as np
import pytest

from cdrmix.errors import DataError
from cdrmix.evaluation import ngram
from cdrmix.evaluation.ngram import BigramCounts, unigram_and_bigram

TEXT = (
    "the cat sat on the mat and the dog sat on the cat while the rat ran round the log and "
    "no one saw that the dog had a hat that the cat had had on the mat in the sun"
)
VOCAB_SIZE = 128


def rows_of(tokens: list[int], length: int) -> np.ndarray:
    """Overlapping rows [N, length + 1], as the loader cuts them."""
    num_rows = (len(tokens) - 1) // length
    return np.array([tokens[i * length : i * length + length + 1] for i in range(num_rows)])


def discount_of(counts: list[int]) -> float:
    ones, twos = counts.count(1), counts.count(2)
    return ones / (ones + 2 * twos) if ones and twos else 0.5


def brute_force_bigram(pairs: Counter, previous: int, following: int) -> float:
    """Interpolated Kneser-Ney, straight from the definition."""
    predecessors = Counter(b for _, b in pairs)
    lower_discount = discount_of(list(predecessors.values()))
    lower = max(predecessors[following] - lower_discount, 0) / len(pairs)
    lower += lower_discount * len(predecessors) / len(pairs) / VOCAB_SIZE
    after = {b: n for (a, b), n in pairs.items() if a == previous}
    if not after:
        return lower
    discount = discount_of(list(pairs.values()))
    direct = max(after.get(following, 0) - discount, 0) / sum(after.values())
    return direct + discount * len(after) / sum(after.values()) * lower


def test_losses_equal_a_brute_force_count():
    tokens = [ord(c) for c in TEXT]
    train, held_out = rows_of(tokens[:120], 7), rows_of(tokens[110:] + [127, 126, 97], 5)
    pairs = Counter((int(a), int(b)) for row in train for a, b in zip(row, row[1:], strict=False))
    singles = Counter(int(b) for row in train for b in row[1:])
    wanted = [(int(a), int(b)) for row in held_out for a, b in zip(row, row[1:], strict=False)]
    counted = sum(singles.values())
    unigram = [math.log((singles[b] + 1) / (counted + VOCAB_SIZE)) for _, b in wanted]
    bigram = [math.log(brute_force_bigram(pairs, a, b)) for a, b in wanted]

    found = unigram_and_bigram(np.array_split(train, 3), np.array_split(held_out, 2), VOCAB_SIZE)

    assert found.unigram_loss == pytest.approx(-sum(unigram) / len(wanted), abs=1e-12)
    assert found.bigram_loss == pytest.approx(-sum(bigram) / len(wanted), abs=1e-12)
    assert (found.counted_tokens, found.evaluated_tokens) == (train.shape[0] * 7, len(wanted))


def test_probabilities_after_every_context_sum_to_one():
    counts = BigramCounts([rows_of([ord(c) for c in TEXT], 6)], VOCAB_SIZE)
    every_token = np.arange(VOCAB_SIZE)
    assert counts.unigram(every_token).sum() == pytest.approx(1, abs=1e-9)
    for context in range(VOCAB_SIZE):  # seen and unseen contexts alike
        after = counts.bigram(np.full(VOCAB_SIZE, context), every_token)
        assert after.sum() == pytest.approx(1, abs=1e-9)
        assert (after > 0).all()


def test_alternating_text_has_no_bigram_loss_and_one_bit_of_unigram_loss():
    rows = rows_of([3, 5] * 20_000, 100)
    found = unigram_and_bigram([rows], [rows], vocab_size=16)
    assert found.bigram_loss < 1e-3
    assert found.unigram_loss == pytest.approx(math.log(2), abs=1e-3)


def test_losses_of_an_independent_source_are_its_entropy():
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    entropy = -(probabilities * np.log(probabilities)).sum()
    tokens = np.random.default_rng(0).choice(5, size=(400, 513), p=probabilities)
    found = unigram_and_bigram([tokens[:300]], [tokens[300:]], vocab_size=5)
    # 51,200 draws of standard deviation 0.66 nats put the mean within 0.009 at three sigma.
    assert found.unigram_loss == pytest.approx(entropy, abs=0.01)
    assert found.bigram_loss == pytest.approx(found.unigram_loss, abs=1e-3)


def test_counts_do_not_depend_on_how_the_rows_are_batched(monkeypatch):
    rows = np.random.default_rng(1).integers(0, 50, size=(64, 33)).astype(np.uint16)
    whole = BigramCounts([rows], 50)
    monkeypatch.setattr(ngram, "_PAIRS_PER_MERGE", 100)
    pieces = BigramCounts((rows[i : i + 1] for i in range(64)), 50)
    np.testing.assert_array_equal(whole.keys, pieces.keys)
    np.testing.assert_array_equal(whole.counts, pieces.counts)
    assert whole.num_tokens == 64 * 32


def test_pair_keys_of_a_large_vocabulary_do_not_overflow_the_shards_type():
    rows = np.array([[50_271, 50_270, 50_271]], dtype=np.uint16)
    counts = BigramCounts([rows], 50_272)
    assert counts.keys.tolist() == [50_270 * 50_272 + 50_271, 50_271 * 50_272 + 50_270]


def test_a_token_outside_the_vocabulary_is_refused_by_id():
    with pytest.raises(DataError, match="token id 16 is outside the vocabulary"):
        BigramCounts([np.array([[1, 16, 2]])], vocab_size=16)


@pytest.mark.parametrize("train, held_out", [([], [[1, 2]]), ([[1, 2]], []), ([[1]], [[1, 2]])])
def test_nothing_to_count_or_to_judge_is_refused(train, held_out):
    with pytest.raises(DataError, match="no predicted token"):
        unigram_and_bigram([np.array(r)[None] for r in train], map(np.atleast_2d, held_out), 4)
