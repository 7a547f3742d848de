"""Figures of a text that the heuristics judge it by: each computed once, and only when asked for.

A word is what stands between white space (str.split), punctuation included: the definition that
Gopher's heuristics are written for, and the same for prose and code. Case counts. A line is what
stands between line ends, without white space around it; empty ones are no lines. A paragraph is
what stands between empty lines. Languages that are written without spaces have no such words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
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
    """The figures of one text.

    Args:
        text: the text.
        stop_words: which words `num_stop_words` counts, in lower case.
    """

    def __init__(self, text: str, stop_words: frozenset[str] = frozenset()) -> None:
        self.text = text
        self._stop_words = stop_words
        self._keys: dict[int, Integers] = {}

    # --- Characters.
    @cached_property
    def num_characters(self) -> int:
        """Characters, white space included."""
        return len(self.text)

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
        """How often the printers' dummy text begins."""
        return self.text.lower().count("lorem ipsum")

    @cached_property
    def num_generated_markers(self) -> int:
        """How often the first characters say that a program wrote the text."""
        return len(_GENERATED.findall(self.text[:_HEAD_CHARACTERS]))

    # --- Words.
    @cached_property
    def _words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
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
        """A function of each word, computed once per distinct word, [N words]."""
        vocabulary = self._vocabulary
        return np.fromiter(map(function, vocabulary), np.int64, len(vocabulary))[self._ids]

    @cached_property
    def num_words(self) -> int:
        """Words."""
        return len(self._words)

    @cached_property
    def mean_word_length(self) -> float:
        """Characters per word."""
        return self._num_word_characters / max(1, self.num_words)

    @cached_property
    def _num_word_characters(self) -> int:
        return int(self._lengths.sum())

    @cached_property
    def max_word_length(self) -> int:
        """Characters of the longest word."""
        return max(map(len, self._vocabulary), default=0)

    @cached_property
    def alphabetic_fraction(self) -> float:
        """Words that hold a letter, of all."""
        holds_letter = self._per_word(lambda word: word.isalpha() or bool(_LETTER.search(word)))
        return int(holds_letter.sum()) / max(1, self.num_words)

    @cached_property
    def num_stop_words(self) -> int:
        """How many of the stop words occur."""
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
    def _line_duplicates(self) -> tuple[float, float]:
        return _duplicates(self._lines)

    @cached_property
    def duplicate_line_fraction(self) -> float:
        """Lines that stood before in the text, of all."""
        return self._line_duplicates[0]

    @cached_property
    def duplicate_line_character_fraction(self) -> float:
        """Characters of lines that stood before, of those of all lines."""
        return self._line_duplicates[1]

    @cached_property
    def _paragraph_duplicates(self) -> tuple[float, float]:
        return _duplicates(_PARAGRAPH_END.split(self.text.strip()))

    @cached_property
    def duplicate_paragraph_fraction(self) -> float:
        """Paragraphs that stood before in the text, of all."""
        return self._paragraph_duplicates[0]

    @cached_property
    def duplicate_paragraph_character_fraction(self) -> float:
        """Characters of paragraphs that stood before, of those of all paragraphs."""
        return self._paragraph_duplicates[1]

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

        Zero where none occurs twice; the longest of those that are as frequent.
        """
        return {n: self._top_ngram_fraction(n) for n in (2, 3, 4)}

    def _top_ngram_fraction(self, n: int) -> float:
        if self.num_words < n + 1:
            return 0.0
        keys = self._ngrams(n)
        ordered = np.sort(keys)
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(starts, append=len(ordered))
        most = int(counts.max())
        if most == 1:
            return 0.0
        positions = np.flatnonzero(np.isin(keys, ordered[starts[counts == most]]))
        sizes = np.sum([self._lengths[positions + i] for i in range(n)], axis=0)
        return most * int(sizes.max()) / self._num_word_characters

    @cached_property
    def duplicate_ngram_fractions(self) -> Mapping[int, float]:
        """n (5 to 10) -> characters in n-grams that stood before, of those of all words.

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
            fractions[n] = self._covered(repeated, n) / self._num_word_characters
            is_member = np.zeros(len(keys), bool)
            is_member[order[1:]] |= is_equal
            is_member[order[:-1]] |= is_equal
            candidates = candidates[is_member]
        return fractions

    def _covered(self, starts: Integers, n: int) -> int:
        """Characters of the words within n words from any of these starts."""
        ends = np.zeros(self.num_words + 1, np.int64)
        ends[starts] += 1
        ends[starts + n] -= 1
        return int(self._lengths[np.cumsum(ends[:-1]) > 0].sum())


def _duplicates(parts: list[str]) -> tuple[float, float]:
    """Share of parts, and of their characters, that stood before in the list."""
    distinct = dict.fromkeys(parts)
    num_characters = sum(map(len, parts))
    return (
        1 - len(distinct) / max(1, len(parts)),
        1 - sum(map(len, distinct)) / max(1, num_characters),
    )
