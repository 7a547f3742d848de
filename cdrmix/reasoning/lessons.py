"""Training batches of Stage B, each a pure function of (seed, phase, number).

A lesson holds tasks, cut into segments, with all that chance decides about them, and plain text.
What training sees of a task is its evidence among a few other segments; whole texts come in the
policy's phase.
"""

# N texts, L segments, E pieces of evidence, n rows of T + 1 tokens of plain text

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdrmix.config.reasoning import Phase, StageBTraining
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.planning.stage_b_memory import (
    DRILLS_PER_TASK,
    TRAINED_SEGMENTS,
    row_tokens,
    rows_of_text,
    segment_tokens,
)
from cdrmix.reasoning.memory_reader import ANSWER_TOKENS, segment_room
from cdrmix.reasoning.segments import (
    Marks,
    Texts,
    cut_segments,
    fitting,
    make_marks,
    make_texts,
    window_tokens,
)
from cdrmix.reasoning.state_rows import map_tensors
from cdrmix.reasoning.tasks import Example, generate_examples

# Segments in a window that do not belong there, as when more was fetched than the answer takes; one
# of these counts is drawn.
_STRAYS = (0, 1, 1, 2)
# How often a segment of a training text is folded into the slots.
_SUMMARISED_SHARE = 0.3
# A task that a length has no room for may be longer by so many windows.
_LONGER_BY = 16

Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True)
class Lesson:
    """One batch, made and learned from as a whole.

    Attributes:
        seed: of what is sampled while it is learned from.
        examples: the tasks, [N].
        texts: their segments and questions.
        evidence: segments from which each answer follows, in the order in which one leads to the
            next, [N].
        found: segments in the window when the next piece of evidence is looked for, [N].
        sought: the segment that is looked for then, [N]; -1 where there is none.
        gathered: segments in the window when the question is answered, [N].
        answers: tokens of the right answer with the stop, [N].
        summarised: segments that are folded into the slots, [N, L].
        plain: text of the corpus, [n, T + 1] int64; no rows without a corpus.
        drills: further windows with a question, as tokens, and the answer to each with the stop.
    """

    seed: int
    examples: tuple[Example, ...]
    texts: Texts
    evidence: tuple[tuple[int, ...], ...]
    found: tuple[tuple[int, ...], ...]
    sought: Tensor
    gathered: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    summarised: Tensor
    plain: Tensor
    drills: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def to(self, device: torch.device) -> Lesson:
        """The lesson with its tensors on a device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class Lessons:
    """Where lessons come from.

    Args:
        training: tasks, lengths and sizes.
        seed: of the whole run.
        window_tokens: of the reader.
        tokenizer: of the corpus.
        rows: samples of the corpus by their numbers, [n] -> [n, T + 1]; None leaves text out.
        num_rows: how many there are.
        drills: whether lessons of the joint phase hold drills.
    """

    training: StageBTraining
    seed: int
    window_tokens: int
    tokenizer: Tokenizer
    rows: Rows | None = None
    num_rows: int = 0
    drills: bool = True

    @functools.cached_property
    def marks(self) -> Marks:
        """Of the tokenizer."""
        return make_marks(self.tokenizer)

    def lesson(self, phase: Phase, number: int) -> Lesson:
        """Lesson `number` of a phase, from 0.

        Raises:
            DataError: if a shard of the corpus is missing or truncated.
        """
        rng = random.Random(f"{self.seed}/{phase}/{number}")
        count = self.training.texts_per_lesson
        examples = [self._example(phase, number * count + place) for place in range(count)]
        drawn = [self._task(example, rng, whole=phase == "policy") for example in examples]
        texts = self.texts([segments for segments, _ in drawn], examples)
        length = texts.tokens.shape[1]
        chosen = [
            self._windows(len(segments), evidence, length - len(segments), rng)
            for segments, evidence in drawn
        ]
        summarised = torch.tensor(
            [[rng.random() < _SUMMARISED_SHARE for _ in range(length)] for _ in examples]
        )
        return Lesson(
            seed=rng.getrandbits(62),
            examples=tuple(examples),
            texts=texts,
            evidence=tuple(
                tuple(place + length - len(segments) for place in evidence)
                for segments, evidence in drawn
            ),
            found=tuple(found for found, _, _ in chosen),
            sought=torch.tensor([sought for _, sought, _ in chosen]),
            gathered=tuple(gathered for _, _, gathered in chosen),
            answers=tuple(self.answer_tokens(example) for example in examples),
            summarised=summarised & (texts.lengths > 0),
            plain=self._plain(rng),
            drills=self._drills(number, rng) if phase == "joint" and self.drills else (),
        )

    def texts(
        self, segments: Sequence[Sequence[Sequence[int]]], examples: Sequence[Example]
    ) -> Texts:
        """A batch from the segments of each text and its task's question."""
        return self.as_texts(
            segments, [self.tokenizer.encode(example.question) for example in examples]
        )

    def as_texts(
        self, segments: Sequence[Sequence[Sequence[int]]], questions: Sequence[Sequence[int]]
    ) -> Texts:
        """A batch from the segments of each text and the tokens of its question."""
        most = segment_tokens(self.window_tokens)
        return make_texts(segments, questions, self.marks, most=most)

    def segments(self, text: str) -> list[list[int]]:
        """A text cut into segments of tokens."""
        ids = self.tokenizer.encode(text)
        return cut_segments(ids, self.marks, most=segment_tokens(self.window_tokens))

    def answer_tokens(self, example: Example) -> tuple[int, ...]:
        """The right answer with the stop; a long one is cut to what a window has room for."""
        words = self.tokenizer.encode(" ".join(example.answers))
        return (*words[: ANSWER_TOKENS - 1], self.marks.stop)

    def _example(self, use: str, number: int) -> Example:
        """Tasks take turns, and in the policy's phase lengths; elsewhere texts are thinned anyway.

        A task that a length has no room for is given the next one that has.
        """
        tasks = self.training.tasks
        ratios = self.training.length_ratios
        task = tasks[number % len(tasks)]
        wanted = ratios[number // len(tasks) % len(ratios)] if use == "policy" else 1
        for ratio in range(wanted, wanted + _LONGER_BY):
            try:
                return self.example(task, f"{self.seed}/{use}", number, ratio)
            except DataError:
                continue
        return self.example(task, f"{self.seed}/{use}", number, wanted + _LONGER_BY)

    def example(self, task: str, seed: str, number: int, length_ratio: int) -> Example:
        """Example `number` of a task at a length, measured in windows of this tokenizer."""
        return generate_examples(
            task,
            number=number,
            seed=seed,
            length_ratio=length_ratio,
            window_tokens=self.window_tokens,
            count_tokens=lambda text: len(self.tokenizer.encode(text)),
        )

    def _task(
        self, example: Example, rng: random.Random, *, whole: bool
    ) -> tuple[list[list[int]], list[int]]:
        """Segments, and which of them are the evidence, in its order."""
        segments = self.segments(example.text)
        said = [self.tokenizer.decode(segment) for segment in segments]
        evidence: list[int] = []
        for line in example.evidence:
            place = next((i for i, text in enumerate(said) if line in text), None)
            if place is not None and place not in evidence:
                evidence.append(place)
        if whole or len(segments) <= TRAINED_SEGMENTS:
            return segments, evidence
        others = [place for place in range(len(segments)) if place not in evidence]
        kept = rng.sample(others, max(TRAINED_SEGMENTS - len(evidence), 0))
        order = sorted([*evidence, *kept])
        places = {place: index for index, place in enumerate(order)}
        return [segments[place] for place in order], [places[place] for place in evidence]

    def _windows(
        self, count: int, evidence: Sequence[int], offset: int, rng: random.Random
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Segments found, the one sought next, and those gathered at the end, in fetching order."""
        others = [place for place in range(count) if place not in evidence]
        strays = rng.sample(others, min(rng.choice(_STRAYS), len(others)))
        gathered = [*evidence, *strays]
        if not evidence:
            return (), -1, tuple(place + offset for place in gathered)
        known = rng.randrange(len(evidence))
        found = [*evidence[:known], *strays]
        return (
            tuple(place + offset for place in found),
            evidence[known] + offset,
            tuple(place + offset for place in gathered),
        )

    def _drills(
        self, number: int, rng: random.Random
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Evidence among a few other segments, question, answer."""
        count = self.training.texts_per_lesson * DRILLS_PER_TASK
        drills = []
        for place in range(count):
            example = self._example("drill", number * count + place)
            segments, evidence = self._task(example, rng, whole=False)
            gathered = self._windows(len(segments), evidence, 0, rng)[2]
            asked = self.tokenizer.encode(example.question)
            room = segment_room(self.window_tokens, len(asked))
            chosen, _ = fitting([len(segment) for segment in segments], gathered, room)
            drills.append(
                (
                    window_tokens([segments[each] for each in sorted(chosen)], asked, self.marks),
                    self.answer_tokens(example),
                )
            )
        return tuple(drills)

    def _plain(self, rng: random.Random) -> Tensor:
        if self.rows is None:
            return torch.zeros(0, 1, dtype=torch.int64)
        count = rows_of_text(self.training.texts_per_lesson)
        wanted = np.array([rng.randrange(self.num_rows) for _ in range(count)], dtype=np.int64)
        rows = torch.from_numpy(self.rows(wanted))
        return rows[:, : 1 + row_tokens(self.window_tokens, rows.shape[1] - 1)]
