"""Filter of texts by Gopher's, C4's and FineWeb's heuristics: a table with a column per profile.

- web: pages as crawled. All three sets of rules with their published thresholds.
- prose: books, articles, talks. The same without the rules against faults of pages alone.
- reference: manuals, API descriptions, dictionaries, mathematics, tables. They repeat themselves,
  list things and end few lines in a full stop: of 800 technical texts, the published web rules
  kept fewer than 85. Only properties that no reference has are refused.
- code: source files. Lines and symbols, not words.

A limit is a pair: the value at strictness 0, which is the published one if a source is named, and
at strictness 1, for a large model with more text than it needs; between them, a straight line. The
second value is ours: about half-way to the median of good text of that kind.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cdrmix.data.document import Document, DocumentStep
from cdrmix.errors import ConfigError, DataError

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
    """Figures of one text, by name: those of `FIGURES`, each computed once and on demand.

    Args:
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
        """Runs of characters between white space, for which Gopher's heuristics are written.

        Languages that are written without spaces have no such words.
        """
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

    # By the number of a word, a figure is computed once for all places where it stands.

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each distinct word."""
        return {word: i for i, word in enumerate(dict.fromkeys(self.words))}

    @cached_property
    def sequence(self) -> Integers:
        """Number of each word of the text, [N words]."""
        return np.fromiter(map(self.numbers.__getitem__, self.words), np.int64, len(self.words))

    @cached_property
    def lengths(self) -> Integers:
        """Characters of each word of the text, [N words]."""
        by_number = np.fromiter(map(len, self.numbers), np.int64, len(self.numbers))
        return by_number[self.sequence]

    def alphanumeric_fraction(self) -> float:
        """Letters and digits, of all bytes of UTF-8 that are not white space."""
        encoded = self.text.encode("utf-8", "surrogatepass").translate(None, b" \t\n\r\f\v")
        symbols = encoded.translate(None, _ALPHANUMERIC)
        return 1 - len(symbols) / max(1, len(encoded))

    def alphabetic_fraction(self) -> float:
        """Words with a letter, of all."""
        holds_letter = (word.isalpha() or bool(_LETTER.search(word)) for word in self.numbers)
        by_number = np.fromiter(holds_letter, np.int64, len(self.numbers))
        return self.share_of_words(int(by_number[self.sequence].sum()))

    def share_of_words(self, number: int) -> float:
        """A number of things per word."""
        return number / max(1, len(self.words))

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Lines that something holds for, of all."""
        return sum(map(holds, self.lines)) / max(1, len(self.lines))

    def _ngrams(self, n: int) -> Integers:
        """A 64-bit key of each n-gram, [N words - n + 1]: equal n-grams have equal keys."""
        if n == 1:
            return self.sequence
        if n not in self._keys:
            shorter = self._ngrams(n - 1)
            self._keys[n] = shorter[:-1] * _MULTIPLIER + self.sequence[n - 1 :]
        return self._keys[n]

    def top_ngram_fractions(self) -> Mapping[int, float]:
        """n (2 to 4) -> characters in the most frequent n-gram, of those of all words.

        The longest of those that are equally frequent.
        """
        # Fewer than n + 1 words hold one n-gram, which repeats nothing.
        fractions = dict.fromkeys((2, 3, 4), 0.0)
        for n in fractions:
            if len(self.words) < n + 1:
                continue
            keys = self._ngrams(n)
            distinct, counts = np.unique(keys, return_counts=True)
            most = int(counts.max())
            if most == 1:
                continue
            positions = np.flatnonzero(np.isin(keys, distinct[counts == most]))
            sizes = np.sum([self.lengths[positions + i] for i in range(n)], axis=0)
            fractions[n] = most * int(sizes.max()) / int(self.lengths.sum())
        return fractions

    def duplicate_ngram_fractions(self) -> Mapping[int, float]:
        """n (5 to 10) -> characters in repeated n-grams, of those of all words.

        Characters that several of them share count once.
        """
        fractions = dict.fromkeys(range(5, 11), 0.0)
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
            covered = int(self.lengths[np.cumsum(ends[:-1]) > 0].sum())
            fractions[n] = covered / int(self.lengths.sum())
            is_member = np.zeros(len(keys), bool)
            is_member[order[1:]] |= is_equal
            is_member[order[:-1]] |= is_equal
            candidates = candidates[is_member]
        return fractions


def _duplicate_fraction(parts: list[str], *, of_characters: bool = False) -> float:
    distinct = set(parts)
    if of_characters:
        return 1 - sum(map(len, distinct)) / max(1, sum(map(len, parts)))
    return 1 - len(distinct) / max(1, len(parts))


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
    "mean_word_length": lambda x: x.share_of_words(int(x.lengths.sum())),
    "max_word_length": lambda x: max(map(len, x.numbers), default=0),
    "alphabetic_fraction": Statistics.alphabetic_fraction,
    # Different ones, however often each stands in the text.
    "num_stop_words": lambda x: len(x.stop_words & x.numbers.keys()),
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
    "duplicate_line_character_fraction": lambda x: _duplicate_fraction(x.lines, of_characters=True),
    "duplicate_paragraph_fraction": lambda x: _duplicate_fraction(x.paragraphs),
    "duplicate_paragraph_character_fraction": lambda x: _duplicate_fraction(
        x.paragraphs, of_characters=True
    ),
    "top_ngram_fractions": Statistics.top_ngram_fractions,
    "duplicate_ngram_fractions": Statistics.duplicate_ngram_fractions,
}


Profile = Literal["web", "prose", "reference", "code"]
Limit = tuple[float, float] | None
PROFILES: tuple[Profile, ...] = get_args(Profile)
# Profile of each domain that a recipe usually has.
PROFILE_OF_DOMAIN: dict[str, str] = {
    **{profile: profile for profile in PROFILES},
    **dict.fromkeys(("books", "documents", "papers", "government", "wiki"), "prose"),
    # A forum's questions and answers about code hold brackets, lists and quotations.
    **dict.fromkeys(("forum", "docs", "maths", "math", "tables"), "reference"),
}
_GOPHER = "Gopher: Rae et al. 2021, arXiv 2112.11446, A.1.1"
_GOPHER_REPETITION = "Gopher: Rae et al. 2021, arXiv 2112.11446, table A1"
_C4 = "C4: Raffel et al. 2020, JMLR 21(140), 2.2"
_FINEWEB = "FineWeb: Penedo et al. 2024, arXiv 2406.17557, 3.6"
_CODEX = "Codex: Chen et al. 2021, arXiv 2107.03374, 3.1"
_STARCODER = "StarCoder: Li et al. 2023, arXiv 2305.06161, 3.1"
_OURS = "ours"
ENGLISH_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # _GOPHER


@dataclass(frozen=True, slots=True)
class FilterRule:
    """One heuristic: the least or most that a figure of a text may be.

    Attributes:
        source: source of the value at strictness 0 of the first profile that has one; `ours` if
            we chose it. Profiles that differ from it are ours.
        web, prose, reference, code: limits of the profiles; None where the rule does not apply.
    """

    bound: Literal["least", "most"]
    reason: str  # to drop a text that fails
    figure: str  # a key of FIGURES
    source: str
    n: int | None = None  # key into the figure, if it holds one value per n-gram length
    web: Limit = None
    prose: Limit = None
    reference: Limit = None
    code: Limit = None

    def limit(self, profile: Profile, strictness: float) -> float | None:
        """Limit of a profile at a strictness of 0 to 1."""
        pair: Limit = getattr(self, profile)
        return None if pair is None else pair[0] + strictness * (pair[1] - pair[0])


_least = partial(FilterRule, "least")
_most = partial(FilterRule, "most")
_LENGTH = (1e7, 1e7)  # bounds the memory of the word lists: about 250 MB
# Cheap figures first: most texts that fail do so before their words are counted.
# fmt: off
RULES: tuple[FilterRule, ...] = (
    _most("too long", "num_characters", _OURS,
          web=_LENGTH, prose=_LENGTH, reference=_LENGTH, code=(2e6, 1e6)),
    _least("too short", "num_characters", _OURS,
           web=(200, 400), prose=(200, 400), reference=(80, 160), code=(40, 80)),
    _most("curly bracket", "num_braces", _C4, web=(0, 0)),
    _most("lorem ipsum", "num_lorem_ipsum", _C4, web=(0, 0), prose=(0, 0)),
    _most("generated code", "num_generated_markers", _STARCODER, code=(0, 0)),
    _most("long lines", "mean_line_length", _CODEX, code=(100, 80)),
    _most("long lines", "max_line_length", _CODEX, code=(1000, 400)),
    _least("symbols", "alphanumeric_fraction", _STARCODER,
           reference=(0.4, 0.5), code=(0.25, 0.4)),
    _least("too few words", "num_words", _GOPHER,
           web=(50, 80), prose=(50, 80), reference=(15, 30), code=(10, 20)),
    _most("too many words", "num_words", _GOPHER, web=(100_000, 100_000)),
    _least("short lines", "mean_line_length", _OURS, prose=(15, 25)),
    _most("short lines", "short_line_fraction", _FINEWEB, web=(0.67, 0.5), prose=(0.8, 0.67)),
    _least("lines without end", "terminal_line_fraction", _FINEWEB, web=(0.12, 0.25)),
    _most("list", "lines_per_word", "datatrove 0.10.1, FineWebQualityFilter",
          web=(0.3, 0.2), prose=(0.5, 0.3)),
    _most("bullets", "bullet_line_fraction", _GOPHER,
          web=(0.9, 0.6), prose=(0.9, 0.6), reference=(0.95, 0.9)),
    _most("ellipses", "ellipsis_line_fraction", _GOPHER, web=(0.3, 0.15), prose=(0.3, 0.15)),
    _most("repeated lines", "duplicate_line_fraction", _GOPHER_REPETITION,
          web=(0.3, 0.2), prose=(0.3, 0.2), reference=(0.6, 0.5), code=(0.8, 0.7)),
    _most("repeated lines", "duplicate_line_character_fraction", _FINEWEB,  # Gopher: 0.2
          web=(0.1, 0.05), prose=(0.2, 0.1), reference=(0.5, 0.4), code=(0.7, 0.6)),
    _most("repeated paragraphs", "duplicate_paragraph_fraction", _GOPHER_REPETITION,
          web=(0.3, 0.2), prose=(0.3, 0.2), reference=(0.6, 0.5)),
    _most("repeated paragraphs", "duplicate_paragraph_character_fraction", _GOPHER_REPETITION,
          web=(0.2, 0.1), prose=(0.2, 0.1), reference=(0.5, 0.4)),
    _most("symbols", "hash_fraction", _GOPHER,
          web=(0.1, 0.05), prose=(0.1, 0.05), reference=(0.3, 0.2)),
    _most("ellipses", "ellipsis_fraction", _GOPHER,
          web=(0.1, 0.05), prose=(0.1, 0.05), reference=(0.3, 0.2)),
    _least("too few sentences", "num_sentences", _C4, web=(3, 5), prose=(3, 5)),
    _most("long words", "max_word_length", _C4,
          web=(1000, 300), prose=(1000, 300), reference=(1000, 500)),
    _least("word length", "mean_word_length", _GOPHER,
           web=(3, 3.5), prose=(3, 3.5), reference=(2, 2.5)),
    _most("word length", "mean_word_length", _GOPHER,
          web=(10, 8), prose=(10, 8), reference=(16, 14)),
    _least("too few stop words", "num_stop_words", _GOPHER, web=(2, 4), prose=(2, 4)),
    _least("too few letters", "alphabetic_fraction", _GOPHER,
           web=(0.8, 0.85), prose=(0.8, 0.85), reference=(0.5, 0.6)),
    *(_most("repeated phrases", "top_ngram_fractions", _GOPHER_REPETITION, n=n,
            web=limit, prose=limit, reference=(0.3, 0.25))
      for n, limit in ((2, (0.20, 0.12)), (3, (0.18, 0.10)), (4, (0.16, 0.08)))),
    *(_most("repeated phrases", "duplicate_ngram_fractions", _GOPHER_REPETITION, n=n,
            web=limit, prose=limit, reference=(0.7, 0.6))
      for n, limit in ((5, (0.15, 0.10)), (6, (0.14, 0.09)), (7, (0.13, 0.08)),
                       (8, (0.12, 0.07)), (9, (0.11, 0.06)), (10, (0.10, 0.05)))),
)


# fmt: on


@dataclass(kw_only=True, eq=False)
class Filter(DocumentStep):
    """Judges each document by the rules of its domain's profile, first failure first.

    Args:
        profile: the profile of all documents; None for that of each document's domain.
        profiles: domain -> profile, for domains that have none or need another.
        strictness: 0 for the published limits (1B and 4B models), 1 for the strictest of the
            table (200B), in between a share of the way (0.5 for 40B).
        stop_words: words that good text contains; an empty list turns that rule off, as text in
            other languages than English requires.
    """

    name = "filter"
    profile: str | None = None
    profiles: Mapping[str, str] | None = None
    strictness: float = 0.0
    stop_words: Sequence[str] = ENGLISH_STOP_WORDS

    def __post_init__(self) -> None:
        if not 0 <= self.strictness <= 1:
            raise ConfigError(f"filter: strictness = {self.strictness} is not between 0 and 1")
        named = {"profile": self.profile} if self.profile is not None else {}
        named |= {f"profiles.{domain}": name for domain, name in (self.profiles or {}).items()}
        for key, name in named.items():
            if name not in PROFILES:
                of_domain = PROFILE_OF_DOMAIN.get(name)
                raise ConfigError(
                    f"filter: {key}: {name!r} is not a profile. Profiles: {', '.join(PROFILES)}."
                    + (f" The domain {name} has the profile {of_domain}." if of_domain else "")
                )
        self._profiles = PROFILE_OF_DOMAIN | dict(self.profiles or {})
        self._stop_words = frozenset(self.stop_words)
        # Computed once, as every document needs them.
        self._limits: dict[str, list[tuple[FilterRule, float]]] = {}
        rules = [rule for rule in RULES if self.stop_words or rule.figure != "num_stop_words"]
        for profile in PROFILES:
            limits = ((rule, rule.limit(profile, self.strictness)) for rule in rules)
            self._limits[profile] = [(rule, limit) for rule, limit in limits if limit is not None]

    def judge(self, document: Document) -> str | None:
        """Reason of the first rule that the document fails, those of RULES."""
        statistics = Statistics(document.text, self._stop_words)
        for rule, limit in self._limits[self.profile_of(document.domain)]:
            figure = statistics[rule.figure]
            value = figure if rule.n is None else figure[rule.n]
            if value < limit if rule.bound == "least" else value > limit:
                return rule.reason
        return None

    def profile_of(self, domain: str) -> str:
        """Name of the profile that judges documents of a domain; DataError if it has none."""
        profile = self.profile or self._profiles.get(domain)
        if profile is None:  # no text is judged by rules that nobody chose
            raise DataError(
                f"filter: domain {domain!r} has no profile. Set one in the step, such as "
                f"profiles: {{{domain}: {PROFILES[0]}}}; profiles: {', '.join(PROFILES)}. Or give "
                "the source a domain that has one; these domains: "
                f"{', '.join(sorted(PROFILE_OF_DOMAIN))}."
            )
        return profile
