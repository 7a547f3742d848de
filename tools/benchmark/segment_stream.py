"""Small environment of the memory agent without a backbone: a stream of random segments.

The window holds one segment. Each step takes one action and moves on; segments that were not
written to memory are lost. Then a question asks for one segment, with a few steps to retrieve it
and to splice it into the window, which solves the episode. The rules are those of
`cdrmix.reasoning.reading_environment`, fast enough to train many policies.
"""

# N episodes, L segments, D hidden, S key dimensions, M entries of memory, K retrieved, A actions

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.config.reasoning import PolicyConfig
from cdrmix.reasoning.policy import NUM_ACTIONS, Action, EpisodeOutcome, Observation, Transition

# fill, budget used, question asked, entries in the buffer, its best score, last action one-hot
NUM_FEATURES = 5 + NUM_ACTIONS


@dataclass(frozen=True)
class Streams:
    """Segments and questions of a batch of episodes; constant.

    Attributes:
        hidden: of each segment's window, [N, L, D].
        keys: of each segment, unit vectors, [N, L, S].
        live: True for segments that may be asked for, [N, L].
        question: hidden state of the window with the question, [N, D].
        query: its retrieval query, unit vectors, [N, S].
        asked: segment that answers it, [N].
    """

    hidden: Tensor
    keys: Tensor
    live: Tensor
    question: Tensor
    query: Tensor
    asked: Tensor


@dataclass(frozen=True)
class StreamState:
    """State of a batch of episodes.

    Attributes:
        streams: segments and questions.
        time: steps taken, [N].
        memory: segments written, oldest first, -1 where empty, [N, M].
        buffer: segments retrieved, best first, -1 where empty, [N, K].
        score: cosine of the best segment in the buffer, [N]; 0 where empty.
        last: last action, [N]; -1 at the start.
        operations: retrievals and writes, [N].
        harm: live segments evicted, and retrievals that cannot help the answer, [N].
        solved: True where the segment asked for was put beside the question, [N].
    """

    streams: Streams
    time: Tensor
    memory: Tensor
    buffer: Tensor
    score: Tensor
    last: Tensor
    operations: Tensor
    harm: Tensor
    solved: Tensor


class SegmentStream:
    """Rules of the stream.

    Args:
        policy: step budget, latency penalty and stability bonus.
        num_entries: M; the oldest entry gives way.
        top_k: K.
        steps_after_question: steps left once the question is asked.
        forbidden: actions that are never legal.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        *,
        num_entries: int,
        top_k: int,
        steps_after_question: int,
        forbidden: frozenset[Action] = frozenset(),
    ) -> None:
        self.config = policy
        self.num_entries = num_entries
        self.top_k = top_k
        self.steps_after_question = steps_after_question
        self.forbidden = forbidden

    def start(self, streams: Streams) -> StreamState:
        """Returns episodes before their first action."""
        count = len(streams.asked)
        device = streams.asked.device
        zero = torch.zeros(count, dtype=torch.int64, device=device)
        return StreamState(
            streams=streams,
            time=zero,
            memory=zero.new_full((count, self.num_entries), -1),
            buffer=zero.new_full((count, self.top_k), -1),
            score=torch.zeros(count, device=device),
            last=zero - 1,
            operations=zero,
            harm=zero,
            solved=zero.bool(),
        )

    def num_steps(self, streams: Streams) -> int:
        """Steps of an episode that is never solved."""
        return streams.hidden.shape[1] + self.steps_after_question

    def observe(self, state: StreamState) -> Observation:
        """Returns the agent's view of a state."""
        streams = state.streams
        asked = self._is_asked(state)
        place = self._segment(state)
        seen = streams.hidden[torch.arange(len(place), device=place.device), place]
        hidden = torch.where(asked.unsqueeze(1), streams.question, seen)
        features = torch.stack(
            [
                (state.memory >= 0).float().mean(1),
                state.time / self.config.step_budget,
                asked.float(),
                (state.buffer >= 0).float().mean(1),
                state.score,
            ],
            dim=1,
        )
        last = F.one_hot(state.last + 1, NUM_ACTIONS + 1)[:, 1:]
        return Observation(hidden, torch.cat([features, last], dim=1), self._legal(state))

    def _legal(self, state: StreamState) -> Tensor:
        """Returns the legal actions, [N, A]; SPLICE_WINDOW always is, as it moves on when empty."""
        legal = torch.ones(len(state.time), NUM_ACTIONS, dtype=torch.bool, device=state.time.device)
        legal[:, Action.RETRIEVE] = (state.memory >= 0).any(1)
        legal[:, Action.CACHE_WRITE] = ~self._is_asked(state)
        for action in self.forbidden:
            legal[:, action] = False
        legal[state.time >= self.config.step_budget] = False
        legal[:, Action.SPLICE_WINDOW] = True
        return legal

    def step(self, state: StreamState, actions: Tensor) -> Transition[StreamState]:
        """Takes one legal action per episode, [N] int64."""
        asked = self._is_asked(state)
        memory, evicted = self._written(state, actions == Action.CACHE_WRITE)
        retrieves = actions == Action.RETRIEVE
        buffer, score = self._retrieved(state, retrieves)
        splices = actions == Action.SPLICE_WINDOW
        answers = (state.buffer == state.streams.asked.unsqueeze(1)).any(1)
        useless = retrieves & (~asked | (buffer == state.buffer).all(1))
        after = dataclasses.replace(
            state,
            time=state.time + 1,
            memory=memory,
            buffer=torch.where(splices.unsqueeze(1), -1, buffer),
            score=torch.where(splices, 0.0, score),
            last=actions,
            operations=state.operations + (retrieves | (actions == Action.CACHE_WRITE)),
            harm=state.harm + evicted + useless,
            solved=state.solved | (splices & asked & answers),
        )
        out_of_budget = after.time >= self.config.step_budget
        done = after.solved | (after.time >= self.num_steps(state.streams)) | out_of_budget
        return Transition(after, done)

    def settle(self, state: StreamState) -> EpisodeOutcome[StreamState]:
        """Rewards success alone: a failure that spent little earns nothing.

        `learn_policy` has the other reward, whose costs and bonus count for failures too.
        """
        stability = 1 - state.harm / self.num_steps(state.streams)
        worth = 1 + self.config.stability_bonus * stability
        worth = worth - self.config.latency_penalty * state.operations
        return EpisodeOutcome(state, torch.where(state.solved, worth, 0.0))

    def _is_asked(self, state: StreamState) -> Tensor:
        return state.time >= state.streams.hidden.shape[1]

    def _segment(self, state: StreamState) -> Tensor:
        return state.time.clamp(max=state.streams.hidden.shape[1] - 1)

    def _written(self, state: StreamState, writes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns memory after the writes, and the number of live segments lost."""
        pushed = torch.cat([state.memory[:, 1:], self._segment(state).unsqueeze(1)], dim=1)
        oldest = state.memory[:, 0]
        was_live = state.streams.live.gather(1, oldest.clamp(min=0).unsqueeze(1)).squeeze(1)
        lost = writes & (oldest >= 0) & was_live
        return torch.where(writes.unsqueeze(1), pushed, state.memory), lost.long()

    def _retrieved(self, state: StreamState, retrieves: Tensor) -> tuple[Tensor, Tensor]:
        """Returns buffer and best score after the retrievals."""
        streams = state.streams
        filled = state.memory >= 0
        width = streams.keys.shape[2]
        places = state.memory.clamp(min=0).unsqueeze(2).expand(-1, -1, width)
        keys = streams.keys.gather(1, places)  # [N, M, S]
        # before the question is asked it is unknown: the key of the segment itself is the query
        segment = streams.keys[
            torch.arange(len(places), device=places.device), self._segment(state)
        ]
        query = torch.where(self._is_asked(state).unsqueeze(1), streams.query, segment)
        scores = (keys @ query.unsqueeze(2)).squeeze(2).masked_fill(~filled, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True)
        found = state.memory.gather(1, best.indices[:, : self.top_k])
        top = best.values[:, 0].clamp(min=0)
        return (
            torch.where(retrieves.unsqueeze(1), found, state.buffer),
            torch.where(retrieves, top, state.score),
        )
