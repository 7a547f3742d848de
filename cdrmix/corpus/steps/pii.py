"""Personal data in text: e-mail, phone, card, IBAN, national identity numbers, IP addresses.

Every detector is a pattern plus a validator, and yields (start, end, kind); two may overlap.
National identity numbers are those of the USA (us_ssn), the United Kingdom (uk_nino), Brazil
(br_cpf), China (cn_id), France (fr_nir) and Italy (it_cf). Names and postal addresses are not
detected: that takes a model, and no pattern does it well.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import cache

from phonenumbers import COUNTRY_CODE_TO_REGION_CODE
from stdnum import iban, luhn, numdb
from stdnum.br import cpf
from stdnum.cn import ric
from stdnum.exceptions import ValidationError
from stdnum.fr import nir
from stdnum.it import codicefiscale

Span = tuple[int, int, str]
NATIONAL_IDS = ("us_ssn", "uk_nino", "br_cpf", "cn_id", "fr_nir", "it_cf")
KINDS = ("email", "phone", "card", "iban", *NATIONAL_IDS, "ipv4", "ipv6")
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


def find_emails(text: str) -> Iterator[Span]:
    """E-mail addresses; not git@host:path, which is how clones are written."""
    for match in _DOMAIN.finditer(text):
        at = match.start()
        tld = match[2].lower()
        if not (len(tld) == 2 or tld in _TLDS or tld.startswith("xn--") or not tld.isascii()):
            continue
        local = _LOCAL_REVERSED.match(text[max(0, at - 64) : at][::-1])
        if not local or (local[0] == "tig" and text[match.end() : match.end() + 1] in (":", "/")):
            continue
        start = at - local.end()
        if not _IN_URL.search(text, max(0, start - 64), start):
            yield start, match.end(), "email"


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
    """Tests for the check digit and a day of birth since 1900.

    The library's own test also requires a place of birth in its list, which is a current one.
    """
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
        if match[0].startswith("00") and national == match[1]:
            return False  # a number padded with zeros, or hexadecimal
        if _DECIMAL.fullmatch(match[0]):
            return False
        if code is None:
            return False
        if code == "1":
            return len(national) == 11 and national[1] > "1" and national[4] > "1"
        return 9 <= len(national) <= 15 and len(national) - len(code) >= 6
    if match.re is _NORTH_AMERICAN:
        # Three groups between spaces are a row of a table, unless something says otherwise.
        return bool(match[1]) or match[3] != " " or _follows_phone_word(match.start(), text)
    if match.re is _NATIONAL:
        return 9 <= len(digits) <= 11 and not _US_ZIP.fullmatch(match[0])
    return (
        7 <= len(digits) <= 15
        and not _DATE.fullmatch(match[0])
        and _follows_phone_word(match.start(), text)
    )


def _follows_phone_word(start: int, text: str) -> bool:
    return bool(_PHONE_WORD.search(text, max(0, start - 48), start))


_NUMBERS = (
    (_CARD, "card", _is_card),
    (_CHINESE_ID, "cn_id", _is_chinese_id),
    (_NIR, "fr_nir", lambda match, _: nir.is_valid(match[0])),
    (_US_SSN, "us_ssn", lambda match, _: True),
    # The check digits hold for eleven equal digits too, which nobody has.
    (_CPF, "br_cpf", lambda match, _: cpf.is_valid(match[0]) and len(set(match[0]) - {*".-"}) > 1),
    *((p, "phone", _is_phone) for p in (_INTERNATIONAL, _NORTH_AMERICAN, _NATIONAL, _AFTER_WORD)),
)


def find_numbers(text: str) -> Iterator[Span]:
    """Cards, numeric national ids and phone numbers; at one place, the surest kind first."""
    for run in _DIGITS.finditer(text):
        # With its surroundings, so that a pattern sees the characters at its edges.
        start = max(0, run.start() - _BEFORE_NUMBER)
        end = min(len(text), run.end() + 3)
        for pattern, kind, is_valid in _NUMBERS:
            for match in pattern.finditer(text, start, end):
                if is_valid(match, text):
                    yield *match.span(), kind


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


def find_ibans(text: str) -> Iterator[Span]:
    """IBANs, with spaces between groups of four or without."""
    for match in _LETTERED.finditer(text):
        length = _iban_length(match[0][:2])
        if length is None or not _starts_word(match, text):
            continue
        end = match.start()
        for _ in range(length):  # the pattern may have run into the word that follows
            end += 1 + (text[end : end + 1] == " ")
        compact = text[match.start() : end].replace(" ", "")
        if text[end : end + 1].isalnum() or len(compact) != length:
            continue
        # Not the checks of a country's account numbers: a wrong one still names its owner.
        if iban.is_valid(compact, check_country=False):
            yield match.start(), end, "iban"


def find_ninos(text: str) -> Iterator[Span]:
    """United Kingdom National Insurance numbers, by the form that HMRC publishes."""
    for match in _NINO.finditer(text):
        if match[0][:2] not in _NO_NINO and _starts_word(match, text):
            yield *match.span(), "uk_nino"


def find_codici_fiscali(text: str) -> Iterator[Span]:
    """Italian tax codes with a correct check letter."""
    for match in _CODICE_FISCALE.finditer(text):
        if _starts_word(match, text) and (
            codicefiscale.calc_check_digit(match[0][:15]) == match[0][15]
        ):
            yield *match.span(), "it_cf"


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


def find_ipv4(text: str) -> Iterator[Span]:
    """Public IPv4 addresses, but no versions, sections or object identifiers."""
    for match in _IPV4.finditer(text):
        start, end = match.span()
        before = text[max(0, start - 24) : start]
        if before[-1:].isalnum() or before[-1:] in ("_", ".") or _VERSION_AFTER.match(text, end):
            continue
        try:
            address = ipaddress.IPv4Address(match[0])
        except ValueError:  # an octet above 255, or with a leading zero
            continue
        is_named = _ADDRESS_BEFORE.search(before) or re.match(r":[0-9]{2,5}\b", text[end : end + 7])
        if not is_named and (max(address.packed) < _SMALL_OCTET or _VERSION_BEFORE.search(before)):
            continue
        if address.is_global and not address.is_multicast:
            yield start, end, "ipv4"


def find_ipv6(text: str) -> Iterator[Span]:
    """IPv6 addresses of 2000::/3, the allocated range; not the documentation range."""
    for match in _IPV6.finditer(text):
        start, end = match.span()
        if text[start - 1 : start].isalnum() or text[start - 1 : start] in ("_", ":", "."):
            continue
        if text[end : end + 1].isalnum():
            continue
        trailing = len(match[0]) - len(match[0].rstrip(":")) == 1  # a colon of the sentence
        try:
            address = ipaddress.IPv6Address(match[0][:-1] if trailing else match[0])
        except ValueError:
            continue
        # Fewer groups name a network (2002::/16), or are a number before a colon or two.
        if address.is_global and len(list(filter(None, match[0].split(":")))) >= _IPV6_GROUPS:
            yield start, end - trailing, "ipv6"
