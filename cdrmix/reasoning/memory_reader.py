"""Backbone that reads texts longer than its window, and answers from its memory of them.

A text is read segment by segment, and the backbone's state and cache begin anew at each. Fast
weights (`hebbian`), slots (`working_memory`) and segments written to memory remain. The hidden
states of a segment do not depend on the agent's actions, so that one reading serves all episodes of
a text. At the end the window holds segments fetched from memory and the question:

    <memory> segment ... <memory> segment <memory> question <answer> the answer, token by token
"""

# N texts, L segments of at most S tokens, D hidden, K key dimensions, n windows of T tokens
# Several windows may be of one text, so that functions on windows take the text of each as `rows`.

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import StageBConfig
from cdrmix.models.backbone import Backbone, Output
from cdrmix.planning.stage_b import segment_tokens
from cdrmix.reasoning.hebbian import EpisodeState, PlasticAdapter, PlasticBackbone, PlasticState
from cdrmix.reasoning.policy import NUM_ACTIONS, MemoryPolicy
from cdrmix.reasoning.segments import Marks, Texts, fitting, window_tokens
from cdrmix.reasoning.state_rows import select
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory

# budget used, question asked, buffer filled, its best score, window filled, last action
NUM_FEATURES = 5 + NUM_ACTIONS
# Room of a window for its answer: three made-up words of four tokens, and the stop.
ANSWER_TOKENS = 14
# Segments are read together in passes of at least so many tokens, each as a document of its own:
# passes of single segments of small windows would cost more in calls than in arithmetic.
_LEAST_PASS_TOKENS = 256
# A tenth of the gain of adapters that learn beside an untrained backbone: a trained one is hardly
# disturbed before the adapters have learned what is worth storing.
_INITIAL_GAIN = 1.0


@dataclass(frozen=True)
class Reading:
    """Result of reading a batch of texts.

    Attributes:
        texts: as they were read.
        hidden: of every token, [N, L, S, D].
        pooled: mean over the tokens of each segment, [N, L, D]; 0 where empty.
        keys: of the segments, unit vectors, [N, L, K].
        plastic: fast weights after the last token; None where they are switched off.
        correlation: local objective of the adapters, summed over texts; None unless asked for.
    """

    texts: Texts
    hidden: Tensor
    pooled: Tensor
    keys: Tensor
    plastic: PlasticState | None
    correlation: Tensor | None = None


@dataclass(frozen=True)
class Windows:
    """Windows of segments and a question.

    Attributes:
        rows: text of each window, [n].
        tokens: [n, T] int64, padded at the end.
        lengths: without padding, [n].
        question_lengths: tokens of the question and the marks around it, [n]; they end the window.
        room: tokens of segments that would still fit, [n].
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    question_lengths: Tensor
    room: Tensor

    @property
    def question_mask(self) -> Tensor:
        """True for the tokens of the question and its marks, [n, T]."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        ends = self.lengths.unsqueeze(1)
        return (place < ends) & (place >= ends - self.question_lengths.unsqueeze(1))


class MemoryReader(nn.Module):
    """Backbone with adapters, working memory, retrieval encoder and memory agent.

    Args:
        backbone: trained or not.
        stage_b: dimensions of the parts.
        window_tokens: length of a window, with question and answer.
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
        """Backbone; without memory it computes what it did before."""
        return self.plastic.backbone

    @property
    def capacity(self) -> int:
        """Most segments that memory holds."""
        return max(self.config.memory.max_tokens // self.segment_tokens, 1)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Sets the initial values of all parts but the backbone from the seed."""
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
        """Reads texts to their end.

        Args:
            texts: N texts.
            plastic: False leaves the fast weights out.
            with_correlation: compute the adapters' local objective too.
        """
        state = self.plastic.start(len(texts.tokens)) if plastic else None
        step = max(self.window_tokens, _LEAST_PASS_TOKENS) // self.segment_tokens
        hidden = []
        correlations = []
        for first in range(0, texts.tokens.shape[1], step):
            part = slice(first, first + step)
            tokens = texts.tokens[:, part].flatten(1)
            mask = texts.mask[:, part].flatten(1)
            segments = torch.arange(tokens.shape[1], device=tokens.device) // self.segment_tokens
            segments = segments.expand_as(tokens)
            if state is None:
                # as under the memory phase's plain reading, which is cheaper without hooks
                hidden.append(self.backbone(tokens, segment_ids=segments).hidden)
                continue
            read = self.plastic(
                tokens,
                state=state,
                segment_ids=segments,
                mask=mask,
                with_correlation=with_correlation,
            )
            state = EpisodeState(None, read.state.plastic)
            hidden.append(read.output.hidden)
            if read.correlation is not None:
                correlations.append(read.correlation)
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
        """Folds chosen segments into fresh slots, in their order, [n, slots, width].

        Args:
            reading: of N texts.
            rows: text of each result, [n].
            chosen: True for segments to fold, [n, L].
        """
        slots = self.memory.start(len(rows))
        mask = reading.texts.mask
        # segment by segment for all rows, as a write depends on the slots before it
        for place in torch.nonzero(chosen.any(0)).flatten().tolist():
            after = self.memory.write(slots, reading.hidden[rows, place], mask[rows, place])
            slots = torch.where(chosen[:, place].view(-1, 1, 1), after, slots)
        return slots

    def windows(
        self, texts: Texts, rows: Sequence[int], fetched: Sequence[Sequence[int]]
    ) -> Windows:
        """Builds windows of fetched segments, in the order of the text, and the question.

        Args:
            texts: N texts.
            rows: text of each window.
            fetched: segments of each window, the most wanted first; the first one without room and
                all behind it are left out.
        """
        windows = []
        rooms = []
        for row, wanted in zip(rows, fetched, strict=True):
            places, room = self.choose(texts, row, wanted)
            rooms.append(room)
            segments = [texts.segment(row, place) for place in sorted(places)]
            windows.append(window_tokens(segments, texts.questions[row], self.marks))
        device = texts.tokens.device
        tokens = torch.full((len(windows), max(map(len, windows))), self.marks.pad)
        for place, ids in enumerate(windows):
            tokens[place, : len(ids)] = torch.tensor(ids)
        return Windows(
            rows=torch.tensor(rows, device=device),
            tokens=tokens.to(device),
            lengths=torch.tensor([len(ids) for ids in windows], device=device),
            question_lengths=torch.tensor(
                [len(texts.questions[row]) + 2 for row in rows], device=device
            ),
            room=torch.tensor(rooms, device=device),
        )

    def last_windows(self, texts: Texts) -> Windows:
        """Builds the windows of a reader without memory: last segments of the text, question."""
        latest = range(texts.tokens.shape[1] - 1, -1, -1)
        rows = range(len(texts.questions))
        return self.windows(texts, rows, [latest] * len(rows))

    def choose(self, texts: Texts, row: int, wanted: Sequence[int]) -> tuple[list[int], int]:
        """Returns the wanted segments that fit into the window of a text, and the room left."""
        room = segment_room(self.window_tokens, len(texts.questions[row]))
        return fitting(texts.lengths[row].tolist(), wanted, room)

    @contextlib.contextmanager
    def remembering(self, slots: Tensor | None) -> Iterator[None]:
        """Lets the backbone read slots while this lasts; None: without."""
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
        """Runs one pass over windows, which writes neither slots nor fast weights.

        Args:
            tokens: of windows, or those that continue `blocks`, [n, T].
            slots: of each window, [n, slots, width]; None without.
            plastic: fast weights of each window; None without.
            blocks: from an earlier pass.
            return_blocks: return the state from which a later pass goes on.
        """
        if plastic is None:
            # blocks are returned in the same form, so that decoding goes on in either case
            with self.remembering(slots):
                before = blocks.blocks if blocks else None
                output = self.backbone(tokens, state=before, return_state=return_blocks)
            return output, EpisodeState(output.state, PlasticState({}, 0))
        state = EpisodeState(blocks.blocks if blocks else None, plastic)
        with self.remembering(slots):
            read = self.plastic(tokens, state=state, writes=False, return_blocks=return_blocks)
        return read.output, read.state

    def question_state(self, windows: Windows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pools the question's hidden states, [n, T, D] -> [n, D], and makes queries [n, K]."""
        pooled = _masked_mean(hidden, windows.question_mask)
        return pooled, self.retrieval.query(pooled)

    @torch.no_grad()
    def answer(
        self, windows: Windows, *, slots: Tensor | None, plastic: PlasticState | None
    ) -> list[list[int]]:
        """Decodes greedy answers, without the stop.

        Args:
            windows: n windows.
            slots: of each window; None without.
            plastic: fast weights of each window; None without.
        """
        answers: list[list[int]] = [[] for _ in windows.rows]
        # windows of equal length together, so that neither state nor cache holds padding
        for length in windows.lengths.unique().tolist():
            group = torch.nonzero(windows.lengths == length).flatten()
            decoded = self._decode(
                windows.tokens[group, :length],
                None if slots is None else slots[group],
                None if plastic is None else select(plastic, group),
            )
            for place, tokens in zip(group.tolist(), decoded.tolist(), strict=True):
                end = tokens.index(self.marks.stop) if self.marks.stop in tokens else None
                answers[place] = tokens[:end]
        return answers

    def _decode(self, tokens: Tensor, slots: Tensor | None, plastic: PlasticState | None) -> Tensor:
        """Decodes until all answers have stopped, [n, T] -> [n, <= ANSWER_TOKENS]."""
        # rows that have stopped are decoded on, which keeps the batch whole, and cut by the caller
        stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        answer = []
        state = None
        for _ in range(ANSWER_TOKENS):
            output, state = self.look(
                tokens, slots=slots, plastic=plastic, blocks=state, return_blocks=True
            )
            next_tokens = self.backbone.logits(output.hidden[:, -1]).argmax(-1)
            answer.append(next_tokens)
            stopped |= next_tokens == self.marks.stop
            if bool(stopped.all()):
                break
            tokens = next_tokens.unsqueeze(1)
        return torch.stack(answer, dim=1)

    @torch.no_grad()
    def answer_alone(self, texts: Texts) -> list[list[int]]:
        """Answers with the backbone alone, from the end of each text."""
        return self.answer(self.last_windows(texts), slots=None, plastic=None)


def segment_room(window_tokens: int, question_tokens: int) -> int:
    """Returns the tokens of segments that fit into a window beside question and answer."""
    return window_tokens - ANSWER_TOKENS - question_tokens - 2


def plastic_rows(plastic: PlasticState | None, rows: Tensor) -> PlasticState | None:
    """Selects the fast weights of chosen texts, [n]."""
    return None if plastic is None else select(plastic, rows)


def _masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Averages over the tokens of a mask, [..., T, D] -> [..., D]; 0 where there are none."""
    total = (hidden * mask.unsqueeze(-1)).sum(-2)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)
