"""Places of a text's evidence among its segments, with labels and without.

Without labels nobody says which segment helps. A few segments of a text then are candidates, those
that hold an answer among them, and the reader's own answers say which (`stage_b/likelihood.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from cdrmix.planning.lesson_sizes import TRAINED_SEGMENTS
from cdrmix.reasoning.answers import holds
from cdrmix.reasoning.tasks import KINDS, Example

# Of the segments of a thinned-out text, so many at most hold an answer: the others must be told
# from them.
_MOST_WITH_ANSWER = TRAINED_SEGMENTS // 2
# Each takes a window of its own in the likelihood of the answer.
_MOST_CANDIDATES = TRAINED_SEGMENTS


def is_made_up(example: Example) -> bool:
    """True for tasks of ours, where no evidence means that the answer takes the whole text; of
    others it means that nobody has named it."""
    return example.task in KINDS


def spans(texts: Sequence[str], line: str) -> list[int]:
    """Segments over which a sentence stands that is whole in none of them; [] if it is nowhere."""
    start = "".join(texts).find(line)
    if start < 0:
        return []
    ends = list(accumulate(map(len, texts)))
    return [
        place
        for place, end in enumerate(ends)
        if end > start and end - len(texts[place]) < start + len(line)
    ]


def with_answer(example: Example, texts: Sequence[str]) -> list[int]:
    """Segments that hold an answer of a task, word by word."""
    return [
        place
        for place, text in enumerate(texts)
        if any(holds(text, answer) for answer in example.answers)
    ]


def kept(example: Example, texts: Sequence[str], rng: random.Random) -> list[int]:
    """Segments of an unlabelled text that thinning it out leaves in it: some of those that hold an
    answer, so that there is one to be found."""
    places = with_answer(example, texts)
    return rng.sample(places, min(_MOST_WITH_ANSWER, len(places)))


def unlabelled_windows(
    example: Example, texts: Sequence[str], rng: random.Random, *, most_strays: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Draws the windows of an unlabelled text, and its candidates.

    Args:
        texts: its segments.
        most_strays: segments of the window at the answer beside those that tell it.
    Returns:
        The window at a retrieval, the window at the answer, and the candidates of that retrieval.
    """
    places = range(len(texts))
    # A second retrieval has the segment before it in its window.
    found = (rng.randrange(len(texts)),) if len(texts) > 1 and rng.random() < 0.5 else ()
    others = [place for place in places if place not in found]
    candidates = tuple(sorted(rng.sample(others, min(_MOST_CANDIDATES, len(others)))))
    telling = with_answer(example, texts)
    rest = [place for place in places if place not in telling]
    # Where the answer is nowhere word by word, as yes and no, any segment may tell it: all that
    # have room. Else strays, as many as beside evidence at most.
    strays = rng.sample(rest, min(most_strays, len(rest)) if telling else len(rest))
    return found, (*telling[:_MOST_WITH_ANSWER], *strays), candidates
