"""Comparison of answers of many words, by the rules of SQuAD (1606.05250): exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Answer in lower case, without punctuation of ASCII and English articles, blanks single."""
    bare = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answers: Sequence[str], answer: str) -> float:
    """1.0 if an answer equals any of the right ones once normalised, else 0.0."""
    return float(normalised(answer) in {normalised(each) for each in answers})


def token_f1(answers: Sequence[str], answer: str) -> float:
    """Harmonic mean of precision and recall over normalised words; the best over right answers."""
    given = Counter(normalised(answer).split())
    return max(_f1(Counter(normalised(each).split()), given) for each in answers)


def _f1(right: Counter[str], given: Counter[str]) -> float:
    common = (right & given).total()
    return 2 * common / (right.total() + given.total()) if common else 0.0


def holds(text: str, answer: str) -> bool:
    """True if a text has the words of an answer in their order, once both are normalised."""
    return f" {normalised(answer)} " in f" {normalised(text)} "
