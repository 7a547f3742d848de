"""Environment of the memory agent on real text: the segments of a text, then a question.

Each step takes one action. While the text lasts, every action moves on to the next segment:

    SUMMARIZE folds the segment into the slots     CACHE_WRITE writes it to memory
    RETRIEVE fetches segments like this one        SPLICE_WINDOW passes the segment by

Once the question is asked, RETRIEVE fetches the segments nearest to the query of the window, those
with words of question and window first (`memory.words_share`),
SPLICE_WINDOW puts them into the window, and SPLICE_WINDOW with nothing fetched answers. An episode
is rewarded for the score of its answer.
"""

# N episodes, P texts, L segments, D hidden, K key dimensions, M entries of memory, J spliced,
# A actions

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.planning.lesson_sizes import steps_after_question
from cdrmix.reasoning.earlier import Earlier
from cdrmix.reasoning.memory_reader import MemoryReader, Reading, Windows
from cdrmix.reasoning.policy import (
    NUM_ACTIONS,
    Action,
    EpisodeOutcome,
    Idle,
    Observation,
    Rollouts,
    Transition,
    is_operation,
)
from cdrmix.reasoning.shared_words import SharedWords

# (text, answer tokens) -> 0 to 1
Grade = Callable[[int, Sequence[int]], float]
# (text, segments in the window, bits of those in the slots): all that a window's numbers depend on
_Key = tuple[int, tuple[int, ...], bytes]
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class ReadingState:
    """State of a batch of episodes.

    Segments in memory, buffer and window are numbered through: first the entries of earlier texts,
    then the segments of the text.
    """

    rows: Tensor  # text of each episode, [N]
    time: Tensor  # steps taken, [N]
    memory: Tensor  # segments written, oldest first, -1 where empty, [N, M]
    buffer: Tensor  # segments retrieved, best first, -1 where empty, [N, top_k]
    score: Tensor  # cosine of the best segment in the buffer, [N]; 0 where empty
    fetched: Tensor  # segments spliced into the window, the earliest first, -1 where empty, [N, J]
    summarised: Tensor  # True for segments folded into the slots, [N, L]
    last: Tensor  # last action, [N]; -1 at the start
    operations: Tensor  # retrievals and writes, [N]
    harm: Tensor  # entries evicted, and retrievals that fetched nothing for the question, [N]
    seen: Tensor  # pooled hidden state of the window with the question, [N, D]; 0 before
    query: Tensor  # retrieval query of that window, [N, K]; 0 before
    filled: Tensor  # share of the window's room that spliced segments take, [N]
    earned: Tensor  # score of the answer, [N]; 0 until it is settled
    solved: Tensor  # True where the episode is over, [N]


class ReadingEpisodes:
    """Rules of episodes on a batch of texts that were read already.

    Args:
        reader, reading: what runs windows and answers, and what it read of P texts.
        grade: score of an answer.
        forbidden: actions that are never legal.
        slots: False leaves slots out of every window, whatever was folded into them.
        words: False chooses segments by their keys alone.
        earlier: entries of earlier texts; None for none.
        budgets: retrievals and writes of each text, P; None for `step_budget`.
        keeps_one: the last operation of a budget is for the question.

    Attributes:
        texts: segments by the numbers that states use.
        retrieval_seconds, num_retrievals: time of searches, and episodes searched for, in total.
    """

    def __init__(
        self,
        reader: MemoryReader,
        reading: Reading,
        grade: Grade,
        *,
        forbidden: frozenset[Action] = frozenset(),
        slots: bool = True,
        words: bool = True,
        earlier: Earlier | None = None,
        budgets: Sequence[int] | None = None,
        keeps_one: bool = True,
    ) -> None:
        self.reader = reader
        self.reading = reading
        self.grade = grade
        self.config: PolicyConfig = reader.config.policy
        self.top_k = reader.config.memory.top_k
        # a text has no more segments to write, and every column costs time in each retrieval
        self.num_entries = min(reader.capacity, reading.texts.tokens.shape[1])
        # what would keep nothing is no operation of this reader's
        absent = set()
        if not reader.has("episodic"):
            absent |= {Action.CACHE_WRITE, Action.RETRIEVE}
        if not (reader.has("slots") or reader.has("state")):
            absent.add(Action.SUMMARIZE)
        self.forbidden = forbidden | absent
        self._has_slots = slots
        self._earlier = earlier
        entries = earlier.index.entries if earlier else []
        self.num_earlier = len(entries)
        # of each text, [P]
        num_segments = reading.texts.num_segments
        self.budgets = torch.full_like(num_segments, self.config.step_budget)
        if budgets is not None:
            self.budgets = num_segments.new_tensor(budgets)
        self._keeps_one = keeps_one
        self._most_steps = reading.texts.num_segments + steps_after_question(self.config)
        self.texts = reading.texts.behind(
            [entry.tokens for entry in entries], earlier.words if earlier else ()
        )
        # where questions are read first, an agent sees how near a segment is to its question
        self._nearness = reader.nearness(reading) if reader.asks_first else None
        self._words_share = reader.config.memory.words_share if words else 0.0
        self._words: dict[int, SharedWords] = {}  # of each text that was asked of
        # of each text and segments in its window, the overlap of every segment
        self._overlaps: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.retrieval_seconds = 0.0
        self.num_retrievals = 0
        # rollouts of one text often share a window: each is run, and answered, once
        self._looks: dict[_Key, tuple[Tensor, Tensor, Tensor]] = {}
        self._answers: dict[_Key, list[int]] = {}

    def start(self, branches: int = 1) -> ReadingState:
        """Returns episodes before their first action, those of one text beside each other."""
        texts = self.reading.texts
        rows = torch.arange(len(texts.tokens), device=texts.tokens.device)
        rows = rows.repeat_interleave(branches)
        zero = torch.zeros_like(rows)
        state = ReadingState(
            rows=rows,
            time=zero,
            memory=zero.new_full((len(rows), self.num_entries), -1),
            buffer=zero.new_full((len(rows), self.top_k), -1),
            score=zero.float(),
            fetched=zero.new_full((len(rows), self.config.max_spliced), -1),
            summarised=zero.bool().unsqueeze(1).repeat(1, texts.tokens.shape[1]),
            last=zero - 1,
            operations=zero,
            harm=zero,
            seen=torch.zeros(len(rows), self.reading.pooled.shape[2], device=rows.device),
            query=torch.zeros(len(rows), self.reading.keys.shape[2], device=rows.device),
            filled=zero.float(),
            earned=zero.float(),
            solved=zero.bool(),
        )
        # an empty text begins with the question
        return self._look(state, self._is_asked(state))

    def observe(self, state: ReadingState) -> Observation:
        """Returns the agent's view of a state."""
        at_question = self._is_asked(state)
        segment = self.reading.pooled[state.rows, self._place(state)]
        hidden = torch.where(at_question.unsqueeze(1), state.seen, segment)
        budget = self.budgets[state.rows]
        used = state.operations / budget
        fetched = (state.buffer >= 0).float().mean(1)
        score = state.score
        if self._nearness is not None:
            nearness = self._nearness[state.rows, self._place(state)]
            score = torch.where(at_question, score, nearness.to(score.dtype))
        numbers = [used, at_question.float(), fetched, score, state.filled]
        last = F.one_hot(state.last + 1, NUM_ACTIONS + 1)[:, 1:]
        features = torch.cat([torch.stack(numbers, dim=1), last], dim=1)
        legal = at_question.new_ones(len(at_question), NUM_ACTIONS)
        # a second retrieval before the splice would ask the same again
        waiting = at_question & (state.buffer >= 0).any(1)
        has_entries = (state.memory >= 0).any(1) | (self.num_earlier > 0)
        legal[:, Action.RETRIEVE] = has_entries & ~waiting
        legal[:, Action.CACHE_WRITE] = ~at_question
        legal[:, Action.SUMMARIZE] = ~at_question
        for action in self.forbidden:
            legal[:, action] = False
        # the budget limits retrievals and writes, so that passing a long text by costs nothing
        legal[state.operations >= budget] = False
        if self._keeps_one:
            # what was written without an operation left for the question was written for nothing
            is_kept = ~at_question & (state.operations == budget - 1)
            legal[:, Action.RETRIEVE] &= ~is_kept
            legal[:, Action.CACHE_WRITE] &= ~is_kept
        legal[:, Action.SPLICE_WINDOW] = True  # always, as it moves on when empty
        return Observation(hidden, features, legal)

    @torch.no_grad()
    def step(self, state: ReadingState, actions: Tensor) -> Transition[ReadingState]:
        """Takes one legal action per episode, [N] int64."""
        at_question = self._is_asked(state)
        running = ~state.solved
        place = self._place(state)
        writes = actions == Action.CACHE_WRITE
        retrieves = actions == Action.RETRIEVE
        splices = actions == Action.SPLICE_WINDOW
        written = torch.cat([state.memory[:, 1:], self.num_earlier + place.unsqueeze(1)], dim=1)
        evicts = writes & (state.memory[:, 0] >= 0)  # entries stand at the end of the row
        buffer = state.buffer
        score = state.score
        asks = torch.nonzero(retrieves).flatten()
        if len(asks):
            began = time.perf_counter()
            buffer, score = self._retrieve(state, asks, at_question[asks])
            self.retrieval_seconds += time.perf_counter() - began
            self.num_retrievals += len(asks)
        # before the question, and with nothing near enough, a retrieval cannot help the answer
        useless = retrieves & (~at_question | (buffer < 0).all(1))
        puts = splices & at_question & (state.buffer >= 0).any(1)
        # a stable sort moves the empty places behind the others, which keep their order
        pushed = torch.cat([state.fetched, state.buffer], dim=1)
        pushed = pushed.gather(1, (pushed < 0).int().argsort(dim=1, stable=True))
        pushed = pushed[:, : self.config.max_spliced]
        summarised = state.summarised.clone()
        folds = torch.nonzero((actions == Action.SUMMARIZE) & ~at_question).flatten()
        summarised[folds, place[folds]] = True
        after = dataclasses.replace(
            state,
            time=state.time + 1,
            memory=torch.where(writes.unsqueeze(1), written, state.memory),
            buffer=torch.where(splices.unsqueeze(1), -1, buffer),
            score=torch.where(splices, 0.0, score),
            fetched=torch.where(puts.unsqueeze(1), pushed, state.fetched),
            summarised=summarised,
            last=actions,
            operations=state.operations + (retrieves | writes),
            harm=state.harm + evicts.long() + useless,
        )
        now_at_question = self._is_asked(after)
        answers = splices & at_question & ~puts
        out_of_time = now_at_question & (after.time >= self._most_steps[state.rows])
        done = running & (answers | out_of_time)
        # the window is run anew only where it changed: at the question, and after each splice
        after = self._look(after, running & now_at_question & ~done & (puts | ~at_question))
        return Transition(dataclasses.replace(after, solved=state.solved | done), done)

    @torch.no_grad()
    def settle(self, state: ReadingState) -> EpisodeOutcome[ReadingState]:
        """Answers and rewards episodes; costs and bonus scale the score, so that a failure earns 0.

        Costs for failures too teach as well, as long as returns are not divided by their standard
        deviation: with both, and only then, the agent learns to do nothing
        (tests/integration/test_learning.py). Gated, a group of failures is known for one that
        teaches nothing.
        """
        earned = self._earned(state)
        stability = 1 - state.harm / self._most_steps[state.rows]
        worth = 1 + self.config.stability_bonus * stability
        worth = worth - self.config.latency_penalty * state.operations
        return EpisodeOutcome(dataclasses.replace(state, earned=earned), earned * worth)

    @torch.no_grad()
    def idle(self, rollouts: Rollouts[ReadingState], evidence: Sequence[Sequence[int]]) -> Idle:
        """Finds the steps of whole episodes that cannot have changed the answer.

        They read a segment without evidence, which did not come into the window, and do not
        summarise, as slots and the state reach every answer. Where a text's evidence is unknown, no
        episode of the text had the segment in its window, and its own budget was not spent, as
        evidence may have passed by then. An operation there cost the latency penalty where the
        answer was right; where it was wrong, and evidence passed by with the budget spent or no
        operation was left in the end, its share of the budget.

        Args:
            rollouts: of these texts, without earlier ones.
            evidence: segments of each text, P; none where it is unknown.
        """
        final = rollouts.final
        length = self.reading.texts.tokens.shape[1]
        holds = torch.zeros(len(evidence), length + 1, dtype=torch.bool, device=final.rows.device)
        for row, places in enumerate(evidence):
            holds[row, list(places)] = True
        is_known = holds.any(1)[final.rows].unsqueeze(1)
        # the column behind the last segment takes what is no segment
        spliced = torch.where(final.fetched >= 0, final.fetched, length)
        in_window = torch.zeros_like(holds[final.rows]).scatter(1, spliced, True)
        of_text = torch.zeros_like(holds, dtype=torch.int64).index_add(
            0, final.rows, in_window.long()
        )
        came = torch.where(is_known, in_window, of_text[final.rows] > 0)
        count = self.reading.texts.num_segments[final.rows].unsqueeze(1)
        time = torch.arange(rollouts.taken.shape[1], device=final.rows.device)
        place = (length - count + time).clamp(max=length - 1)
        reads = time < count
        has_evidence = holds[final.rows].gather(1, place)
        operates = is_operation(rollouts.actions) & reads
        budget = self.budgets[final.rows].unsqueeze(1)
        before_question = budget - int(self._keeps_one)
        spent = operates.cumsum(1)  # after each step
        missed = (reads & has_evidence & (spent - operates.long() >= before_question)).any(1)
        # the question may have asked for one more
        lacked = missed | (final.operations >= self.budgets[final.rows])
        prices = self.config.latency_penalty * final.earned
        prices = prices + lacked * (1 - final.earned) / budget.squeeze(1)
        summarises = rollouts.actions == Action.SUMMARIZE
        steps = reads & ~has_evidence & ~came.gather(1, place) & ~summarises
        return Idle(steps & (is_known | (spent[:, -1:] < before_question)), prices)

    @torch.no_grad()
    def answers(self, state: ReadingState) -> list[list[int]]:
        """Returns the tokens of each episode's answer."""
        every = torch.arange(len(state.rows), device=state.rows.device)
        return self._for_windows(state, every, self._answers, self.reader.answer)

    def in_window(self, state: ReadingState, row: int) -> list[int]:
        """Returns the segments in the window of an episode beside its question."""
        text = int(state.rows[row])
        return sorted(self.reader.choose(self.texts, text, self._wanted(state, row))[0])

    def segment_read(self, state: ReadingState) -> int | None:
        """Returns the present segment of a single episode; None once the question is asked."""
        if bool(self._is_asked(state)[0]):
            return None
        return self.num_earlier + int(self._place(state)[0])

    def _look(self, state: ReadingState, changed: Tensor) -> ReadingState:
        """Runs the windows that changed, and puts their states and queries into the state."""
        rows = torch.nonzero(changed).flatten()
        if len(rows) == 0:
            return state

        def run(windows: Windows, **memory: Any) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
            output, _ = self.reader.look(windows.tokens, **memory)
            seen, query = self.reader.question_state(windows, output.hidden)
            free = self.reader.window_tokens - windows.question_lengths
            return zip(seen, query, 1 - windows.room / free, strict=True)

        looks = self._for_windows(state, rows, self._looks, run)
        seen, query, filled = (torch.stack(column) for column in zip(*looks, strict=True))
        return dataclasses.replace(
            state,
            seen=state.seen.index_copy(0, rows, seen.to(state.seen.dtype)),
            query=state.query.index_copy(0, rows, query),
            filled=state.filled.index_copy(0, rows, filled),
        )

    def _earned(self, state: ReadingState) -> Tensor:
        """Returns the scores of the answers, [N]."""
        answers = zip(state.rows.tolist(), self.answers(state), strict=True)
        return state.earned.new_tensor([self.grade(row, answer) for row, answer in answers])

    def _for_windows(
        self,
        state: ReadingState,
        places: Tensor,
        known: dict[_Key, _Found],
        run: Callable[..., Iterable[_Found]],
    ) -> list[_Found]:
        """Runs the windows of chosen episodes [n], equal ones once, unless their result is known.

        Args:
            state, places: all episodes, and the places of those chosen.
            known: results by window; new ones are added.
            run: (windows, slots=, plastic=) -> a result for each.
        """
        keys = [
            (
                int(state.rows[place]),
                tuple(self._wanted(state, place)),
                state.summarised[place].cpu().numpy().tobytes(),
            )
            for place in places.tolist()
        ]
        # of equal windows any one stands for all
        by_key = dict(zip(keys, places, strict=True))
        new = {key: place for key, place in by_key.items() if key not in known}
        if new:
            chosen = torch.stack(list(new.values()))
            rows = state.rows[chosen]
            wanted = [segments for _, segments, _ in new]
            windows = self.reader.windows(self.texts, rows.tolist(), wanted)
            slots = None
            if self._has_slots:
                slots = self.reader.summarise(self.reading, rows, state.summarised[chosen])
            recalled = self.reader.recalled(self.reading, rows, state.summarised[chosen])
            found = run(windows, slots=slots, plastic=recalled)
            known.update(zip(new, found, strict=True))
        return [known[key] for key in keys]

    def _wanted(self, state: ReadingState, place: int) -> list[int]:
        return [segment for segment in state.fetched[place].tolist() if segment >= 0]

    def _is_asked(self, state: ReadingState) -> Tensor:
        return state.time >= self.reading.texts.num_segments[state.rows]

    def _place(self, state: ReadingState) -> Tensor:
        """Returns the present segment, [N]; the last one once the question is asked."""
        count = self.reading.texts.num_segments[state.rows]
        length = self.reading.texts.tokens.shape[1]
        return length - count + torch.minimum(state.time, count - 1)

    def _retrieve(
        self, state: ReadingState, asks: Tensor, at_question: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns buffer and best score of all episodes after the retrievals of some, without
        segments of their windows.

        `asks` are the places of those some, `at_question` is True where the question is asked, [n].
        """
        # Of those alone: keys of all entries of all episodes are the most that a step would move.
        memory = state.memory[asks]
        rows = state.rows[asks]
        keys = self.reading.keys[rows.unsqueeze(1), (memory - self.num_earlier).clamp(min=0)]
        # before the question is asked it is unknown: the key of the segment itself is the query
        segment = self.reading.keys[rows, self._place(state)[asks]]
        query = torch.where(at_question.unsqueeze(1), state.query[asks], segment)
        candidates = memory
        scores = (keys @ query.unsqueeze(2)).squeeze(2)
        if self._earlier and self.num_earlier:
            # as many more as may stand in the window already
            count = self.top_k + self.config.max_spliced
            entries, cosines = self._earlier.find(query, keys, candidates >= 0, count=count)
            candidates = torch.cat([entries, candidates], dim=1)
            scores = torch.cat([cosines, scores], dim=1)
        in_window = (candidates.unsqueeze(2) == state.fetched[asks].unsqueeze(1)).any(2)
        usable = (candidates >= 0) & ~in_window
        wanted = scores
        if self._words_share:
            overlap = self._overlap(state, asks, at_question, candidates)
            overlap = overlap.masked_fill(~usable, 0.0)
            most = overlap.amax(1, keepdim=True).clamp(min=torch.finfo(overlap.dtype).tiny)
            wanted = (1 - self._words_share) * scores + self._words_share * (overlap / most)
        wanted = wanted.masked_fill(~usable, -torch.inf)
        order = wanted.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
        nearest = torch.where(usable.gather(1, order), candidates.gather(1, order), -1)
        nearest = F.pad(nearest, (0, self.top_k - nearest.shape[1]), value=-1)
        cosine = scores.masked_fill(~usable, 0.0).gather(1, order)[:, 0].clamp(min=0)
        buffer = state.buffer.index_copy(0, asks, nearest)
        return buffer, state.score.index_copy(0, asks, cosine.to(state.score.dtype))

    def _overlap(
        self, state: ReadingState, asks: Tensor, at_question: Tensor, candidates: Tensor
    ) -> Tensor:
        """Weights of the words that candidates, [n, C], share with the question and the window of
        the episodes `asks`; 0 before the question."""
        overlap = torch.zeros(candidates.shape, device=candidates.device)
        of_question = torch.nonzero(at_question).flatten()
        if len(of_question) == 0:
            return overlap
        found = []
        for place in asks[of_question].tolist():
            row, fetched = int(state.rows[place]), tuple(self._wanted(state, place))
            if (row, fetched) not in self._overlaps:
                words = self._words.setdefault(row, SharedWords(self.texts.words[row]))
                scores = words.scores(words.asked(self.texts.asked[row], fetched))
                self._overlaps[row, fetched] = torch.tensor(scores, device=candidates.device)
            found.append(self._overlaps[row, fetched])
        of_all = torch.stack(found)  # [n, segments]
        values = of_all.gather(1, candidates[of_question].clamp(min=0))
        return overlap.index_copy(0, of_question, values)
