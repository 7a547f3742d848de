"""The record of data preparation, the interface of its steps, and two forms of documents.

A step reports every document that it does not pass on to `drop` with a reason, so that nothing
disappears without a trace. It keeps no state from one document to the next unless its docstring
says which, and its size.

Fill in the middle rearranges documents so that predicting the next token learns to infill: a
document is cut at two places (`cdrmix.data.fim_span`), and its middle put last: prefix, suffix,
middle (PSM), or suffix, prefix, middle (SPM, in the second variant of the paper). Source: Bavarian
et al., Efficient Training of Language Models to Fill in the Middle, 2022.

A chain of thought is a document in three parts, prompt, thought and answer, with a role per token.
Between steps it is one text, its parts joined by the names of special tokens, which the fields read
must not contain. Only in documents of these sources the names then become special tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from cdrmix.config.section import Section
from cdrmix.data.fim_span import (
    Kind,
    middle_of_characters,
    middle_of_lines,
    middle_of_syntax,
)
from cdrmix.data.tokenizer import ANSWER, SPECIAL_TOKENS, THOUGHT
from cdrmix.data.tokenizer_base import CHAIN_ROLES, FIM_ROLES, Tokenizer


@dataclass(slots=True)
class Document:
    """One text and its origin."""

    text: str
    id: str  # unique and stable within the corpus: `<source>/<file>#<row>`
    source: str  # name in the recipe
    domain: str
    metadata: dict[str, Any] = field(default_factory=dict)  # plain JSON values: url, title, ...


def draw_by_key(document_id: str, purpose: str) -> float:
    """Number from 0 to 1 that follows from an id, another one for each purpose."""
    digest = hashlib.blake2b(f"{purpose}:{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# Takes a document that goes no further and the reason: a few words such as `too short`, the same
# for the same cause.
Drop = Callable[[Document, str], None]


class Step(Protocol):
    """One stage of data preparation: picklable, so that it can run in a pool's process."""

    name: str  # short and stable; reports count by it

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Passes documents on, one at a time and in order, changed or not."""
        ...


class DocumentStep(ABC):
    """A step that judges each document by itself."""

    @abstractmethod
    def judge(self, document: Document) -> str | None:
        """Changes a document in place; returns the reason to drop it, or None."""

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Passes on the documents that there is no reason to drop."""
        for document in documents:
            reason = self.judge(document)
            if reason is None:
                yield document
            else:
                drop(document, reason)


# Prefix, suffix, middle; or suffix first.
FimOrder = Literal["psm", "spm"]


class FimConfig(Section):
    """Rearrangement of training documents for infilling."""

    domains: tuple[str, ...] | None = Field(
        None, description="Domains whose documents may be rearranged; null: all of them."
    )
    rate: float = Field(0.5, ge=0, le=1, description="Share of their documents, by hash of the id.")
    spm_rate: float = Field(
        0.5, ge=0, le=1, description="Share of those with the suffix first; the rest prefix first."
    )
    max_characters: int = Field(
        16_384,
        ge=1,
        description="Longer documents stay as they are: their middle would be in another sample "
        "than what is around it.",
    )
    # Left out where they say nothing, so that recipes without them keep their digest.
    span: Kind = Field(
        "characters",
        exclude_if=lambda value: value == "characters",
        description="Middle: any characters; whole lines; ast: a node of the syntax tree of "
        "Python, or characters where a document does not parse.",
    )
    window_tokens: int | None = Field(
        None,
        ge=8,
        exclude_if=lambda value: value is None,
        description="training.sequence_length, or a divisor of it, by which documents are placed "
        "so that no rearranged one lies in two samples; null: they are placed in order (tokens).",
    )


def rearranged(
    document: Document,
    config: FimConfig,
    tokenizer: Tokenizer,
    *,
    counts: Counter[str] | None = None,
) -> list[int] | None:
    """Ids of a rearranged document, without prefix and EOS; None if it stays as it is.

    `counts` counts documents that were drawn, and those of them that did not parse.
    """
    text = document.text
    if config.domains is not None and document.domain not in config.domains:
        return None
    if len(text) > config.max_characters or draw_by_key(document.id, "fim") >= config.rate:
        return None
    counts = Counter() if counts is None else counts
    counts["drawn"] += 1
    draws = [draw_by_key(document.id, f"fim cut {number}") for number in (1, 2)]
    span = middle_of_characters(text, draws)
    if config.span == "lines":
        span = middle_of_lines(text, draws)
    elif config.span == "ast":
        node = middle_of_syntax(text, draws)
        counts["unparsed"] += node is None
        span = node or span
    prefix, middle, suffix = encoded_parts(text, span, tokenizer)
    suffix_first = draw_by_key(document.id, "fim order") < config.spm_rate
    return [*arranged(prefix, suffix, tokenizer, "spm" if suffix_first else "psm"), *middle]


def encoded_parts(
    text: str, middle: tuple[int, int], tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[int]]:
    """Ids of prefix, middle and suffix of a text; `middle` is the begin and end of it."""
    begin, end = middle
    # Encoded apart: a token that reaches over a cut would give the middle away.
    return (
        tokenizer.encode(text[:begin]),
        tokenizer.encode(text[begin:end], continues=begin > 0),
        tokenizer.encode(text[end:], continues=end > 0),
    )


def arranged(
    prefix: Sequence[int], suffix: Sequence[int], tokenizer: Tokenizer, order: FimOrder
) -> list[int]:
    """Ids that a middle follows in a rearranged document; DataError without tokens for them."""
    pre, suf, mid = map(tokenizer.role_id, FIM_ROLES)
    if order == "spm":
        return [pre, suf, *suffix, mid, *prefix]
    return [pre, *prefix, suf, *suffix, mid]


def fim_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens of `rearranged` documents, in the order of FIM_ROLES; () without them."""
    ids = tuple(tokenizer.roles[role] for role in FIM_ROLES if role in tokenizer.roles)
    return ids if len(ids) == len(FIM_ROLES) else ()


def restored(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is the original one, of ids with or without the order of `rearranged`."""
    ids = _without_prefix(ids, tokenizer)
    if not ids or ids[0] != tokenizer.roles.get("fim_prefix"):
        return list(ids)
    suf, mid = map(tokenizer.role_id, FIM_ROLES[1:])
    # Text never encodes to these ids, so that the first ones are the separators.
    suffix_at, middle_at = map(ids.index, (suf, mid))
    # In SPM the part before the suffix is empty, and prefix and middle stand together at the end.
    return [*ids[1:suffix_at], *ids[middle_at + 1 :], *ids[suffix_at + 1 : middle_at]]


def _without_prefix(ids: Sequence[int], tokenizer: Tokenizer) -> Sequence[int]:
    """Ids of a document behind those that each one begins with."""
    prefix = tokenizer.document_prefix
    return ids[len(prefix) :] if tuple(ids[: len(prefix)]) == prefix else ids


# Parts that a token may belong to; shards store the index. `<|thought|>` belongs to the thought and
# `<|answer|>` to the answer, as a model has to begin them; so does the EOS behind the answer. A BOS
# belongs to the prompt.
ROLES = ("text", "prompt", "thought", "answer")
# Of a token in the loss: its role, or a part of a document rearranged for infilling, which shards
# do not tell from other text; see `cdrmix.data.loader.label_kinds`.
KINDS = (*ROLES, "fim", "fim_middle")


def joined(prompt: str, thought: str, answer: str) -> str:
    """Joins the parts into one text."""
    return f"{prompt}{THOUGHT}{thought}{ANSWER}{answer}"


def reserved_in(text: str) -> str | None:
    """First name of a special token in a text, or None."""
    return next((token for token in SPECIAL_TOKENS if token in text), None)


def parted(text: str) -> tuple[str, str, str] | None:
    """Parts of a joined text; None if a step has taken them apart."""
    # A step may have cut the text, or replaced a name in it.
    if text.count(THOUGHT) != 1 or text.count(ANSWER) != 1:
        return None
    prompt, _, rest = text.partition(THOUGHT)
    thought, separator, answer = rest.partition(ANSWER)
    return (prompt, thought, answer) if separator else None


def encoded(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a joined text, and the role of each, without prefix and EOS."""
    parts = parted(text)
    assert parts is not None, "documents whose parts were taken apart are dropped before"
    prompt = tokenizer.encode(parts[0])
    thought, answer = (
        [tokenizer.role_id(role), *tokenizer.encode(part, continues=True)]
        for role, part in zip(CHAIN_ROLES, parts[1:], strict=True)
    )
    # Their places in ROLES.
    roles = [1] * len(prompt) + [2] * len(thought) + [3] * len(answer)
    return [*prompt, *thought, *answer], roles


def fields_of(ids: Sequence[int], tokenizer: Tokenizer) -> dict[str, str] | None:
    """Parts of a document by role, from its ids; None if it is no chain of thought."""
    marks = [tokenizer.roles[role] for role in CHAIN_ROLES if role in tokenizer.roles]
    if len(marks) < len(CHAIN_ROLES) or not all(mark in ids for mark in marks):
        return None
    ids = _without_prefix(ids, tokenizer)
    begin, end = map(ids.index, marks)
    prompt = tokenizer.decode(ids[:begin])
    parts = (ids[begin + 1 : end], ids[end + 1 :])
    later = (tokenizer.decode(part, continues=True) for part in parts)
    return dict(zip(ROLES[1:], (prompt, *later), strict=True))
