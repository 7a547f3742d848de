"""Words that segments share with what is asked: a score without a parameter. No torch.

A word counts by how rare it is in the text, the logarithm of the number of segments over that of
those with it (inverse document frequency, Sparck Jones 1972).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence


def words_of(text: str) -> frozenset[str]:
    """Words of a text: letters, digits and underscores in a row, in lower case."""
    return frozenset(re.findall(r"\w+", text.lower()))


class SharedWords:
    """Segments of a text as sets of words; empty segments have none."""

    def __init__(self, segments: Sequence[frozenset[str]]) -> None:
        self._segments = segments
        counts = Counter(word for words in segments for word in words)
        total = sum(map(bool, segments))
        self._weights = {word: math.log(total / count) for word, count in counts.items()}

    def scores(self, asked: frozenset[str]) -> list[float]:
        """Weight of the words that each segment shares with those asked for."""
        # an exact sum: the order of a set is another in each process
        return [
            math.fsum(self._weights[word] for word in words & asked) for words in self._segments
        ]

    def asked(self, question: frozenset[str], places: Sequence[int]) -> frozenset[str]:
        """Words of a question and of the segments at some places."""
        return question.union(*(self._segments[place] for place in places))
