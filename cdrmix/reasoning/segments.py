"""Texts cut into segments: what is read at a time, and what episodic memory keeps."""

# N texts, L segments, S tokens of the longest possible one, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.data.tokenizer import ANSWER, Tokenizer

_SENTENCE_ENDS = (".", "?", "!", "\n")


class Marks(NamedTuple):
    """Tokens that give a window its form.

    Attributes:
        memory: stands before every segment, and before the question.
        answer: stands behind the question.
        stop: ends an answer.
        pad: fills up.
        ends: whether a sentence ends with a token, [V].
    """

    memory: int
    answer: int
    stop: int
    pad: int
    ends: Tensor


@dataclass(frozen=True)
class Texts:
    """Texts in segments, with a question each.

    Rows are aligned at their ends: the segments that a shorter text lacks are empty ones before it.

    Attributes:
        tokens: [N, L, S] int64, filled up behind each segment.
        lengths: tokens of each segment, 0 where empty, [N, L].
        questions: tokens of each question.
    """

    tokens: Tensor
    lengths: Tensor
    questions: tuple[tuple[int, ...], ...]

    @property
    def mask(self) -> Tensor:
        """Which tokens are text, [N, L, S]."""
        place = torch.arange(self.tokens.shape[2], device=self.tokens.device)
        return place < self.lengths.unsqueeze(2)

    @property
    def num_segments(self) -> Tensor:
        """Segments of each text, [N]."""
        return (self.lengths > 0).sum(1)

    def to(self, device: torch.device) -> Texts:
        """The texts on a device."""
        return Texts(self.tokens.to(device), self.lengths.to(device), self.questions)

    def behind(self, segments: Sequence[Sequence[int]]) -> Texts:
        """The texts with further segments, the same before each; those are numbered first."""
        longest = max(map(len, segments), default=0)
        wider = max(longest - self.tokens.shape[2], 0)
        tokens = F.pad(self.tokens, (0, wider, len(segments), 0))
        lengths = F.pad(self.lengths, (len(segments), 0))
        for place, ids in enumerate(segments):
            tokens[:, place, : len(ids)] = torch.tensor(ids)
            lengths[:, place] = len(ids)
        return Texts(tokens, lengths, self.questions)

    def segment(self, row: int, place: int) -> list[int]:
        """Tokens of one segment."""
        return self.tokens[row, place, : int(self.lengths[row, place])].tolist()


def make_marks(tokenizer: Tokenizer) -> Marks:
    """The marks of a tokenizer's special tokens."""
    ends = [tokenizer.decode([id]).endswith(_SENTENCE_ENDS) for id in range(tokenizer.vocab_size)]
    return Marks(
        memory=tokenizer.special_id("<|memory|>"),
        answer=tokenizer.special_id(ANSWER),
        stop=tokenizer.eos_id,
        pad=tokenizer.pad_id,
        ends=torch.tensor(ends),
    )


def cut_segments(ids: Sequence[int], marks: Marks, *, most: int) -> list[list[int]]:
    """Segments of a text: as many whole sentences as fit; a longer sentence is cut.

    Args:
        ids: tokens of the text.
        marks: say where sentences end.
        most: length of the longest segment (tokens).
    """
    segments: list[list[int]] = []
    open_segment: list[int] = []
    for sentence in _sentences(ids, marks):
        if len(open_segment) + len(sentence) > most:
            segments.append(open_segment)
            open_segment = []
        open_segment = open_segment + sentence
        while len(open_segment) > most:
            segments.append(open_segment[:most])
            open_segment = open_segment[most:]
    return [segment for segment in [*segments, open_segment] if segment]


def _sentences(ids: Sequence[int], marks: Marks) -> list[list[int]]:
    sentences: list[list[int]] = [[]]
    for id in ids:
        sentences[-1].append(id)
        if id < len(marks.ends) and bool(marks.ends[id]):
            sentences.append([])
    return [sentence for sentence in sentences if sentence]


def fitting(lengths: Sequence[int], wanted: Sequence[int], room: int) -> tuple[list[int], int]:
    """Wanted segments up to the first that does not fit behind its mark, and the room left.

    Args:
        lengths: tokens of each segment; those of 0 are passed over.
        wanted: segments, the most wanted first.
        room: tokens.
    """
    taken: list[int] = []
    for place in wanted:
        if lengths[place] + 1 > room:
            break
        if lengths[place] > 0:
            taken.append(place)
            room -= lengths[place] + 1
    return taken, room


def window_tokens(
    segments: Sequence[Sequence[int]], question: Sequence[int], marks: Marks
) -> tuple[int, ...]:
    """What a window holds: segments, each behind its mark, and the question."""
    ids: list[int] = []
    for segment in segments:
        ids += [marks.memory, *segment]
    return (*ids, marks.memory, *question, marks.answer)


def make_texts(
    texts: Sequence[Sequence[Sequence[int]]],
    questions: Sequence[Sequence[int]],
    marks: Marks,
    *,
    most: int,
) -> Texts:
    """A batch of texts from their segments.

    Args:
        texts: tokens of each segment of each text; at least one segment in one of them.
        questions: tokens of each question.
        marks: give the filling.
        most: S.
    """
    length = max(len(segments) for segments in texts)
    tokens = torch.full((len(texts), length, most), marks.pad)
    lengths = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, segments in enumerate(texts):
        for place, segment in enumerate(segments, length - len(segments)):
            tokens[row, place, : len(segment)] = torch.tensor(segment)
            lengths[row, place] = len(segment)
    return Texts(tokens, lengths, tuple(tuple(question) for question in questions))
