"""lm-evaluation-harness on a model in this process, in any layout, without an export.

Results are those of its `hf` model on an exported folder. `lm_eval`, which takes seconds to import,
is imported when a model is made for it and nowhere else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cdrmix.errors import ConfigError
from cdrmix.evaluation.scoring import Prompt, Sampling, Scorer
from cdrmix.evaluation.trained import TrainedModel

_DEFAULT_NEW_TOKENS = 256  # as of the harness
# of a request for text; others change the choice of tokens and are refused where they would
_KNOWN_ARGUMENTS = {"until", "do_sample", "temperature", "top_p", "max_gen_toks"}


class _Requests:
    """Requests of the harness, answered by a scorer; the base of its models comes behind this."""

    scorer: Scorer
    seed: int

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

        prompts = _prompts([request.args[0] for request in requests], self.tok_encode)
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
                    "temperature and top_p. Evaluate an exported folder with lm-eval's model `hf`"
                )
            sampling = Sampling(
                max_new_tokens=arguments["max_gen_toks"],
                until=tuple(arguments["until"]),
                temperature=arguments["temperature"] if arguments["do_sample"] else 0.0,
                top_p=arguments.get("top_p", 1.0),
                seed=self.seed,
            )
            new = self.scorer.continue_prompts([prompts[i] for i in alike], sampling)
            for i, continuation in zip(alike, new, strict=True):
                texts[i] = continuation.text
        return texts


def _prompts(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[Prompt]:
    """Prompts of texts, each with draws by the text and its number among equal ones."""
    seen: Counter[str] = Counter()
    prompts = []
    for text in texts:
        prompts.append(Prompt(encode(text), text, seen[text]))
        seen[text] += 1
    return prompts


def harness_model(run: TrainedModel, *, batch_size: int = 8) -> Any:
    """Makes the model that `lm_eval.simple_evaluate(model=...)` takes; see `harness_of`."""
    length = run.config.training.sequence_length
    return harness_of(Scorer(run.model, run.tokenizer, length, batch_size))


def harness_of(scorer: Scorer, *, seed: int = 0) -> Any:
    """Makes the harness's model of a scorer; in a layout of several ranks, on all of them.

    A text begins with EOS, as documents in training do and as the exported tokenizer has it. The
    log-likelihood of a whole text (`loglikelihood_rolling`) is that of its tokens after the EOS,
    which is not predicted: the `hf` model does so with `add_bos_token=False`.

    Args:
        seed: of the texts that are drawn.
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
        """A model as the harness calls it."""

    model = HarnessModel()
    model.scorer = scorer
    model.seed = seed
    return model
