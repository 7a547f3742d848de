"""Web addresses: one spelling, keys for documents of one page or host, and lists of unwanted ones.

A blocklist is a text file with one entry per line. A # and a space begin a comment, as does a # at
the start of a line. No list is shipped: the user decides whose texts are unwanted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from cdrmix.data.document import Document, DocumentStep
from cdrmix.errors import ConfigError, DataError

# Parameters of the campaign or the visit, which do not change the page. Sources: the campaign
# parameters that Google, Meta, Microsoft, Matomo, HubSpot, Mailchimp, Marketo, Adobe, LinkedIn, X,
# TikTok and Yandex document, and the session parameters of PHP, Java, ASP and ColdFusion.
_TRACKING = re.compile(
    r"(?i)(?:utm|mtm|matomo|piwik|hsa|vero)_[a-z_]+|pk_(?:campaign|kwd|keyword|source|medium|content)"
    r"|[gdw]clid|gclsrc|gbraid|wbraid|_g[al]|gad_source|fbclid|fb_(?:action|source|ref)[a-z_]*"
    r"|msclkid|yclid|ysclid|_openstat|twclid|ttclid|li_fat_id|igshid|igsh|epik|_hsenc|_hsmi|__hs[a-z]+"
    r"|mc_[ce]id|mkt_tok|s_kwcid|ef_id|irclickid|_branch_match_id|ref_src|ref_url"
    r"|phpsessid|jsessionid|aspsessionid[a-z]*|sessionid|cfid|cftoken"
)
_SESSION_IN_PATH = re.compile(r"(?i);(?:jsessionid|phpsessid|sid)=[^/?;]*")
_DEFAULT_PAGE = re.compile(r"(?i)/(?:index|default)\.(?:html?|php|aspx?|jsp)$")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:[\w-]{1,63}\.)*[\w-]{1,63}|\[[0-9a-f:.]+\]")
_KEY_BYTES = 8


def canonical_url(url: str) -> str | None:
    """Canonical spelling of a web address, or None if it is not one.

    Sorted parameters, right escapes and no fragment (w3lib), a host in lower case without the
    scheme's own port, user or final dot, no tracking or session parameters.
    """
    try:
        from w3lib.url import canonicalize_url
    except ImportError as error:
        raise ConfigError("url: needs w3lib: pip install 'cdrmix[data]'") from error
    try:
        parts = urlsplit(canonicalize_url(url.strip()))
        host = parts.hostname
        port = parts.port
    except ValueError:  # a port that is no number, or half an IPv6 address
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host:
        return None
    host = f"[{host}]" if ":" in host else host.rstrip(".")
    if not _HOST.fullmatch(host):
        return None
    netloc = host if port in (None, _DEFAULT_PORTS[parts.scheme]) else f"{host}:{port}"
    pairs = parts.query.split("&")
    query = "&".join(pair for pair in pairs if not _TRACKING.fullmatch(pair.partition("=")[0]))
    path = _SESSION_IN_PATH.sub("", parts.path) or "/"
    return urlunsplit((parts.scheme, netloc, path, query, ""))


def host_of(url: str) -> str:
    """Host of a canonical address, without port and www."""
    return (urlsplit(url).hostname or "").removeprefix("www.")


def url_key(url: str) -> str:
    """16 hexadecimal digits, equal for canonical addresses of one page.

    http and https, www and none, a slash at the end and none, index.html and none are the same.
    """
    parts = urlsplit(url)
    path = _DEFAULT_PAGE.sub("/", parts.path).rstrip("/")
    page = f"{parts.netloc.removeprefix('www.')}{path}?{parts.query}"
    return hashlib.blake2b(page.encode(), digest_size=_KEY_BYTES).hexdigest()


@dataclass(kw_only=True, eq=False)
class Url(DocumentStep):
    """Writes metadata `url` in canonical spelling, `url_key` and `host` of documents with a url.

    Args:
        drop_invalid: drop a document whose url is no web address, rather than pass it unchanged.
    """

    name = "url"
    drop_invalid: bool = False

    def judge(self, document: Document) -> str | None:
        """Reason, with `drop_invalid`: invalid url."""
        url = document.metadata.get("url")
        canonical = canonical_url(url) if isinstance(url, str) else None
        if canonical is None:
            return "invalid url" if url is not None and self.drop_invalid else None
        document.metadata["url"] = canonical
        document.metadata["url_key"] = url_key(canonical)
        document.metadata["host"] = host_of(canonical)
        return None


_COMMENT = re.compile(r"^#.*|\s#\s.*")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def read_list(path: str | Path | None) -> list[str]:
    """Reads the entries of a list file, in UTF-8 and with at least one; no file has none."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a list: {error}") from error
    entries = [entry for line in lines if (entry := _COMMENT.sub("", line).strip())]
    if not entries:
        raise DataError(f"{path}: holds no entry. Write one per line, or leave the list out")
    return entries


@dataclass(kw_only=True, eq=False)
class Blocklist(DocumentStep):
    """Drops documents from listed addresses and hosts, or with listed words.

    Args:
        hosts: file of host names; example.org blocks its subdomains too.
        urls: file of addresses; spelling, scheme and tracking parameters do not matter.
        words: file of words and phrases, matched as whole words in any case.
        min_distinct_words: number of different listed words from which a document is dropped; 1 as
            in C4, more for lists with words that also have a harmless meaning.
    """

    name = "blocklist"
    hosts: str | Path | None = None
    urls: str | Path | None = None
    words: str | Path | None = None
    min_distinct_words: int = 1

    def __post_init__(self) -> None:
        if self.hosts is None and self.urls is None and self.words is None:
            raise ConfigError("blocklist: no list given. Set one of hosts, urls, words")
        if self.min_distinct_words < 1:
            number = self.min_distinct_words
            raise ConfigError(f"blocklist: min_distinct_words = {number} is below 1")
        hosts = read_list(self.hosts)
        self._hosts = {host.lower().removeprefix("www.").strip(".") for host in hosts}
        self._url_keys = set()
        for entry in read_list(self.urls):
            canonical = canonical_url(entry if "://" in entry else f"http://{entry}")
            if canonical is None:
                example = "a web address such as https://example.org/page"
                raise DataError(f"{self.urls}: {entry!r} is not {example}")
            self._url_keys.add(url_key(canonical))
        split = [tuple(_WORD.findall(entry.lower())) for entry in read_list(self.words)]
        self._words = {words[0] for words in split if len(words) == 1}
        self._phrases = {words for words in split if len(words) > 1}

    def judge(self, document: Document) -> str | None:
        """Reasons: blocked host, blocked url, blocked words."""
        url = document.metadata.get("url")
        if (self._hosts or self._url_keys) and isinstance(url, str):
            canonical = canonical_url(url)
            labels = host_of(canonical).split(".") if canonical else []
            if any(".".join(labels[i:]) in self._hosts for i in range(len(labels))):
                return "blocked host"
            if canonical and url_key(canonical) in self._url_keys:
                return "blocked url"
        if not (self._words or self._phrases):
            return None
        words = _WORD.findall(document.text.lower())
        distinct = set(words)
        num_listed = len(distinct & self._words)
        for phrase in self._phrases:
            # A phrase is compared in sequence only where its first word occurs.
            if phrase[0] in distinct:
                num_listed += any(
                    tuple(words[i : i + len(phrase)]) == phrase
                    for i, word in enumerate(words)
                    if word == phrase[0]
                )
        return "blocked words" if num_listed >= self.min_distinct_words else None
