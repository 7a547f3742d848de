"""Replacement of personal data and secrets by placeholders that name their kind.

Secrets are private keys, cloud and service tokens and passwords in URLs. Personal data are e-mail
addresses, phone and card numbers, IBANs, public IP addresses, and national identity numbers of the
USA (us_ssn), the United Kingdom (uk_nino), Brazil (br_cpf), China (cn_id), France (fr_nir) and
Italy (it_cf). Names and postal addresses are not detected: that takes a model, and no pattern does
it well.
"""

from __future__ import annotations

import ipaddress
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from phonenumbers import COUNTRY_CODE_TO_REGION_CODE
from stdnum import iban, luhn, numdb
from stdnum.br import cpf
from stdnum.cn import ric
from stdnum.exceptions import ValidationError
from stdnum.fr import nir
from stdnum.it import codicefiscale

from cdrmix.data.document import Document, DocumentStep
from cdrmix.errors import ConfigError

Span = tuple[int, int, str]  # start, end, kind
_AWS_SECRET = (
    r"(?i:aws_?(?:secret)?_?(?:access)?_?key|secret_?access_?key)[\"']?\s*[:=]\s*[\"']?"
    r"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
)
_SLACK_HOOK = r"hooks\.slack\.com/(?:services|workflows)/([A-Za-z0-9/]{30,})"
# (kind, a string in every match, pattern). The search for the string costs a hundredth of the
# pattern; for the same reason none starts with a look-behind. If a pattern has a group, only the
# group is the secret. Sources: the token formats that the issuers publish.
_SECRETS = (
    ("aws_key", "AKIA", r"AKIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("aws_key", "ASIA", r"ASIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("aws_key", "ecret", _AWS_SECRET),
    ("aws_key", "ECRET", _AWS_SECRET),
    ("github_token", "gh", r"gh[pousr]_[A-Za-z0-9]{36,255}(?![A-Za-z0-9])"),
    ("github_token", "github_pat_", r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    ("gitlab_token", "glpat-", r"glpat-[A-Za-z0-9_-]{20,64}"),
    ("slack_token", "xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,250}"),
    ("slack_token", "xapp-", r"xapp-\d-[A-Za-z0-9-]{20,250}"),
    ("slack_token", "hooks.slack.com/", _SLACK_HOOK),
    ("google_key", "AIza", r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    ("google_key", "GOCSPX-", r"GOCSPX-[A-Za-z0-9_-]{28}"),
    ("google_key", "ya29.", r"ya29\.[A-Za-z0-9_-]{20,500}"),
    ("azure_key", "Key=", r"(?:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{43,86}={1,2})"),
    ("stripe_key", "k_live_", r"[rs]k_live_[A-Za-z0-9]{16,250}"),
    ("huggingface_token", "hf_", r"hf_[A-Za-z0-9]{34,40}(?![A-Za-z0-9])"),
    ("npm_token", "npm_", r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
    ("pypi_token", "pypi-AgE", r"pypi-AgE[A-Za-z0-9_-]{50,}"),
    ("sendgrid_key", "SG.", r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("llm_key", "sk-", r"sk-(?:ant-[A-Za-z0-9_-]{20,200}|(?:proj-)?[A-Za-z0-9_-]{40,200})"),
    # The edge is tested first: a long run of eyJ would be read anew from each.
    ("web_token", "eyJ", r"eyJ(?<![\w-]eyJ)[\w-]{10,2000}\.eyJ[\w-]{10,9000}\.[\w-]{20,1000}"),
    ("password", "://", r"://[^\s:/@?#\"'<>]{1,64}:([^\s:/@\"'<>]{3,128})@[\w.-]"),
)
_KEY_BEGINS = re.compile(r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINES = re.compile(r"(?:\s*(?:\\n)?[A-Za-z0-9+/=]{16,100})*")  # of base64; \n as in JSON
_KEY_CHARACTERS = 20_000  # three times the size of a key of 8,192 bits
_WITHIN = frozenset(string.ascii_letters + string.digits + "_-")  # one of these before: no start
# Stand-ins for a password in documentation.
_NO_PASSWORD = re.compile(r"(?i)[$%{<*].*|[x.]{3,}|.*\}|pass|password|passwd|pwd|secret|pw|\d{1,5}")


def find_secrets(text: str, kinds: frozenset[str]) -> Iterator[Span]:
    """Spans of the secrets of these kinds, pattern by pattern."""
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
    for kind, needle, pattern in _SECRETS:
        if kind not in kinds or needle not in text:
            continue
        for match in re.finditer(pattern, text):
            start = match.start()
            if text[start].isalnum() and text[start - 1 : start] in _WITHIN:
                continue
            if kind != "password" or not _NO_PASSWORD.fullmatch(match[1]):
                yield *match.span(match.lastindex or 0), kind


# --- E-mail: the search starts from the @, which is rare, and reads the local part backwards.
_DOMAIN = re.compile(
    r"@((?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8})(xn--[a-z0-9-]{2,40}|[^\W\d_]{2,18})"
)
_IN_URL = re.compile(r"://[^\s/@]*$")  # user:password@host
_LOCAL_REVERSED = re.compile(r"[\w%+-](?:[.']?[\w%+&-]){0,63}")
# Top-level domains of more than two letters that mail is sent from; two letters are a country's.
# Other words in that place are of a file (icon@2x.png) or an attribute (x@self.weight).
_TLD_NAMES = (
    "com org net edu gov mil int info biz name pro aero coop museum jobs mobi travel tel cat asia"
    " post app dev cloud online site store shop tech blog news email live media agency digital xyz"
    " top club space website world life today solutions services company group global network"
    " systems software science academy school university institute foundation health care clinic"
    " law legal consulting finance bank insurance eco green energy art design studio photography"
    " music film games london berlin paris nyc tokyo amsterdam wien hamburg bayern koeln swiss"
    " scot wales africa example invalid test"
)
_TLDS = frozenset(_TLD_NAMES.split())


def email_span(match: re.Match[str], text: str) -> tuple[int, int] | None:
    """Span of an address; of git@host:path none, which is how clones are written."""
    at = match.start()
    tld = match[2].lower()
    if not (len(tld) == 2 or tld in _TLDS or tld.startswith("xn--") or not tld.isascii()):
        return None
    local = _LOCAL_REVERSED.match(text[max(0, at - 64) : at][::-1])
    if not local or (local[0] == "tig" and text[match.end() : match.end() + 1] in (":", "/")):
        return None
    start = at - local.end()
    return None if _IN_URL.search(text, max(0, start - 64), start) else (start, match.end())


# --- Numbers: one search for runs of digits and separators; the costly patterns see only those.
_DIGITS = re.compile(r"[0-9](?:[ .()/-]{0,3}[0-9]){6,}")
_BEFORE_NUMBER = 4  # characters before the first digit that may belong to it: `+(`, `00 `
_END = r"(?!\w|[.,:/-][0-9]|[-/][A-Za-z])"
_CARD = re.compile(
    r"(?<![\w.-])(?:[0-9]{12,19}|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?"
    rf"|[0-9]{{4}}([ -])[0-9]{{6}}\2[0-9]{{4,5}}){_END}"
)
# Issuer prefixes and lengths of payment cards: Visa, Mastercard, American Express, Diners Club,
# Discover, JCB, UnionPay, Maestro. No library has them.
_CARD_OF_ISSUER = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|3[47]\d{13}"
    r"|3(?:0[0-5]|[689]\d)\d{11}"
    r"|(?:6011|64[4-9]\d|65\d\d)\d{12}"
    r"|35(?:2[89]|[3-8]\d)\d{12}"
    r"|62\d{14,17}"
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}"
)
_US_SSN = re.compile(
    rf"(?<![\w.-])(?!000|666|9)[0-9]{{3}}-(?!00)[0-9]{{2}}-(?!0000)[0-9]{{4}}{_END}"
)
_CPF = re.compile(rf"(?<![\w.-])[0-9]{{3}}\.[0-9]{{3}}\.[0-9]{{3}}-[0-9]{{2}}{_END}")
_CHINESE_ID = re.compile(rf"(?<![\w.-])[1-9][0-9]{{16}}[0-9Xx]{_END}")
_NIR = re.compile(
    r"(?<![\w.-])[12] ?[0-9]{2} ?(?:0[1-9]|1[0-2]|[2-9][0-9]) ?(?:[0-9]{2}|2[AB])"
    rf" ?[0-9]{{3}} ?[0-9]{{3}} ?[0-9]{{2}}{_END}"
)
_INTERNATIONAL = re.compile(
    r"(?<![\w.)+])(?:\+|(?<![0-9] )00[ .-]?)([1-9][0-9]{0,2}(?:[ .()/-]{0,3}[0-9]){6,13})"
    r"(?!\w|[.,:][0-9])"
)
_NORTH_AMERICAN = re.compile(
    r"(?<![\w.+/-])(1[ .-])?(\([2-9][0-9]{2}\)[ .-]?|[2-9][0-9]{2}([ .-]))[2-9](?!11)[0-9]{2}[ .-]"
    rf"[0-9]{{4}}{_END}"
)
# A trunk zero and groups: 020 7946 0958, 0171/123-4567, 01 23 45 67 89.
_NATIONAL = re.compile(
    r"(?<![\w.+/:-])(?<![0-9] )(?:\(0[1-9][0-9]{0,4}\)|0[1-9][0-9]{0,4})(?:[ /-][0-9]{2,8}){1,4}"
    rf"(?! ?[0-9]){_END}"
    r"|(?<![\w.+/:-])0[1-9](?:\.[0-9]{2}){4}(?!\.?\w)"
)
_DATE = re.compile(
    r"[0-9]{1,2}([-/ ])[0-9]{1,2}\1[0-9]{2,4}|[0-9]{4}[-/ ][0-9]{1,2}[-/ ][0-9]{1,2}"
)
_DECIMAL = re.compile(r"\+[0-9]+\.[0-9]+")
_US_ZIP = re.compile(r"[0-9]{5}-[0-9]{4}")
_AFTER_WORD = re.compile(r"(?<![\w.+-])[(]?[0-9](?:[ .()-]{0,2}[0-9]){6,14}(?!\w|[.,:/-][0-9])")
_PHONE_WORD = re.compile(
    r"(?i)\b(?:tele)?(?:phone|tel|fax|mobile|cell|whatsapp|hotline|call|dial)s?"
    r"(?: (?:number|no|nr|us|me|him|her|at|on|is|now|or|direct|toll.free)\b){0,3}"
    r"[ :.=*\"'>\t]{1,4}$"
)

_NOT_DIGIT = re.compile(r"\D+")


def _is_card(match: re.Match[str], _: str) -> bool:
    """Tests for a known issuer's prefix and length, and for the check digit."""
    digits = _NOT_DIGIT.sub("", match[0])
    if _CARD_OF_ISSUER.fullmatch(digits) is None or len(set(digits)) == 1:
        return False
    return bool(luhn.is_valid(digits))


def _is_chinese_id(match: re.Match[str], _: str) -> bool:
    """Tests for the check digit and a day of birth since 1900."""
    # The library's own test also requires a place of birth in its list, which is a current one.
    number = match[0].upper()
    if number[6:8] not in ("19", "20") or ric.calc_check_digit(number) != number[17]:
        return False
    try:
        ric.get_birth_date(number)
    except ValidationError:
        return False
    return True


def _is_phone(match: re.Match[str], text: str) -> bool:
    """Tests whether a match of one of the patterns of phone numbers can be one."""
    digits = _NOT_DIGIT.sub("", match[0])
    if match.re is _INTERNATIONAL:
        national = _NOT_DIGIT.sub("", match[1])
        # Country codes are prefix-free, so that the first match is the only one.
        codes = (national[:n] for n in (1, 2, 3))
        code = next((code for code in codes if int(code) in COUNTRY_CODE_TO_REGION_CODE), None)
        # A number padded with zeros, or hexadecimal.
        is_padded = match[0].startswith("00") and national == match[1]
        if code is None or is_padded or _DECIMAL.fullmatch(match[0]):
            return False
        if code == "1":
            return len(national) == 11 and national[1] > "1" and national[4] > "1"
        return 9 <= len(national) <= 15 and len(national) - len(code) >= 6
    if match.re is _NATIONAL:
        return 9 <= len(digits) <= 11 and not _US_ZIP.fullmatch(match[0])
    start = match.start()
    follows_word = bool(_PHONE_WORD.search(text, max(0, start - 48), start))
    if match.re is _NORTH_AMERICAN:
        # Three groups between spaces are a row of a table, unless something says otherwise.
        return bool(match[1]) or match[3] != " " or follows_word
    return 7 <= len(digits) <= 15 and not _DATE.fullmatch(match[0]) and follows_word


# (kind, pattern, test of a match); at one place, the surest kind first.
_NUMBERS = (
    ("card", _CARD, _is_card),
    ("cn_id", _CHINESE_ID, _is_chinese_id),
    ("fr_nir", _NIR, lambda match, _: nir.is_valid(match[0])),
    ("us_ssn", _US_SSN, lambda match, _: True),
    # The check digits hold for eleven equal digits too, which nobody has.
    ("br_cpf", _CPF, lambda match, _: cpf.is_valid(match[0]) and len(set(match[0]) - {*".-"}) > 1),
    *(("phone", p, _is_phone) for p in (_INTERNATIONAL, _NORTH_AMERICAN, _NATIONAL, _AFTER_WORD)),
)

# --- Letters and digits mixed.
_LETTERED = re.compile(r"[A-Z]{2}[0-9]{2}(?: ?[0-9A-Z]{4}){2,7}(?: ?[0-9A-Z]{1,3})?")
_NINO = re.compile(
    r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D](?!\w)"
)
_NO_NINO = frozenset(("BG", "GB", "NK", "KN", "TN", "NT", "ZZ"))
_CODICE_FISCALE = re.compile(r"[A-Z]{6}[0-9]{2}[A-EHLMPRST][0-9]{2}[A-Z][0-9]{3}[A-Z](?!\w)")


def _starts_word(match: re.Match[str], text: str) -> bool:
    before = text[match.start() - 1 : match.start()] if match.start() else " "
    return not (before.isalnum() or before in "_-.+/")


@cache
def _iban_length(country: str) -> int | None:
    """Length of a country's IBANs, or None if it has none, by SWIFT's registry."""
    structure = numdb.get("iban").info(country)[0][1].get("bban")
    if structure is None:
        return None
    return len("DE00") + sum(int(n) for n in re.findall(r"(\d+)!", structure))


def iban_span(match: re.Match[str], text: str) -> tuple[int, int] | None:
    """Span of an IBAN, with spaces between groups of four or without."""
    length = _iban_length(match[0][:2])
    if length is None or not _starts_word(match, text):
        return None
    end = match.start()
    for _ in range(length):  # the pattern may have run into the word that follows
        end += 1 + (text[end : end + 1] == " ")
    compact = text[match.start() : end].replace(" ", "")
    if text[end : end + 1].isalnum() or len(compact) != length:
        return None
    # Not the checks of a country's account numbers: a wrong one still names its owner.
    return (match.start(), end) if iban.is_valid(compact, check_country=False) else None


def lettered_span(match: re.Match[str], text: str) -> tuple[int, int] | None:
    """Span of a number of the United Kingdom or Italy, by prefix or check letter."""
    if not _starts_word(match, text):
        return None
    if match.re is _NINO:  # National Insurance number, by the form that HMRC publishes
        is_valid = match[0][:2] not in _NO_NINO
    else:
        is_valid = codicefiscale.calc_check_digit(match[0][:15]) == match[0][15]
    return match.span() if is_valid else None


# --- IP addresses: public ones only; private, loopback and documentation ranges point to nobody.
_IPV4 = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}")
_VERSION_BEFORE = re.compile(
    r"(?i)(?:(?<![a-z])(?:v|ver|version|release|build|rev|revision|firmware|patch|update|upgrade"
    r"|section|sec|chapter|clause|appendix|figure|fig|table|oid)s?[ :=\"'.#-]{0,3}"
    r"|[=<>~!]= ?|\^|(?<![/:])\w/|[a-z_]-)$"
)
_VERSION_AFTER = re.compile(
    r"[-+_]?[A-Za-z_]|\.[0-9]|-[0-9.]+-"
    r"|\.(?:in-addr|tar|zip|exe|jar|whl|deb|rpm)"
)
_ADDRESS_BEFORE = re.compile(
    r"(?i)(?:\b(?:ipv?4?|addr|address|host|inet|server|nameserver|dns|ping|gateway|client|peer)"
    r"(?: is| at)?[ :=\"'(\[]{1,3}|//|@)$"
)
_SMALL_OCTET = 64  # all four below it: more often a version or a section than an address
_IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}")
_IPV6_GROUPS = 3


def ipv4_span(match: re.Match[str], text: str) -> tuple[int, int] | None:
    """Span of a public address, but of no version, section or object identifier."""
    start, end = match.span()
    before = text[max(0, start - 24) : start]
    if before[-1:].isalnum() or before[-1:] in ("_", ".") or _VERSION_AFTER.match(text, end):
        return None
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:  # an octet above 255, or with a leading zero
        return None
    is_named = _ADDRESS_BEFORE.search(before) or re.match(r":[0-9]{2,5}\b", text[end : end + 7])
    if not is_named and (max(address.packed) < _SMALL_OCTET or _VERSION_BEFORE.search(before)):
        return None
    return (start, end) if address.is_global and not address.is_multicast else None


def ipv6_span(match: re.Match[str], text: str) -> tuple[int, int] | None:
    """Span of an address of 2000::/3, the allocated range; not of the documentation range."""
    start, end = match.span()
    before = text[start - 1 : start]
    if before.isalnum() or before in ("_", ":", ".") or text[end : end + 1].isalnum():
        return None
    trailing = len(match[0]) - len(match[0].rstrip(":")) == 1  # a colon of the sentence
    try:
        address = ipaddress.IPv6Address(match[0][:-1] if trailing else match[0])
    except ValueError:
        return None
    # Fewer groups name a network (2002::/16), or are a number before a colon or two.
    is_address = len(list(filter(None, match[0].split(":")))) >= _IPV6_GROUPS
    return (start, end - trailing) if address.is_global and is_address else None


# (kind, pattern, function that gives the span of a match, or None if it is no such thing)
_ELSEWHERE = (
    ("email", _DOMAIN, email_span),
    ("iban", _LETTERED, iban_span),
    ("uk_nino", _NINO, lettered_span),
    ("it_cf", _CODICE_FISCALE, lettered_span),
    ("ipv4", _IPV4, ipv4_span),
    ("ipv6", _IPV6, ipv6_span),
)


def find_personal(text: str, kinds: frozenset[str]) -> Iterator[Span]:
    """Spans of the personal data of these kinds."""
    for kind, pattern, span_of in _ELSEWHERE:
        if kind in kinds:
            for match in pattern.finditer(text):
                if span := span_of(match, text):
                    yield *span, kind
    numbers = [row for row in _NUMBERS if row[0] in kinds]
    for run in _DIGITS.finditer(text) if numbers else ():
        # With its surroundings, so that a pattern sees the characters at its edges.
        start = max(0, run.start() - _BEFORE_NUMBER)
        end = min(len(text), run.end() + 3)
        for kind, pattern, is_valid in numbers:
            for match in pattern.finditer(text, start, end):
                if is_valid(match, text):
                    yield *match.span(), kind


# In the order in which they count where two begin at one place: a phone number before an address.
_KINDS = (row[0] for row in (*_SECRETS, *_ELSEWHERE[:2], *_NUMBERS, *_ELSEWHERE[2:]))
KINDS = ("private_key", *dict.fromkeys(_KINDS))


def find_private(text: str, kinds: Iterable[str] = KINDS) -> list[Span]:
    """Spans of all personal data and secrets, in order, without overlaps.

    Of two that overlap the one that starts first counts; at one start, the first in KINDS.
    """
    selected = frozenset(kinds)
    spans = [*find_secrets(text, selected), *find_personal(text, selected)]
    spans.sort(key=lambda span: (span[0], KINDS.index(span[2])))
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
        # StarCoder's form (Li et al. 2023, section 4), which models have seen: <EMAIL>, <AWS_KEY>
        pieces += [text[position:start], f"<{kind.upper()}>"]
        position = end
    pieces.append(text[position:])
    return "".join(pieces), Counter(kind for _, _, kind in spans)


class Scrub(DocumentStep):
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

    def judge(self, document: Document) -> None:
        """Replaces what is private in the document."""
        document.text, counts = scrub(document.text, self.kinds)
        if counts:
            document.metadata["scrubbed"] = dict(sorted(counts.items()))
