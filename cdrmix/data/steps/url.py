"""One spelling per address, and keys by which documents of one page or host are found.

The keys are figures of one document: no step holds a set of what it has seen, so that any number
of processes agree, and a sort or the exact deduplication finds equal keys afterwards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit, urlunsplit

from cdrmix.data.document import Document, Drop
from cdrmix.errors import ConfigError

# Parameters that say who sent the reader or which visit it was, not which page it is. Sources: what
# Google, Meta, Microsoft, Matomo, HubSpot, Mailchimp, Marketo, Adobe, LinkedIn, X, TikTok and
# Yandex document for campaigns, and the session parameters of PHP, Java, ASP and ColdFusion.
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


def _canonicalize(url: str) -> str:
    try:
        from w3lib.url import canonicalize_url
    except ImportError as error:
        raise ConfigError("url: needs w3lib: pip install 'cdrmix[data]'") from error
    return canonicalize_url(url)


def canonical_url(url: str) -> str | None:
    """One spelling of a web address, or None where it is not one.

    Sorted parameters, right escapes and no fragment (w3lib), a host in lower case without the
    scheme's own port, user or final dot, no tracking or session parameters.
    """
    try:
        parts = urlsplit(_canonicalize(url.strip()))
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number, or half an IPv6 address
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host:
        return None
    host = f"[{host}]" if ":" in host else host.rstrip(".")
    if not _HOST.fullmatch(host):
        return None
    netloc = host if port in (None, _DEFAULT_PORTS[parts.scheme]) else f"{host}:{port}"
    query = "&".join(
        pair for pair in parts.query.split("&") if not _TRACKING.fullmatch(pair.partition("=")[0])
    )
    path = _SESSION_IN_PATH.sub("", parts.path) or "/"
    return urlunsplit((parts.scheme, netloc, path, query, ""))


def host_of(url: str) -> str:
    """Host of a canonical address, without port and www."""
    return (urlsplit(url).hostname or "").removeprefix("www.")


def url_key(url: str) -> str:
    """16 hexadecimal digits that addresses of one page share.

    Beyond the canonical spelling: http and https, www and none, a slash at the end and none,
    index.html and none are the same page.
    """
    parts = urlsplit(url)
    path = _DEFAULT_PAGE.sub("/", parts.path).rstrip("/")
    page = f"{parts.netloc.removeprefix('www.')}{path}?{parts.query}"
    return hashlib.blake2b(page.encode(), digest_size=_KEY_BYTES).hexdigest()


class Url:
    """Writes metadata `url` in one spelling, `url_key` and `host`, where a document has a url.

    Args:
        drop_invalid: drop a document whose url is no web address, rather than leave it as it is.
    """

    name = "url"

    def __init__(self, *, drop_invalid: bool = False) -> None:
        self.drop_invalid = drop_invalid

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """All documents; reason, when asked for: invalid url."""
        for document in documents:
            url = document.metadata.get("url")
            canonical = canonical_url(url) if isinstance(url, str) else None
            if canonical is not None:
                document.metadata["url"] = canonical
                document.metadata["url_key"] = url_key(canonical)
                document.metadata["host"] = host_of(canonical)
            elif url is not None and self.drop_invalid:
                drop(document, "invalid url")
                continue
            yield document
