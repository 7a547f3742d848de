"""Targets of retrieval from the reader's own answers, for texts without labels.

A segment is worth fetching if the right answer is likelier with it in the window: the softmax over
the answer's log-likelihoods is what a query should find, as in perplexity distillation (Atlas,
2208.03299) and REPLUG (2301.12652). Each candidate costs a window without gradient.
"""

# N texts, L segments, n windows of T tokens

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.models.state_rows import select
from cdrmix.objectives.language_model import IGNORED_LABEL
from cdrmix.reasoning.lessons import Lesson
from cdrmix.reasoning.memory_reader import MemoryReader, Reading
from cdrmix.stage_b.answer_rows import rows_with_answers


@torch.no_grad()
def preferences(reader: MemoryReader, reading: Reading, lesson: Lesson) -> Tensor | None:
    """Share of each segment in what the retrieval of each text should find, [N, L], float32.

    A row sums to 1 over the candidates of its text, and is 0 where there are none. None without
    any candidate.
    """
    rounds = max(map(len, lesson.candidates), default=0)
    if rounds == 0:
        return None
    device = reading.keys.device
    scores = torch.full(reading.keys.shape[:2], -torch.inf, device=device)
    # A candidate of each text at a time: no more windows at once than the lesson has texts.
    for turn in range(rounds):
        rows = [row for row, each in enumerate(lesson.candidates) if turn < len(each)]
        places = [lesson.candidates[row][turn] for row in rows]
        found = _log_likelihoods(reader, reading, lesson, rows, places)
        scores[torch.tensor(rows, device=device), torch.tensor(places, device=device)] = found
    return scores.softmax(1).nan_to_num(0.0)  # a row without candidates has none to share


def _log_likelihoods(
    reader: MemoryReader, reading: Reading, lesson: Lesson, rows: list[int], places: list[int]
) -> Tensor:
    """Nats of the right answer with a segment in the window, negative, [n], float32."""
    # The candidate first, so that it has room whatever else stands in the window.
    wanted = [(place, *lesson.found[row]) for row, place in zip(rows, places, strict=True)]
    windows = reader.windows(lesson.texts, rows, wanted)
    lengths = windows.lengths.tolist()
    tokens, labels = rows_with_answers(
        [ids[:length] for ids, length in zip(windows.tokens.tolist(), lengths, strict=True)],
        [lesson.answers[row] for row in rows],
        windows.tokens.device,
    )
    index = torch.tensor(rows, device=tokens.device)
    output, _ = reader.look(tokens, slots=None, plastic=select(reading.plastic, index))
    answered = labels != IGNORED_LABEL
    logits = reader.backbone.logits(output.hidden[answered]).float()
    nats = logits.log_softmax(-1).gather(1, labels[answered].unsqueeze(1)).squeeze(1)
    row_of = answered.nonzero()[:, 0]
    return nats.new_zeros(len(rows)).index_add(0, row_of, nats)
