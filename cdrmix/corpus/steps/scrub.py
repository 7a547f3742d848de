"""Replacement of personal data and secrets by placeholders that name their kind.

Secrets are private keys, cloud and service tokens and passwords in URLs; pii.py detects personal
data.
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
# (kind, a string in every match, pattern). The search for the string costs a hundredth of the
# pattern; for the same reason none starts with a look-behind. If a pattern has a group, only the
# group is the secret. Sources: the token formats that the issuers publish.
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
            # The edge is tested first: a long run of eyJ would be read anew from each.
            r"eyJ(?<![\w-]eyJ)[\w-]{10,2000}\.eyJ[\w-]{10,9000}\.[\w-]{20,1000}",
        ),
        ("password", "://", r"://[^\s:/@?#\"'<>]{1,64}:([^\s:/@\"'<>]{3,128})@[\w.-]"),
    )
)
_KEY_BEGINS = re.compile(r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINES = re.compile(r"(?:\s*(?:\\n)?[A-Za-z0-9+/=]{16,100})*")  # of base64; \n as in JSON
_KEY_CHARACTERS = 20_000  # three times the size of a key of 8,192 bits
CREDENTIAL_KINDS = ("private_key", *dict.fromkeys(kind for kind, _, _ in _PATTERNS))
_WITHIN = frozenset(string.ascii_letters + string.digits + "_-")  # one of these before: no start
# Stand-ins for a password in documentation.
_NO_PASSWORD = re.compile(r"(?i)[$%{<*].*|[x.]{3,}|.*\}|pass|password|passwd|pwd|secret|pw|\d{1,5}")


def find_credentials(text: str, kinds: frozenset[str]) -> Iterator[Span]:
    """Spans (start, end, kind) of the secrets of these kinds, pattern by pattern."""
    if "private_key" in kinds and "PRIVATE KEY" in text:
        end = 0
        for begin in _KEY_BEGINS.finditer(text):
            if begin.start() < end:
                continue
            # A block that is cut off goes up to its last line of base64.
            last = _KEY_ENDS.search(text, begin.end(), begin.end() + _KEY_CHARACTERS)
            last = last or _KEY_LINES.match(text, begin.end())
            assert last, "the pattern of lines matches the empty string, too"
            end = last.end()
            yield begin.start(), end, "private_key"
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
# (kinds that a detector can report, detector)
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
    """Placeholder in the text for data of this kind: <EMAIL>, <AWS_KEY>, ...

    The form is StarCoder's (Li et al. 2023, section 4), which models have seen before.
    """
    return f"<{kind.upper()}>"


def find_private(text: str, kinds: Iterable[str] = KINDS) -> list[Span]:
    """Spans (start, end, kind) of all personal data and secrets, in order, without overlaps.

    Of two that overlap the one that starts first counts; at one start, secrets before the rest.
    """
    selected = frozenset(kinds)
    spans = list(find_credentials(text, selected))
    for detectable, detect in _DETECTORS:
        if detectable & selected:
            spans += [span for span in detect(text) if span[2] in selected]
    spans.sort(key=lambda span: span[0])  # stable: at one start the order of detection stays
    disjoint: list[Span] = []
    for span in spans:
        if not disjoint or span[0] >= disjoint[-1][1]:
            disjoint.append(span)
    return disjoint


def scrub(text: str, kinds: Iterable[str] = KINDS) -> tuple[str, Counter[str]]:
    """Replaces private data; returns the text and the number of replacements by kind."""
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

    Writes metadata `scrubbed`, the number of replacements by kind, if there were any.

    Args:
        kinds: kinds to replace; None for all of KINDS.
    """

    name = "scrub"

    def __init__(self, *, kinds: Sequence[str] | None = None) -> None:
        self.kinds = frozenset(KINDS if kinds is None else kinds)
        if unknown := sorted(self.kinds - set(KINDS)):
            raise ConfigError(
                f"scrub: kinds: {', '.join(unknown)}: unknown. Known: {', '.join(sorted(KINDS))}"
            )

    def __call__(self, documents: Iterable[Document], drop: Drop) -> Iterator[Document]:
        """All documents, without personal data and secrets of these kinds."""
        for document in documents:
            document.text, counts = scrub(document.text, self.kinds)
            if counts:
                document.metadata["scrubbed"] = dict(sorted(counts.items()))
            yield document
