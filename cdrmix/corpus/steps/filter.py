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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cdrmix.corpus.steps.statistics import Statistics
from cdrmix.data.document import Document, Drop
from cdrmix.errors import ConfigError, DataError

Profile = Literal["web", "prose", "reference", "code"]
Limit = tuple[float, float] | None
PROFILES: tuple[Profile, ...] = get_args(Profile)
# Profile of each domain that a recipe usually has.
_PROFILE_OF_DOMAIN: dict[str, Profile] = {
    **{profile: profile for profile in PROFILES},
    "books": "prose",
    "documents": "prose",
    "papers": "prose",
    "government": "prose",
    "wiki": "prose",
    "forum": "reference",  # questions and answers about code hold brackets, lists and quotations
    "docs": "reference",
    "maths": "reference",
    "math": "reference",
    "tables": "reference",
}
_GOPHER = "Gopher: Rae et al. 2021, arXiv 2112.11446, A.1.1"
_GOPHER_REPETITION = "Gopher: Rae et al. 2021, arXiv 2112.11446, table A1"
_C4 = "C4: Raffel et al. 2020, JMLR 21(140), 2.2"
_FINEWEB = "FineWeb: Penedo et al. 2024, arXiv 2406.17557, 3.6"
_CODEX = "Codex: Chen et al. 2021, arXiv 2107.03374, 3.1"
_STARCODER = "StarCoder: Li et al. 2023, arXiv 2305.06161, 3.1"
_OURS = "ours"
ENGLISH_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # _GOPHER


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRule:
    """One heuristic: the least or most that a figure of a text may be.

    Attributes:
        reason: reason to drop a text that fails.
        figure: figure of the text that is compared, a key of FIGURES.
        n: key into the figure, if it holds one value per n-gram length.
        bound: the limits are the least or the most allowed.
        source: source of the value at strictness 0 of the first profile that has one; `ours` if
            we chose it. Profiles that differ from it are ours.
        web, prose, reference, code: limits of the profiles; None where the rule does not apply.
    """

    reason: str
    figure: str
    n: int | None = None
    bound: Literal["least", "most"]
    source: str
    web: Limit = None
    prose: Limit = None
    reference: Limit = None
    code: Limit = None

    def limit(self, profile: Profile, strictness: float) -> float | None:
        """Limit of a profile at a strictness of 0 to 1."""
        pair: Limit = getattr(self, profile)
        return None if pair is None else pair[0] + strictness * (pair[1] - pair[0])


def _least(reason: str, figure: str, source: str, **limits: Limit) -> FilterRule:
    return FilterRule(reason=reason, figure=figure, n=None, bound="least", source=source, **limits)


def _most(
    reason: str, figure: str, source: str, n: int | None = None, **limits: Limit
) -> FilterRule:
    return FilterRule(reason=reason, figure=figure, n=n, bound="most", source=source, **limits)


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


class Filter:
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

    def __init__(
        self,
        *,
        profile: str | None = None,
        profiles: Mapping[str, str] | None = None,
        strictness: float = 0.0,
        stop_words: Sequence[str] = ENGLISH_STOP_WORDS,
    ) -> None:
        if not 0 <= strictness <= 1:
            raise ConfigError(f"filter: strictness = {strictness} is not between 0 and 1")
        for name in ([] if profile is None else [profile]) + list((profiles or {}).values()):
            if name not in PROFILES:
                known = ", ".join(PROFILES)
                raise ConfigError(f"filter: profile {name!r} is unknown. Known: {known}")
        self.profile = profile
        self.profiles = dict(profiles or {})
        self.strictness = strictness
        self.stop_words = frozenset(stop_words)
        # Computed once, as every document needs them.
        self._limits: dict[str, list[tuple[FilterRule, float]]] = {}
        for known_profile in PROFILES:
            limits = ((rule, rule.limit(known_profile, strictness)) for rule in RULES)
            self._limits[known_profile] = [
                (rule, limit)
                for rule, limit in limits
                if limit is not None and (stop_words or rule.figure != "num_stop_words")
            ]

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Documents that fail no rule; reasons: those of RULES."""
        for document in documents:
            reason = self.reason_to_drop(document)
            if reason is None:
                yield document
            else:
                drop(document, reason)

    def check_domains(self, domains: Iterable[str]) -> None:
        """Checks that documents of some domains can be judged.

        Raises:
            DataError: naming the first domain without a profile.
        """
        for domain in domains:
            self.profile_of(domain)

    def reason_to_drop(self, document: Document) -> str | None:
        """Reason of the first rule that the document fails, or None."""
        statistics = Statistics(document.text, self.stop_words)
        for rule, limit in self._limits[self.profile_of(document.domain)]:
            figure = statistics[rule.figure]
            value = figure if rule.n is None else figure[rule.n]
            if value < limit if rule.bound == "least" else value > limit:
                return rule.reason
        return None

    def profile_of(self, domain: str) -> str:
        """Name of the profile that judges documents of a domain.

        Raises:
            DataError: if the domain has none; no text is judged by rules that nobody chose.
        """
        profile = self.profile or self.profiles.get(domain) or _PROFILE_OF_DOMAIN.get(domain)
        if profile is None:
            known = ", ".join(sorted(_PROFILE_OF_DOMAIN))
            raise DataError(
                f"filter: domain {domain!r} has no profile. Known: {known}. Name one of these as "
                f"the source's domain, or set the step's profiles: {{{domain}: {PROFILES[0]}}}"
            )
        return profile
