"""Task `recall`, made from text of a corpus without labels: a word that is missing from a sentence.

The word is rare in the text, and its earlier uses stand at least a window before the sentence: to
know it, a reader must have remembered one. Beside one of them stands another word that does so in
the sentence, too, and is not common: it tells which of the words of a segment is the missing one.
Both there are the evidence, a label that the text itself gives.
"""

# n samples of T + 1 tokens

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
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
# What tells it may have more in a long text: one of so many words before the sentence.
_WORDS_PER_USE = 128
_LEAST_WORDS = 5  # of the sentence
_BESIDE = 2  # words before a word, and after it, that stand beside it
# Of long sentences; a third of a window at most, so that segments have room beside it.
_MOST_QUESTION_TOKENS = 48
# Sentences of a stretch of text that are looked at: each has all the text before it counted.
_PLACES = 32
_BLANK = "____"
_SENTENCE = re.compile(r"[^.?!\n]+[.?!]*\s*|[.?!\n]+\s*")
_WORD = re.compile(r"\w+")


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
    swaps: bool = False,
) -> Example:
    """Makes example `number` from samples of a corpus; equal arguments give equal examples.

    Args:
        samples, tokenizer: of the corpus.
        number, seed: of the example, and of all examples.
        length_ratio: longest text, in windows of `window_tokens`.
        answer_tokens: room for the answer and its stop.
        swaps: puts another word of the corpus in the place of the missing one wherever the text has
            it, so that nothing but the text tells it. Of a few million tokens a reader has soon
            learned by heart which word is missing where.
    Raises:
        DataError: if no sentence was found, or a shard cannot be read.
    """
    rng = random.Random(f"{seed}/{RECALL}/{length_ratio}/{number}")
    if length_ratio >= LEAST_LENGTH_RATIO:
        for _ in range(_TRIES):
            sentences = _stretch(samples, tokenizer, rng, (length_ratio + 1) * window_tokens)
            found = _find(sentences, tokenizer, rng, length_ratio, window_tokens, answer_tokens)
            if found is None:
                continue
            other = None
            if swaps:
                other = _other_word(samples, tokenizer, rng, found, answer_tokens)
            return found if other is None else _swapped(found, other)
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
    """An example from a sentence with a word that may be asked for; None if none has one."""
    before = 0
    places = []
    for place, (_, size) in enumerate(sentences):
        if before >= (length_ratio - 1) * window_tokens:
            places.append(place)
        before += size
    for place in rng.sample(places, min(_PLACES, len(places))):
        start, near = _text_before(sentences, place, length_ratio, window_tokens)
        sentence = " ".join(sentences[place][0].split())
        far, near_by = (
            [each for each, _ in sentences[begin:end]]
            for begin, end in ((start, near), (near, place))
        )
        found = _missing(sentence, far, near_by, tokenizer)
        if not found:
            continue
        # Any of them: of the best ones there are so few that a reader learns them by heart.
        word, evidence = rng.choice(found)
        most = min(window_tokens // 3, _MOST_QUESTION_TOKENS)
        question = _question(sentence, word, tokenizer, most=most)
        if question is not None and len(tokenizer.encode(word)) < answer_tokens:
            text = "".join((*far, *near_by)).strip()
            return Example(RECALL, length_ratio, text, question, (word,), "any", (evidence,))
    return None


def _other_word(
    samples: Samples, tokenizer: Tokenizer, rng: random.Random, example: Example, answer_tokens: int
) -> str | None:
    """A word of some sample that an example does not have; None if none was found."""
    taken = {word.lower() for word in _WORD.findall(f"{example.text} {example.question}")}
    for _ in range(_TRIES):
        row = samples.rows(np.array([rng.randrange(samples.num_rows)], dtype=np.int64))[0]
        words = _WORD.findall(tokenizer.decode(row.tolist()))[1:-1]  # those at the ends may be cut
        for word in rng.sample(words, len(words)):
            if (
                word.lower() not in taken
                and not _is_common(word, tokenizer)
                and len(tokenizer.encode(word)) < answer_tokens
            ):
                return word
    return None


def _swapped(example: Example, other: str) -> Example:
    (word,) = example.answers
    uses = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    text, evidence = (uses.sub(lambda _: other, each) for each in (example.text, *example.evidence))
    return replace(example, text=text, answers=(other,), evidence=(evidence,))


def _question(sentence: str, word: str, tokenizer: Tokenizer, *, most: int) -> str | None:
    """Asks for a word of a sentence, with as much of it around the word as `most` tokens hold; None
    if they do not hold the words beside it."""
    matches = list(_WORD.finditer(sentence))
    place = next(place for place, each in enumerate(matches) if each.group() == word)
    start, end = matches[place].span()
    for reach in range(len(matches), _BESIDE - 1, -1):
        first = matches[place - reach].start() if place >= reach else 0
        last = matches[place + reach].end() if place + reach < len(matches) else len(sentence)
        question = f"Which word is missing: {sentence[first:start]}{_BLANK}{sentence[end:last]}?"
        if len(tokenizer.encode(question)) <= most:
            return question
    return None


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
) -> list[tuple[str, str]]:
    """Rare words of a sentence that the text before it has far away alone, and that a word beside
    them tells, each with its evidence. `far` and `near` are sentences."""
    words = _WORD.findall(sentence)
    if len(words) < _LEAST_WORDS:
        return []
    lowered = [word.lower() for word in words]
    far_words, near_words = ([_lowered(each) for each in text] for text in (far, near))
    here = Counter(lowered)
    far_uses, near_uses = (Counter(chain(*text)) for text in (far_words, near_words))
    most = max(_MOST_USES, far_uses.total() // _WORDS_PER_USE)
    found = []
    for place, (word, lower) in enumerate(zip(words, lowered, strict=True)):
        is_far = 1 <= far_uses[lower] <= _MOST_USES and not near_uses[lower]
        # A word that is part of another one of the sentence cannot be left out by itself.
        if not is_far or here[lower] > 1 or sentence.count(word) > 1:
            continue
        if _is_common(word, tokenizer):
            continue
        beside = {lowered[each] for each in _beside(lowered, place)}
        rare = {each for each in beside if far_uses[each] + near_uses[each] <= most}
        told, evidence = max(
            _told(far[number], uses, use, rare)
            for number, uses in enumerate(far_words)
            for use, each in enumerate(uses)
            if each == lower
        )
        if told:
            found.append((word, evidence))
    return found


def _is_common(word: str, tokenizer: Tokenizer) -> bool:
    """True if a word can be guessed: what is common in its corpus is one token of a tokenizer."""
    is_one = len(tokenizer.encode(f" {word.lower()}")) == 1
    return len(word) == 1 or (is_one and not word[0].isdigit())


def _told(sentence: str, words: Sequence[str], use: int, rare: Set[str]) -> tuple[int, str]:
    """Number of the rare words that stand beside a use of a word, and the part of its sentence with
    both; `words` are the sentence's."""
    places = [place for place in _beside(words, use) if words[place] in rare]
    if not places:
        return 0, ""
    matches = list(_WORD.finditer(sentence))
    start, end = matches[min(use, *places)].start(), matches[max(use, *places)].end()
    return len({words[place] for place in places}), sentence[start:end]


# Each place of a stretch has the same sentences before it.
@functools.lru_cache(maxsize=2**14)
def _lowered(sentence: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(sentence))


def _beside(words: Sequence[str], place: int) -> list[int]:
    """Places of the words that stand beside the one at a place."""
    near = range(max(0, place - _BESIDE), min(place + _BESIDE + 1, len(words)))
    return [each for each in near if each != place]
