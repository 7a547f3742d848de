"""lm-evaluation-harness on a trained model in this process, without an export.

Results are those of its `hf` model on an exported folder. `lm_eval`, which takes seconds to import,
is imported when a model is made for it and nowhere else.
"""

# n requests of a batch, T their longest input (tokens), V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.data.tokenizer import Tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.trained import TrainedModel
from cdrmix.models.backbone import LanguageModel

_DEFAULT_NEW_TOKENS = 256  # as of the harness
# of a request for text; others change the choice of tokens and are refused where they would
_KNOWN_ARGUMENTS = {"until", "do_sample", "temperature", "max_gen_toks"}


@dataclass(frozen=True)
class Scorer:
    """Scores and continues texts in batches; the size of a batch changes nothing but the time.

    Attributes:
        max_length: most tokens of an input; longer ones lose their beginning.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    max_length: int
    batch_size: int

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
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for batch in _batches(order, self.batch_size):
            rows = [torch.tensor(inputs[i]) for i in batch]
            # on the right: no token sees what comes after it
            padded = torch.nn.utils.rnn.pad_sequence(
                rows, batch_first=True, padding_value=self.tokenizer.pad_id
            )
            hidden = self.model(padded.to(self.model.device)).hidden  # [n, T, D]
            for i, row in zip(batch, hidden, strict=True):
                end, new = len(inputs[i]), pairs[i][1]
                scores[i] = self._score(row[end - len(new) : end], new)
        return scores

    def _score(self, hidden: Tensor, new: list[int]) -> tuple[float, bool]:
        """Scores one continuation from the hidden states before its tokens."""
        logits = self.model.logits(hidden).float()  # [tokens, V]
        targets = torch.tensor(new, device=logits.device)
        taken = F.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1))
        return float(taken.sum()), bool((logits.argmax(-1) == targets).all())

    @torch.no_grad()
    def continue_texts(
        self,
        prompts: Sequence[list[int]],
        *,
        until: Sequence[str],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """Continues prompts of one or more tokens up to EOS or a text of `until`, left out itself.

        Args:
            temperature: 0 takes the most likely token; above, each prompt draws numbers of its own.
        """
        kept = max(1, self.max_length - max_new_tokens)
        inputs = [prompt[-kept:] for prompt in prompts]
        texts = [""] * len(prompts)
        # of one length, as the recurrent state takes no padding on the left
        for length in sorted(set(map(len, inputs)), reverse=True):
            alike = [i for i, tokens in enumerate(inputs) if len(tokens) == length]
            for batch in _batches(alike, self.batch_size):
                rows = torch.tensor([inputs[i] for i in batch], device=self.model.device)
                draws = [torch.Generator(rows.device).manual_seed(seed + i) for i in batch]
                new = self._continue(rows, until, max_new_tokens, temperature, draws)
                for i, tokens in zip(batch, new, strict=True):
                    texts[i] = _before(self._text(tokens), until)
        return texts

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones and ids that have no token."""
        known = range(self.tokenizer.vocab_size)
        return self.tokenizer.decode(
            t for t in tokens if t in known and t not in self.tokenizer.special_ids
        )

    def _continue(
        self,
        tokens: Tensor,
        until: Sequence[str],
        max_new_tokens: int,
        temperature: float,
        draws: list[torch.Generator],
    ) -> list[list[int]]:
        """Continues rows, [n, T]: the new tokens of each up to its end."""
        new: list[list[int]] = [[] for _ in tokens]
        going = set(range(len(tokens)))
        state = None
        for _ in range(max_new_tokens):
            output = self.model(tokens, state=state, return_state=True)
            state = output.state
            logits = self.model.logits(output.hidden[:, -1]).float()  # [n, V]
            if temperature == 0:
                chosen = logits.argmax(-1)
            else:
                likely = torch.softmax(logits / temperature, dim=-1)
                chosen = torch.cat(
                    [
                        torch.multinomial(row, 1, generator=draw)
                        for row, draw in zip(likely, draws, strict=True)
                    ]
                )
            for row in list(going):
                token = int(chosen[row])
                new[row].append(token)
                text = self._text(new[row])
                if token == self.tokenizer.eos_id or _before(text, until) != text:
                    going.remove(row)
            if not going:
                break
            tokens = chosen.unsqueeze(1)
        return new


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


def _before(text: str, until: Sequence[str]) -> str:
    """Text up to the first place of any of `until`."""
    starts = [text.find(stop) for stop in until if stop]
    return text[: min((start for start in starts if start >= 0), default=None)]


class _Requests:
    """Requests of the harness, answered by a scorer; the base of its models comes behind this."""

    scorer: Scorer

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.scorer.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before the first one of a text."""
        return self.scorer.tokenizer.prefix_ids[-1]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text, behind what a document begins with unless that is refused."""
        tokenizer = self.scorer.tokenizer
        prefix = [] if add_special_tokens is False else tokenizer.prefix_ids
        return [*prefix, *tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.scorer.score([(context, new) for _, context, new in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text (nats), its tokens in windows."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs: list[tuple[list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.scorer.max_length,
                context_len=1,
            )
            pairs += map(make_disjoint_window, windows)
            ends.append(len(pairs))
        nats = [score for score, _ in self.scorer.score(pairs)]
        return [sum(nats[first:end]) for first, end in itertools.pairwise(ends)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each context by the arguments of its request."""
        from lm_eval.models.utils import normalize_gen_kwargs

        texts = [""] * len(requests)
        by_arguments: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_arguments.setdefault(repr(request.args[1]), []).append(i)
        for alike in by_arguments.values():
            arguments = normalize_gen_kwargs(requests[alike[0]].args[1], _DEFAULT_NEW_TOKENS)
            others = arguments.keys() - _KNOWN_ARGUMENTS
            if arguments["do_sample"] and others:
                raise ConfigError(
                    f"a task asks for text with {', '.join(sorted(others))}: sampling here knows "
                    "temperature alone. Evaluate an exported folder with lm-eval's model `hf`"
                )
            new = self.scorer.continue_texts(
                [self.tok_encode(requests[i].args[0]) for i in alike],
                until=arguments["until"],
                max_new_tokens=arguments["max_gen_toks"],
                temperature=arguments["temperature"] if arguments["do_sample"] else 0.0,
            )
            for i, text in zip(alike, new, strict=True):
                texts[i] = text
        return texts


def harness_model(run: TrainedModel, *, batch_size: int = 8) -> Any:
    """Makes the model that `lm_eval.simple_evaluate(model=...)` takes.

    A text begins with EOS, as documents in training do and as the exported tokenizer has it. The
    log-likelihood of a whole text (`loglikelihood_rolling`) is that of its tokens after the EOS,
    which is not predicted: the `hf` model does so with `add_bos_token=False`.

    Raises:
        ConfigError: if lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ConfigError(
            "lm-evaluation-harness needs the package lm_eval: pip install 'cdrmix[evaluation]'"
        ) from error

    class HarnessModel(_Requests, TemplateLM):
        """A trained model as the harness calls it."""

    model = HarnessModel()
    model.scorer = Scorer(run.model, run.tokenizer, run.config.training.sequence_length, batch_size)
    return model
