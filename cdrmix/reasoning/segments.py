"""Texts as segments, the unit of reading and of episodic memory, and the form of a window."""

# N texts, L segments of at most S tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.errors import DataError
from cdrmix.reasoning.shared_words import words_of


class Marks(NamedTuple):
    """Special tokens of a window."""

    memory: int  # before every segment, and before the question
    answer: int  # behind the question
    stop: int  # end of an answer
    pad: int  # padding
    ends: Tensor  # True for tokens that end a sentence, [V]


@dataclass(frozen=True)
class Texts:
    """Batch of texts in segments, with a question each.

    Rows are aligned at their ends: a shorter text has empty segments before it, so that the
    question follows the last segment of every row.
    """

    tokens: Tensor  # [N, L, S] int64, padded at the end of each segment
    lengths: Tensor  # tokens of each segment, 0 where empty, [N, L]
    questions: tuple[tuple[int, ...], ...]  # tokens of each question
    words: tuple[tuple[frozenset[str], ...], ...]  # of each segment, none where empty, [N][L]
    asked: tuple[frozenset[str], ...]  # words of each question, [N]

    @property
    def mask(self) -> Tensor:
        """True for text, False for padding, [N, L, S]."""
        place = torch.arange(self.tokens.shape[2], device=self.tokens.device)
        return place < self.lengths.unsqueeze(2)

    @property
    def num_segments(self) -> Tensor:
        """Number of segments of each text, [N]."""
        return (self.lengths > 0).sum(1)

    def behind(
        self, segments: Sequence[Sequence[int]], words: Sequence[frozenset[str]] = ()
    ) -> Texts:
        """Returns the texts with the same further segments, of such words, numbered first, before
        each."""
        longest = max(map(len, segments), default=0)
        wider = max(longest - self.tokens.shape[2], 0)
        tokens = F.pad(self.tokens, (0, wider, len(segments), 0))
        lengths = F.pad(self.lengths, (len(segments), 0))
        for place, ids in enumerate(segments):
            tokens[:, place, : len(ids)] = torch.tensor(ids)
            lengths[:, place] = len(ids)
        all_words = tuple((*words, *own) for own in self.words)
        return Texts(tokens, lengths, self.questions, all_words, self.asked)

    def segment(self, row: int, place: int) -> list[int]:
        """Returns the tokens of one segment."""
        return self.tokens[row, place, : int(self.lengths[row, place])].tolist()


def cut_segments(ids: Sequence[int], marks: Marks, *, most: int) -> list[list[int]]:
    """Cuts a text into segments of as many whole sentences as fit into `most` tokens.

    A longer sentence is cut.
    """
    sentences: list[list[int]] = [[]]
    for id in ids:
        sentences[-1].append(id)
        # a model may have more ids than its tokenizer
        if id < len(marks.ends) and marks.ends[id]:
            sentences.append([])
    segments: list[list[int]] = [[]]
    for sentence in sentences:
        if len(segments[-1]) + len(sentence) > most:
            segments.append([])
        segments[-1] += sentence
        while len(segments[-1]) > most:
            segments.append(segments[-1][most:])
            del segments[-2][most:]
    return [segment for segment in segments if segment]


def fitting(lengths: Sequence[int], wanted: Sequence[int], room: int) -> tuple[list[int], int]:
    """Returns the wanted segments up to the first that has no room, and the room left.

    Args:
        lengths: tokens of each segment; those of 0 are passed over.
        wanted: segments, the most wanted first.
        room: tokens, including a mark before each segment.
    """
    places: list[int] = []
    for place in wanted:
        if lengths[place] + 1 > room:
            # no smaller one further on instead: the order is the agent's, best first
            break
        if lengths[place] > 0:
            places.append(place)
            room -= lengths[place] + 1
    return places, room


def window_tokens(
    segments: Sequence[Sequence[int]], question: Sequence[int], marks: Marks
) -> tuple[int, ...]:
    """Joins the tokens of a window: segments, each behind its mark, and the question."""
    held = [id for segment in segments for id in (marks.memory, *segment)]
    return (*held, marks.memory, *question, marks.answer)


def make_texts(
    texts: Sequence[Sequence[Sequence[int]]],
    questions: Sequence[Sequence[int]],
    marks: Marks,
    *,
    most: int,
    decode: Callable[[Sequence[int]], str],
) -> Texts:
    """Builds a batch of texts from the tokens of their segments and questions; `most` is S.

    At least one text has a segment. `decode` makes text of tokens.
    """
    length = max(len(segments) for segments in texts)
    tokens = torch.full((len(texts), length, most), marks.pad)
    lengths = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, segments in enumerate(texts):
        for place, segment in enumerate(segments, length - len(segments)):
            tokens[row, place, : len(segment)] = torch.tensor(segment)
            lengths[row, place] = len(segment)
    words = tuple(
        (frozenset[str](),) * (length - len(segments))
        + tuple(words_of(decode(segment)) for segment in segments)
        for segments in texts
    )
    asked = tuple(words_of(decode(question)) for question in questions)
    return Texts(tokens, lengths, tuple(map(tuple, questions)), words, asked)


class Asked(NamedTuple):
    """Segments of texts behind the question of their text, each a document of its own."""

    tokens: Tensor  # [N, L, Q + S] int64, padded at the end of each segment
    mask: Tensor  # True for the tokens of segments alone, [N, L, Q + S]
    places: Tensor  # of a segment's tokens, [N, S]


def ask_first(texts: Texts, marks: Marks, *, room: int) -> Asked:
    """Puts the question of each text before each of its segments, between marks, in `room` tokens
    (Q); segments of texts without a question stand alone. Raises DataError if one is longer."""
    heads = [(marks.memory, *ids, marks.memory) if ids else () for ids in texts.questions]
    longest = max(map(len, heads))
    if longest > room:
        raise DataError(
            f"the question takes {longest} tokens with its marks, and where it is read first "
            f"(stage_b.training.question = first) at most {room}. Ask a shorter one"
        )
    device = texts.tokens.device
    length, size = texts.tokens.shape[1:]
    starts = torch.tensor([len(head) for head in heads], device=device)
    # Padding stands behind a segment, never before it: it would alter what is read after it.
    tokens = F.pad(texts.tokens, (0, room), value=marks.pad)
    places = starts.unsqueeze(1) + torch.arange(size, device=device)  # [N, S]
    index = places.unsqueeze(1).expand(-1, length, -1)
    mask = torch.zeros_like(tokens, dtype=torch.bool).scatter(2, index, texts.mask)
    tokens = torch.full_like(tokens, marks.pad).scatter(2, index, texts.tokens)
    for row, head in enumerate(heads):
        tokens[row, :, : len(head)] = torch.tensor(head, dtype=tokens.dtype, device=device)
    return Asked(tokens, mask, places)
