"""The one record that travels through data preparation, and what a step is.

A step takes documents and gives documents, one at a time and in order. What it does not pass on it
hands to `drop` with a reason, so that nothing disappears without a trace. A step keeps nothing
from one document to the next unless its docstring says what and how much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Document:
    """One text and where it is from.

    Attributes:
        text: the text, str.
        id: unique and stable within the corpus: `<source>/<file>#<row>`.
        source: name of the source in the recipe.
        domain: domain of the source, such as code or prose.
        metadata: plain JSON values that a reader or step found out: url, language, title, ...
    """

    text: str
    id: str
    source: str
    domain: str
    metadata: dict[str, Any] = field(default_factory=dict)


def draw(document_id: str, purpose: str) -> float:
    """A number from 0 to 1 that follows from an id, another one for each purpose."""
    digest = hashlib.blake2b(f"{purpose}:{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


Drop = Callable[[Document, str], None]


class Step(Protocol):
    """One stage of data preparation: picklable, so that it can run in a pool's process.

    Attributes:
        name: short and stable; reports count by it.
    """

    name: str

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Pass documents on, in order, changed or not.

        Args:
            documents: what the step before gave.
            drop: told of each document that goes no further, with a reason of a few words
                (`too short`, `language fr`), the same words for the same cause.
        """
        ...
