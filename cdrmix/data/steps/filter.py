"""Drops texts that do not look like their kind: Gopher's, C4's and FineWeb's heuristics at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cdrmix.data.document import Document, Drop
from cdrmix.data.steps.profiles import (
    ENGLISH_STOP_WORDS,
    RULES,
    Profile,
    Rule,
    checked_profile,
    profile_of,
)
from cdrmix.data.steps.statistics import Statistics
from cdrmix.errors import ConfigError


class Filter:
    """Judges each document by the rules of its domain's profile, first failure first.

    Args:
        profile: the profile of all documents; None for that of each document's domain.
        profiles: domain -> profile, for domains that have none or should have another.
        strictness: 0 for the published limits (1B and 4B models), 1 for the strictest of the
            table (200B), in between a share of the way (0.5 for 40B).
        stop_words: words of which good text holds some; none turns that rule off, as text in
            other languages than English needs it.
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
        self.profile = None if profile is None else checked_profile(profile)
        self.profiles = {d: checked_profile(name) for d, name in (profiles or {}).items()}
        self.strictness = strictness
        self.stop_words = frozenset(stop_words)
        self._limits: dict[Profile, list[tuple[Rule, float]]] = {}

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Documents that fail no rule; reasons: those of profiles.RULES."""
        for document in documents:
            reason = self.reason_to_drop(document)
            if reason is None:
                yield document
            else:
                drop(document, reason)

    def check_domains(self, domains: Iterable[str]) -> None:
        """Check that documents of some domains can be judged.

        Raises:
            DataError: naming the first domain without a profile.
        """
        for domain in domains:
            self._profile_of(domain)

    def reason_to_drop(self, document: Document) -> str | None:
        """Reason of the first rule that the document fails, or None."""
        profile = self._profile_of(document.domain)
        statistics = Statistics(document.text, self.stop_words)
        for rule, limit in self._limits_of(profile):
            figure = getattr(statistics, rule.figure)
            value = figure if rule.n is None else figure[rule.n]
            if value < limit if rule.bound == "least" else value > limit:
                return rule.reason
        return None

    def _profile_of(self, domain: str) -> Profile:
        return self.profile or self.profiles.get(domain) or profile_of(domain)

    def _limits_of(self, profile: Profile) -> list[tuple[Rule, float]]:
        """The rules that apply to a profile, with their limits."""
        if profile not in self._limits:
            limits = ((rule, rule.limit(profile, self.strictness)) for rule in RULES)
            self._limits[profile] = [
                (rule, limit)
                for rule, limit in limits
                if limit is not None and (self.stop_words or rule.figure != "num_stop_words")
            ]
        return self._limits[profile]
