"""Files and streams to documents. What cannot be read is set aside with its reason, and the
reading goes on with the next row or file; memory is bounded by the largest document allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdrmix.data.document import Document
from cdrmix.data.source import SetAside, SourceConfig, SourceFile
from cdrmix.data.steps.read_bytes import Unreadable
from cdrmix.data.steps.read_rows import Row, read_rows
from cdrmix.data.steps.read_text import read_text

_WHOLE_FILES = ("text", "code", "html", "docx")
# What is kept beside a text must stay small beside it.
_MAX_METADATA_CHARACTERS = 2_000


def read_file(file: SourceFile, source: SourceConfig, set_aside: SetAside) -> Iterator[Document]:
    """The documents of one file, in its order, ids `<source>/<file>#<row>`.

    What comes before a damage is given; the rest of the file is set aside.

    Args:
        set_aside: told of each row, or the rest of the file, that cannot be read.
    """

    def refuse(row: int, reason: str, detail: str) -> None:
        set_aside(file.name, row, reason, detail)

    try:
        if file.kind in _WHOLE_FILES and source.chain_of_thought is not None:
            raise Unreadable("no fields for a chain of thought", f"a file of kind {file.kind}")
        if file.kind in _WHOLE_FILES:
            text, metadata = read_text(file, source)
            rows: Iterator[Row] = iter([(0, text, metadata)])
        else:
            rows = read_rows(file, source, refuse)
        yield from documents(rows, file.name, source, set_aside)
    except Unreadable as error:
        set_aside(file.name, None, error.reason, error.detail)
    except OSError as error:
        damaged = error.errno is None  # pyarrow's own
        reason = "damaged file" if damaged else f"cannot be read: {error.strerror}"
        set_aside(file.name, None, reason, str(error))


def documents(
    rows: Iterator[Row], file: str, source: SourceConfig, set_aside: SetAside
) -> Iterator[Document]:
    """Documents of rows (number, text, metadata); those without a text of plain characters are
    set aside."""
    for row, given, metadata in rows:
        text = given
        if not text.isascii() and _has_surrogates(text):
            if source.encoding_errors == "set_aside":
                set_aside(file, row, "invalid unicode", "a lone surrogate")
                continue
            text = text.encode(errors="surrogatepass").decode(errors="replace")
        if not text or text.isspace():
            set_aside(file, row, "empty text", "")
            continue
        yield Document(
            text=text,
            id=f"{source.name}/{file}#{row}",
            source=source.name,
            domain=source.domain,
            metadata={"path": file} | _plain(metadata),
        )


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON holds as they are: numbers and short texts."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, bool | int | float)
        or (
            isinstance(value, str)
            and len(value) <= _MAX_METADATA_CHARACTERS
            and not _has_surrogates(value)
        )
    }
