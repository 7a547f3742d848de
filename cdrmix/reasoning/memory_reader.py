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

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdrmix.config.reasoning import MemoryPart, StageBConfig
from cdrmix.models.attention import AttentionState, below_each_other
from cdrmix.models.backbone import Backbone, Output
from cdrmix.models.block import BlockState
from cdrmix.models.state_rows import joined, map_tensors, part, select
from cdrmix.planning.blocks.block_type import layer_type
from cdrmix.planning.lesson_sizes import question_head, segment_tokens, segments_of_pass
from cdrmix.reasoning.carried_state import carry
from cdrmix.reasoning.hebbian import EpisodeState, PlasticBackbone
from cdrmix.reasoning.policy import NUM_ACTIONS, Action, MemoryPolicy
from cdrmix.reasoning.segments import Asked, Marks, Texts, ask_first, fitting, window_tokens
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory

# budget used, question asked, buffer filled, its best score (of a segment, how near it is to a
# question that is read first), window filled, last action
NUM_FEATURES = 5 + NUM_ACTIONS
AT_QUESTION = 1  # the feature that is 1 once the question is asked, else 0
NEARNESS = 3  # the best score
# Answers are decoded together from as many full windows at most.
_WINDOWS_TOGETHER = 32
# A tenth of the gain of adapters that learn beside an untrained backbone: a trained one is hardly
# disturbed before the adapters have learned what is worth storing.
_INITIAL_GAIN = 1.0


@dataclass(frozen=True)
class Reading:
    """Result of reading a batch of texts."""

    texts: Texts  # as they were read
    hidden: Tensor  # of every token, [N, L, S, D]
    pooled: Tensor  # mean over the tokens of each segment, [N, L, D]; 0 where empty
    keys: Tensor  # of the segments, unit vectors, [N, L, K]
    # fast weights after the last token; None where they are switched off
    plastic: EpisodeState | None
    # local objective of the adapters, summed over texts; None unless asked for
    correlation: Tensor | None = None


@dataclass(frozen=True)
class Windows:
    """Windows of segments and a question."""

    tokens: Tensor  # [n, T] int64, padded at the end
    lengths: Tensor  # without padding, [n]
    # tokens of the question and the marks around it, [n]; they end the window
    question_lengths: Tensor
    room: Tensor  # tokens of segments that would still fit, [n]


class MemoryReader(nn.Module):
    """Backbone, trained or not, with adapters, working memory, retrieval encoder and memory agent.

    A window has `window_tokens` tokens, with question and answer.
    """

    def __init__(
        self, backbone: Backbone, stage_b: StageBConfig, *, window_tokens: int, marks: Marks
    ) -> None:
        super().__init__()
        width = backbone.config.hidden_size
        self.plastic = PlasticBackbone(backbone, stage_b.adapters)
        self.memory = WorkingMemory(width, stage_b.memory)
        self.retrieval = RetrievalEncoder(width, stage_b.memory.summary_dim)
        self.config = stage_b
        self.marks = marks
        self.window_tokens = window_tokens
        training = stage_b.training
        self.segment_tokens = segment_tokens(window_tokens, training.segment_tokens)
        self.answer_tokens = training.answer_tokens
        self.asks_first = training.question == "first"
        # How near a segment is to the question has to decide what is kept, beside a hidden state of
        # many values: with a factor of 1 agents keep what comes first.
        weights = {NEARNESS: width / 2} if self.asks_first else None
        value_width = stage_b.policy.value_width
        self.policy = MemoryPolicy(width, NUM_FEATURES, value_width=value_width, weights=weights)
        self._joins_lengths = all(
            kind == "transformer" or layer_type(backbone.config, layer).carries_state
            for layer, kind in enumerate(backbone.config.layer_kinds())
        )

    @property
    def backbone(self) -> Backbone:
        """Backbone; without memory it computes what it did before."""
        return self.plastic.backbone

    def has(self, part: MemoryPart) -> bool:
        """True for a memory that this reader has."""
        return part in self.config.memory.parts

    @property
    def capacity(self) -> int:
        """Most segments that memory holds."""
        return max(self.config.memory.max_tokens // self.segment_tokens, 1)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Sets the initial values of all parts but the backbone from the seed."""
        self.plastic.initialize(seed=seed, gain=_INITIAL_GAIN)
        for module in (self.memory, self.retrieval, self.policy):
            module.initialize(seed=seed)
        # Before the question two of four actions cost an operation. An agent to whom all are as
        # likely has spent the budget long before the end of a text with many more segments, so that
        # only what stands at the beginning could teach it. So it passes more of them by at first.
        most = max(self.config.training.length_ratios) * self.window_tokens // self.segment_tokens
        passing = math.log(max(2 * most / self.config.policy.step_budget - 3, 1.0))
        features = self.policy.feature_policy
        features.bias[Action.SPLICE_WINDOW] = passing
        features.weight[Action.SPLICE_WINDOW, AT_QUESTION] = -passing

    def read(
        self, texts: Texts, *, plastic: bool = True, with_correlation: bool = False
    ) -> Reading:
        """Reads texts to their end, with fast weights and their local objective if asked for."""
        plastic = plastic and self.has("plastic")
        state = self.plastic.start(len(texts.tokens)) if plastic else None
        asked = self._asked(texts)
        inputs = texts.tokens if asked is None else asked.tokens
        input_mask = texts.mask if asked is None else asked.mask
        width = inputs.shape[2]
        step = segments_of_pass(self.window_tokens, width)
        hidden = []
        correlations = []
        for first in range(0, texts.tokens.shape[1], step):
            taken = slice(first, first + step)
            tokens = inputs[:, taken].flatten(1)
            places = torch.arange(tokens.shape[1], device=tokens.device)
            segments = (places // width).expand_as(tokens)
            if state is None:
                # as under the memory phase's plain reading, which is cheaper without hooks
                hidden.append(self.backbone(tokens, segment_ids=segments).hidden)
                continue
            read = self.plastic(
                tokens,
                state=state,
                segment_ids=segments,
                mask=input_mask[:, taken].flatten(1),
                with_correlation=with_correlation,
            )
            state = read.state
            hidden.append(read.output.hidden)
            if read.correlation is not None:
                correlations.append(read.correlation)
        every = torch.cat(hidden, dim=1).unflatten(1, inputs.shape[1:])  # [N, L, S, D]
        if asked is not None:  # of the segments alone
            index = asked.places.view(len(every), 1, -1, 1)
            every = every.gather(2, index.expand(-1, every.shape[1], -1, every.shape[3]))
        pooled = _masked_mean(every, texts.mask)
        keys = self.retrieval.key(pooled.flatten(0, 1).unsqueeze(1)).unflatten(0, pooled.shape[:2])
        correlation = torch.stack(correlations).mean() if correlations else None
        return Reading(texts, every, pooled, keys, state, correlation)

    def _asked(self, texts: Texts) -> Asked | None:
        """Segments behind their questions, where these are read first."""
        if not self.asks_first:
            return None
        return ask_first(texts, self.marks, room=question_head(self.window_tokens))

    def summarise(self, reading: Reading, rows: Tensor, chosen: Tensor) -> Tensor | None:
        """Folds chosen segments [n, L] into fresh slots, in their order, [n, slots, width].

        `rows`, [n], says of which text each row is. None without slots.
        """
        if not self.has("slots"):
            return None
        slots = self.memory.start(len(rows))
        mask = reading.texts.mask
        counts = chosen.sum(1)
        # of each row the chosen places first, in the order of the text
        places = chosen.int().argsort(dim=1, descending=True, stable=True)
        # the n-th segment of all rows at once, as a write depends on the slots before it
        for number in range(int(counts.max()) if len(rows) else 0):
            place = places[:, number]
            after = self.memory.write(slots, reading.hidden[rows, place], mask[rows, place])
            slots = torch.where((number < counts).view(-1, 1, 1), after, slots)
        return slots

    def recalled(self, reading: Reading, rows: Tensor, chosen: Tensor) -> EpisodeState | None:
        """Returns what windows of texts `rows`, [n], begin with beside slots.

        These are fast weights, and, where the reader carries it, the recurrent state behind the
        segments `chosen`, [n, L], read one after another.
        """
        plastic = select(reading.plastic, rows)
        if not self.has("state"):
            return plastic
        texts = reading.texts
        committed = [
            # a mark before them, so that a row without a segment has a state too
            [self.marks.memory]
            + [id for place in places.nonzero().flatten() for id in texts.segment(row, int(place))]
            for row, places in zip(rows.tolist(), chosen, strict=True)
        ]
        blocks = carry(self.backbone, committed, window_tokens=self.window_tokens)
        return dataclasses.replace(plastic or EpisodeState({}, 0), blocks=blocks)

    def windows(
        self, texts: Texts, rows: Sequence[int], fetched: Sequence[Sequence[int]]
    ) -> Windows:
        """Builds windows of fetched segments, in the order of the text, and the question.

        `rows` holds the text of each window, `fetched` its segments as `choose` takes them.
        """
        windows = []
        rooms = []
        for row, wanted in zip(rows, fetched, strict=True):
            places, room = self.choose(texts, row, wanted)
            rooms.append(room)
            segments = [texts.segment(row, place) for place in sorted(places)]
            windows.append(window_tokens(segments, texts.questions[row], self.marks))
        lengths = [len(ids) for ids in windows]
        questions = [len(texts.questions[row]) + 2 for row in rows]
        tokens = torch.full((len(windows), max(lengths)), self.marks.pad)
        for place, ids in enumerate(windows):
            tokens[place, : len(ids)] = torch.tensor(ids)
        device = texts.tokens.device
        numbers = (torch.tensor(each, device=device) for each in (lengths, questions, rooms))
        return Windows(tokens.to(device), *numbers)

    def choose(self, texts: Texts, row: int, wanted: Sequence[int]) -> tuple[list[int], int]:
        """Returns the `fitting` segments for the window of a text, and the room left."""
        question = len(texts.questions[row])
        room = segment_room(self.window_tokens, question, self.answer_tokens)
        return fitting(texts.lengths[row].tolist(), wanted, room)

    def look(
        self,
        tokens: Tensor,
        *,
        slots: Tensor | None,
        plastic: EpisodeState | None,
        return_blocks: bool = False,
    ) -> tuple[Output, EpisodeState]:
        """Runs one pass over windows, which writes neither slots nor fast weights.

        Args:
            tokens: of windows, or those that continue a pass, [n, T].
            slots: of each window, [n, slots, width]; None without.
            plastic: fast weights of each window, or the state of the pass to continue; None, or one
                without fast weights, leaves them out.
            return_blocks: return the state from which a later pass goes on.
        """
        state = plastic or EpisodeState({}, 0)
        with self.memory.reading(self.backbone, slots):
            if state.layers:
                read = self.plastic(tokens, state=state, writes=False, return_blocks=return_blocks)
                return read.output, read.state
            output = self.backbone(tokens, state=state.blocks, return_state=return_blocks)
            # in the same form, so that decoding goes on in either case
            return output, EpisodeState({}, 0, output.state)

    def question_state(self, windows: Windows, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pools the question's hidden states, [n, T, D] -> [n, D], and makes queries [n, K]."""
        place = torch.arange(hidden.shape[1], device=hidden.device)
        ends = windows.lengths.unsqueeze(1)
        is_question = (place < ends) & (place >= ends - windows.question_lengths.unsqueeze(1))
        pooled = _masked_mean(hidden, is_question)
        return pooled, self.retrieval.query(pooled)

    @torch.no_grad()
    def nearness(self, reading: Reading) -> Tensor:
        """Cosine of each segment's key with the query of the question alone, [N, L]."""
        rows = range(len(reading.texts.questions))
        windows = self.windows(reading.texts, rows, [()] * len(rows))
        # without slots and fast weights, which would tell of what is not read yet
        output, _ = self.look(windows.tokens, slots=None, plastic=None)
        _, query = self.question_state(windows, output.hidden)
        return (reading.keys @ query.unsqueeze(2)).squeeze(2)

    @torch.no_grad()
    def answer(
        self, windows: Windows, *, slots: Tensor | None, plastic: EpisodeState | None
    ) -> list[list[int]]:
        """Decodes greedy answers, without the stop; slots and fast weights as in `look`."""
        answers: list[list[int]] = [[] for _ in windows.lengths]
        for batch in self._decoded_together(windows.lengths):
            rows = batch  # whose answers go on
            own_slots, own = select(slots, rows), select(plastic, rows)
            tokens, lengths = windows.tokens[rows], windows.lengths[rows]
            next_tokens, blocks = self._read_windows(tokens, lengths, slots=own_slots, plastic=own)
            state = dataclasses.replace(own or EpisodeState({}, 0), blocks=blocks)
            for place in range(self.answer_tokens):
                goes_on = next_tokens != self.marks.stop
                if not bool(goes_on.all()):
                    kept = torch.nonzero(goes_on).flatten()
                    rows, next_tokens = rows[kept], next_tokens[kept]
                    own_slots, state = select(own_slots, kept), select(state, kept)
                for row, token in zip(rows.tolist(), next_tokens.tolist(), strict=True):
                    answers[row].append(token)
                if len(rows) == 0 or place == self.answer_tokens - 1:
                    break
                output, state = self.look(
                    next_tokens.unsqueeze(1), slots=own_slots, plastic=state, return_blocks=True
                )
                next_tokens = self.backbone.logits(output.hidden[:, -1]).argmax(-1)
        return answers

    def _decoded_together(self, lengths: Tensor) -> list[Tensor]:
        """Places of windows of lengths [n] whose answers are decoded together, the shortest first.

        As many as `_WINDOWS_TOGETHER` full windows hold, which bounds their caches; of one length
        where a block keeps more of a row than a state of a fixed size or the keys of attention.
        """
        most = _WINDOWS_TOGETHER * self.window_tokens
        sizes = lengths.tolist()
        batches: list[list[int]] = []
        longest = 0
        for place in sorted(range(len(sizes)), key=sizes.__getitem__):
            length = sizes[place]
            has_room = bool(batches) and (len(batches[-1]) + 1) * length <= most
            if has_room and (self._joins_lengths or length == longest):
                batches[-1].append(place)
            else:
                batches.append([place])
            longest = length
        return [torch.tensor(batch, device=lengths.device) for batch in batches]

    def _read_windows(
        self, tokens: Tensor, lengths: Tensor, *, slots: Tensor | None, plastic: EpisodeState | None
    ) -> tuple[Tensor, list[BlockState]]:
        """Reads windows, [n, T], of rising lengths, [n], for their answers.

        Gives the first token of each answer, [n], and the state behind each window, from which all
        rows go on together. Windows of one length are read together, so that no state holds
        padding.
        """
        first = []
        states = []
        begin = 0
        sizes, counts = lengths.unique_consecutive(return_counts=True)
        for length, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            group = slice(begin, begin + count)
            begin += count
            output, after = self.look(
                tokens[group, :length],
                slots=part(slots, group),
                plastic=part(plastic, group),
                return_blocks=True,
            )
            assert after.blocks is not None, "asked for"
            first.append(self.backbone.logits(output.hidden[:, -1]).argmax(-1))
            # apart from the hidden states of the whole window, of which some of it are views
            states.append(map_tensors(after.blocks, torch.clone))
        blocks = [self._below_each_other(parts) for parts in zip(*states, strict=True)]
        return torch.cat(first), blocks

    def _below_each_other(self, parts: Sequence[BlockState]) -> BlockState:
        """Puts the states of a block behind windows of different lengths into one."""
        mixers = [each.mixer for each in parts]
        if len(parts) == 1 or not isinstance(mixers[0], AttentionState):
            return joined(parts)
        # room for all answers at once: stages of a pipeline cut the rows, and put pieces of equal
        # width together again
        mixer = below_each_other(mixers, room=self.answer_tokens)
        return joined([each._replace(mixer=None) for each in parts])._replace(mixer=mixer)

    @torch.no_grad()
    def answer_alone(self, texts: Texts) -> list[list[int]]:
        """Answers with the backbone alone, from windows of the last segments of each text."""
        latest = range(texts.tokens.shape[1] - 1, -1, -1)
        rows = range(len(texts.questions))
        windows = self.windows(texts, rows, [latest] * len(rows))
        return self.answer(windows, slots=None, plastic=None)


def is_used(name: str, parts: Collection[MemoryPart]) -> bool:
    """True for a parameter of a reader, by its name, unless it is of a memory not among `parts`."""
    memories: dict[str, MemoryPart] = {
        "adapters": "plastic",
        "retrieval": "episodic",
        "memory": "slots",
    }
    modules = name.replace("/", ".").split(".")
    return all(memory in parts for module, memory in memories.items() if module in modules)


def segment_room(window_tokens: int, question_tokens: int, answer_tokens: int) -> int:
    """Returns the tokens of segments that fit into a window beside question and answer."""
    return window_tokens - answer_tokens - question_tokens - 2


def _masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Averages over the tokens of a mask, [..., T, D] -> [..., D]; 0 where there are none."""
    total = (hidden * mask.unsqueeze(-1)).sum(-2)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)
