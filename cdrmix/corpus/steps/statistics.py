"""Figures of a text for the filter, each computed at most once and only on demand.

A word is a run of characters between white space (str.split), punctuation included: the definition
that Gopher's heuristics are written for, and the same for prose and code. Case counts. A line is
the text between line ends, without white space around it; empty lines do not count. A paragraph is
the text between empty lines. Languages that are written without spaces have no such words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
_TERMINAL = frozenset(".!?\"'”’…。！？:;")  # ends a sentence, or a line that is part of one
_BULLETS = frozenset("•‣◦▪●○·*-–+")
_SHORT_LINE = 30  # characters; FineWeb
_SENTENCE_END = re.compile(r"[.!?。！？][\"'”’)\]]*(?:\s|$)")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_LETTER = re.compile(r"[^\W\d_]")
# Bytes of UTF-8 beyond ASCII stand for letters here, so that no script counts as symbols.
_ALPHANUMERIC = (string.ascii_letters + string.digits).encode() + bytes(range(128, 256))
_GENERATED = re.compile(r"(?i)auto-?\s?generated|generated (?:by|from|automatically)|do not edit")
_HEAD_CHARACTERS = 500
_MULTIPLIER = np.int64(-7046029254386353131)  # odd and large: 2^64 / golden ratio


class Statistics:
    """Figures of one text.

    Args:
        text: the text.
        stop_words: words that `num_stop_words` counts, in lower case.
    Attributes:
        num_characters: characters, white space included.
    """

    def __init__(self, text: str, stop_words: frozenset[str] = frozenset()) -> None:
        self.text = text
        self.num_characters = len(text)
        self._stop_words = stop_words
        self._keys: dict[int, Integers] = {}

    # --- Characters.

    @cached_property
    def alphanumeric_fraction(self) -> float:
        """Letters and digits, of all bytes of UTF-8 that are not white space."""
        encoded = self.text.encode("utf-8", "surrogatepass").translate(None, b" \t\n\r\f\v")
        symbols = encoded.translate(None, _ALPHANUMERIC)
        return 1 - len(symbols) / max(1, len(encoded))

    @cached_property
    def num_braces(self) -> int:
        """Opening curly brackets."""
        return self.text.count("{")

    @cached_property
    def num_lorem_ipsum(self) -> int:
        """Occurrences of the beginning of the printers' dummy text."""
        return self.text.lower().count("lorem ipsum")

    @cached_property
    def num_generated_markers(self) -> int:
        """Phrases in the first characters by which programs mark the text they write."""
        return len(_GENERATED.findall(self.text[:_HEAD_CHARACTERS]))

    # --- Words.
    @cached_property
    def _words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Number of each distinct word; figures of words are computed once per distinct word."""
        return {word: i for i, word in enumerate(dict.fromkeys(self._words))}

    @cached_property
    def _ids(self) -> Integers:
        """Number of each word in the vocabulary, [N words]."""
        numbers = map(self._vocabulary.__getitem__, self._words)
        return np.fromiter(numbers, np.int64, self.num_words)

    @cached_property
    def _lengths(self) -> Integers:
        """Characters of each word, [N words]."""
        return self._per_word(len)

    def _per_word(self, function: Callable[[str], int]) -> Integers:
        """Values of a function of each word, computed once per distinct word, [N words]."""
        vocabulary = self._vocabulary
        return np.fromiter(map(function, vocabulary), np.int64, len(vocabulary))[self._ids]

    @cached_property
    def num_words(self) -> int:
        """Words."""
        return len(self._words)

    @cached_property
    def mean_word_length(self) -> float:
        """Characters per word."""
        return int(self._lengths.sum()) / max(1, self.num_words)

    @cached_property
    def max_word_length(self) -> int:
        """Characters of the longest word."""
        return max(map(len, self._vocabulary), default=0)

    @cached_property
    def alphabetic_fraction(self) -> float:
        """Words with a letter, of all."""
        holds_letter = self._per_word(lambda word: word.isalpha() or bool(_LETTER.search(word)))
        return int(holds_letter.sum()) / max(1, self.num_words)

    @cached_property
    def num_stop_words(self) -> int:
        """Different stop words in the text."""
        return len(self._stop_words & self._vocabulary.keys())

    @cached_property
    def hash_fraction(self) -> float:
        """Number signs per word."""
        return self.text.count("#") / max(1, self.num_words)

    @cached_property
    def ellipsis_fraction(self) -> float:
        """Ellipses per word."""
        return (self.text.count("...") + self.text.count("…")) / max(1, self.num_words)

    @cached_property
    def num_sentences(self) -> int:
        """Sentence ends: . ! or ? before white space or the end."""
        return len(_SENTENCE_END.findall(self.text))

    # --- Lines and paragraphs.
    @cached_property
    def _raw_lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def _lines(self) -> list[str]:
        return list(filter(None, map(str.strip, self._raw_lines)))

    def _fraction_of_lines(self, holds: Callable[[str], bool]) -> float:
        return sum(map(holds, self._lines)) / max(1, len(self._lines))

    @cached_property
    def mean_line_length(self) -> float:
        """Characters per line, indentation and empty lines included."""
        return len(self.text) / len(self._raw_lines)

    @cached_property
    def max_line_length(self) -> int:
        """Characters of the longest line, indentation included."""
        return max(map(len, self._raw_lines))

    @cached_property
    def lines_per_word(self) -> float:
        """Line ends per word: high in lists."""
        return self.text.count("\n") / max(1, self.num_words)

    @cached_property
    def bullet_line_fraction(self) -> float:
        """Lines that start with a bullet, of all."""
        return self._fraction_of_lines(lambda line: line[0] in _BULLETS)

    @cached_property
    def ellipsis_line_fraction(self) -> float:
        """Lines that end in an ellipsis, of all."""
        return self._fraction_of_lines(lambda line: line.endswith(("...", "…")))

    @cached_property
    def terminal_line_fraction(self) -> float:
        """Lines that end as a sentence or a clause does, of all."""
        return self._fraction_of_lines(lambda line: line[-1] in _TERMINAL)

    @cached_property
    def short_line_fraction(self) -> float:
        """Lines of up to 30 characters, of all."""
        return self._fraction_of_lines(lambda line: len(line) <= _SHORT_LINE)

    @cached_property
    def duplicate_line_fraction(self) -> float:
        """Lines that repeat an earlier one of the text, of all."""
        return 1 - len(set(self._lines)) / max(1, len(self._lines))

    @cached_property
    def duplicate_line_character_fraction(self) -> float:
        """Characters of lines that repeat an earlier one, of those of all lines."""
        return 1 - _num_characters(set(self._lines)) / max(1, _num_characters(self._lines))

    @cached_property
    def _paragraphs(self) -> list[str]:
        return _PARAGRAPH_END.split(self.text.strip())

    @cached_property
    def duplicate_paragraph_fraction(self) -> float:
        """Paragraphs that repeat an earlier one of the text, of all."""
        return 1 - len(set(self._paragraphs)) / max(1, len(self._paragraphs))

    @cached_property
    def duplicate_paragraph_character_fraction(self) -> float:
        """Characters of paragraphs that repeat an earlier one, of those of all paragraphs."""
        distinct = set(self._paragraphs)
        return 1 - _num_characters(distinct) / max(1, _num_characters(self._paragraphs))

    # --- Word n-grams.
    def _ngrams(self, n: int) -> Integers:
        """A 64-bit key of each n-gram, [N words - n + 1]: equal n-grams have equal keys."""
        if n == 1:
            return self._ids
        if n not in self._keys:
            shorter = self._ngrams(n - 1)
            self._keys[n] = shorter[:-1] * _MULTIPLIER + self._ids[n - 1 :]
        return self._keys[n]

    @cached_property
    def top_ngram_fractions(self) -> Mapping[int, float]:
        """n (2 to 4) -> characters in the most frequent n-gram, of those of all words.

        Zero if none occurs twice; the longest of those that are equally frequent.
        """
        # Fewer than n + 1 words hold one n-gram, which repeats nothing.
        fractions = dict.fromkeys((2, 3, 4), 0.0)
        for n in fractions:
            if self.num_words < n + 1:
                continue
            keys = self._ngrams(n)
            ordered = np.sort(keys)
            starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
            counts = np.diff(starts, append=len(ordered))
            most = int(counts.max())
            if most == 1:
                continue
            positions = np.flatnonzero(np.isin(keys, ordered[starts[counts == most]]))
            sizes = np.sum([self._lengths[positions + i] for i in range(n)], axis=0)
            fractions[n] = most * int(sizes.max()) / int(self._lengths.sum())
        return fractions

    @cached_property
    def duplicate_ngram_fractions(self) -> Mapping[int, float]:
        """n (5 to 10) -> characters in repeated n-grams, of those of all words.

        Characters that several of them share count once.
        """
        fractions = dict.fromkeys(range(5, 11), 0.0)
        # A repeated n-gram starts where a repeated (n-1)-gram starts: each n looks only at the
        # places that the one before left over, and most texts leave none.
        candidates = np.arange(max(0, self.num_words - 4))
        for n in fractions:
            candidates = candidates[candidates <= self.num_words - n]
            keys = self._ngrams(n)[candidates] if len(candidates) > 1 else candidates[:0]
            order = np.argsort(keys, kind="stable")
            is_equal = keys[order[1:]] == keys[order[:-1]]
            if not is_equal.any():
                break
            repeated = candidates[order[1:][is_equal]]
            # +1 where a repeated n-gram begins and -1 behind its end: the sum is above 0 inside.
            ends = np.zeros(self.num_words + 1, np.int64)
            ends[repeated] += 1
            ends[repeated + n] -= 1
            covered = int(self._lengths[np.cumsum(ends[:-1]) > 0].sum())
            fractions[n] = covered / int(self._lengths.sum())
            is_member = np.zeros(len(keys), bool)
            is_member[order[1:]] |= is_equal
            is_member[order[:-1]] |= is_equal
            candidates = candidates[is_member]
        return fractions


def _num_characters(parts: Iterable[str]) -> int:
    return sum(map(len, parts))
