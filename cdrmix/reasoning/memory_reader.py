"""A backbone that reads texts longer than its window, and answers from what it kept.

The text is read segment by segment. The backbone forgets at every border, state and cache; what
remains is fast weights (`hebbian`), slots (`working_memory`) and the segments that were written to
memory. How a segment looks does not depend on what was done with those before it, so that one
reading serves all branches of an agent. At the end the window holds segments fetched from memory
and the question:

    <memory> segment ... <memory> segment <memory> question <answer> the answer, token by token
"""

# N texts, L segments of at most S tokens, D hidden, K key dimensions, n windows of T tokens

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import StageBConfig
from cdrmix.models.backbone import Backbone, Output
from cdrmix.planning.stage_b_memory import segment_tokens
from cdrmix.reasoning.hebbian import EpisodeState, PlasticAdapter, PlasticBackbone, PlasticState
from cdrmix.reasoning.policy import NUM_ACTIONS, MemoryPolicy
from cdrmix.reasoning.segments import Marks, Texts, fitting, window_tokens
from cdrmix.reasoning.state_rows import select
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory

# budget used, question asked, buffer filled, its best score, window filled, last action
NUM_FEATURES = 5 + NUM_ACTIONS
# Room that a window keeps for its answer: three made-up words of four tokens, and the stop.
ANSWER_TOKENS = 14
# Segments are read together in passes of at least so many tokens; each is its own document there.
_LEAST_PASS_TOKENS = 256
# A tenth of what adapters have that learn with an untrained backbone: a trained one is disturbed
# little before they have learned what is worth storing.
_INITIAL_GAIN = 1.0


@dataclass(frozen=True)
class Reading:
    """What a batch of texts left behind.

    Attributes:
        texts: that were read.
        hidden: of every token, [N, L, S, D].
        pooled: mean over the tokens of each segment, [N, L, D]; 0 where empty.
        keys: of the segments, unit vectors, [N, L, K].
        plastic: fast weights after the last token; None where they are switched off.
        correlation: objective of the adapters, summed over texts; None unless asked for.
    """

    texts: Texts
    hidden: Tensor
    pooled: Tensor
    keys: Tensor
    plastic: PlasticState | None
    correlation: Tensor | None = None


@dataclass(frozen=True)
class Windows:
    """Windows with a question.

    Attributes:
        rows: the text that each is about, [n].
        tokens: [n, T] int64, filled up behind.
        lengths: [n].
        question_lengths: tokens of the question with the marks around it, which end the window.
        room: tokens of segments that would still fit, [n].
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    question_lengths: Tensor
    room: Tensor

    @property
    def question_mask(self) -> Tensor:
        """Which tokens are the question with its marks, [n, T]."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        ends = self.lengths.unsqueeze(1)
        return (place < ends) & (place >= ends - self.question_lengths.unsqueeze(1))


class MemoryReader(nn.Module):
    """A backbone with adapters, working memory, retrieval encoder and memory agent.

    Args:
        backbone: taken over as it is.
        stage_b: dimensions of the parts.
        window_tokens: tokens that the backbone sees at a time, question and answer included.
        marks: of the tokenizer.
    """

    def __init__(
        self, backbone: Backbone, stage_b: StageBConfig, *, window_tokens: int, marks: Marks
    ) -> None:
        super().__init__()
        width = backbone.config.hidden_size
        self.plastic = PlasticBackbone(backbone, stage_b.adapters)
        self.memory = WorkingMemory(width, stage_b.memory)
        self.retrieval = RetrievalEncoder(width, stage_b.memory.summary_dim)
        self.policy = MemoryPolicy(width, NUM_FEATURES)
        self.config = stage_b
        self.marks = marks
        self.window_tokens = window_tokens
        self.segment_tokens = segment_tokens(window_tokens)

    @property
    def backbone(self) -> Backbone:
        """The backbone, whose numbers without memory are what they were."""
        return self.plastic.backbone

    @property
    def capacity(self) -> int:
        """Segments that memory holds at most."""
        return max(self.config.memory.max_tokens // self.segment_tokens, 1)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Set the initial values of all parts but the backbone from the seed."""
        self.plastic.initialize(seed=seed)
        for adapter in self.plastic.adapters.values():
            assert isinstance(adapter, PlasticAdapter), "the table holds adapters only"
            adapter.gain.fill_(_INITIAL_GAIN)
        self.memory.initialize(seed=seed)
        self.retrieval.initialize(seed=seed)
        self.policy.initialize(seed=seed)

    def read(
        self, texts: Texts, *, plastic: bool = True, with_correlation: bool = False
    ) -> Reading:
        """Read texts to their end.

        Args:
            texts: N of them.
            plastic: False leaves the fast weights out.
            with_correlation: also give the adapters' local objective.
        """
        state = self.plastic.start(len(texts.tokens)) if plastic else None
        step = max(self.window_tokens, _LEAST_PASS_TOKENS) // self.segment_tokens
        hidden = []
        correlations = []
        for first in range(0, texts.tokens.shape[1], step):
            part = slice(first, first + step)
            tokens = texts.tokens[:, part].flatten(1)
            mask = texts.mask[:, part].flatten(1)
            borders = torch.arange(tokens.shape[1], device=tokens.device) // self.segment_tokens
            borders = borders.expand_as(tokens)
            if state is None:
                hidden.append(self.backbone(tokens, segment_ids=borders).hidden)
                continue
            found = self.plastic(
                tokens,
                state=state,
                segment_ids=borders,
                mask=mask,
                with_correlation=with_correlation,
            )
            state = EpisodeState(None, found.state.plastic)
            hidden.append(found.output.hidden)
            if found.correlation is not None:
                correlations.append(found.correlation)
        every = torch.cat(hidden, dim=1).unflatten(1, texts.tokens.shape[1:])  # [N, L, S, D]
        pooled = _masked_mean(every, texts.mask)
        return Reading(
            texts=texts,
            hidden=every,
            pooled=pooled,
            keys=self.retrieval.key(pooled.flatten(0, 1).unsqueeze(1)).unflatten(
                0, pooled.shape[:2]
            ),
            plastic=state.plastic if state else None,
            correlation=torch.stack(correlations).mean() if correlations else None,
        )

    def summarise(self, reading: Reading, rows: Tensor, chosen: Tensor) -> Tensor:
        """Slots after chosen segments were folded into them in their order, [n, slots, width].

        Args:
            reading: N texts.
            rows: text of each, [n].
            chosen: which of its segments, [n, L].
        """
        slots = self.memory.start(len(rows))
        mask = reading.texts.mask
        for place in torch.nonzero(chosen.any(0)).flatten().tolist():
            after = self.memory.write(slots, reading.hidden[rows, place], mask[rows, place])
            slots = torch.where(chosen[:, place].view(-1, 1, 1), after, slots)
        return slots

    def windows(
        self, texts: Texts, rows: Sequence[int], fetched: Sequence[Sequence[int]]
    ) -> Windows:
        """Windows with fetched segments, in the order of the text, and the question.

        Args:
            texts: N of them.
            rows: text of each window.
            fetched: segments to put there, the most wanted first; from the first that finds no
                room on they are left out.
        """
        built = []
        rooms = []
        for row, wanted in zip(rows, fetched, strict=True):
            chosen, room = self.choose(texts, row, wanted)
            rooms.append(room)
            segments = [texts.segment(row, place) for place in sorted(chosen)]
            built.append(window_tokens(segments, texts.questions[row], self.marks))
        return self._stacked(texts, rows, built, rooms)

    def last_windows(self, texts: Texts) -> Windows:
        """What a window of each text holds that was only read: its last segments, the question."""
        latest = range(texts.tokens.shape[1] - 1, -1, -1)
        rows = range(len(texts.questions))
        return self.windows(texts, rows, [latest] * len(rows))

    def choose(self, texts: Texts, row: int, wanted: Sequence[int]) -> tuple[list[int], int]:
        """Which of the wanted segments fit into the window of a text, and how much room is left."""
        room = segment_room(self.window_tokens, len(texts.questions[row]))
        return fitting(texts.lengths[row].tolist(), wanted, room)

    def _stacked(
        self,
        texts: Texts,
        rows: Sequence[int],
        built: Sequence[Sequence[int]],
        rooms: Sequence[int],
    ) -> Windows:
        device = texts.tokens.device
        tokens = torch.full((len(built), max(map(len, built))), self.marks.pad)
        for place, ids in enumerate(built):
            tokens[place, : len(ids)] = torch.tensor(ids)
        return Windows(
            rows=torch.tensor(rows, device=device),
            tokens=tokens.to(device),
            lengths=torch.tensor([len(ids) for ids in built], device=device),
            question_lengths=torch.tensor(
                [len(texts.questions[row]) + 2 for row in rows], device=device
            ),
            room=torch.tensor(rooms, device=device),
        )

    @contextlib.contextmanager
    def remembering(self, slots: Tensor | None) -> Iterator[None]:
        """While this lasts, the backbone reads the slots; None: it does not."""
        if slots is None:
            yield
            return
        with self.memory.reading(self.backbone, slots):
            yield

    def look(
        self,
        tokens: Tensor,
        *,
        slots: Tensor | None,
        plastic: PlasticState | None,
        blocks: EpisodeState | None = None,
        return_blocks: bool = False,
    ) -> tuple[Output, EpisodeState | None]:
        """One pass over windows, which stores nothing.

        Args:
            tokens: [n, T]; of windows, or what follows on `blocks`.
            slots: of each window, [n, slots, width]; None without.
            plastic: fast weights of each window; None without.
            blocks: from an earlier pass.
            return_blocks: give what a later pass goes on from.
        """
        if plastic is None:
            with self.remembering(slots):
                before = blocks.blocks if blocks else None
                output = self.backbone(tokens, state=before, return_state=return_blocks)
            return output, EpisodeState(output.state, PlasticState({}, 0))
        state = EpisodeState(blocks.blocks if blocks else None, plastic)
        with self.remembering(slots):
            found = self.plastic(tokens, state=state, writes=False, return_blocks=return_blocks)
        return found.output, found.state

    def question_state(self, windows: Windows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the agent sees of windows [n, D], and their queries [n, K], from [n, T, D]."""
        seen = _masked_mean(hidden, windows.question_mask)
        return seen, self.retrieval.query(seen)

    @torch.no_grad()
    def answer(
        self, windows: Windows, *, slots: Tensor | None, plastic: PlasticState | None
    ) -> list[list[int]]:
        """Greedy answers, without the stop.

        Windows of equal length go together, so that state and cache never hold filling.

        Args:
            windows: n of them.
            slots: of each window; None without.
            plastic: fast weights of each window; None without.
        """
        answers: list[list[int]] = [[] for _ in windows.rows]
        for length in windows.lengths.unique().tolist():
            group = torch.nonzero(windows.lengths == length).flatten()
            found = self._decode(
                windows.tokens[group, :length],
                None if slots is None else slots[group],
                None if plastic is None else select(plastic, group),
            )
            for place, tokens in zip(group.tolist(), found.tolist(), strict=True):
                end = tokens.index(self.marks.stop) if self.marks.stop in tokens else None
                answers[place] = tokens[:end]
        return answers

    def _decode(self, tokens: Tensor, slots: Tensor | None, plastic: PlasticState | None) -> Tensor:
        """[n, T] -> [n, <= ANSWER_TOKENS]."""
        stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        chosen = []
        state = None
        for _ in range(ANSWER_TOKENS):
            output, state = self.look(
                tokens, slots=slots, plastic=plastic, blocks=state, return_blocks=True
            )
            next_tokens = self.backbone.logits(output.hidden[:, -1]).argmax(-1)
            chosen.append(next_tokens)
            stopped |= next_tokens == self.marks.stop
            if bool(stopped.all()):
                break
            tokens = next_tokens.unsqueeze(1)
        return torch.stack(chosen, dim=1)

    @torch.no_grad()
    def answer_alone(self, texts: Texts) -> list[list[int]]:
        """What the backbone answers from the end of each text, without any memory."""
        return self.answer(self.last_windows(texts), slots=None, plastic=None)


def segment_room(window_tokens: int, question_tokens: int) -> int:
    """Tokens of segments that fit into a window beside a question and its answer."""
    return window_tokens - ANSWER_TOKENS - question_tokens - 2


def plastic_rows(plastic: PlasticState | None, rows: Tensor) -> PlasticState | None:
    """Fast weights of chosen texts, [n]."""
    return None if plastic is None else select(plastic, rows)


def _masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of a mask, [..., T, D] -> [..., D]; 0 where there are none."""
    total = (hidden * mask.unsqueeze(-1)).sum(-2)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)
