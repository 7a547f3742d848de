"""Scores of texts and continuations of prompts by a model in any layout.

Prompts of unequal length share a batch without padding. All rows read as many tokens at once as the
shortest prompt has; from there on each row reads one token at a time, the next one of its prompt or
the one that it has just written. So nothing but tokens of a row reaches its recurrent states, token
shifts, keys and values, positions and experts, whatever the architecture.

Data ranks share out batches, of which they run equally many, with the head called equally often:
their experts, or parameters that are gathered, may lie on other ranks.
"""

# n rows of a batch, T their longest input (tokens), D hidden, V vocabulary

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cdrmix import runtime
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import DataError
from cdrmix.evaluation.suite import Judged
from cdrmix.models.backbone import LanguageModel
from cdrmix.parallel.topology import ALONE, Topology

T = TypeVar("T")

# Positions whose logits are held at once: 1,024 of 50,000 tokens are 200 MiB in float32.
_HEAD_POSITIONS = 1_024
# Prompts in one batch differ by as many tokens as are written behind them, or by these.
_SMALL_SPREAD = 16


@dataclass(frozen=True)
class Sampling:
    """Choice of the tokens behind a prompt.

    Attributes:
        until: texts that end a continuation, left out themselves; so does EOS.
        temperature: 0 takes the most likely token; above, samples from logits / temperature.
        top_p: share of probability that the tokens drawn from reach, the most likely ones first.
        seed: of the draws, with key and sample of each prompt.
    """

    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Prompt(NamedTuple):
    """Text to continue.

    Its draws are its own, by the sampling's seed, `key` and `sample`: they depend neither on other
    prompts nor on batches and ranks.
    """

    tokens: list[int]  # one or more
    key: str = ""  # of a task, such as its name
    sample: int = 0  # number among those of a key


class Continuation(NamedTuple):
    """Text behind a prompt."""

    text: str
    num_tokens: int  # written, with what has ended it
    is_ended: bool  # False: cut off at the most new tokens
    tokens: tuple[int, ...] = ()  # all that were written


class _Turn(NamedTuple):
    """Batches that the data ranks run at the same time."""

    batches: list[list[int]]  # of each rank that has one
    own: list[int]  # of this rank, or the first one again
    is_counted: bool  # False: another rank has it, and gives the result


@dataclass(frozen=True)
class Scorer:
    """Scores and continues texts in batches; the size of a batch changes nothing but the time.

    All ranks of the layout make the same calls together, and get the same results.

    Attributes:
        model: put into evaluation mode for a call, and back.
        max_length: most tokens of an input; longer ones lose their beginning.
        batch_size: rows of a forward pass, most.
        topology: of this rank; those of a sequence group read whole rows of their own.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    max_length: int
    batch_size: int
    topology: Topology = ALONE

    @classmethod
    def of(cls, judged: Judged) -> Scorer:
        """Makes the scorer of a model that suites judge."""
        sizes = (judged.max_length, judged.batch_size)
        return cls(judged.model, judged.tokenizer, *sizes, judged.topology)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Scores continuations, tokens behind the tokens of a context, both of one or more.

        Returns:
            Of each, the sum of its tokens' log-probabilities (nats), and True if each token is the
            most likely one.
        Raises:
            DataError: if a continuation is longer than an input may be.
        """
        longest = max((len(new) for _, new in pairs), default=0)
        if longest > self.max_length:
            raise DataError(
                f"a task scores a text of {longest:,} tokens at once, and the model's sequences "
                f"have {self.max_length:,}. Leave this task out"
            )
        inputs = [(context + new)[-self.max_length - 1 : -1] for context, new in pairs]
        order = sorted(range(len(pairs)), key=lambda i: -len(inputs[i]))
        size = self.batch_size
        found: dict[int, tuple[float, bool]] = {}
        with self._evaluating():
            batches = [order[first : first + size] for first in range(0, len(order), size)]
            for turn in self._turns(batches):
                new = [pairs[i][1] for i in turn.own]
                hidden = self._hidden([inputs[i] for i in turn.own], new)
                most = max(sum(len(pairs[i][1]) for i in batch) for batch in turn.batches)
                if not self.topology.is_last_stage:
                    continue
                scores = self._scores(hidden, new, num_pieces=-(-most // _HEAD_POSITIONS))
                if turn.is_counted:
                    found.update(zip(turn.own, scores, strict=True))
        return self._shared(found, len(pairs))

    def _hidden(self, inputs: list[list[int]], new: list[list[int]]) -> Tensor:
        """Runs rows; gives the hidden states before the new tokens, row after row, [tokens, D]."""
        # Padding on the right, which no token before it sees; experts drop none in evaluation.
        rows = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(tokens) for tokens in inputs],
            batch_first=True,
            padding_value=self.tokenizer.pad_id,
        )
        hidden = self.model(rows.to(self.model.device)).hidden  # [n, T, D]
        ends = [len(tokens) for tokens in inputs]
        parts = zip(hidden, ends, new, strict=True)
        return torch.cat([row[end - len(tokens) : end] for row, end, tokens in parts])

    def _scores(
        self, hidden: Tensor, new: list[list[int]], *, num_pieces: int
    ) -> list[tuple[float, bool]]:
        """Scores rows of new tokens from the hidden states before them, as `score`.

        The head is called `num_pieces` times, as often as by the rank with the most tokens.
        """
        targets = torch.tensor([token for tokens in new for token in tokens], device=hidden.device)
        pieces = zip(hidden.split(_HEAD_POSITIONS), targets.split(_HEAD_POSITIONS), strict=True)
        nats, hits = [], []
        for _ in range(num_pieces):
            states, wanted = next(pieces, (None, None))
            if states is None or wanted is None:
                self.model.embedding.logits(hidden[:1])
                continue
            logits = self.model.embedding.logits(states).float()  # [tokens, V]
            taken = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
            nats.append((taken - logits.logsumexp(-1)).double())
            hits.append(logits.argmax(-1) == wanted)
        sizes = [len(tokens) for tokens in new]
        rows = zip(torch.cat(nats).split(sizes), torch.cat(hits).split(sizes), strict=True)
        return [(float(values.sum()), bool(hit.all())) for values, hit in rows]

    @torch.no_grad()
    def continue_prompts(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Continuation]:
        """Continues prompts up to EOS or a text of `until`.

        A prompt that leaves no room for the new tokens loses its beginning.
        """
        kept = max(1, self.max_length - sampling.max_new_tokens)
        inputs = [prompt.tokens[-kept:] for prompt in prompts]
        spread = max(_SMALL_SPREAD, sampling.max_new_tokens)
        found: dict[int, Continuation] = {}
        with self._evaluating():
            for turn in self._turns(_alike(inputs, self.batch_size, spread)):
                rows = [inputs[i] for i in turn.own]
                draws = [_draws(sampling.seed, prompts[i]) for i in turn.own]
                new = self._continue(rows, draws, sampling, is_counted=turn.is_counted)
                if turn.is_counted:
                    found.update(zip(turn.own, new, strict=True))
        return self._shared(found, len(prompts))

    def _continue(
        self,
        rows: list[list[int]],
        draws: list[np.random.Generator],
        sampling: Sampling,
        *,
        is_counted: bool,
    ) -> list[Continuation]:
        """Continues the rows of one batch, of any lengths; runs as long as a rank has a row left.

        Rows that are done, and those that are not counted, go on with EOS.
        """
        new: list[list[int]] = [[] for _ in rows]
        ended = [False] * len(rows)
        wanted = sampling.max_new_tokens if is_counted else 0
        place = self._first_tokens(rows)  # tokens of each row that the state will have seen
        tokens = [row[:place] for row in rows]
        state = None
        while self._is_any(not ended[i] and len(new[i]) < wanted for i in range(len(rows))):
            inputs = torch.tensor(tokens, device=self.model.device)
            output = self.model(inputs, state=state, return_state=True)
            state = output.state
            logits = self.model.logits(output.hidden[:, -1]).float()  # [n, V]
            writing = [
                place >= len(row) and not ended[i] and len(new[i]) < wanted
                for i, row in enumerate(rows)
            ]
            numbers = [d.random() if w else 0.0 for d, w in zip(draws, writing, strict=True)]
            chosen = _chosen(logits, sampling, numbers)
            tokens = []
            for i, row in enumerate(rows):
                token = self.tokenizer.eos_id
                if place < len(row):
                    token = row[place]
                elif writing[i]:
                    token = chosen[i]
                    new[i].append(token)
                    ended[i] = self._is_end(new[i], sampling.until)
                tokens.append([token])
            place += 1
        texts = [_before(self._text(written), sampling.until) for written in new]
        parts = zip(texts, new, ended, strict=True)
        return [Continuation(text, len(ids), end, tuple(ids)) for text, ids, end in parts]

    def _first_tokens(self, rows: list[list[int]]) -> int:
        """Tokens that all rows read at once."""
        # Blocks that ranks call together choose other numbers of several tokens on each rank.
        is_collective = self.topology.degrees.data > 1 or self.topology.degrees.expert > 1
        if self.model.config.routed_layers() and is_collective:
            return 1
        return min(map(len, rows))

    def _is_end(self, new: list[int], until: Sequence[str]) -> bool:
        """Tells if the last new token ends a text."""
        if new[-1] == self.tokenizer.eos_id:
            return True
        longest = max(map(len, until), default=0)
        # A stop that ends with this token is in the last few: a character has four bytes at most.
        recent = self._text(new[-4 * longest - 4 :]) if longest else ""
        if not any(stop and stop in recent for stop in until):
            return False
        text = self._text(new)
        return _before(text, until) != text

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones and ids that have no token."""
        known = range(self.tokenizer.vocab_size)
        return self.tokenizer.decode(
            t for t in tokens if t in known and t not in self.tokenizer.special_ids
        )

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, without dropped tokens; the mode before it at the end."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def _turns(self, batches: list[list[int]]) -> Iterator[_Turn]:
        """Shares batches out over the data ranks; each of them runs equally many."""
        ranks, rank = self.topology.degrees.data, self.topology.data_rank
        for first in range(0, len(batches), ranks):
            turn = batches[first : first + ranks]
            is_counted = rank < len(turn)
            yield _Turn(turn, turn[rank if is_counted else 0], is_counted)

    def _is_any(self, mine: Iterator[bool]) -> bool:
        """Tells if one is true on any data rank."""
        number = sum(mine)
        if self.topology.degrees.data == 1:
            return number > 0
        total = torch.tensor([float(number)], device=self.model.device)
        return bool(runtime.all_reduce_sum(total) > 0)

    def _shared(self, found: dict[int, T], count: int) -> list[T]:
        """Results of all ranks, by number."""
        if self.topology.degrees.world_size > 1:
            own = found if self.topology.counts_tokens else {}
            parts = runtime.all_gather_object(own)
            found = {i: result for part in parts for i, result in part.items()}
        return [found[i] for i in range(count)]


def _alike(inputs: list[list[int]], size: int, spread: int) -> list[list[int]]:
    """Batches of up to `size` inputs, long ones first, whose lengths differ by up to `spread`.

    Beyond it, a batch of its own is less work than tokens that are read one by one.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(inputs)), key=lambda i: -len(inputs[i])):
        is_full = not batches or len(batches[-1]) == size
        if is_full or len(inputs[batches[-1][0]]) - len(inputs[i]) > spread:
            batches.append([])
        batches[-1].append(i)
    return batches


def _draws(seed: int, prompt: Prompt) -> np.random.Generator:
    """Random numbers of one sample."""
    key = hashlib.sha256(prompt.key.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([seed, int.from_bytes(key[:8]), prompt.sample])


def _chosen(logits: Tensor, sampling: Sampling, numbers: Sequence[float]) -> list[int]:
    """Chooses a token of each row of logits, [n, V], by a number from 0 to 1 of its own."""
    chosen: list[int]
    if sampling.temperature == 0:
        chosen = logits.argmax(-1).tolist()
        return chosen
    # In float64: sums over a vocabulary would be off by more than the rarest tokens in float32.
    shares = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    shares, order = shares.sort(dim=-1, descending=True, stable=True)
    reached = shares.cumsum(-1)
    # the fewest tokens that reach top_p, one at least
    number = (reached - shares < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)
    total = reached.gather(-1, number - 1)  # [n, 1]
    at = total * torch.tensor(numbers, dtype=total.dtype, device=total.device).unsqueeze(-1)
    place = (reached <= at).sum(-1, keepdim=True).minimum(number - 1)
    chosen = order.gather(-1, place).squeeze(-1).tolist()
    return chosen


def _before(text: str, until: Sequence[str]) -> str:
    """Text up to the first place of any of `until`."""
    starts = [text.find(stop) for stop in until if stop]
    return text[: min((start for start in starts if start >= 0), default=None)]
