"""Secrets that must not be learnt: private keys, cloud and service tokens, passwords in URLs.

Takes personal data and secrets out of text, and says in their place what stood there.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from cdrmix.corpus.steps import pii
from cdrmix.data.document import Document, Drop
from cdrmix.errors import ConfigError

Span = tuple[int, int, str]
_AWS_SECRET = (
    r"(?i:aws_?(?:secret)?_?(?:access)?_?key|secret_?access_?key)[\"']?\s*[:=]\s*[\"']?"
    r"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
)
# (kind, a string that every match holds, pattern). Looking for the string first costs a hundredth
# of the pattern; for the same reason none starts with a look-behind. Where a pattern has a group,
# only the group is the secret. Sources: the token formats that the issuers publish.
_PATTERNS = tuple(
    (kind, needle, re.compile(pattern))
    for kind, needle, pattern in (
        ("aws_key", "AKIA", r"AKIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("aws_key", "ASIA", r"ASIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("aws_key", "ecret", _AWS_SECRET),
        ("aws_key", "ECRET", _AWS_SECRET),
        ("github_token", "gh", r"gh[pousr]_[A-Za-z0-9]{36,255}(?![A-Za-z0-9])"),
        ("github_token", "github_pat_", r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
        ("gitlab_token", "glpat-", r"glpat-[A-Za-z0-9_-]{20,64}"),
        ("slack_token", "xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,250}"),
        ("slack_token", "xapp-", r"xapp-\d-[A-Za-z0-9-]{20,250}"),
        (
            "slack_token",
            "hooks.slack.com/",
            r"hooks\.slack\.com/(?:services|workflows)/([A-Za-z0-9/]{30,})",
        ),
        ("google_key", "AIza", r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
        ("google_key", "GOCSPX-", r"GOCSPX-[A-Za-z0-9_-]{28}"),
        ("google_key", "ya29.", r"ya29\.[A-Za-z0-9_-]{20,500}"),
        (
            "azure_key",
            "Key=",
            r"(?:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{43,86}={1,2})",
        ),
        ("stripe_key", "k_live_", r"[rs]k_live_[A-Za-z0-9]{16,250}"),
        ("huggingface_token", "hf_", r"hf_[A-Za-z0-9]{34,40}(?![A-Za-z0-9])"),
        ("npm_token", "npm_", r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
        ("pypi_token", "pypi-AgE", r"pypi-AgE[A-Za-z0-9_-]{50,}"),
        ("sendgrid_key", "SG.", r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
        (
            "llm_key",
            "sk-",
            r"sk-(?:ant-[A-Za-z0-9_-]{20,200}|(?:proj-)?[A-Za-z0-9_-]{40,200})",
        ),
        (
            "web_token",
            "eyJ",
            # The edge is looked at first: a long run of eyJ would be read anew from each.
            r"eyJ(?<![\w-]eyJ)[\w-]{10,2000}\.eyJ[\w-]{10,9000}\.[\w-]{20,1000}",
        ),
        ("password", "://", r"://[^\s:/@?#\"'<>]{1,64}:([^\s:/@\"'<>]{3,128})@[\w.-]"),
    )
)
_KEY_BEGINS = re.compile(r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINES = re.compile(r"(?:\s*(?:\\n)?[A-Za-z0-9+/=]{16,100})*")  # of base64; \n as in JSON
_KEY_CHARACTERS = 20_000  # three times what 8,192 bits take
CREDENTIAL_KINDS = ("private_key", *dict.fromkeys(kind for kind, _, _ in _PATTERNS))
_WITHIN = frozenset(string.ascii_letters + string.digits + "_-")  # one of these before: no start
# What documentation writes where a password would stand.
_NO_PASSWORD = re.compile(r"(?i)[$%{<*].*|[x.]{3,}|.*\}|pass|password|passwd|pwd|secret|pw|\d{1,5}")


def _find_private_keys(text: str) -> Iterator[Span]:
    """Blocks of PEM; one that is cut off goes up to its last line of base64."""
    end = 0
    for begin in _KEY_BEGINS.finditer(text) if "PRIVATE KEY" in text else ():
        if begin.start() < end:
            continue
        last = _KEY_ENDS.search(text, begin.end(), begin.end() + _KEY_CHARACTERS)
        last = last or _KEY_LINES.match(text, begin.end())
        assert last, "the pattern of lines matches nothing at all, too"
        end = last.end()
        yield begin.start(), end, "private_key"


def find_credentials(text: str, kinds: frozenset[str]) -> Iterator[Span]:
    """(start, end, kind) of the secrets of these kinds, pattern by pattern."""
    if "private_key" in kinds:
        yield from _find_private_keys(text)
    for kind, needle, pattern in _PATTERNS:
        if kind not in kinds or needle not in text:
            continue
        for match in pattern.finditer(text):
            start = match.start()
            if text[start].isalnum() and text[start - 1 : start] in _WITHIN:
                continue
            if kind != "password" or not _NO_PASSWORD.fullmatch(match[1]):
                yield *match.span(match.lastindex or 0), kind


KINDS = (*CREDENTIAL_KINDS, *pii.KINDS)
# (kinds a detector may find, detector)
_DETECTORS: tuple[tuple[frozenset[str], Callable[[str], Iterator[Span]]], ...] = (
    (frozenset(("email",)), pii.find_emails),
    (frozenset(("iban",)), pii.find_ibans),
    (
        frozenset(("card", "phone", "us_ssn", "br_cpf", "cn_id", "fr_nir")),
        pii.find_numbers,
    ),
    (frozenset(("uk_nino",)), pii.find_ninos),
    (frozenset(("it_cf",)), pii.find_codici_fiscali),
    (frozenset(("ipv4",)), pii.find_ipv4),
    (frozenset(("ipv6",)), pii.find_ipv6),
)


def placeholder(kind: str) -> str:
    """What stands in the text for something of this kind: <EMAIL>, <AWS_KEY>, ...

    The form is StarCoder's (Li et al. 2023, section 4), which models have seen before.
    """
    return f"<{kind.upper()}>"


def find_private(text: str, kinds: Iterable[str] = KINDS) -> list[Span]:
    """(start, end, kind) of all personal data and secrets, in order, without overlaps.

    Of two that overlap the one that starts first stays; at one start, secrets before the rest.
    """
    wanted = frozenset(kinds)
    spans = list(find_credentials(text, wanted))
    for found, detect in _DETECTORS:
        if found & wanted:
            spans += [span for span in detect(text) if span[2] in wanted]
    spans.sort(key=lambda span: span[0])  # stable: at one start the order of detection stays
    kept: list[Span] = []
    for span in spans:
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return kept


def scrub(text: str, kinds: Iterable[str] = KINDS) -> tuple[str, Counter[str]]:
    """(text with placeholders, how many of each kind were replaced)."""
    spans = find_private(text, kinds)
    pieces = []
    position = 0
    for start, end, kind in spans:
        pieces += [text[position:start], placeholder(kind)]
        position = end
    pieces.append(text[position:])
    return "".join(pieces), Counter(kind for _, _, kind in spans)


class Scrub:
    """Replaces personal data and secrets by placeholders; drops nothing.

    Writes metadata `scrubbed`: how many of each kind a document held, where it held any.

    Args:
        kinds: what to look for; None for all of KINDS.
    """

    name = "scrub"

    def __init__(self, *, kinds: Sequence[str] | None = None) -> None:
        self.kinds = frozenset(KINDS if kinds is None else kinds)
        if unknown := sorted(self.kinds - set(KINDS)):
            raise ConfigError(
                f"scrub: kinds: {', '.join(unknown)}: unknown. Known: {', '.join(sorted(KINDS))}"
            )

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """All documents, without what was found in them."""
        for document in documents:
            document.text, counts = scrub(document.text, self.kinds)
            if counts:
                document.metadata["scrubbed"] = dict(sorted(counts.items()))
            yield document
