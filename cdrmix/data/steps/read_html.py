"""The readable text of an HTML page, by the standard library's parser.

It takes what a page shows: no scripts, styles, forms or navigation, blocks on lines of their own,
preformatted text as it stands. It does not guess which part of a page is its article; line-level
boilerplate is a matter for a later step.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = {
    *("script", "style", "template", "noscript", "svg", "math", "iframe", "object", "canvas"),
    *("head", "nav", "header", "footer", "aside", "form", "button", "select"),
}
_BLOCKS = {
    *("address", "article", "blockquote", "body", "dd", "div", "dl", "dt", "figcaption", "figure"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "main", "ol", "p", "pre", "section"),
    *("table", "tbody", "tfoot", "thead", "tr", "ul", "caption", "details", "summary"),
}
_PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "ul", "ol", "blockquote"}
_PREFORMATTED = {"pre", "textarea"}
_SPACES = re.compile(r"[ \t\r\n\f]+")


def extract_text(html: str) -> tuple[str, str]:
    """The text that a page shows, and its title ('' where it has none)."""
    parser = _Extractor()
    parser.feed(html)
    parser.close()
    text = "".join(parser.pieces)
    lines = [line.rstrip(" ") for line in text.split("\n")]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    return text, _SPACES.sub(" ", "".join(parser.title)).strip()


class _Extractor(HTMLParser):
    """Collects `pieces` of text, which joined are the page, and the `title`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._hidden: list[str] = []
        self._preformatted = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and self._hidden[-1:] != ["svg"]:
            self._in_title = True
        elif tag == "body":  # ends whatever a page has forgotten to close in its head
            self._hidden.clear()
        elif tag in _HIDDEN:
            self._hidden.append(tag)
        elif not self._hidden:
            self._open(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        elif not self._hidden:
            self._close(tag)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._hidden:
            self._add(data)

    def _open(self, tag: str) -> None:
        if tag == "br":
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            if not self._at_line_start():
                self.pieces.append("\t")
        elif tag in _BLOCKS:
            self._break(tag)
        if tag == "li":
            self.pieces.append("- ")
        if tag in _PREFORMATTED:
            self._preformatted += 1

    def _close(self, tag: str) -> None:
        if tag in _PREFORMATTED and self._preformatted:
            self._preformatted -= 1
        if tag in _BLOCKS:
            self._break(tag)

    def _break(self, tag: str) -> None:
        """End the line, and leave an empty one around what is a paragraph."""
        if self.pieces and not self._at_line_start():
            self.pieces.append("\n")
        if tag in _PARAGRAPHS and self.pieces:
            self.pieces.append("\n")

    def _add(self, data: str) -> None:
        if self._preformatted:
            self.pieces.append(data)
            return
        text = _SPACES.sub(" ", data)
        if text.startswith(" ") and (self._at_line_start() or self.pieces[-1].endswith(" ")):
            text = text[1:]
        if text:
            self.pieces.append(text)

    def _at_line_start(self) -> bool:
        return not self.pieces or self.pieces[-1].endswith("\n")
