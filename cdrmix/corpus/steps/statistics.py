"""Figures of a text for the filter, each computed at most once and only on demand.

A word is a run of characters between white space (str.split), punctuation included: the definition
that Gopher's heuristics are written for, and the same for prose and code. Case counts. A line is
the text between line ends, without white space around it; empty lines do not count. A paragraph is
the text between empty lines. Languages that are written without spaces have no such words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

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


class Words(NamedTuple):
    """The words of a text by their numbers, so that a figure is computed once per distinct word.

    Attributes:
        numbers: number of each distinct word.
        sequence: number of each word of the text, [N words].
        lengths: characters of each word of the text, [N words].
    """

    numbers: dict[str, int]
    sequence: Integers
    lengths: Integers


class Statistics:
    """Figures of one text, by name: those of `FIGURES`.

    Args:
        text: the text.
        stop_words: words that `num_stop_words` counts, in lower case.
    """

    def __init__(self, text: str, stop_words: frozenset[str] = frozenset()) -> None:
        self.text = text
        self.stop_words = stop_words
        self._keys: dict[int, Integers] = {}
        self._figures: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """A figure: a number, or numbers by the length of an n-gram."""
        # Several rules look at one figure, with other limits.
        if name not in self._figures:
            self._figures[name] = FIGURES[name](self)
        return self._figures[name]

    # Each of these is a pass over the text. A text that fails an early rule needs few of them.

    @cached_property
    def words(self) -> list[str]:
        """Runs of characters between white space."""
        return self.text.split()

    @cached_property
    def raw_lines(self) -> list[str]:
        """Text between line ends, indentation and empty lines included."""
        return self.text.split("\n")

    @cached_property
    def lines(self) -> list[str]:
        """The same without white space around it and without empty lines."""
        return list(filter(None, map(str.strip, self.raw_lines)))

    @cached_property
    def paragraphs(self) -> list[str]:
        """Text between empty lines."""
        return _PARAGRAPH_END.split(self.text.strip())

    @cached_property
    def numbered(self) -> Words:
        """Words by number, for the rules that come after that on the number of words."""
        numbers = {word: i for i, word in enumerate(dict.fromkeys(self.words))}
        words = map(numbers.__getitem__, self.words)
        sequence = np.fromiter(words, np.int64, len(self.words))
        lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))
        return Words(numbers, sequence, lengths[sequence])

    def alphanumeric_fraction(self) -> float:
        """Letters and digits, of all bytes of UTF-8 that are not white space."""
        encoded = self.text.encode("utf-8", "surrogatepass").translate(None, b" \t\n\r\f\v")
        symbols = encoded.translate(None, _ALPHANUMERIC)
        return 1 - len(symbols) / max(1, len(encoded))

    def alphabetic_fraction(self) -> float:
        """Words with a letter, of all."""
        numbers, sequence, _ = self.numbered
        holds_letter = (word.isalpha() or bool(_LETTER.search(word)) for word in numbers)
        by_word = np.fromiter(holds_letter, np.int64, len(numbers))
        return self.share_of_words(int(by_word[sequence].sum()))

    def share_of_words(self, number: int) -> float:
        """A number of things per word."""
        return number / max(1, len(self.words))

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Lines of which something holds, of all."""
        return sum(map(holds, self.lines)) / max(1, len(self.lines))

    def _ngrams(self, n: int) -> Integers:
        """A 64-bit key of each n-gram, [N words - n + 1]: equal n-grams have equal keys."""
        if n == 1:
            return self.numbered.sequence
        if n not in self._keys:
            shorter = self._ngrams(n - 1)
            self._keys[n] = shorter[:-1] * _MULTIPLIER + self.numbered.sequence[n - 1 :]
        return self._keys[n]

    def top_ngram_fractions(self) -> Mapping[int, float]:
        """n (2 to 4) -> characters in the most frequent n-gram, of those of all words.

        Zero if none occurs twice; the longest of those that are equally frequent.
        """
        lengths = self.numbered.lengths
        # Fewer than n + 1 words hold one n-gram, which repeats nothing.
        fractions = dict.fromkeys((2, 3, 4), 0.0)
        for n in fractions:
            if len(self.words) < n + 1:
                continue
            keys = self._ngrams(n)
            ordered = np.sort(keys)
            starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
            counts = np.diff(starts, append=len(ordered))
            most = int(counts.max())
            if most == 1:
                continue
            positions = np.flatnonzero(np.isin(keys, ordered[starts[counts == most]]))
            sizes = np.sum([lengths[positions + i] for i in range(n)], axis=0)
            fractions[n] = most * int(sizes.max()) / int(lengths.sum())
        return fractions

    def duplicate_ngram_fractions(self) -> Mapping[int, float]:
        """n (5 to 10) -> characters in repeated n-grams, of those of all words.

        Characters that several of them share count once.
        """
        fractions = dict.fromkeys(range(5, 11), 0.0)
        lengths = self.numbered.lengths
        # A repeated n-gram starts where a repeated (n-1)-gram starts: each n looks only at the
        # places that the one before left over, and most texts leave none.
        candidates = np.arange(max(0, len(self.words) - 4))
        for n in fractions:
            candidates = candidates[candidates <= len(self.words) - n]
            keys = self._ngrams(n)[candidates] if len(candidates) > 1 else candidates[:0]
            order = np.argsort(keys, kind="stable")
            is_equal = keys[order[1:]] == keys[order[:-1]]
            if not is_equal.any():
                break
            repeated = candidates[order[1:][is_equal]]
            # +1 where a repeated n-gram begins and -1 behind its end: the sum is above 0 inside.
            ends = np.zeros(len(self.words) + 1, np.int64)
            ends[repeated] += 1
            ends[repeated + n] -= 1
            covered = int(lengths[np.cumsum(ends[:-1]) > 0].sum())
            fractions[n] = covered / int(lengths.sum())
            is_member = np.zeros(len(keys), bool)
            is_member[order[1:]] |= is_equal
            is_member[order[:-1]] |= is_equal
            candidates = candidates[is_member]
        return fractions


def _duplicate_fraction(parts: list[str]) -> float:
    return 1 - len(set(parts)) / max(1, len(parts))


def _duplicate_character_fraction(parts: list[str]) -> float:
    return 1 - sum(map(len, set(parts))) / max(1, sum(map(len, parts)))


# Names of the rules' figures. "Of all" is a share of words or lines, 0 where a text has none.
FIGURES: dict[str, Callable[[Statistics], float | Mapping[int, float]]] = {
    # Characters, white space included.
    "num_characters": lambda x: len(x.text),
    "alphanumeric_fraction": Statistics.alphanumeric_fraction,
    "num_braces": lambda x: x.text.count("{"),
    # The beginning of the printers' dummy text.
    "num_lorem_ipsum": lambda x: x.text.lower().count("lorem ipsum"),
    # Phrases by which programs mark the text they write.
    "num_generated_markers": lambda x: len(_GENERATED.findall(x.text[:_HEAD_CHARACTERS])),
    "num_words": lambda x: len(x.words),
    "mean_word_length": lambda x: x.share_of_words(int(x.numbered.lengths.sum())),
    "max_word_length": lambda x: max(map(len, x.numbered.numbers), default=0),
    "alphabetic_fraction": Statistics.alphabetic_fraction,
    # Different ones, however often each stands in the text.
    "num_stop_words": lambda x: len(x.stop_words & x.numbered.numbers.keys()),
    "hash_fraction": lambda x: x.share_of_words(x.text.count("#")),
    "ellipsis_fraction": lambda x: x.share_of_words(x.text.count("...") + x.text.count("…")),
    "num_sentences": lambda x: len(_SENTENCE_END.findall(x.text)),
    # Indentation and empty lines included.
    "mean_line_length": lambda x: len(x.text) / len(x.raw_lines),
    "max_line_length": lambda x: max(map(len, x.raw_lines)),
    # High in lists.
    "lines_per_word": lambda x: x.share_of_words(x.text.count("\n")),
    "bullet_line_fraction": lambda x: x.share_of_lines(lambda line: line[0] in _BULLETS),
    "ellipsis_line_fraction": lambda x: x.share_of_lines(lambda line: line.endswith(("...", "…"))),
    # A sentence or a clause ends with the line.
    "terminal_line_fraction": lambda x: x.share_of_lines(lambda line: line[-1] in _TERMINAL),
    "short_line_fraction": lambda x: x.share_of_lines(lambda line: len(line) <= _SHORT_LINE),
    # Parts that repeat an earlier one of the text, of all; and their characters.
    "duplicate_line_fraction": lambda x: _duplicate_fraction(x.lines),
    "duplicate_line_character_fraction": lambda x: _duplicate_character_fraction(x.lines),
    "duplicate_paragraph_fraction": lambda x: _duplicate_fraction(x.paragraphs),
    "duplicate_paragraph_character_fraction": lambda x: _duplicate_character_fraction(x.paragraphs),
    "top_ngram_fractions": Statistics.top_ngram_fractions,
    "duplicate_ngram_fractions": Statistics.duplicate_ngram_fractions,
}
