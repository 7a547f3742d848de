"""Task `recall`, made from text of a corpus without labels: a word that is missing from a sentence.

The word is rare in the text, and its earlier uses stand at least a window before the sentence: to
know it, a reader must have remembered one. There is no evidence: which segment helps is learned
from the reader's own answers (`stage_b/likelihood.py`).
"""

# n samples of T + 1 tokens

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.reasoning.tasks import RECALL, Example

# Shorter texts have no window before the last.
LEAST_LENGTH_RATIO = 2
# Places of the corpus that are searched for a sentence: the text of many has none.
_TRIES = 12
# Most uses of the word before the sentence: what comes more often can be guessed.
_MOST_USES = 3
_LEAST_WORDS = 5  # of the sentence
# Of long sentences; a third of a window at most, so that segments have room beside it.
_MOST_QUESTION_TOKENS = 48
_PLACES = 16  # sentences of a stretch of text that are looked at
_BLANK = "____"
_SENTENCE = re.compile(r"[^.?!\n]+[.?!]*\s*|[.?!\n]+\s*")
_WORD = re.compile(r"\w+")
_Rank = tuple[bool, int, int]  # smaller is better


class Samples(NamedTuple):
    """Samples of a split of the corpus."""

    rows: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # by their numbers, [n] -> [n, T + 1]
    num_rows: int  # of all


def recall(
    samples: Samples,
    tokenizer: Tokenizer,
    *,
    number: int,
    seed: int | str,
    length_ratio: int,
    window_tokens: int,
    answer_tokens: int,
) -> Example:
    """Makes example `number` from samples of a corpus; equal arguments give equal examples.

    Args:
        samples, tokenizer: of the corpus.
        number, seed: of the example, and of all examples.
        length_ratio: longest text, in windows of `window_tokens`.
        answer_tokens: room for the answer and its stop.
    Raises:
        DataError: if no sentence was found, or a shard cannot be read.
    """
    rng = random.Random(f"{seed}/{RECALL}/{length_ratio}/{number}")
    if length_ratio >= LEAST_LENGTH_RATIO:
        for _ in range(_TRIES):
            sentences = _stretch(samples, tokenizer, rng, (length_ratio + 1) * window_tokens)
            found = _find(sentences, tokenizer, rng, length_ratio, window_tokens, answer_tokens)
            if found is not None:
                return found
    raise DataError(
        f"{RECALL}: no word of the corpus comes back a window of {window_tokens} tokens later in "
        f"{length_ratio} windows of text, at {_TRIES} places. Try a longer length_ratio, or a "
        "corpus of longer documents"
    )


def _stretch(
    samples: Samples, tokenizer: Tokenizer, rng: random.Random, least: int
) -> list[tuple[str, int]]:
    """Sentences of neighbouring samples, of `least` tokens and more, with the tokens of each."""
    first = rng.randrange(samples.num_rows)
    row = samples.rows(np.array([first], dtype=np.int64))[0]
    count = -(-least // (len(row) - 1))
    if count > samples.num_rows:  # the same sentences would stand there twice
        raise DataError(
            f"{RECALL}: {least} tokens of text are more than the {samples.num_rows} samples of the "
            "corpus have. Try a shorter length_ratio"
        )
    numbers = (first + np.arange(count)) % samples.num_rows
    # Neighbours share a token.
    ids = samples.rows(numbers)[:, :-1].flatten().tolist()
    documents: list[list[int]] = [[]]
    for id in ids:
        if id in tokenizer.special_ids or id == tokenizer.eos_id:
            documents.append([])
        else:
            documents[-1].append(id)
    text = "\n".join(tokenizer.decode(document) for document in documents if document)
    return [(each, len(tokenizer.encode(each))) for each in _SENTENCE.findall(text)]


def _find(
    sentences: Sequence[tuple[str, int]],
    tokenizer: Tokenizer,
    rng: random.Random,
    length_ratio: int,
    window_tokens: int,
    answer_tokens: int,
) -> Example | None:
    """An example from the sentence with the rarest word of some; None if none has one."""
    before = 0
    places = []
    for place, (_, size) in enumerate(sentences):
        if before >= (length_ratio - 1) * window_tokens:
            places.append(place)
        before += size
    # The word of the best rank of some places: there is nearly always one, but seldom a rare one.
    best: tuple[_Rank, Example] | None = None
    for place in rng.sample(places, min(_PLACES, len(places))):
        start, near = _text_before(sentences, place, length_ratio, window_tokens)
        sentence = " ".join(sentences[place][0].split())
        far_text, near_text = (
            "".join(each for each, _ in sentences[begin:end])
            for begin, end in ((start, near), (near, place))
        )
        missing = _missing(sentence, far_text, near_text, tokenizer)
        if missing is None or (best is not None and best[0] <= missing[0]):
            continue
        rank, word = missing
        question = f"Which word is missing: {sentence.replace(word, _BLANK, 1)}?"
        fits = len(tokenizer.encode(question)) <= min(window_tokens // 3, _MOST_QUESTION_TOKENS)
        if fits and len(tokenizer.encode(word)) < answer_tokens:
            text = (far_text + near_text).strip()
            best = rank, Example(RECALL, length_ratio, text, question, (word,), "any")
    return None if best is None else best[1]


def _text_before(
    sentences: Sequence[tuple[str, int]], place: int, length_ratio: int, window_tokens: int
) -> tuple[int, int]:
    """First sentence of the text before one, and the first that stands within a window of it."""
    start = near = place
    size = 0
    while start and size + sentences[start - 1][1] <= length_ratio * window_tokens:
        start -= 1
        # A sentence that reaches into the last window is near.
        if size < window_tokens:
            near = start
        size += sentences[start][1]
    return start, near


def _missing(sentence: str, far: str, near: str, tokenizer: Tokenizer) -> tuple[_Rank, str] | None:
    """The rarest word of a sentence that the text before it has far away alone, with its rank; None
    if there is none. Numbers and names go before other words."""
    words = _WORD.findall(sentence)
    if len(words) < _LEAST_WORDS:
        return None
    here, far_uses, near_uses = (
        Counter(_WORD.findall(each.lower())) for each in (sentence, far, near)
    )
    found = []
    for word in words:
        lower = word.lower()
        is_far = 1 <= far_uses[lower] <= _MOST_USES and not near_uses[lower]
        # A word that is part of another one of the sentence cannot be left out by itself.
        if not is_far or here[lower] > 1 or sentence.count(word) > 1:
            continue
        is_name = word[0].isdigit() or (word[0].isupper() and word != words[0])
        # The tokenizer's pieces tell how rare a word is in the corpus that it was trained on.
        pieces = len(tokenizer.encode(f" {word}"))
        if pieces > 1 or (is_name and len(word) > 1):
            found.append(((not is_name, far_uses[lower], -pieces), word))
    return min(found, default=None)
