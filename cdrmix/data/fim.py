"""Fill in the middle: documents rearranged so that predicting the next token learns to infill.

A document is cut at two characters, anywhere, and its middle put last, behind what comes before and
after it: prefix, suffix, middle (PSM), or suffix, prefix, middle (SPM, in the second variant of the
paper). Which documents, and where, follows from their ids. Source: Bavarian et al., Efficient
Training of Language Models to Fill in the Middle, 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from cdrmix.config.section import Section
from cdrmix.data.document import Document, draw
from cdrmix.data.tokenizer import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, Tokenizer


class FimConfig(Section):
    """Which training documents are rearranged for infilling."""

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


def rearranged(document: Document, config: FimConfig, tokenizer: Tokenizer) -> list[int] | None:
    """Ids of a rearranged document, without EOS; None where it stays as it is."""
    text = document.text
    if config.domains is not None and document.domain not in config.domains:
        return None
    if len(text) > config.max_characters or draw(document.id, "fim") >= config.rate:
        return None
    # Either cut may be before the first character or behind the last.
    begin, end = sorted(
        int(draw(document.id, f"fim cut {number}") * (len(text) + 1)) for number in (1, 2)
    )
    # Encoded apart: a token that reaches over a cut would give the middle away.
    prefix, middle, suffix = map(tokenizer.encode, (text[:begin], text[begin:end], text[end:]))
    pre, suf, mid = map(tokenizer.special_id, (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE))
    if draw(document.id, "fim order") < config.spm_rate:
        return [pre, suf, *suffix, mid, *prefix, *middle]
    return [pre, *prefix, suf, *suffix, mid, *middle]


def restored(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is the document's, of ids with or without an order of `rearranged`."""
    pre, suf, mid = map(tokenizer.special_id, (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE))
    if not ids or ids[0] != pre:
        return list(ids)
    suffix_at, middle_at = ids.index(suf), ids.index(mid)
    prefix, suffix = ids[1:suffix_at], ids[suffix_at + 1 : middle_at]
    # In SPM nothing is before the suffix, and prefix and middle follow each other at the end.
    return [*prefix, *ids[middle_at + 1 :], *suffix]
