"""Drops documents from listed addresses and hosts, or with listed words.

A list is a text file with one entry per line; what follows a # and a space, or stands behind a # at
the start of a line, is a comment. Nothing is shipped: whose texts are unwanted, the user decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cdrmix.data.document import Document, Drop
from cdrmix.data.steps.url import canonical_url, host_of, url_key
from cdrmix.errors import ConfigError, DataError

_COMMENT = re.compile(r"^#.*|\s#\s.*")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def read_list(path: str | Path) -> list[str]:
    """The entries of a list file.

    Raises:
        DataError: if it cannot be read, is not UTF-8, or holds no entry.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a list: {error}") from error
    entries = [entry for line in lines if (entry := _COMMENT.sub("", line).strip())]
    if not entries:
        raise DataError(f"{path}: holds no entry. Write one per line, or leave the list out")
    return entries


class Blocklist:
    """Drops what is listed; the lists are read once, when the step is made.

    Args:
        hosts: file of host names; example.org blocks its subdomains too.
        urls: file of addresses; spelling, scheme and tracking parameters do not matter.
        words: file of words and phrases, found as whole words in any case.
        min_distinct_words: how many different listed words a document must hold to be dropped;
            1 as in C4, more for lists with words that also have a harmless meaning.
    """

    name = "blocklist"

    def __init__(
        self,
        *,
        hosts: str | Path | None = None,
        urls: str | Path | None = None,
        words: str | Path | None = None,
        min_distinct_words: int = 1,
    ) -> None:
        if hosts is None and urls is None and words is None:
            raise ConfigError("blocklist: no list given. Set one of hosts, urls, words")
        if min_distinct_words < 1:
            raise ConfigError(f"blocklist: min_distinct_words = {min_distinct_words} is below 1")
        self._hosts = frozenset(
            host.lower().removeprefix("www.").strip(".") for host in _entries(hosts)
        )
        self._url_keys = frozenset(_key_of_entry(entry, urls) for entry in _entries(urls))
        split = [tuple(_WORD.findall(entry.lower())) for entry in _entries(words)]
        self._words = frozenset(words[0] for words in split if len(words) == 1)
        self._phrases = frozenset(words for words in split if len(words) > 1)
        self.min_distinct_words = min_distinct_words

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """Documents that nothing lists; reasons: blocked host, blocked url, blocked words."""
        for document in documents:
            reason = self.reason_to_drop(document)
            if reason is None:
                yield document
            else:
                drop(document, reason)

    def reason_to_drop(self, document: Document) -> str | None:
        """Which list a document is on, or None."""
        url = document.metadata.get("url")
        if (self._hosts or self._url_keys) and isinstance(url, str):
            canonical = canonical_url(url)
            if canonical and self._is_blocked_host(host_of(canonical)):
                return "blocked host"
            if canonical and url_key(canonical) in self._url_keys:
                return "blocked url"
        if not (self._words or self._phrases):
            return None
        num_found = self._num_distinct_words(document.text)
        return "blocked words" if num_found >= self.min_distinct_words else None

    def _is_blocked_host(self, host: str) -> bool:
        labels = host.split(".")
        return any(".".join(labels[i:]) in self._hosts for i in range(len(labels)))

    def _num_distinct_words(self, text: str) -> int:
        words = _WORD.findall(text.lower())
        distinct = frozenset(words)
        num_found = len(distinct & self._words)
        # A phrase is looked for in sequence only where its first word occurs.
        for phrase in self._phrases:
            if phrase[0] in distinct:
                size = len(phrase)
                num_found += any(
                    tuple(words[i : i + size]) == phrase
                    for i, word in enumerate(words)
                    if word == phrase[0]
                )
        return num_found


def _entries(path: str | Path | None) -> list[str]:
    return [] if path is None else read_list(path)


def _key_of_entry(entry: str, path: str | Path | None) -> str:
    canonical = canonical_url(entry if "://" in entry else f"http://{entry}")
    if canonical is None:
        raise DataError(f"{path}: {entry!r} is not a web address such as https://example.org/page")
    return url_key(canonical)
