"""Steps that clean text: valid Unicode in one form, no boilerplate lines, limits on the length.

Boilerplate lines are menus, notices and counters, which belong to the page and not to its text, by
line-level rules of C4 (Raffel et al. 2020, section 2.2) and RefinedWeb (Penedo et al. 2023, arXiv
2306.01116, G.2). Every rule sees one line, so that a document is cleaned alike in any context.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cdrmix.data.document import Document, DocumentStep
from cdrmix.errors import ConfigError

# VT, FF and the separators of ASCII and Unicode end a line (as in str.splitlines); NEL is also
# byte 0x85 of Windows-1252, an ellipsis, and becomes one if encodings are repaired.
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# C0 and C1 controls and DEL, of which text has none.
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f\x80-\x84\x86-\x9f]")
# Invisible everywhere: soft hyphen, zero width space, word joiner, byte order mark, non-characters,
# and the direction overrides that hide code from its reviewer (CVE-2021-42574). The zero width
# joiners stay: emoji, Persian and Indic scripts need them.
_INVISIBLE = re.compile("[\xad\u200b\u2060\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
# Few enough to be an accident, in a text of any length.
_FORGIVEN = 2
_SURROGATES = re.compile("[\ud800-\udfff]+")
_C1 = re.compile("[\x80-\x9f]")
# One character per byte as Windows-1252 reads it; its five holes read as Latin-1.
_CP1252 = [bytes([i]).decode("cp1252", "replace").replace("\ufffd", chr(i)) for i in range(256)]
_BYTE_OF = {ord(c): i for i, c in enumerate(_CP1252)} | {i: i for i in range(256)}
_TAIL = f"[\x80-\xbf{re.escape(''.join(_CP1252[0x80:0xA0]))}]"
_CHARACTER = f"(?:[\xc2-\xdf]{_TAIL}|[\xe0-\xef]{_TAIL}{{2}}|[\xf0-\xf4]{_TAIL}{{3}})"
# UTF-8 that was read as Windows-1252 or Latin-1. One character alone counts only where correct text
# has no such sequence (it begins with Ã, Â, â€, â‚, ï¿½, ðŸ and the like); of the others, such as
# é…” at the end of a French quotation, it takes two in a row.
_MOJIBAKE = re.compile(
    f"{_CHARACTER}{{2,}}|[\xc2\xc3]{_TAIL}|\xe2[€‚„†ˆ‰\x80\x82\x84\x86\x88\x89]{_TAIL}"
    f"|\xef[»\xbf¿]{_TAIL}|\xf0[Ÿ\x9f]{_TAIL}{{2}}"
)


def _reread_as_utf8(match: re.Match[str]) -> str:
    """Characters whose UTF-8 bytes were read one by one, or the match if they are none."""
    try:
        return bytes(_BYTE_OF[ord(c)] for c in match[0]).decode("utf-8")
    except UnicodeDecodeError:
        return match[0]


@dataclass(kw_only=True, eq=False)
class Normalise(DocumentStep):
    """Makes text valid, and drops documents that are not text.

    Args:
        form: Unicode normal form; NFKC also folds ligatures and full width letters, and so loses
            superscripts (x² becomes x2). None leaves the text as it is.
        max_control_fraction: share of control characters above which a text is binary; two are
            always allowed.
        max_invalid_fraction: the same for U+FFFD and lone surrogates, which mark undecodable bytes.
    """

    name = "normalise"
    form: Literal["NFC", "NFKC"] | None = "NFC"
    repair_encoding: bool = True  # UTF-8 that was read as Windows-1252 or Latin-1: cafÃ© -> café
    max_control_fraction: float = 0.02
    max_invalid_fraction: float = 0.02

    def __post_init__(self) -> None:
        if self.form not in ("NFC", "NFKC", None):
            raise ConfigError(f"normalise: form = {self.form!r} is not one of NFC, NFKC, null")

    def judge(self, document: Document) -> str | None:
        """Reasons: binary, undecodable, empty."""
        text = document.text
        num_invalid = 0
        # ASCII cannot be cut in half, misread or in another normal form.
        if not text.isascii():
            # Surrogate pairs become the characters they stand for, lone surrogates U+FFFD.
            text = _SURROGATES.sub(
                lambda m: m[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"),
                text,
            )
            num_invalid = text.count("\ufffd")
            if self.repair_encoding:
                text = _MOJIBAKE.sub(_reread_as_utf8, text)
                text = _C1.sub(lambda match: _CP1252[ord(match[0])], text)
            text = _INVISIBLE.sub("", text)
        text = _LINE_ENDS.sub("\n", text)
        with_controls = len(text)
        text = _CONTROLS.sub("", text)
        num_controls = with_controls - len(text)
        # Last: a character removed above may have separated a letter and its accent.
        if self.form and not unicodedata.is_normalized(self.form, text):
            text = unicodedata.normalize(self.form, text)
        length = len(document.text)
        if num_controls > self.max_control_fraction * length + _FORGIVEN:
            return "binary"
        if num_invalid > self.max_invalid_fraction * length + _FORGIVEN:
            return "undecodable"
        if not text or text.isspace():
            return "empty"
        document.text = text
        return None


# Notices anywhere in a short line: C4's, and similar ones.
_NOTICE = re.compile(
    r"javascript|terms of (?:use|service)|privacy policy|cookie policy|(?:uses?|use of) cookies"
    r"|accept (?:all )?cookies|all rights reserved|skip to (?:main )?content"
)
_NOTICE_CHARACTERS = 200  # a longer line is a paragraph, which may well be about cookies
# Captions of buttons and menus, as the whole line.
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
    """Tests for a line that is a notice, a button, a counter or a menu."""
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


@dataclass(kw_only=True, eq=False)
class Boilerplate(DocumentStep):
    """Removes boilerplate lines; indentation and order of the other lines stay.

    Args:
        domains: domains whose documents are cleaned; other documents pass unchanged. A manual of
            JavaScript names it in every other line.
        require_sentence_end: keep only lines that end as a sentence does, as C4 does. It removes
            headings, lists and verses too; FineWeb found more text to be worth more.
        min_line_words: keep only lines of so many words: 5 in C4, 1 keeps all.
        min_kept_fraction: smallest share of the characters that must remain; below it the document
            was all menus.
    """

    name = "boilerplate"
    domains: Sequence[str] = ("web",)
    require_sentence_end: bool = False
    min_line_words: int = 1
    min_kept_fraction: float = 0.1

    def judge(self, document: Document) -> str | None:
        """Reason: only boilerplate."""
        if document.domain not in self.domains:
            return None
        lines = []
        for line in document.text.split("\n"):
            bare = line.strip()
            ends = bare.endswith(_SENTENCE_ENDS) and not bare.endswith("...")
            is_fit = (ends or not self.require_sentence_end) and (
                self.min_line_words <= 1 or len(bare.split()) >= self.min_line_words
            )
            # Empty lines stay: they separate paragraphs.
            if not bare or (is_fit and not is_boilerplate(bare)):
                lines.append(line)
        text = _EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip("\n")
        if not text or len(text) < self.min_kept_fraction * len(document.text):
            return "only boilerplate"
        document.text = text
        return None


@dataclass(kw_only=True, eq=False)
class Length(DocumentStep):
    """Keeps documents whose number of characters lies between two limits, both included.

    It selects the long documents of a source for long contexts, for example.
    """

    name = "length"
    min_characters: int = 1
    max_characters: int | None = None

    def __post_init__(self) -> None:
        least = self.min_characters
        most = self.max_characters
        if least < 0 or (most is not None and most < least):
            raise ConfigError(
                f"length: min_characters = {least} and max_characters = {most} "
                "leave nothing; give 0 <= min_characters <= max_characters"
            )

    def judge(self, document: Document) -> str | None:
        """Reasons: too short, too long."""
        if len(document.text) < self.min_characters:
            return "too short"
        is_long = self.max_characters is not None and len(document.text) > self.max_characters
        return "too long" if is_long else None
