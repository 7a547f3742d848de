"""Rules of windows, segments and answers of Stage B, of `planning/rules.py`."""

from __future__ import annotations

from cdrmix.config.reasoning import SEGMENTS_PER_WINDOW
from cdrmix.planning.layout import Combination
from cdrmix.planning.rule import Rule

# Least part of a window that segments and question have beside the answer.
_LEAST_SHARE = 2


def _window(combination: Combination) -> int:
    """Tokens that Stage B reads at a time; 0 without a Stage B."""
    stage_b = combination.config.stage_b
    if stage_b is None or combination.training.stage == "a":
        return 0
    return stage_b.training.window_tokens or combination.training.sequence_length


def _long_segment(combination: Combination) -> str | None:
    """Segments longer than a share of the window, with the longest allowed."""
    window = _window(combination)
    stage_b = combination.config.stage_b
    most = window // SEGMENTS_PER_WINDOW
    length = stage_b.training.segment_tokens if stage_b else None
    if not window or length is None or length <= most:
        return None
    return f"segment_tokens = {length} is more than a quarter of {window} tokens, a window: {most}"


def _long_answer(combination: Combination) -> str | None:
    """Room for answers that leaves too little of the window, with the most allowed."""
    window = _window(combination)
    stage_b = combination.config.stage_b
    length = stage_b.training.answer_tokens if stage_b else 0
    most = window // _LEAST_SHARE
    if not window or length <= most:
        return None
    return f"answer_tokens = {length} is more than half of {window} tokens, a window: {most}"


READING_RULES: tuple[Rule, ...] = (
    Rule(
        "segment-longer-than-a-quarter",
        _long_segment,
        "stage_b.training.{found}. Try at most that, null, or a larger "
        "stage_b.training.window_tokens",
        "a window holds several segments beside question and answer",
    ),
    Rule(
        "answer-longer-than-half",
        _long_answer,
        "stage_b.training.{found}. Try at most that, or a larger stage_b.training.window_tokens",
        "segments and question need room beside the answer",
    ),
)
