"""Lessons, the batches of Stage B: each a pure function of (seed, phase, number).

A lesson holds tasks, cut into segments, with every random choice about them, and plain text. The
policy's phase reads whole texts; the others read a task's evidence among a few other segments.
"""

# N texts, L segments, n rows of T + 1 tokens of plain text

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdrmix.config.reasoning import SEGMENTS_PER_WINDOW, Phase, StageBTraining
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.planning.lesson_sizes import (
    DRILLS_PER_TASK,
    MOST_STRAYS,
    TRAINED_SEGMENTS,
    row_tokens,
    rows_of_text,
    segment_tokens,
)
from cdrmix.reasoning.evidence import is_made_up, kept, spans, unlabelled_windows
from cdrmix.reasoning.memory_reader import segment_room
from cdrmix.reasoning.own_tasks import OwnTasks, target
from cdrmix.reasoning.recall import Samples, recall
from cdrmix.reasoning.segments import (
    Marks,
    Texts,
    cut_segments,
    fitting,
    make_texts,
    window_tokens,
)
from cdrmix.reasoning.shared_words import SharedWords, words_of
from cdrmix.reasoning.tasks import (
    RECALL,
    TRAINED,
    WHOLE_TEXT_TASKS,
    Example,
    Wording,
    generate_examples,
)

# Counts of stray segments in a window, one drawn for each, as an agent fetches more than the answer
# takes. With a single stray in .3 of the windows, answers beside another key's code were right in
# .56 to .75 of texts (docs/reasoning.md). A retrieval of several segments brings more.
_STRAYS = (0, 1, 1, MOST_STRAYS)
# Share of a training text's segments that are folded into the slots.
_SUMMARISED_SHARE = 0.3
# Most windows by which a text may exceed its length to have room for its task.
_LONGER_BY = 16

# End of the seed of examples that are evaluated, which training takes none of.
EVALUATION = "/evaluation"

_SENTENCE_ENDS = (".", "?", "!", "\n")

Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True)
class Lesson:
    """One batch, learned from as a whole."""

    seed: int  # of the sampling while it is learned from
    examples: tuple[Example, ...]  # tasks, [N]
    texts: Texts  # segments and questions of the tasks
    # segments from which each answer follows, in the order in which one leads to the next, [N]
    evidence: tuple[tuple[int, ...], ...]
    found: tuple[tuple[int, ...], ...]  # segments in the window at a retrieval, [N]
    sought: Tensor  # segment that this retrieval should fetch, [N]; -1 for none
    gathered: tuple[tuple[int, ...], ...]  # segments in the window at the answer, [N]
    answers: tuple[tuple[int, ...], ...]  # tokens of the right answers, with the stop, [N]
    summarised: Tensor  # True for segments that are folded into the slots, [N, L]
    plain: Tensor  # text of the corpus, [n, T + 1] int64; no rows without a corpus
    # windows with their questions, and the answers with the stop, read without any memory; in the
    # joint phase alone, and none where no evidence fits into a window
    drills: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    # segments of which the reader's own answers say which this retrieval should fetch, [N]; none
    # where evidence says so, or nothing is sought
    candidates: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Lessons:
    """Source of lessons."""

    training: StageBTraining  # tasks, lengths and sizes
    seed: int  # of the run
    window_tokens: int  # of the reader
    tokenizer: Tokenizer  # of the corpus
    # samples of the corpus by their numbers, [n] -> [n, T + 1]; None leaves text out
    rows: Rows | None = None
    num_rows: int = 0  # samples of the corpus
    held_out: Samples | None = None  # of the corpus, for texts that training does not see
    own: OwnTasks | None = None  # tasks of the user's
    drills: bool = True  # in lessons of the joint phase
    # of the answers that are asked for without their evidence in the window
    hidden_evidence_share: float = 0.0
    top_k: int = 1  # segments of a retrieval
    num_segments: int = TRAINED_SEGMENTS  # of a text in all phases but the policy's
    wording: Wording = TRAINED  # of texts that are made

    @functools.cached_property
    def marks(self) -> Marks:
        """Marks of the tokenizer."""
        tokenizer = self.tokenizer
        # whole tokens are tested: one that joins a stop and the next word ends no segment
        every = range(tokenizer.vocab_size)
        ends = [tokenizer.decode([id]).endswith(_SENTENCE_ENDS) for id in every]
        return Marks(
            memory=tokenizer.role_id("memory"),
            answer=tokenizer.role_id("answer"),
            stop=tokenizer.eos_id,
            pad=tokenizer.pad_id,
            ends=torch.tensor(ends),
        )

    def lesson(self, phase: Phase, number: int, *, lengths: Sequence[int] | None = None) -> Lesson:
        """Makes lesson `number` of a phase; raises DataError if a shard cannot be read.

        `lengths` of texts in the policy's phase, in windows, are all of the configuration if None.
        """
        # Resuming, and other numbers of ranks, rely on lessons that depend on nothing else. All
        # choices are drawn from one generator: their order decides the numbers of every run.
        rng = random.Random(f"{self.seed}/{phase}/{number}")
        training = self.training
        count = training.texts_per_lesson
        examples = [
            self._example(phase, number * count + place, lengths=lengths) for place in range(count)
        ]
        tasks = [self._task(example, rng, whole=phase == "policy") for example in examples]
        texts = self.texts(
            [segments for segments, _ in tasks], [example.question for example in examples]
        )
        length = texts.tokens.shape[1]
        # shorter texts have empty segments before them, which shifts their places
        evidence = []
        windows = []
        candidates: list[tuple[int, ...]] = []
        for example, (segments, places) in zip(examples, tasks, strict=True):
            offset = length - len(segments)
            evidence.append(tuple(place + offset for place in places))
            if phase != "policy" and not places and not is_made_up(example):
                window, options = self._unlabelled_windows(example, segments, offset, rng)
                windows.append(window)
                candidates.append(options)
                continue
            windows.append(self._windows(range(offset, length), evidence[-1], rng))
            candidates.append(())
        found, sought, gathered = zip(*windows, strict=True)
        summarised = torch.tensor(
            [[rng.random() < _SUMMARISED_SHARE for _ in range(length)] for _ in examples]
        )
        in_windows = list(gathered)
        for row, pieces in enumerate(evidence):
            # no draw where the share is 0, so that it decides nothing else
            if self.hidden_evidence_share and rng.random() < self.hidden_evidence_share:
                in_windows[row] = tuple(each for each in gathered[row] if each not in pieces)
                summarised[row, list(pieces)] = True
        seed = rng.getrandbits(62)
        plain = torch.zeros(0, 1, dtype=torch.int64)
        if self.rows is not None:
            numbers = [rng.randrange(self.num_rows) for _ in range(rows_of_text(count))]
            samples = torch.from_numpy(self.rows(np.array(numbers, dtype=np.int64)))
            plain = samples[:, : 1 + row_tokens(self.window_tokens, samples.shape[1] - 1)]
        return Lesson(
            seed=seed,
            examples=tuple(examples),
            texts=texts,
            evidence=tuple(evidence),
            found=found,
            sought=torch.tensor(sought),
            gathered=tuple(in_windows),
            answers=tuple(self._answer(example) for example in examples),
            summarised=summarised & (texts.lengths > 0),
            plain=plain,
            drills=self._drills(number, rng) if phase == "joint" and self.drills else (),
            candidates=tuple(candidates),
        )

    def texts(self, segments: Sequence[Sequence[Sequence[int]]], questions: Sequence[str]) -> Texts:
        """Builds a batch from the segments and the question of each text."""
        ids = [self.tokenizer.encode(question) for question in questions]
        decode = self.tokenizer.decode
        return make_texts(segments, ids, self.marks, most=self._segment_tokens, decode=decode)

    def segments(self, text: str) -> list[list[int]]:
        """Cuts a text into segments of tokens."""
        ids = self.tokenizer.encode(text)
        return cut_segments(ids, self.marks, most=self._segment_tokens)

    @property
    def _segment_tokens(self) -> int:
        return segment_tokens(self.window_tokens, self.training.segment_tokens)

    def evidence(self, example: Example, texts: Sequence[str]) -> list[int]:
        """Returns the places of a task's evidence among the texts of its segments, in its order."""
        evidence: list[int] = []
        for line in example.evidence:
            place = next((i for i, text in enumerate(texts) if line in text), None)
            if place is not None and place not in evidence:
                evidence.append(place)
            elif place is None:
                # it is longer than a segment, or is cut by their borders
                evidence += [each for each in spans(texts, line) if each not in evidence]
        return evidence

    def _answer(self, example: Example) -> tuple[int, ...]:
        """Returns the right answer with the stop, cut to the room that windows have for it."""
        words = self.tokenizer.encode(target(example))
        return (*words[: self.training.answer_tokens - 1], self.marks.stop)

    def _example(self, use: str, number: int, *, lengths: Sequence[int] | None = None) -> Example:
        """Makes an example, or takes one of the user's; tasks take turns, and in the policy's phase
        also lengths.

        Elsewhere texts are thinned out, and a length of one window is enough. A task without room
        in its length takes the next one that has room.
        """
        if self.own is not None:
            share = self.training.task_file_share
            place = int(number * share)  # rows of the user's before this one
            if int((number + 1) * share) > place:
                return self.own.row(place, f"{self.seed}/{use}")
            number -= place  # the other tasks take their turns as without them
        tasks = self.training.tasks
        ratios = lengths or self.training.length_ratios
        task = tasks[number % len(tasks)]
        # Of a text of several windows more words can be asked for than of two.
        is_short = use != "policy" and task != RECALL
        shortest = 1 if is_short else ratios[number // len(tasks) % len(ratios)]
        if use != "policy" and task in WHOLE_TEXT_TASKS:
            return self._shortest_example(task, f"{self.seed}/{use}", number)
        # the same task and not the next one, so that each keeps its share of the lessons
        for ratio in range(shortest, shortest + _LONGER_BY):
            with contextlib.suppress(DataError):
                return self.example(task, f"{self.seed}/{use}", number, ratio)
        return self.example(task, f"{self.seed}/{use}", number, shortest + _LONGER_BY)

    def example(
        self,
        task: str,
        seed: str,
        number: int,
        length_ratio: int,
        *,
        wording: Wording | None = None,
    ) -> Example:
        """Makes example `number` of a task at a length in windows of this tokenizer; `wording` is
        that of the lessons unless given."""
        if task == RECALL:
            return self._recall(seed, number, length_ratio)
        return self._generated(task, seed, number, length_ratio, self.window_tokens, wording)

    def _shortest_example(self, task: str, seed: str, number: int) -> Example:
        """Makes an example of as few segments as hold its statements, none of which may go."""
        # Lengths in segments: a text of several windows would end with one of fillers. Each length
        # is another text, so that one whose answer has no room gives way to the next.
        most = _LONGER_BY * SEGMENTS_PER_WINDOW
        for count in range(self.num_segments, most):
            with contextlib.suppress(DataError):
                return self._generated(
                    task, f"{seed}/{count}", number, 1, count * self._segment_tokens
                )
        return self._generated(task, seed, number, 1, most * self._segment_tokens)

    def _generated(
        self,
        task: str,
        seed: str,
        number: int,
        length_ratio: int,
        window_tokens: int,
        wording: Wording | None = None,
    ) -> Example:
        example = generate_examples(
            task,
            number=number,
            seed=seed,
            length_ratio=length_ratio,
            window_tokens=window_tokens,
            count_tokens=lambda text: len(self.tokenizer.encode(text)),
            wording=wording or self.wording,
        )
        # A part of an answer is a wrong one.
        needed = len(self.tokenizer.encode(target(example))) + 1
        if needed > self.training.answer_tokens:
            raise DataError(
                f"{task}: an answer takes {needed} tokens with its stop, and "
                f"stage_b.training.answer_tokens has room for {self.training.answer_tokens}. Try "
                f"stage_b.training.answer_tokens={needed}"
            )
        return example

    def _recall(self, seed: str, number: int, length_ratio: int) -> Example:
        """Makes an example of `recall`, for the evaluation from text that is held out."""
        samples = self.held_out
        trains = not seed.endswith(EVALUATION)
        if trains and self.rows is not None:
            samples = Samples(self.rows, self.num_rows)
        if samples is None:
            raise DataError(f"{RECALL}: is made from the corpus, and there is none here")
        return recall(
            samples,
            self.tokenizer,
            number=number,
            seed=seed,
            length_ratio=length_ratio,
            window_tokens=self.window_tokens,
            answer_tokens=self.training.answer_tokens,
            swaps=trains,
        )

    def _unlabelled_windows(
        self, example: Example, segments: Sequence[list[int]], offset: int, rng: random.Random
    ) -> tuple[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[int, ...]]:
        """Returns what `_windows` does for a text without evidence, and the candidates of the
        retrieval."""
        texts = [self.tokenizer.decode(segment) for segment in segments]
        most_strays = MOST_STRAYS + self.top_k - 1
        drawn = unlabelled_windows(example, texts, rng, most_strays=most_strays)
        found, gathered, candidates = (tuple(p + offset for p in places) for places in drawn)
        return (found, -1, gathered), candidates

    def _task(
        self, example: Example, rng: random.Random, *, whole: bool
    ) -> tuple[list[list[int]], list[int]]:
        """Returns a task's segments, and the places of its evidence among them, in its order."""
        segments = self.segments(example.text)
        # by text, as the tokens of a sentence differ with what stands before it
        texts = [self.tokenizer.decode(segment) for segment in segments]
        evidence = self.evidence(example, texts)[: self.num_segments]
        is_whole = whole or (is_made_up(example) and example.task in WHOLE_TEXT_TASKS)
        if is_whole or len(segments) <= self.num_segments:
            return segments, evidence
        is_bare = not evidence and not is_made_up(example)
        stay = kept(example, texts, rng) if is_bare else evidence
        others = [place for place in range(len(segments)) if place not in stay]
        count = max(self.num_segments - len(stay), 0)
        # Half of them as a retrieval brings them, which are the likest to what is asked for: with
        # any segments of a long text alone, nothing is learned of telling one needle from another.
        words = SharedWords([words_of(text) for text in texts])
        scores = words.scores(words.asked(words_of(example.question), stay))
        rng.shuffle(others)  # of equal ones any
        alike = sorted(others, key=lambda place: -scores[place])[: count // 2]
        left = [place for place in others if place not in alike]
        order = sorted([*stay, *alike, *rng.sample(left, count - len(alike))])
        places = {place: index for index, place in enumerate(order)}
        return [segments[place] for place in order], [places[place] for place in evidence]

    def _windows(
        self, places: Sequence[int], evidence: Sequence[int], rng: random.Random
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Draws the window at a retrieval, the segment to fetch, and the window at the answer."""
        others = [place for place in places if place not in evidence]
        count = rng.choice(_STRAYS)
        if self.top_k > 1:  # what a retrieval brings beside the segment sought
            count += rng.randrange(self.top_k)
        strays = rng.sample(others, min(count, len(others)))
        if not evidence:  # a task over its whole text, as counting words
            return (), -1, tuple(strays)
        # any prefix of the evidence: the query has to ask for each piece from those before it
        known = rng.randrange(len(evidence))
        return (*evidence[:known], *strays), evidence[known], (*evidence, *strays)

    def _drills(
        self, number: int, rng: random.Random
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Makes windows of evidence and strays with a question, and their answers.

        They are read without any memory, so an example whose evidence does not all fit, or is the
        whole text, is left out: its answer would not follow from its window.
        """
        count = self.training.texts_per_lesson * DRILLS_PER_TASK
        drills = []
        for place in range(count):
            example = self._example("drill", number * count + place)
            segments, evidence = self._task(example, rng, whole=False)
            if evidence or is_made_up(example):
                *_, gathered = self._windows(range(len(segments)), evidence, rng)
            else:
                (*_, gathered), _ = self._unlabelled_windows(example, segments, 0, rng)
            question = self.tokenizer.encode(example.question)
            room = segment_room(self.window_tokens, len(question), self.training.answer_tokens)
            places, _ = fitting([len(segment) for segment in segments], gathered, room)
            if not set(evidence) <= set(places) or (is_made_up(example) and not evidence):
                continue
            held = [segments[each] for each in sorted(places)]
            window = window_tokens(held, question, self.marks)
            drills.append((window, self._answer(example)))
        return tuple(drills)
