"""Rivals and controls of a reader with memory, on the same texts, by the same checker.

    whole       text and question in one pass of the backbone, without memory
    state       windows with the recurrent state carried, the key-value cache dropped
    oracle      evidence put into the window
    all         writes all that the budget allows, keeping one operation, then acts as the agent
    all-once    writes the same, retrieves once and answers
    words       retrieves by shared words, weighted by how rare they are in the text; no parameter,
                and as many rounds as the agent has time for
    words-once  the same in one round
    random      legal actions, drawn evenly
    -words      the agent, retrieving by the keys of segments alone
    -plastic    the agent without fast weights
    -slots      the agent without slots
    -write      the agent without writing to memory

What is fetched after the right segment stands in the window, too, and can mislead: when to stop is
the agent's to learn. A column that always goes on, or never does, suits one kind of task alone.

All but `whole` and `state` are answered by the reader, which reads what its memory holds.
"""

# P texts

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix.models.state_rows import merge
from cdrmix.reasoning.carried_state import carry
from cdrmix.reasoning.hebbian import EpisodeState
from cdrmix.reasoning.lessons import Lessons
from cdrmix.reasoning.memory_reader import MemoryReader, Reading, Windows
from cdrmix.reasoning.policy import Action, MemoryPolicy, Observation, roll_out
from cdrmix.reasoning.reading_environment import (
    Grade,
    ReadingEpisodes,
    ReadingState,
)
from cdrmix.reasoning.segments import Texts, window_tokens
from cdrmix.reasoning.shared_words import SharedWords
from cdrmix.reasoning.tasks import Example

CONTROLS = (
    *("whole", "state", "oracle", "all", "all-once", "words", "words-once", "random"),
    *("-words", "-plastic", "-slots", "-write"),
)
_WILSON_Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Answers:
    """Scores of a batch of texts, and what they took.

    Attributes:
        scores: of each answer, 0 to 1.
        operations: retrievals and writes of each text; None where there are no actions.
        seconds: wall time of all of them, reading included.
    """

    scores: list[float]
    operations: list[int] | None
    seconds: float


@dataclass(frozen=True)
class ControlScore:
    """Mean score of one column, 0 to 1, with its 95 % interval by Wilson.

    Attributes:
        n: texts (count).
        operations: retrievals and writes of a text, on average; None where there are no actions.
        seconds: wall time of a text, on average.
    """

    score: float
    low: float
    high: float
    n: int
    operations: float | None
    seconds: float


def summary(batches: Sequence[Answers]) -> ControlScore:
    """Joins the batches of one column."""
    scores = [score for batch in batches for score in batch.scores]
    operations = [each for batch in batches for each in batch.operations or ()]
    mean = sum(scores) / len(scores)
    low, high = wilson_interval(mean, len(scores))
    return ControlScore(
        *(mean, low, high, len(scores)),
        operations=sum(operations) / len(operations) if operations else None,
        seconds=sum(batch.seconds for batch in batches) / len(scores),
    )


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share of `count` trials (Wilson, 1927).

    For a mean of scores between 0 and 1 it is wider than needed: none varies more than a share.
    """
    z2 = _WILSON_Z**2 / count
    centre = (mean + z2 / 2) / (1 + z2)
    half = math.sqrt(mean * (1 - mean) * z2 + z2**2 / 4) / (1 + z2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


class Controls:
    """Answers of all columns to one batch of texts, which the reader has read.

    Args:
        reader, lessons: in evaluation mode, and the forms of its texts.
        examples: tasks of the batch.
        texts: of the tasks, on the reader's device.
        reading: what the reader read of them.
        reading_seconds: wall time of that, which every column that uses it is charged for.
        grade: checker of the tasks.
    """

    def __init__(
        self,
        reader: MemoryReader,
        lessons: Lessons,
        examples: Sequence[Example],
        texts: Texts,
        reading: Reading,
        reading_seconds: float,
        grade: Grade,
    ) -> None:
        self._reader = reader
        self._lessons = lessons
        self._examples = examples
        self._texts = texts
        self._reading = reading
        self._reading_seconds = reading_seconds
        self._grade = grade

    @torch.no_grad()
    def answers(self, column: str) -> Answers | None:
        """Returns the answers of a member of `CONTROLS`; None where a text has no evidence."""
        began = time.perf_counter()
        reads = True
        operations: list[int] | None = None
        if column in ("whole", "state"):
            reads = False
            given = self._whole() if column == "whole" else self._state()
            scores = self._graded(given)
        elif column in ("oracle", "words", "words-once"):
            rounds = 1 if column == "words-once" else self._reader.config.policy.retrieval_rounds
            chosen = self._evidence() if column == "oracle" else self._by_words(rounds)
            if chosen is None:
                return None
            scores = self._graded(self._from_segments(chosen))
        else:
            reads = column != "-plastic"
            final = self._played(column)
            scores = final.earned.tolist()
            operations = final.operations.tolist()
        seconds = time.perf_counter() - began + (self._reading_seconds if reads else 0.0)
        return Answers(scores, operations, seconds)

    def _graded(self, answers: Sequence[Sequence[int]]) -> list[float]:
        return [self._grade(row, answer) for row, answer in enumerate(answers)]

    def _ids(self, row: int) -> list[int]:
        """Tokens of a text, without its padding."""
        count = int(self._texts.num_segments[row])
        length = self._texts.tokens.shape[1]
        places = range(length - count, length)
        return [id for place in places for id in self._texts.segment(row, place)]

    def _whole(self) -> list[list[int]]:
        questions = self._texts.questions
        windows = [
            window_tokens([self._ids(row)], question, self._reader.marks)
            for row, question in enumerate(questions)
        ]
        return self._reader.answer(self._windows(windows), slots=None, plastic=None)

    def _state(self) -> list[list[int]]:
        reader = self._reader
        rows = [self._ids(row) for row in range(len(self._examples))]
        state = carry(reader.backbone, rows, window_tokens=reader.window_tokens)
        windows = [window_tokens([], question, reader.marks) for question in self._texts.questions]
        before = EpisodeState({}, 0, state)
        return reader.answer(self._windows(windows), slots=None, plastic=before)

    def _windows(self, rows: Sequence[Sequence[int]]) -> Windows:
        lengths = [len(row) for row in rows]
        tokens = torch.full((len(rows), max(lengths)), self._reader.marks.pad)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
        device = self._texts.tokens.device
        questions = [len(question) + 2 for question in self._texts.questions]
        return Windows(
            tokens.to(device),
            torch.tensor(lengths, device=device),
            torch.tensor(questions, device=device),
            room=torch.zeros(len(rows), dtype=torch.int64, device=device),
        )

    def _from_segments(self, chosen: Sequence[Sequence[int]]) -> list[list[int]]:
        reader = self._reader
        windows = reader.windows(self._texts, range(len(chosen)), chosen)
        rows = torch.arange(len(chosen), device=self._texts.tokens.device)
        nothing = torch.zeros_like(self._texts.lengths, dtype=torch.bool)  # is summarised
        return reader.answer(
            windows,
            slots=reader.summarise(self._reading, rows, nothing),
            plastic=reader.recalled(self._reading, rows, nothing),
        )

    def _evidence(self) -> list[list[int]] | None:
        chosen = []
        length = self._texts.tokens.shape[1]
        for row, example in enumerate(self._examples):
            count = int(self._texts.num_segments[row])
            decode = self._lessons.tokenizer.decode
            segments = [self._texts.segment(row, length - count + n) for n in range(count)]
            places = self._lessons.evidence(example, [decode(each) for each in segments])
            if not places:
                return None
            chosen.append([length - count + place for place in places])
        return chosen

    def _by_words(self, rounds: int) -> list[list[int]]:
        """Fetches as the agent may: `top_k` segments a round, each round asking for more."""
        top_k = self._reader.config.memory.top_k
        return [
            by_shared_words(words, asked, rounds=rounds, top_k=top_k)
            for words, asked in zip(self._texts.words, self._texts.asked, strict=True)
        ]

    def _played(self, column: str) -> ReadingState:
        reader = self._reader
        reading = self._reading
        policy = reader.policy
        generator = None
        forbidden: frozenset[Action] = frozenset()
        if column == "-plastic":
            reading = reader.read(self._texts, plastic=False)
        if column == "-write":
            forbidden = frozenset([Action.CACHE_WRITE])
        episodes = ReadingEpisodes(
            *(reader, reading, self._grade),
            forbidden=forbidden,
            slots=column != "-slots",
            words=column != "-words",
        )
        if column == "all":
            return _play(episodes, lambda state, seen: _write_all(episodes, state, seen, policy))
        if column == "all-once":
            return _play(episodes, lambda state, seen: _write_all(episodes, state, seen, None))
        if column == "random":
            policy = MemoryPolicy(policy.policy.in_features, policy.feature_policy.in_features)
            policy.initialize(seed=0)  # even over the legal actions
            policy.to(self._texts.tokens.device)
            generator = torch.Generator(self._texts.tokens.device).manual_seed(0)
        return roll_out(episodes, policy, episodes.start(), generator=generator).final


def by_shared_words(
    segments: Sequence[frozenset[str]], question: frozenset[str], *, rounds: int, top_k: int
) -> list[int]:
    """Chooses segments by the words that they share with the question and those chosen before.

    Returns the places of the segments, the most wanted first; equal ones go to the earlier.
    """
    shared = SharedWords(segments)
    chosen: list[int] = []
    for _ in range(rounds):
        scores = shared.scores(shared.asked(question, chosen))
        left = (place for place in range(len(scores)) if place not in chosen and scores[place] > 0)
        best = sorted(left, key=lambda place: (-scores[place], place))[:top_k]
        if not best:
            break
        chosen += best
    return chosen


def _play(
    episodes: ReadingEpisodes, choose: Callable[[ReadingState, Observation], Tensor]
) -> ReadingState:
    """Plays episodes to their end by a script of actions."""
    state = episodes.start()
    running = ~state.solved
    while bool(running.any()):
        after = episodes.step(state, choose(state, episodes.observe(state)))
        state = merge(running, after.state, state)
        running = running & ~after.done
    return episodes.settle(state).state


def _write_all(
    episodes: ReadingEpisodes,
    state: ReadingState,
    observation: Observation,
    policy: MemoryPolicy | None,
) -> Tensor:
    """Writes each segment while it may, then acts as the policy does, or retrieves once where there
    is none."""
    legal = observation.legal
    is_read = state.time >= episodes.reading.texts.num_segments[state.rows]
    passes = torch.full_like(state.time, Action.SPLICE_WINDOW)
    reading = torch.where(legal[:, Action.CACHE_WRITE], int(Action.CACHE_WRITE), passes)
    if policy is None:
        fetched = torch.cat([state.buffer, state.fetched], dim=1).amax(1) >= 0
        retrieves = legal[:, Action.RETRIEVE] & ~fetched
        answering = torch.where(retrieves, int(Action.RETRIEVE), passes)
    else:
        answering = policy(*observation).logprobs.argmax(-1)
    return torch.where(is_read, answering, reading)
