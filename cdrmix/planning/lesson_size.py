"""Size of a lesson of Stage B: tokens that are learned from with a graph kept.

Whole texts are read only where nothing is learned from the reading: when the agent plays. What the
other phases learn from is some segments of each text, two windows with a question, and rows of the
corpus.
"""

from __future__ import annotations

from cdrmix.config.reasoning import StageBTraining

LARGEST_SEGMENT = 64  # tokens
SEGMENTS_PER_WINDOW = 4
# Segments of a text in all phases but the policy's: enough to confuse one with another.
TRAINED_SEGMENTS = 6
# One row of plain text for so many tasks.
TASKS_PER_ROW = 8
# Further windows for each task, of evidence, question and answer, for a backbone that learns: to
# answer from a window takes many times the examples that retrieval takes.
DRILLS_PER_TASK = 4
# Plain text is read over so many windows at most.
_WINDOWS_OF_TEXT = 4
# Tokens of a question, an answer and the marks around them, about.
_QUESTION_TOKENS = 64


def segment_tokens(window_tokens: int) -> int:
    """Length of the longest segment: several fit into a window, and one says one thing (tokens)."""
    return min(LARGEST_SEGMENT, window_tokens // SEGMENTS_PER_WINDOW)


def rows_of_text(texts: int) -> int:
    """Rows of plain text in a lesson of so many texts."""
    return max(1, texts // TASKS_PER_ROW)


def row_tokens(window_tokens: int, sequence_length: int) -> int:
    """Tokens of a row of plain text: of the corpus's row, those of its first windows."""
    return min(sequence_length, _WINDOWS_OF_TEXT * window_tokens)


def lesson_tokens(training: StageBTraining, *, window_tokens: int, sequence_length: int) -> int:
    """Tokens that the backbone reads in a lesson of the joint phase, the largest, at most.

    Args:
        training: of Stage B.
        window_tokens: tokens read at a time.
        sequence_length: tokens of a row of the corpus.
    """
    segment, texts = segment_tokens(window_tokens), training.texts_per_lesson
    window = min(window_tokens, TRAINED_SEGMENTS * (segment + 1) + _QUESTION_TOKENS)
    tokens = texts * (TRAINED_SEGMENTS * segment + 2 * window)
    plain = rows_of_text(texts) * row_tokens(window_tokens, sequence_length)
    if training.backbone_lr_scale > 0:  # it keeps its language, and learns to read windows, alone
        return tokens + 2 * plain + texts * DRILLS_PER_TASK * window
    return tokens + plain
