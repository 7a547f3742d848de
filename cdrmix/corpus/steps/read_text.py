"""Files that are one text each: plain text, source code, HTML and Word documents.

The text of a page is what it shows, by resiliparse: no scripts, styles, forms or navigation, blocks
on lines of their own, preformatted text as it stands. It is not guessed which part of a page is its
article; a later step takes out boilerplate lines.

The parser runs in a child process with limits, because the tree that the HTML standard prescribes
may be quadratic in the page: 50 kB of unclosed <font> make 1 GB of it, and nothing in Python stops
a parser written in C++. The child answers page after page; a page that exceeds the limits ends it,
and the next page starts another.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from cdrmix.corpus.source import SourceConfig, SourceFile
from cdrmix.corpus.steps.read_bytes import Unreadable, from_extra, open_bytes

# Ordinary pages take 0.025 CPU seconds and 10 MB of memory per MB.
_CPU_SECONDS = 0.5
_CPU_SECONDS_PER_BYTE = 1e-6
_MEMORY_BYTES = 2**29
_MEMORY_PER_BYTE = 64  # the interpreter with its libraries, and the tree
# Elements that are no text of the page, and elements with ARIA landmarks of the same meaning.
# A headerlink is the pilcrow that documentation generators put behind each heading.
_HIDDEN = (
    *("script", "style", "template", "noscript", "svg", "math", "iframe", "object", "canvas"),
    *("nav", "header", "footer", "aside", "form", "button", "select"),
    *(f"[role={role}]" for role in ("navigation", "banner", "contentinfo", "complementary")),
    *("[role=search]", "a.headerlink"),
)
_SPACES = re.compile(r"[ \t\r\n\f]+")
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")
_LONGEST_TEXT = 4  # times the page: more is the indentation of hundreds of lists in lists
_SIZE_BYTES = 8  # a message is its size and then UTF-8
_DECLARED_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([a-zA-Z0-9_:.-]+)", re.I)
_CHARSET_WITHIN_BYTES = 1024  # the HTML standard has readers look no further
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


class _Parser:
    """Child process that parses pages, started by the first page and after a page that ended it."""

    process: subprocess.Popen[bytes] | None = None

    def extract(self, html: str) -> tuple[str, str]:
        """Extracts the text that a page shows, and its title ('' if it has none).

        Raises:
            Unreadable: if the page takes more time or memory than any page of its size should.
        """
        if self.process is None:
            from_extra("resiliparse", "HTML")
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cdrmix.corpus.steps.read_text"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        process = self.process
        assert process.stdin and process.stdout
        try:
            process.stdin.write(_message(html))
            process.stdin.flush()
            return _read_message(process.stdout), _read_message(process.stdout)
        except BaseException as error:
            # After an interrupt too: the next page would get the answer to this one.
            self.process = None
            process.kill()
            process.stdout.close()
            with contextlib.suppress(OSError):  # bytes that it could not flush
                process.stdin.close()
            status = process.wait()
            if not isinstance(error, BrokenPipeError | EOFError):
                raise
            cpu_seconds, memory_bytes = _limits(html)
            raise Unreadable(
                "HTML beyond the limits of the parser",
                f"{len(html)} characters may take {cpu_seconds:.1f} CPU seconds, "
                f"{memory_bytes >> 20} MiB and give {_LONGEST_TEXT * len(html)} characters "
                f"of text; the parser ended with status {status}",
            ) from None


_parser = _Parser()
# Its pipes serve one process at a time: a fork starts a child of its own.
os.register_at_fork(after_in_child=lambda: setattr(_parser, "process", None))
extract_text = _parser.extract


def _message(text: str) -> bytes:
    content = text.encode(errors="surrogatepass")
    return len(content).to_bytes(_SIZE_BYTES) + content


def _read_message(stream: IO[bytes]) -> str:
    header = stream.read(_SIZE_BYTES)
    content = stream.read(int.from_bytes(header))
    if len(header) < _SIZE_BYTES or len(content) < int.from_bytes(header):
        raise EOFError
    return content.decode(errors="surrogatepass")


def _limits(html: str) -> tuple[float, int]:
    """CPU time (seconds) and address space (bytes) that a page may take."""
    cpu_seconds = _CPU_SECONDS + _CPU_SECONDS_PER_BYTE * len(html)
    return cpu_seconds, _MEMORY_BYTES + _MEMORY_PER_BYTE * len(html)


def _answer_pages() -> None:
    """Reads pages from standard input until it ends; writes text and title of each."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the parent to handle; its end ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            html = _read_message(sys.stdin.buffer)
        except EOFError:
            return
        # The default action of SIGPROF ends a process even inside C++; CPU time, because a result
        # must not depend on how busy the machine is.
        cpu_seconds, memory_bytes = _limits(html)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
        # Alternative texts, because figures are left out as a whole without them. A summary is not
        # among the library's blocks: its text would be one word with the text behind it.
        tree = HTMLTree.parse(html.replace("</summary>", "</summary><br>"))
        text = extract_plain_text(
            tree, preserve_formatting=True, alt_texts=True, skip_elements=_HIDDEN
        )
        title = _SPACES.sub(" ", tree.title or "").strip()
        text = "\n".join(line.rstrip() for line in text.split("\n"))
        text = _EMPTY_LINES.sub("\n\n", text).strip("\n")
        if len(text) > _LONGEST_TEXT * len(html):
            raise MemoryError("lists in lists, whose indentation is quadratic in the page")
        sys.stdout.buffer.write(_message(text) + _message(title))
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def read_text(file: SourceFile, source: SourceConfig) -> tuple[str, dict[str, Any]]:
    """Reads the text of a file, and metadata from within it; Unreadable if it is damaged."""
    limit = source.max_document_bytes
    if file.kind == "docx":
        return _docx_text(file.path, limit), {}
    with open_bytes(file.path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise Unreadable("larger than max_document_bytes", f"more than {limit} bytes in one text")
    encoding = source.encoding
    # The charset that an HTML page declares, if Python knows it; a byte order mark outranks it.
    if file.kind == "html" and not content.startswith(codecs.BOM_UTF8):
        declaration = _DECLARED_CHARSET.search(content, 0, _CHARSET_WITHIN_BYTES)
        if declaration is not None:
            with contextlib.suppress(LookupError):
                encoding = codecs.lookup(declaration[1].decode()).name
    text = decoded(content, encoding, source.encoding_errors)
    if "\0" in text:
        raise Unreadable("NUL characters", "a binary file, or text in another encoding")
    if file.kind != "html":
        return text, {}
    text, title = extract_text(text)
    return text, {"title": title} if title else {}


def decoded(content: bytes, encoding: str, errors: str) -> str:
    """Decodes bytes, without a byte order mark; `errors` is `set_aside` or `replace`."""
    handler = "strict" if errors == "set_aside" else errors
    try:
        return content.decode(encoding, errors=handler).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        detail = f"{error.reason} at byte {error.start}; see encoding_errors"
        raise Unreadable(f"invalid {encoding}", detail) from None


def _docx_text(path: Path, limit: int) -> str:
    """Reads a Word document: a paragraph to a line; the cells of a table's row between tabs."""
    try:
        with zipfile.ZipFile(path) as archive:
            # zipfile reads no more of a member than its directory claims, so this bounds it.
            size = archive.getinfo("word/document.xml").file_size
            if size > limit:
                raise Unreadable("larger than max_document_bytes", f"{size} bytes of XML")
            with archive.open("word/document.xml") as file:
                return "\n".join(_docx_lines(file))
    except (zipfile.BadZipFile, zlib.error) as error:
        raise Unreadable("damaged docx", str(error)) from None
    except KeyError:
        raise Unreadable("damaged docx", "no word/document.xml in it") from None
    except ElementTree.ParseError as error:
        raise Unreadable("damaged docx", f"its XML: {error}") from None
    except (NotImplementedError, RuntimeError) as error:  # unusual compression, or encryption
        raise Unreadable("unknown kind of docx", str(error)) from None


def _docx_lines(file: IO[bytes]) -> Iterator[str]:
    """Text of each paragraph, and of each row of a table, in order."""
    breaks = {"tab": "\t", "br": "\n", "cr": "\n"}
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
                tags = ((part.tag.removeprefix(_WORD), part.text) for part in element.iter())
                runs = (run or "" if tag == "t" else breaks.get(tag, "") for tag, run in tags)
                text = "".join(runs)
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


if __name__ == "__main__":
    _answer_pages()
