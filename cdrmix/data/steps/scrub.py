"""Takes personal data and secrets out of text, and says in their place what stood there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from cdrmix.data.document import Document, Drop
from cdrmix.data.steps import credentials, pii
from cdrmix.errors import ConfigError

Span = tuple[int, int, str]

KINDS = (*credentials.KINDS, *pii.KINDS)

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


def find(text: str, kinds: Iterable[str] = KINDS) -> list[Span]:
    """(start, end, kind) of all personal data and secrets, in order, without overlaps.

    Of two that overlap the one that starts first stays; at one start, secrets before the rest.
    """
    wanted = frozenset(kinds)
    spans = list(credentials.find_credentials(text, wanted))
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
    spans = find(text, kinds)
    pieces, position = [], 0
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
