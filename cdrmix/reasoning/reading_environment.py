"""The environment of the memory agent on real text: segments that were read, then a question.

Each step takes one action. While the text lasts, every action moves on to the next segment:

    SUMMARIZE folds the segment into the slots     CACHE_WRITE writes it to memory
    RETRIEVE reads memory                          SPLICE_WINDOW passes the segment by

Once the question stands in the window, RETRIEVE fetches the segments nearest to what the window now
asks for, SPLICE_WINDOW puts them into the window, and SPLICE_WINDOW with nothing fetched answers.
The answer's score, by the checker of `tasks`, is what the episode earns.
"""

# N rollouts, P texts, L segments, D hidden, K key dimensions, M entries, J fetched, A actions

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.reasoning.earlier import Earlier
from cdrmix.reasoning.hebbian import PlasticState
from cdrmix.reasoning.memory_reader import MemoryReader, Reading, Windows, plastic_rows
from cdrmix.reasoning.policy import NUM_ACTIONS, Action, EpisodeOutcome, Observation, Transition

# Segments that the agent may fetch; those that find no room in the window are left out.
MOST_FETCHED = 8
STEPS_AFTER_QUESTION = 9  # four times retrieve and splice, then answer
Grade = Callable[[int, Sequence[int]], float]
# (text, segments in the window, bits of those in the slots)
_Key = tuple[int, tuple[int, ...], bytes]


@dataclass(frozen=True)
class ReadingState:
    """Where a batch of episodes stands; the names shared with `StreamState` mean the same.

    Segments in memory, buffer and window are numbered through: those of earlier texts, then those
    of the text.

    Attributes:
        rows: the text of each, [N].
        time: steps taken, [N].
        memory: segments written, oldest first, -1 where empty, [N, M].
        buffer: segments retrieved, best first, -1 where empty, [N, top_k].
        score: cosine of the best of them, [N]; 0 where none.
        fetched: segments spliced into the window, the earliest first, -1 where empty, [N, J].
        summarised: segments folded into the slots, [N, L].
        last: last action, [N]; -1 at the start.
        operations: retrievals and writes, [N].
        harm: entries evicted, and retrievals to no purpose, [N].
        seen: what the agent sees of the window with the question, [N, D]; 0 before.
        query: retrieval query of that window, [N, K]; 0 before.
        filled: share of the window's room that is fetched segments, [N].
        earned: score of the answer, [N]; 0 until it is settled.
        solved: whether the episode is over, [N].
    """

    rows: Tensor
    time: Tensor
    memory: Tensor
    buffer: Tensor
    score: Tensor
    fetched: Tensor
    summarised: Tensor
    last: Tensor
    operations: Tensor
    harm: Tensor
    seen: Tensor
    query: Tensor
    filled: Tensor
    earned: Tensor
    solved: Tensor


class ReadingEpisodes:
    """Rules of reading, for a batch of texts that were read already.

    Args:
        reader: its backbone looks at windows and answers.
        reading: of P texts.
        grade: score of an answer, (text, tokens) -> 0 to 1.
        forbidden: actions that are never legal.
        earlier: what earlier texts left in memory; None: nothing.

    Attributes:
        texts: segments as states number them.
        num_earlier: of them are of earlier texts.
        retrieval_seconds: spent on looking for entries.
        num_retrievals: episodes that they were looked for in.
    """

    def __init__(
        self,
        reader: MemoryReader,
        reading: Reading,
        grade: Grade,
        *,
        forbidden: frozenset[Action] = frozenset(),
        earlier: Earlier | None = None,
    ) -> None:
        self.reader = reader
        self.reading = reading
        self.grade = grade
        self.config: PolicyConfig = reader.config.policy
        self.top_k = reader.config.memory.top_k
        # a text has no more segments to write
        self.num_entries = min(reader.capacity, reading.texts.tokens.shape[1])
        self.forbidden = forbidden
        self._earlier = earlier
        self.texts = reading.texts if earlier is None else earlier.before(reading.texts)
        self.num_earlier = len(earlier) if earlier else 0
        self.retrieval_seconds = 0.0
        self.num_retrievals = 0
        self._known: dict[_Key, tuple[Tensor, Tensor, Tensor]] = {}
        self._answered: dict[_Key, tuple[list[int], float]] = {}

    def start(self, branches: int = 1) -> ReadingState:
        """Episodes before their first action, those of one text beside each other."""
        texts = self.reading.texts
        device = texts.tokens.device
        rows = torch.arange(len(texts.tokens), device=device).repeat_interleave(branches)
        zero = torch.zeros_like(rows)
        state = ReadingState(
            rows=rows,
            time=zero,
            memory=zero.new_full((len(rows), self.num_entries), -1),
            buffer=zero.new_full((len(rows), self.top_k), -1),
            score=torch.zeros(len(rows), device=device),
            fetched=zero.new_full((len(rows), MOST_FETCHED), -1),
            summarised=torch.zeros(
                len(rows), texts.tokens.shape[1], dtype=torch.bool, device=device
            ),
            last=zero - 1,
            operations=zero,
            harm=zero,
            seen=torch.zeros(len(rows), self.reading.pooled.shape[2], device=device),
            query=torch.zeros(len(rows), self.reading.keys.shape[2], device=device),
            filled=torch.zeros(len(rows), device=device),
            earned=torch.zeros(len(rows), device=device),
            solved=zero.bool(),
        )
        return self._looked(state, self._is_asked(state))  # a text may be empty

    def observe(self, state: ReadingState) -> Observation:
        """What the agent sees in a state."""
        asked = self._is_asked(state)
        segment = self.reading.pooled[state.rows, self._place(state)]
        hidden = torch.where(asked.unsqueeze(1), state.seen, segment)
        features = torch.stack(
            [
                state.operations / self.config.step_budget,
                asked.float(),
                (state.buffer >= 0).float().mean(1),
                state.score,
                state.filled,
            ],
            dim=1,
        )
        last = F.one_hot(state.last + 1, NUM_ACTIONS + 1)[:, 1:]
        return Observation(hidden, torch.cat([features, last], dim=1), self._legal(state, asked))

    def _legal(self, state: ReadingState, asked: Tensor) -> Tensor:
        """[N, A]. SPLICE_WINDOW moves on where there is nothing to splice: it is always legal.

        The budget is of retrievals and writes: a longer text may be passed by for nothing.
        """
        legal = torch.ones(len(state.time), NUM_ACTIONS, dtype=torch.bool, device=asked.device)
        # what was found already is put into the window before there is something new to ask for
        found = asked & (state.buffer >= 0).any(1)
        holds = (state.memory >= 0).any(1) | (self.num_earlier > 0)
        legal[:, Action.RETRIEVE] = holds & ~found
        legal[:, Action.CACHE_WRITE] = ~asked
        legal[:, Action.SUMMARIZE] = ~asked
        for action in self.forbidden:
            legal[:, action] = False
        legal[state.operations >= self.config.step_budget] = False
        legal[:, Action.SPLICE_WINDOW] = True
        return legal

    @torch.no_grad()
    def step(self, state: ReadingState, actions: Tensor) -> Transition[ReadingState]:
        """Take one action per episode, [N] int64, legal ones."""
        asked = self._is_asked(state)
        running = ~state.solved
        memory, evicted = self._written(state, actions == Action.CACHE_WRITE)
        retrieves = actions == Action.RETRIEVE
        splices = actions == Action.SPLICE_WINDOW
        buffer = state.buffer
        score = state.score
        if bool(retrieves.any()):
            began = time.perf_counter()
            buffer, score = self._retrieved(state, retrieves, asked)
            self.retrieval_seconds += time.perf_counter() - began
            self.num_retrievals += len(retrieves)  # all rows are searched for, in one product
        useless = retrieves & (~asked | (buffer < 0).all(1))
        puts = splices & asked & (state.buffer >= 0).any(1)
        pushed = torch.cat([state.fetched, state.buffer], dim=1)
        pushed = pushed.gather(1, (pushed < 0).int().argsort(dim=1, stable=True))[:, :MOST_FETCHED]
        summarised = state.summarised.clone()
        folds = torch.nonzero((actions == Action.SUMMARIZE) & ~asked).flatten()
        summarised[folds, self._place(state)[folds]] = True
        after = dataclasses.replace(
            state,
            time=state.time + 1,
            memory=memory,
            buffer=torch.where(splices.unsqueeze(1), -1, buffer),
            score=torch.where(splices, 0.0, score),
            fetched=torch.where(puts.unsqueeze(1), pushed, state.fetched),
            summarised=summarised,
            last=actions,
            operations=state.operations + (retrieves | (actions == Action.CACHE_WRITE)),
            harm=state.harm + evicted + useless,
        )
        now_asked = self._is_asked(after)
        answers = splices & asked & ~puts
        out = now_asked & (after.time >= self._num_steps(after))
        done = running & (answers | out)
        after = self._looked(after, running & now_asked & ~done & (puts | ~asked))
        return Transition(dataclasses.replace(after, solved=state.solved | done), done)

    @torch.no_grad()
    def settle(self, state: ReadingState) -> EpisodeOutcome[ReadingState]:
        """Answer and reward, for what was right alone; see `stream`."""
        earned = self._earned(state)
        stability = 1 - state.harm / self._num_steps(state)
        worth = 1 + self.config.stability_bonus * stability
        worth = worth - self.config.latency_penalty * state.operations
        return EpisodeOutcome(dataclasses.replace(state, earned=earned), earned * worth)

    @torch.no_grad()
    def answers(self, state: ReadingState) -> list[list[int]]:
        """Tokens of each episode's answer."""
        return [self._answered[key][0] for key in self._answer(state)]

    def in_window(self, state: ReadingState, row: int) -> list[int]:
        """Segments that stand in the window of an episode beside its question."""
        text = int(state.rows[row])
        return sorted(self.reader.choose(self.texts, text, self._wanted(state, row))[0])

    def segment_read(self, state: ReadingState) -> int | None:
        """The segment that a single episode has before it; None once the question is asked."""
        if bool(self._is_asked(state)[0]):
            return None
        return self.num_earlier + int(self._place(state)[0])

    def _looked(self, state: ReadingState, changed: Tensor) -> ReadingState:
        """The state with what windows that changed now look like."""
        rows = torch.nonzero(changed).flatten()
        if len(rows) == 0:
            return state
        keys = self._keys(state, rows)
        new = {key: int(row) for key, row in zip(keys, rows, strict=True) if key not in self._known}
        if new:
            places = torch.tensor(list(new.values()), device=rows.device)
            windows, slots, plastic = self._window(state, places)
            output, _ = self.reader.look(windows.tokens, slots=slots, plastic=plastic)
            seen, query = self.reader.question_state(windows, output.hidden)
            free = self.reader.window_tokens - windows.question_lengths
            filled = 1 - windows.room / free
            for place, key in enumerate(new):
                self._known[key] = (seen[place], query[place], filled[place])
        found = [
            torch.stack(column) for column in zip(*(self._known[key] for key in keys), strict=True)
        ]
        return dataclasses.replace(
            state,
            seen=state.seen.index_copy(0, rows, found[0].to(state.seen.dtype)),
            query=state.query.index_copy(0, rows, found[1]),
            filled=state.filled.index_copy(0, rows, found[2]),
        )

    def _earned(self, state: ReadingState) -> Tensor:
        """Scores of the answers, [N]."""
        return state.earned.new_tensor([self._answered[key][1] for key in self._answer(state)])

    def _answer(self, state: ReadingState) -> list[_Key]:
        """Answer each window that was not answered yet; what they are kept under."""
        keys = self._keys(state, torch.arange(len(state.rows)))
        new = {key: row for row, key in enumerate(keys) if key not in self._answered}
        if new:
            places = torch.tensor(list(new.values()), device=state.rows.device)
            windows, slots, plastic = self._window(state, places)
            answers = self.reader.answer(windows, slots=slots, plastic=plastic)
            for key, answer in zip(new, answers, strict=True):
                self._answered[key] = (answer, self.grade(key[0], answer))
        return keys

    def _window(
        self, state: ReadingState, places: Tensor
    ) -> tuple[Windows, Tensor, PlasticState | None]:
        """Windows, slots and fast weights of chosen episodes."""
        rows = state.rows[places]
        windows = self.reader.windows(
            self.texts, rows.tolist(), [self._wanted(state, int(p)) for p in places]
        )
        slots = self.reader.summarise(self.reading, rows, state.summarised[places])
        return windows, slots, plastic_rows(self.reading.plastic, rows)

    def _wanted(self, state: ReadingState, place: int) -> list[int]:
        return [segment for segment in state.fetched[place].tolist() if segment >= 0]

    def _keys(self, state: ReadingState, rows: Tensor) -> list[_Key]:
        """What the look of a window depends on; rollouts of one text often share it."""
        return [
            (
                int(state.rows[row]),
                tuple(self._wanted(state, row)),
                state.summarised[row].cpu().numpy().tobytes(),
            )
            for row in rows.tolist()
        ]

    def _num_steps(self, state: ReadingState) -> Tensor:
        return self.reading.texts.num_segments[state.rows] + STEPS_AFTER_QUESTION

    def _is_asked(self, state: ReadingState) -> Tensor:
        return state.time >= self.reading.texts.num_segments[state.rows]

    def _place(self, state: ReadingState) -> Tensor:
        """The segment that stands in the window, [N]."""
        count = self.reading.texts.num_segments[state.rows]
        length = self.reading.texts.tokens.shape[1]
        return length - count + torch.minimum(state.time, count - 1)

    def _written(self, state: ReadingState, writes: Tensor) -> tuple[Tensor, Tensor]:
        """Memory after the writes, the oldest first, and how many entries were lost, [N]."""
        place = self.num_earlier + self._place(state)
        pushed = torch.cat([state.memory[:, 1:], place.unsqueeze(1)], dim=1)
        lost = writes & (state.memory[:, 0] >= 0)
        return torch.where(writes.unsqueeze(1), pushed, state.memory), lost.long()

    def _retrieved(
        self, state: ReadingState, retrieves: Tensor, asked: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Buffer and its best score after the retrievals; what is in the window is not fetched."""
        places = (state.memory - self.num_earlier).clamp(min=0)
        rows = state.rows.unsqueeze(1)
        keys = self.reading.keys[rows, places]  # [N, M, K]
        # before the question is asked nobody knows it: a segment looks for what is like itself
        own = self.reading.keys[state.rows, self._place(state)]
        query = torch.where(asked.unsqueeze(1), state.query, own)
        held = state.memory
        scores = (keys @ query.unsqueeze(2)).squeeze(2)
        if self._earlier:  # of which some may stand in the window
            count = self.top_k + MOST_FETCHED
            found, cosines = self._earlier.find(query, keys, held >= 0, count=count)
            held = torch.cat([found, held], dim=1)
            scores = torch.cat([cosines, scores], dim=1)
        there = (held.unsqueeze(2) == state.fetched.unsqueeze(1)).any(2)
        usable = (held >= 0) & ~there
        best = scores.masked_fill(~usable, -torch.inf).sort(dim=1, descending=True, stable=True)
        order = best.indices[:, : self.top_k]
        found = torch.where(usable.gather(1, order), held.gather(1, order), -1)
        found = F.pad(found, (0, self.top_k - found.shape[1]), value=-1)
        top = best.values[:, 0].clamp(min=0)
        return (
            torch.where(retrieves.unsqueeze(1), found, state.buffer),
            torch.where(retrieves, top, state.score),
        )
