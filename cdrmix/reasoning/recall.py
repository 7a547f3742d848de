"""Task `recall`, made from text of a corpus without labels: a word that is missing from a sentence.

The word is rare in the text, and its earlier uses stand at least a window before the sentence: to
know it, a reader must have remembered one. Beside one of them stands a word that stands beside it
in the sentence, too, and is as rare: it tells which of the words of a segment is the missing one.
Both there are the evidence, a label that the text itself gives.
"""

# n samples of T + 1 tokens

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.reasoning.tasks import RECALL, Example

# Shorter texts have no window before the last.
LEAST_LENGTH_RATIO = 2
# Places of the corpus that are searched for a sentence: the text of many has none.
_TRIES = 24
# Most uses of the word before the sentence: what comes more often can be guessed.
_MOST_USES = 3
_LEAST_WORDS = 5  # of the sentence
_BESIDE = 2  # words before a word, and after it, that stand beside it
# Of long sentences; a third of a window at most, so that segments have room beside it.
_MOST_QUESTION_TOKENS = 48
_PLACES = 16  # sentences of a stretch of text that are looked at
_BLANK = "____"
_SENTENCE = re.compile(r"[^.?!\n]+[.?!]*\s*|[.?!\n]+\s*")
_WORD = re.compile(r"\w+")


class _Missing(NamedTuple):
    """A word of a sentence that may be asked for; smaller is better."""

    untold: int  # minus the number of rare words that stand beside it in the evidence, too
    is_common: bool  # neither a number nor a name
    num_uses: int  # in the text before
    shortness: int  # minus the number of its tokens: of more, it is rarer in the corpus
    word: str
    evidence: str  # a use in the text, with the rare words beside it


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
        f"{RECALL}: no rare word of the corpus comes back beside another one a window of "
        f"{window_tokens} tokens later in {length_ratio} windows of text, at {_TRIES} places. Try "
        "a longer length_ratio, or a corpus of longer documents"
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
    """An example from the sentence with the best word of some; None if none has one."""
    before = 0
    places = []
    for place, (_, size) in enumerate(sentences):
        if before >= (length_ratio - 1) * window_tokens:
            places.append(place)
        before += size
    best: tuple[_Missing, Example] | None = None
    for place in rng.sample(places, min(_PLACES, len(places))):
        start, near = _text_before(sentences, place, length_ratio, window_tokens)
        sentence = " ".join(sentences[place][0].split())
        far, near_by = (
            [each for each, _ in sentences[begin:end]]
            for begin, end in ((start, near), (near, place))
        )
        missing = _missing(sentence, far, near_by, tokenizer)
        if missing is None or (best is not None and best[0] <= missing):
            continue
        question = f"Which word is missing: {sentence.replace(missing.word, _BLANK, 1)}?"
        fits = len(tokenizer.encode(question)) <= min(window_tokens // 3, _MOST_QUESTION_TOKENS)
        if fits and len(tokenizer.encode(missing.word)) < answer_tokens:
            text = "".join((*far, *near_by)).strip()
            answers, evidence = (missing.word,), (missing.evidence,)
            example = Example(RECALL, length_ratio, text, question, answers, "any", evidence)
            best = missing, example
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


def _missing(
    sentence: str, far: Sequence[str], near: Sequence[str], tokenizer: Tokenizer
) -> _Missing | None:
    """The best word of a sentence that the text before it has far away alone, and that a word
    beside it tells; None if there is none. `far` and `near` are sentences."""
    words = _WORD.findall(sentence)
    if len(words) < _LEAST_WORDS:
        return None
    lowered = [word.lower() for word in words]
    far_words, near_words = ([_lowered(each) for each in text] for text in (far, near))
    here = Counter(lowered)
    far_uses, near_uses = (Counter(chain(*text)) for text in (far_words, near_words))
    found = []
    for place, (word, lower) in enumerate(zip(words, lowered, strict=True)):
        is_far = 1 <= far_uses[lower] <= _MOST_USES and not near_uses[lower]
        # A word that is part of another one of the sentence cannot be left out by itself.
        if not is_far or here[lower] > 1 or sentence.count(word) > 1:
            continue
        is_name = word[0].isdigit() or (word[0].isupper() and word != words[0])
        # The tokenizer's pieces tell how rare a word is in the corpus that it was trained on.
        pieces = len(tokenizer.encode(f" {word}"))
        if pieces == 1 and (not is_name or len(word) == 1):
            continue
        beside = {lowered[each] for each in _beside(lowered, place)}
        rare = {each for each in beside if far_uses[each] + near_uses[each] <= _MOST_USES}
        told, evidence = max(
            _told(far[number], uses, use, rare)
            for number, uses in enumerate(far_words)
            for use, each in enumerate(uses)
            if each == lower
        )
        if told:
            found.append(_Missing(-told, not is_name, far_uses[lower], -pieces, word, evidence))
    return min(found, default=None)


def _told(sentence: str, words: Sequence[str], use: int, rare: Set[str]) -> tuple[int, str]:
    """Number of the rare words that stand beside a use of a word, and the part of its sentence with
    both; `words` are the sentence's."""
    places = [place for place in _beside(words, use) if words[place] in rare]
    if not places:
        return 0, ""
    matches = list(_WORD.finditer(sentence))
    start, end = matches[min(use, *places)].start(), matches[max(use, *places)].end()
    return len({words[place] for place in places}), sentence[start:end]


def _lowered(sentence: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(sentence)]


def _beside(words: Sequence[str], place: int) -> list[int]:
    """Places of the words that stand beside the one at a place."""
    near = range(max(0, place - _BESIDE), min(place + _BESIDE + 1, len(words)))
    return [each for each in near if each != place]
