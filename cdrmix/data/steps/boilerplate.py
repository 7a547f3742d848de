"""Takes out lines that belong to the page and not to its text: menus, notices, counters.

Line-level rules of C4 (Raffel et al. 2020, section 2.2) and RefinedWeb (Penedo et al. 2023,
arXiv 2306.01116, G.2). Every rule sees one line, so that a document is cleaned alike wherever it
stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from cdrmix.data.document import Document, Drop

# Notices, found anywhere in a short line: C4's, and their usual relatives.
_NOTICE = re.compile(
    r"javascript|terms of (?:use|service)|privacy policy|cookie policy|(?:uses?|use of) cookies"
    r"|accept (?:all )?cookies|all rights reserved|skip to (?:main )?content"
)
_NOTICE_CHARACTERS = 200  # a longer line is a paragraph, which may well be about cookies

# What a button or a menu says, as the whole line.
_CONTROL = re.compile(
    r"(?:sign|log) ?(?:in|up|out|on)|register|subscribe(?: now)?|tweet|pin it|like|reply"
    r"|share(?: (?:this|on|via) .{1,20})?|follow us(?: on .{1,20})?|click here(?: to .{1,40})?"
    r"|(?:read|show|load|learn|see|view) (?:more|all|less)|home|menu|search|close|back to top"
    r"|(?:next|prev(?:ious)?)(?: (?:page|post|article))?|print(?: this page)?|advertisements?"
    r"|sponsored|related (?:posts|articles|stories)|(?:leave|add|post) a (?:comment|reply)"
    r"|contact(?: us)?|about(?: us)?|site ?map|faqs?|newsletter|download|buy now"
    r"|add to (?:cart|basket)"
)
# 3 likes, 12 Comments, 1.2k views: RefinedWeb's counters.
_COUNTER = re.compile(
    r"[\d.,]+ ?[km]?\+? (?:likes?|shares?|comments?|views?|repl(?:y|ies)|followers?|retweets?"
    r"|votes?|points?|reactions?|downloads?|results?)"
)
_CONTROL_CHARACTERS = 60
_EDGES = " \t*•·-–—|<>»«›‹→←+#:.…!"
_MENU_SEPARATOR = re.compile(r"\s[|•·»›>/]\s")
_MENU_ITEMS = 4
_WORDS_PER_MENU_ITEM = 4
_SENTENCE_ENDS = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？")
_EMPTY_LINES = re.compile(r"\n{3,}")


def is_boilerplate(line: str) -> bool:
    """Whether a line is a notice, a button, a counter or a menu."""
    if len(line) > _NOTICE_CHARACTERS:
        return False
    lowered = line.lower()
    if _NOTICE.search(lowered):
        return True
    if len(line) <= _CONTROL_CHARACTERS:
        bare = lowered.strip(_EDGES)
        if _CONTROL.fullmatch(bare) or _COUNTER.fullmatch(bare):
            return True
    items = _MENU_SEPARATOR.split(line)
    return len(items) >= _MENU_ITEMS and len(line.split()) <= _WORDS_PER_MENU_ITEM * len(items)


class Boilerplate:
    """Takes boilerplate lines out of documents; indentation and order of the rest stay.

    Args:
        domains: whose documents are cleaned; the others pass as they are. A manual of JavaScript
            names it in every other line.
        require_sentence_end: keep only lines that end as a sentence does, as C4 does. It removes
            headings, lists and verses too; FineWeb found more text to be worth more.
        min_line_words: keep only lines of so many words: 5 in C4, 1 keeps all.
        min_kept_fraction: characters that must be left, of all; fewer say that it was all menus.
    """

    name = "boilerplate"

    def __init__(
        self,
        *,
        domains: Sequence[str] = ("web",),
        require_sentence_end: bool = False,
        min_line_words: int = 1,
        min_kept_fraction: float = 0.1,
    ) -> None:
        self.domains = frozenset(domains)
        self.require_sentence_end = require_sentence_end
        self.min_line_words = min_line_words
        self.min_kept_fraction = min_kept_fraction

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Documents without those lines; reason: only boilerplate."""
        for document in documents:
            if document.domain not in self.domains:
                yield document
                continue
            text = self._cleaned(document.text)
            if not text or len(text) < self.min_kept_fraction * len(document.text):
                drop(document, "only boilerplate")
            else:
                document.text = text
                yield document

    def _cleaned(self, text: str) -> str:
        lines = [line for line in text.split("\n") if self._stays(line.strip())]
        return _EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip("\n")

    def _stays(self, line: str) -> bool:
        if not line:
            return True
        if self.require_sentence_end and (
            not line.endswith(_SENTENCE_ENDS) or line.endswith("...")
        ):
            return False
        if self.min_line_words > 1 and len(line.split()) < self.min_line_words:
            return False
        return not is_boilerplate(line)
