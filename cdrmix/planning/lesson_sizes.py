"""Sizes of Stage B's lessons and calls, which the plan counts and training reads and makes.

They follow from the configuration alone, and are the same on every rank and layout.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from cdrmix.config.reasoning import SEGMENTS_PER_WINDOW, PolicyConfig, StageBConfig

LARGEST_SEGMENT = 64  # tokens, unless another length is given
# Fewest segments of a text in all phases but the policy's: so many that retrieval can pick a wrong
# one.
TRAINED_SEGMENTS = 6
# Segments beside the evidence where one is fetched at a time, at most.
MOST_STRAYS = 2
# Segments are read together in passes of at least so many tokens, each as a document of its own:
# passes of single segments of small windows would cost more in calls than in arithmetic.
_LEAST_PASS_TOKENS = 256
# Tasks of a lesson for each row of plain text.
TASKS_PER_ROW = 8
# Further windows for each task, of evidence, question and answer, where the backbone is trained:
# learning to answer from a window takes many times the examples that retrieval takes.
DRILLS_PER_TASK = 4
# Largest number of windows of a row of plain text.
_WINDOWS_OF_TEXT = 4
# Approximate tokens of a question, an answer and the marks around them.
QUESTION_TOKENS = 64
# Pieces of a call's rows for each pipeline stage, and the fewest tokens of one. With four a stage
# waits for a fifth of the time. A piece reads all weights of the stage, which takes as long as
# computing some hundred tokens with them.
_PIECES_PER_STAGE = 4
_PIECE_TOKENS = 512


class AdapterKernels(NamedTuple):
    """Kernels that a plastic adapter starts in a call of whole chunks, however many.

    tests/unit/reasoning/test_hebbian.py counts them.
    """

    writing: int = 356  # and its gradients, with the objective
    looking: int = 77  # at what was written, and its gradients
    writing_alone: int = 92  # without gradients
    looking_alone: int = 16


ADAPTER_KERNELS = AdapterKernels()


def segment_tokens(window_tokens: int, longest: int | None) -> int:
    """Length of the longest segment, of which several fit into a window (tokens).

    `longest` is `stage_b.training.segment_tokens`.
    """
    most = LARGEST_SEGMENT if longest is None else longest
    return min(most, window_tokens // SEGMENTS_PER_WINDOW)


def segments_of_pass(window_tokens: int, width: int) -> int:
    """Number of segments of `width` tokens that are read in one pass."""
    return max(max(window_tokens, _LEAST_PASS_TOKENS) // width, 1)


def trained_segments(stage_b: StageBConfig) -> int:
    """Number of segments of a text in all phases but the policy's.

    A retrieval brings `memory.top_k` segments, and a window holds `policy.max_spliced` of them: the
    windows of training have to hold as many, or answers are right from few segments alone.
    """
    most = stage_b.memory.top_k + MOST_STRAYS
    return max(TRAINED_SEGMENTS, min(most, stage_b.policy.max_spliced))


def question_head(window_tokens: int) -> int:
    """Room for a question and its marks before each segment, where it is read first (tokens).

    A constant: how much is read before a segment tells in its fast weights, so that a text's would
    depend on the questions of those beside it.
    """
    return min(QUESTION_TOKENS, window_tokens // 2)


def rows_of_text(texts: int) -> int:
    """Number of rows of plain text in a lesson of `texts` texts."""
    return max(1, texts // TASKS_PER_ROW)


def row_tokens(window_tokens: int, sequence_length: int) -> int:
    """Tokens of a row of plain text: the first windows of a row of the corpus."""
    return min(sequence_length, _WINDOWS_OF_TEXT * window_tokens)


def pieces_of_rows(rows: int, tokens: int, stages: int) -> list[slice]:
    """Cuts a call of `rows` rows of `tokens` tokens into pieces, which follow each other through
    the stages of a pipeline: while one stage computes a piece, the one before computes the next.
    """
    if stages == 1:
        return [slice(0, rows)]
    pieces = max(1, min(_PIECES_PER_STAGE * stages, rows, rows * tokens // _PIECE_TOKENS))
    ends = [rows * place // pieces for place in range(pieces + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


def steps_after_question(policy: PolicyConfig) -> int:
    """Steps that there is time for once the question is asked, the answer the last of them."""
    return 2 * policy.retrieval_rounds + 1


def most_steps(stage_b: StageBConfig, window_tokens: int) -> int:
    """Upper bound of the steps of an episode on the longest text."""
    # Of two segments beside each other, the first sentence of the second had no room in the first:
    # both together are longer than the longest segment.
    tokens = max(stage_b.training.length_ratios) * window_tokens
    longest = segment_tokens(window_tokens, stage_b.training.segment_tokens)
    segments = 2 * -(-tokens // longest)
    return segments + steps_after_question(stage_b.policy)
