"""Files that are one text each: plain text, source code, HTML and Word documents."""

from __future__ import annotations

import codecs
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from cdrmix.data.source import SourceConfig, SourceFile
from cdrmix.data.steps.read_bytes import Unreadable, read_bounded
from cdrmix.data.steps.read_html import extract_text

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_DECLARED_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([a-zA-Z0-9_:.-]+)", re.I)
_CHARSET_WITHIN_BYTES = 1024  # where the HTML standard has readers look for it


def read_text(file: SourceFile, source: SourceConfig) -> tuple[str, dict[str, Any]]:
    """The text of a file and what it says about itself.

    Raises:
        Unreadable: if it is too large, binary or damaged.
        OSError: if it cannot be opened.
    """
    if file.kind == "docx":
        return _docx_text(file.path, source.max_document_bytes), {}
    content = read_bounded(file.path, source.max_document_bytes)
    encoding = (_declared_charset(content) if file.kind == "html" else None) or source.encoding
    text = decoded(content, encoding, source.encoding_errors)
    if "\0" in text:
        raise Unreadable("NUL characters", "a binary file, or text in another encoding")
    if file.kind != "html":
        return text, {}
    text, title = extract_text(text)
    return text, {"title": title} if title else {}


def decoded(content: bytes, encoding: str, errors: str) -> str:
    """Text of bytes, without a byte order mark.

    Args:
        errors: `set_aside` or `replace`, as a source has it.
    Raises:
        Unreadable: if they are not valid in `encoding` and are to be set aside.
    """
    how = "strict" if errors == "set_aside" else errors
    try:
        return content.decode(encoding, errors=how).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"invalid {encoding}", f"{error.reason} at byte {error.start}; see encoding_errors"
        ) from None


def _declared_charset(content: bytes) -> str | None:
    """The encoding that an HTML page names, if Python knows it."""
    declared = _DECLARED_CHARSET.search(content, 0, _CHARSET_WITHIN_BYTES)
    if declared is None or content.startswith(codecs.BOM_UTF8):
        return None
    try:
        return codecs.lookup(declared[1].decode()).name
    except LookupError:
        return None


def _docx_text(path: Path, limit: int) -> str:
    """Paragraphs of a Word document, one to a line; the cells of a table's row by tabs."""
    try:
        with zipfile.ZipFile(path) as archive:
            # What the directory says about the size, zipfile holds the content to.
            size = archive.getinfo("word/document.xml").file_size
            if size > limit:
                raise Unreadable("larger than max_document_bytes", f"{size} bytes of XML")
            with archive.open("word/document.xml") as file:
                return "\n".join(_paragraphs(file))
    except (zipfile.BadZipFile, zlib.error) as error:
        raise Unreadable("damaged docx", str(error)) from None
    except KeyError:
        raise Unreadable("damaged docx", "no word/document.xml in it") from None
    except ElementTree.ParseError as error:
        raise Unreadable("damaged docx", f"its XML: {error}") from None
    except (NotImplementedError, RuntimeError) as error:  # a compression or encryption of its own
        raise Unreadable("unknown kind of docx", str(error)) from None


def _paragraphs(file: IO[bytes]) -> Iterator[str]:
    """Text of each paragraph, and of each row of a table, in order."""
    cells: list[str] = []
    cell: list[str] = []
    depth = 0  # of tables in tables: the rows of an inner one are text of the outer one's cell
    for event, element in ElementTree.iterparse(file, events=("start", "end")):
        match event, element.tag.removeprefix(_WORD):
            case "start", "tbl":
                depth += 1
            case "end", "tbl":
                depth -= 1
            case "end", "p":
                text = "".join(_runs(element))
                if depth:
                    cell.append(text)
                else:
                    yield text
                element.clear()
            case "end", "tc" if depth == 1:
                cells.append(" ".join(cell))
                cell = []
            case "end", "tr" if depth == 1:
                yield "\t".join(cells)
                cells = []
                element.clear()


def _runs(paragraph: ElementTree.Element) -> Iterator[str]:
    for element in paragraph.iter():
        match element.tag.removeprefix(_WORD):
            case "t":
                yield element.text or ""
            case "tab":
                yield "\t"
            case "br" | "cr":
                yield "\n"
