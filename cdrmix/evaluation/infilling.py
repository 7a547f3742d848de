"""Single-line infilling on held-out documents: a line is left out, and written by the model.

The line is asked for in both orders of training, prefix first (PSM) and suffix first (SPM), and
decoded greedily. The control asks again with the suffix of another document: a model that reads
what comes behind the gap must do worse there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.document import FimOrder, arranged, draw_by_key, encoded_parts, fields_of
from cdrmix.data.fim_span import line_starts
from cdrmix.data.token_dataset import Permutation
from cdrmix.data.tokenizer import Tokenizer
from cdrmix.data.tokenizer_base import FIM_ROLES
from cdrmix.errors import DataError
from cdrmix.evaluation.scoring import Prompt, Sampling, Scorer
from cdrmix.monitoring.suite_results import bootstrap_interval

ORDERS: tuple[FimOrder, ...] = ("psm", "spm")
NUM_EXAMPLES = 100
# Tokens beyond those of the line, which may be written in other pieces, and its end.
_MORE_TOKENS = 4
# Fixed, so that evaluations of different runs read the same documents.
_ORDER_KEY = (0,)


class Example(NamedTuple):
    """A held-out line, and what is around it, in tokens."""

    prefix: list[int]
    suffix: list[int]
    line: str
    num_tokens: int  # of the line


@dataclass(frozen=True)
class Infilling:
    """Lines that were written exactly, of one order.

    Attributes:
        examples: lines asked for (count).
        exact: share written as they are, but for blanks at the end.
        low, high: 95 % interval of that share, by bootstrap over the documents.
        other_suffix: share with the suffix of another document, the control; other_low and
            other_high are its interval.
    """

    order: FimOrder
    examples: int
    exact: float
    low: float
    high: float
    other_suffix: float
    other_low: float
    other_high: float


def line_examples(
    documents: Sequence[Sequence[int] | NDArray[np.int64]],
    tokenizer: Tokenizer,
    *,
    num_examples: int,
    window: int,
) -> list[Example]:
    """Draws a line of each of up to `num_examples` documents, the same ones each time.

    A line is not blank and not the last one. Around it are as many lines as fit with it into
    `window` tokens, as many behind as before; documents where none fits are passed over.
    """
    examples: list[Example] = []
    if not len(documents):
        return examples
    num_prefix = len(tokenizer.document_prefix)
    for number in Permutation(len(documents), _ORDER_KEY)(np.arange(len(documents))).tolist():
        ids = [int(token) for token in documents[number]]
        if fields_of(ids, tokenizer) is not None:  # a chain of thought is not infilled
            continue
        text = tokenizer.decode(ids[num_prefix:])
        starts = line_starts(text)
        if starts[-1] != len(text):
            starts.append(len(text))
        # Of line n, starts[n] to starts[n + 1]; the last one has nothing behind it.
        lines = [n for n in range(len(starts) - 2) if text[starts[n] : starts[n + 1]].strip()]
        if not lines:
            continue
        line = lines[int(draw_by_key(str(number), "infilled line") * len(lines))]
        if (example := _around(text, starts, line, tokenizer, window)) is not None:
            examples.append(example)
        if len(examples) == num_examples:
            break
    return examples


def _around(
    text: str, starts: list[int], line: int, tokenizer: Tokenizer, window: int
) -> Example | None:
    """The example with the most lines on either side that fits; None if not even one does."""
    begin, end = starts[line], starts[line + 1]
    roles = len(FIM_ROLES) + len(tokenizer.prefix_ids) + _MORE_TOKENS

    def with_lines(radius: int) -> Example | None:
        first = starts[max(0, line - radius)]
        last = starts[min(len(starts) - 1, line + 1 + radius)]
        span = (begin - first, end - first)
        prefix, middle, suffix = encoded_parts(text[first:last], span, tokenizer)
        if len(prefix) + len(middle) + len(suffix) + roles > window:
            return None
        return Example(prefix, suffix, text[begin:end], len(middle))

    found = None
    # A line has a token at least, so that no more than these fit.
    low, high = 1, min(window, max(line, len(starts) - 2 - line))
    while low <= high:
        radius = (low + high) // 2
        if (example := with_lines(radius)) is None:
            high = radius - 1
        else:
            found, low = example, radius + 1
    return found


def evaluate_infilling(
    scorer: Scorer,
    documents: Sequence[Sequence[int] | NDArray[np.int64]],
    *,
    num_examples: int = NUM_EXAMPLES,
    seed: int = 0,
) -> list[Infilling]:
    """Measures how many left-out lines a model writes exactly, in each order; collective.

    Args:
        documents: tokens of held-out documents in their own order, without EOS.
        num_examples: most lines, each of another document (count).
        seed: of the intervals; the lines are the same each time.
    Raises:
        DataError: if the tokenizer has no tokens for infilling, or fewer than two documents have a
            line to leave out.
    """
    tokenizer = scorer.tokenizer
    if missing := [role for role in FIM_ROLES if role not in tokenizer.roles]:
        raise DataError(
            f"infilling cannot be evaluated: the tokenizer has no token for {', '.join(missing)}, "
            "so that the model was not trained to infill. Evaluate one whose data set was built "
            "with fim (docs/data.md)"
        )
    window = scorer.max_length
    examples = line_examples(documents, tokenizer, num_examples=num_examples, window=window)
    if len(examples) < 2:
        raise DataError(
            f"infilling cannot be evaluated: of {len(documents)} held-out documents "
            f"{len(examples)} have a line that fits with its neighbours into {window} tokens, and "
            "2 are needed. "
            "Give --data with more documents"
        )
    others = [*examples[1:], examples[0]]
    # The same number of tokens at most, so that the prompt stays within the window.
    replaced = [
        each._replace(suffix=other.suffix[: len(each.suffix)])
        for each, other in zip(examples, others, strict=True)
    ]
    asked = [(each, order) for order in ORDERS for each in (*examples, *replaced)]
    written = _written(scorer, asked).reshape(len(ORDERS), 2, len(examples))
    rows = []
    for order, (right, control) in zip(ORDERS, written, strict=True):
        intervals = [bootstrap_interval(each.tolist(), seed=seed) for each in (right, control)]
        shares = [float(each.mean()) for each in (right, control)]
        rows.append(
            Infilling(order, len(examples), shares[0], *intervals[0], shares[1], *intervals[1])
        )
    return rows


def _written(scorer: Scorer, asked: Sequence[tuple[Example, FimOrder]]) -> NDArray[np.bool_]:
    """Tells of each if the likeliest tokens are the line, but for blanks at its end."""
    tokenizer = scorer.tokenizer
    found = np.zeros(len(asked), dtype=bool)
    # Lines of one length together: room for a longer one would cut off the beginning of a prompt.
    sizes = np.array([example.num_tokens for example, _ in asked])
    for size in np.unique(sizes).tolist():
        here = np.flatnonzero(sizes == size).tolist()
        prompts = []
        for number in here:
            example, order = asked[number]
            prompt = arranged(example.prefix, example.suffix, tokenizer, order)
            prompts.append(Prompt([*tokenizer.prefix_ids, *prompt]))
        most = Sampling(max_new_tokens=size + _MORE_TOKENS)
        for number, new in zip(here, scorer.continue_prompts(prompts, most), strict=True):
            example, _ = asked[number]
            tokens = (token for token in new.tokens if token != tokenizer.eos_id)
            text = tokenizer.decode(tokens, continues=bool(example.prefix))
            found[number] = text.rstrip() == example.line.rstrip()
    return found
