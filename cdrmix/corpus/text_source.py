"""Sources of documents that a user writes, and the documents read from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from cdrmix.config.plugin import PluginConfig
from cdrmix.corpus.source import SetAside, SourceConfig
from cdrmix.corpus.steps.read import documents_of
from cdrmix.corpus.steps.read_bytes import Unreadable
from cdrmix.corpus.time_limit import TooSlow
from cdrmix.data.document import Document
from cdrmix.errors import DataError, TrainingError
from cdrmix.hooks.plugin import make_plugin


class TextSource(ABC):
    """Base class of sources: parts that are read independently, each a sequence of rows.

    A build may read a part in any process, after any other part, and again after a kill. So a part
    gives the same rows in the same order each time, whatever was read before it.

    With a class attribute `Options`, a pydantic model, its instance is made of the configured
    options, `Name(options)`; without, options are refused, and it is made as `Name()`.
    """

    Options: ClassVar[type[BaseModel] | None] = None

    @abstractmethod
    def parts(self) -> Sequence[str]:
        """Names of the parts, each once, such as files or ranges of pages: one or more. Document
        ids begin with them."""

    @abstractmethod
    def read(self, part: str) -> Iterator[Mapping[str, Any] | str]:
        """Yields the rows of a part: a text, or an object with the fields that `text_field` and
        `metadata_fields` of the recipe name.

        Raises:
            OSError: if the system fails: the build ends, and goes on here when it starts again.
            Exception: for damage: the rest of the part is set aside.
        """

    def state(self, part: str) -> Any:
        """Returns plain values that differ once a part has changed, such as its size and time of
        change; None: parts never change."""
        return None


def source_plugin(source: SourceConfig) -> TextSource:
    """Makes the source of a user's. Raises ConfigError if its class or options are wrong."""
    plugin = PluginConfig(use=source.type, options=source.options)
    where = f"source '{source.name}'"
    return make_plugin(plugin, TextSource, where=where, keys=("type", "options"))


def parts_of(source: SourceConfig) -> list[tuple[str, Any]]:
    """Returns name and state of each part of a user's source.

    Raises:
        ConfigError: if its class or options are wrong.
        DataError: if it gives none, or they cannot be told apart.
    """
    plugin = source_plugin(source)
    what = f"source '{source.name}': {source.type}"
    try:
        parts = [(str(part), plugin.state(part)) for part in plugin.parts()]
    except TrainingError:
        raise
    except Exception as error:  # any that code of a user's may raise
        raise DataError(f"{what}: parts: {type(error).__name__}: {error}") from error
    names = [name for name, _ in parts]
    if not names:
        raise DataError(
            f"{what}: gives no parts, so that there is nothing to read. See its options"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{what}: gives two parts named {twice[0]!r}; ids of documents need one")
    return parts


def read_part(source: SourceConfig, part: str, set_aside: SetAside) -> Iterator[Document]:
    """Reads the documents of one part in order, ids `<source>/<part>#<row>`.

    Documents before an error are given; the rest of the part is set aside.
    """
    row = -1

    def rows() -> Iterator[tuple[int, Any]]:
        nonlocal row
        for row, value in enumerate(source_plugin(source).read(part)):
            yield row, _as_object(value, source)

    try:
        yield from documents_of(rows(), part, source, set_aside)
    except (TooSlow, TrainingError):
        raise
    except OSError as error:
        what = f"source '{source.name}': {source.type}: part {part}, behind row {row}"
        raise DataError(
            f"{what}: {error}. Finished work is kept; start again when this is mended"
        ) from error
    except Exception as error:  # any that code of a user's may raise
        reason = f"{type(error).__name__} in {source.type}"
        set_aside(part, row + 1, reason, f"{error}; the rest of this part is not read")


def _as_object(value: Any, source: SourceConfig) -> Any:
    """Returns a row as a reader of files would give it."""
    if isinstance(value, str):
        value = {source.text_field: value}
    if not isinstance(value, Mapping):
        return Unreadable("not an object", f"a {type(value).__name__}")
    limit = source.max_document_bytes
    # Characters, of a byte or more: encoding a text that is too long would copy it.
    if sum(len(text) for text in value.values() if isinstance(text, str)) > limit:
        return Unreadable("row longer than max_document_bytes", f"more than {limit} bytes")
    return dict(value)
