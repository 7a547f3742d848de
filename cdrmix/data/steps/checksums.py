"""Validators of numbers that carry a check digit, and the sets of prefixes they start with."""

from __future__ import annotations

import re

# Length of an IBAN by country: SWIFT's IBAN registry.
_IBAN_LENGTHS = {
    length: countries.split()
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
}
IBAN_LENGTH = {country: n for n, countries in _IBAN_LENGTHS.items() for country in countries}

# Issuer prefixes and lengths of payment cards: Visa, Mastercard, American Express, Diners Club,
# Discover, JCB, UnionPay, Maestro.
_CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|3[47]\d{13}"
    r"|3(?:0[0-5]|[689]\d)\d{11}"
    r"|(?:6011|64[4-9]\d|65\d\d)\d{12}"
    r"|35(?:2[89]|[3-8]\d)\d{12}"
    r"|62\d{14,17}"
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}"
)

# ITU-T E.164 country codes; every code that starts with one of these digits or pairs is listed.
_TWO_DIGIT_CODES = (
    "20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64"
    " 65 66 81 82 84 86 90 91 92 93 94 95 98"
)
_THREE_DIGIT_CODES = (
    "21[1-368] 22\\d 23\\d 24\\d 25[0-8] 26\\d 29[0-17-9] 35\\d 37[0-8] 38[0-35-79] 42[013]"
    " 50\\d 59\\d 67[02-9] 68[0-35-9] 69[0-2] 80[08] 85[02356] 88[0-36] 96[0-8] 97[0-9] 99[2-68]"
)
CALLING_CODE = re.compile("1|7|" + "|".join(f"{_TWO_DIGIT_CODES} {_THREE_DIGIT_CODES}".split()))

_ODD_VALUES = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (1, 0, 5, 7, 9, 13, 15, 17, 19, 21) * 2
        + (2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        strict=True,
    )
)
_IBAN = re.compile(r"[A-Z]{2}[0-9]{2}[0-9A-Z]+")


def luhn(digits: str) -> bool:
    """Whether the last digit is the Luhn check digit of the others (ISO/IEC 7812-1)."""
    doubled = (int(d) * 2 for d in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(d - 9 * (d > 9) for d in doubled)) % 10 == 0


def is_card(digits: str) -> bool:
    """Whether digits are a payment card's: a known issuer's prefix and length, and Luhn."""
    return _CARD.fullmatch(digits) is not None and len(set(digits)) > 1 and luhn(digits)


def is_iban(compact: str) -> bool:
    """Whether a text without spaces is an IBAN (ISO 13616: letters, digits, mod 97 equals 1)."""
    if len(compact) != IBAN_LENGTH.get(compact[:2]) or not _IBAN.fullmatch(compact):
        return False
    return int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1


def is_cpf(digits: str) -> bool:
    """Whether eleven digits are a Brazilian CPF: two check digits, mod 11."""
    for n in (9, 10):
        total = sum((n + 1 - i) * int(digits[i]) for i in range(n))
        if total * 10 % 11 % 10 != int(digits[n]):
            return False
    return len(set(digits)) > 1


def is_chinese_id(number: str) -> bool:
    """Whether 17 digits and a digit or X are a Chinese resident identity number (GB 11643)."""
    month, day = int(number[10:12]), int(number[12:14])
    if number[6:8] not in ("19", "20") or not (1 <= month <= 12 and 1 <= day <= 31):
        return False
    total = sum(int(c) * pow(2, 17 - i, 11) for i, c in enumerate(number[:17]))
    return "10X98765432"[total % 11] == number[17].upper()


def is_nir(number: str) -> bool:
    """Whether 15 characters are a French NIR: key = 97 - number mod 97; 2A, 2B are Corsica."""
    digits = number[:13].replace("2A", "19").replace("2B", "18")
    return digits.isdigit() and 97 - int(digits) % 97 == int(number[13:])


def is_codice_fiscale(code: str) -> bool:
    """Whether 16 letters and digits are an Italian codice fiscale: check letter, mod 26."""
    odd = sum(_ODD_VALUES[c] for c in code[:15:2])
    even = sum(int(c) if c.isdigit() else ord(c) - ord("A") for c in code[1:15:2])
    return (odd + even) % 26 == ord(code[15]) - ord("A")
