"""Keeps documents of some lengths, such as the long ones of a source for long contexts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdrmix.data.document import Document, Drop
from cdrmix.errors import ConfigError


class Length:
    """Keeps documents whose number of characters lies between two limits, both included.

    Args:
        min_characters: shortest text that is kept.
        max_characters: longest text that is kept; None: any.
    """

    name = "length"

    def __init__(self, *, min_characters: int = 1, max_characters: int | None = None) -> None:
        if min_characters < 0 or (max_characters is not None and max_characters < min_characters):
            raise ConfigError(
                f"length: min_characters = {min_characters} and max_characters = {max_characters} "
                "leave nothing; give 0 <= min_characters <= max_characters"
            )
        self.min_characters, self.max_characters = min_characters, max_characters

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Documents of these lengths; reasons: too short, too long."""
        for document in documents:
            if len(document.text) < self.min_characters:
                drop(document, "too short")
            elif self.max_characters is not None and len(document.text) > self.max_characters:
                drop(document, "too long")
            else:
                yield document
