"""Documents in three parts, prompt, thought and answer, and the role of each of their tokens.

On its way through the steps such a document is one text, its parts joined by the names of special
tokens, which fields that are read must not hold. Only in documents of these sources the names then
become special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdrmix.data.tokenizer import ANSWER, SPECIAL_TOKENS, THOUGHT, Tokenizer

# What a token is part of; its place here is what shards store. `<|thought|>` belongs to the thought
# and `<|answer|>` to the answer: a model has to begin them. So does the EOS behind it.
ROLES = ("text", "prompt", "thought", "answer")
_PROMPT, _THOUGHT, _ANSWER = (ROLES.index(role) for role in ROLES[1:])


def joined(prompt: str, thought: str, answer: str) -> str:
    """The parts as one text."""
    return f"{prompt}{THOUGHT}{thought}{ANSWER}{answer}"


def reserved_in(text: str) -> str | None:
    """The first name of a special token in a text; None: there is none."""
    return next((token for token in SPECIAL_TOKENS if token in text), None)


def parted(text: str) -> tuple[str, str, str] | None:
    """The parts of a joined text; None where something has taken them apart."""
    if text.count(THOUGHT) != 1 or text.count(ANSWER) != 1:
        return None
    prompt, _, rest = text.partition(THOUGHT)
    thought, found, answer = rest.partition(ANSWER)
    return (prompt, thought, answer) if found else None


def encoded(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a joined text, and the role of each, without EOS."""
    parts = parted(text)
    assert parts is not None, "documents whose parts were taken apart are dropped before"
    prompt, thought, answer = map(tokenizer.encode, parts)
    ids = [*prompt, tokenizer.special_id(THOUGHT), *thought, tokenizer.special_id(ANSWER), *answer]
    lengths = {_PROMPT: len(prompt), _THOUGHT: 1 + len(thought), _ANSWER: 1 + len(answer)}
    return ids, [role for role, length in lengths.items() for _ in range(length)]


def fields_of(ids: Sequence[int], tokenizer: Tokenizer) -> dict[str, str] | None:
    """The parts of a document by role, from its ids; None where it is no chain of thought."""
    thought, answer = map(tokenizer.special_id, (THOUGHT, ANSWER))
    if thought not in ids or answer not in ids:
        return None
    begin, end = ids.index(thought), ids.index(answer)
    parts = (ids[:begin], ids[begin + 1 : end], ids[end + 1 :])
    return dict(zip(ROLES[1:], map(tokenizer.decode, parts), strict=True))
