"""A user's step in a data build: what it does to each document is checked, and its errors cost no
more than the document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from cdrmix.corpus.steps.read import has_surrogates
from cdrmix.corpus.time_limit import TooSlow
from cdrmix.data.document import Document, DocumentStep, Drop
from cdrmix.errors import DataError


class PluginStep:
    """Passes documents through a step of a user's, one at a time.

    Attributes:
        failures: reason and detail of each document that it failed on, by id; they are neither
            passed on nor dropped.
    """

    def __init__(
        self, name: str, step: DocumentStep, action: Literal["drop", "stop"] | None = None
    ) -> None:
        """
        Args:
            name: package.module:Name.
            action: of a validator, which changes no document; None: a step.
        """
        self.name = name
        self.failures: dict[str, tuple[str, str]] = {}
        self._step = step
        self._action = action

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Passes on the documents that it gives no reason to drop.

        Raises:
            DataError: at a document that is not valid, if the action is `stop`.
        """
        for document in documents:
            # A copy: a step that fails may have changed half of it.
            seen = replace(document, metadata=dict(document.metadata))
            try:
                reason = self._step.judge(seen)
                _check(reason, seen, document)
            except TooSlow:
                raise
            except Exception as error:  # any that code of a user's may raise
                self._fail(document, error)
                continue
            if reason is None:
                yield seen if self._action is None else document
            elif self._action == "stop":
                raise DataError(
                    f"validators: {self.name}: document {document.id}: {reason}. Its action is "
                    "stop: mend the source, drop such documents by a step, or set action: drop. "
                    "Finished work is kept"
                )
            else:
                drop(document, reason)

    def _fail(self, document: Document, error: Exception) -> None:
        if self._action == "stop":
            raise DataError(
                f"validators: {self.name}: document {document.id}: {type(error).__name__}: {error}"
            ) from error
        self.failures[document.id] = (f"{type(error).__name__} in {self.name}", str(error))


def _check(reason: object, seen: Document, document: Document) -> None:
    """Raises TypeError or ValueError for a verdict or document that a build cannot go on with."""
    if reason is not None and not (isinstance(reason, str) and reason):
        raise TypeError(f"gave {reason!r}, not a reason or None")
    if reason is not None:
        return
    if (seen.id, seen.source, seen.domain) != (document.id, document.source, document.domain):
        raise ValueError("changed id, source or domain of a document")
    if not isinstance(seen.text, str) or not seen.text or seen.text.isspace():
        raise ValueError("left no text, without a reason to drop the document")
    if has_surrogates(seen.text):
        raise ValueError("left a lone surrogate in the text")
    json.dumps(seen.metadata)
