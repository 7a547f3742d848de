"""The readable text of an HTML page, by resiliparse, in a child process with limits.

The text is what a page shows: no scripts, styles, forms or navigation, blocks on lines of their
own, preformatted text as it stands. No guess is made at which part of a page is its article;
line-level boilerplate is a matter for a later step.

The child process is there because the tree that the HTML standard asks for may be quadratic in the
page: 50 kB of unclosed <font> make 1 GB of it, and nothing in Python stops a parser written in C++.
The child answers page after page; one that exceeds the limits ends it, and the next page starts
another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
from typing import IO

from cdrmix.data.steps.read_bytes import Unreadable, missing_extra

# Ordinary pages take 0.025 CPU seconds and 10 MB of memory per MB.
_CPU_SECONDS, _CPU_SECONDS_PER_BYTE = 0.5, 1e-6
_MEMORY_BYTES, _MEMORY_PER_BYTE = 2**29, 64  # the interpreter with its libraries, and the tree

# Elements that are no text of the page, and what ARIA's landmarks of the same meaning mark so.
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


def extract_text(html: str) -> tuple[str, str]:
    """Extract the text that a page shows, and its title ('' where it has none).

    Raises:
        Unreadable: if the page takes more time or memory than any page of its size should.
        DataError: if resiliparse is not installed.
    """
    return _parser.extract(html)


class _Parser:
    """The child process, started by the first page and again after one that ended it.

    Attributes:
        process: the child, or None before it is started.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        # Its pipes serve one process at a time: a fork starts a child of its own.
        os.register_at_fork(after_in_child=self._forget)

    def extract(self, html: str) -> tuple[str, str]:
        """Ask the child for the text and title of a page."""
        if self.process is None:
            if importlib.util.find_spec("resiliparse") is None:
                raise missing_extra("HTML", "resiliparse")
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cdrmix.data.steps.read_html"],
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
            with contextlib.suppress(OSError):  # what it could not flush
                process.stdin.close()
            status = process.wait()
            if not isinstance(error, BrokenPipeError | EOFError):
                raise
            raise Unreadable(
                "HTML beyond the limits of the parser",
                f"{len(html)} characters may take {_cpu_seconds(html):.1f} CPU seconds, "
                f"{_memory_bytes(html) >> 20} MiB and give {_LONGEST_TEXT * len(html)} characters "
                f"of text; the parser ended with status {status}",
            ) from None

    def _forget(self) -> None:
        self.process = None


_parser = _Parser()


def _message(text: str) -> bytes:
    content = text.encode(errors="surrogatepass")
    return len(content).to_bytes(_SIZE_BYTES) + content


def _read_message(stream: IO[bytes]) -> str:
    header = stream.read(_SIZE_BYTES)
    content = stream.read(int.from_bytes(header))
    if len(header) < _SIZE_BYTES or len(content) < int.from_bytes(header):
        raise EOFError
    return content.decode(errors="surrogatepass")


def _cpu_seconds(html: str) -> float:
    return _CPU_SECONDS + _CPU_SECONDS_PER_BYTE * len(html)


def _memory_bytes(html: str) -> int:
    return _MEMORY_BYTES + _MEMORY_PER_BYTE * len(html)


def _answer_pages() -> None:
    """Read pages from standard input until it ends, and write text and title of each."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle; its end ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            html = _read_message(sys.stdin.buffer)
        except EOFError:
            return
        # The default action of SIGPROF ends a process even inside C++; CPU time, because a result
        # must not depend on how busy the machine is.
        signal.setitimer(signal.ITIMER_PROF, _cpu_seconds(html))
        resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes(html), resource.RLIM_INFINITY))
        # Alternative texts, because figures are left out as a whole without them. A summary is not
        # among the library's blocks: its text would be one word with what follows.
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


if __name__ == "__main__":
    _answer_pages()
