"""A labelled text of invented personal data among lookalikes, from a seed.

Check digits are worked out here on their own, not by the code under test.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

LETTERS, UPPER, DIGITS = string.ascii_letters, string.ascii_uppercase, string.digits
ALNUM = LETTERS + DIGITS


@dataclass
class Planted:
    """A document and where in it what stands: (start, end, kind)."""

    text: str
    spans: list[tuple[int, int, str]]


def some(rng: random.Random, characters: str, count: int) -> str:
    return "".join(rng.choices(characters, k=count))


def number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def grouped(text: str, sizes: list[int], separator: str) -> str:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(text[position : position + size])
        position += size
    return separator.join(piece for piece in pieces if piece)


# --- What must be found.
def email(rng: random.Random) -> str:
    first, last = (
        rng.choice(["anna", "j", "maria.luisa", "O'Neill", "li", "jürgen"]),
        rng.choice(["smith", "de-vries", "kowalska_99", "garcia+news", "42", "nguyen%lists"]),
    )
    host = rng.choice(["mail", "cs.some-university", "xn--bcher-kva", "lists.a-b", "bücher", "m1"])
    tld = rng.choice(
        ["com", "org", "co.uk", "de", "edu", "info", "museum", "com.br", "dev", "ac.jp"]
    )
    return f"{first}.{last}@{host}.{tld}"


def phone(rng: random.Random) -> str:
    area, exchange = f"{rng.randint(2, 9)}{rng.randint(0, 8)}{rng.randint(0, 9)}", "555"
    line, n = number(rng, 4), number
    return rng.choice(
        [
            f"({area}) {exchange}-{line}",
            f"{area}-{exchange}-{line}",
            f"{area}.{exchange}.{line}",
            f"1-{area}-{exchange}-{line}",
            f"+1 {area} {exchange} {line}",
            f"+1 ({area}) {exchange}-{line}",
            f"+1{area}{exchange}{line}",
            f"+44 20 {n(rng, 4)} {n(rng, 4)}",
            f"+44 (0)161 {n(rng, 3)} {n(rng, 4)}",
            f"020 {n(rng, 4)} {n(rng, 4)}",
            f"07{n(rng, 3)} {n(rng, 6)}",
            f"+49 30 {n(rng, 7)}",
            f"+49-171-{n(rng, 7)}",
            f"0171/{n(rng, 7)}",
            f"030 {n(rng, 8)}",
            f"+33 6 {n(rng, 2)} {n(rng, 2)} {n(rng, 2)} {n(rng, 2)}",
            f"06 {n(rng, 2)} {n(rng, 2)} {n(rng, 2)} {n(rng, 2)}",
            f"01.{n(rng, 2)}.{n(rng, 2)}.{n(rng, 2)}.{n(rng, 2)}",
            f"+34 6{n(rng, 2)} {n(rng, 3)} {n(rng, 3)}",
            f"+39 06 {n(rng, 4)} {n(rng, 4)}",
            f"+86 138 {n(rng, 4)} {n(rng, 4)}",
            f"+91 98{n(rng, 3)} {n(rng, 5)}",
            f"+55 (11) 9{n(rng, 4)}-{n(rng, 4)}",
            f"03-{n(rng, 4)}-{n(rng, 4)}",
            f"0031 20 {n(rng, 7)}",
        ]
    )


def phone_after_word(rng: random.Random) -> str:
    n = number
    return rng.choice(
        [f"{n(rng, 10)}", f"{n(rng, 3)}-{n(rng, 4)}", f"{n(rng, 3)} {n(rng, 3)} {n(rng, 4)}"]
    )


def luhn_completed(payload: str) -> str:
    total = 0
    for i, digit in enumerate(reversed(payload)):
        value = int(digit) * (2 if i % 2 == 0 else 1)
        total += value // 10 + value % 10
    return payload + str(-total % 10)


def card(rng: random.Random) -> str:
    prefix, size = rng.choice([("4", 16), ("52", 16), ("2221", 16), ("6011", 16), ("3530", 16)])
    digits = luhn_completed(prefix + some(rng, DIGITS, size - len(prefix) - 1))
    if rng.random() < 0.2:
        digits = luhn_completed("37" + some(rng, DIGITS, 12))
        return grouped(digits, [4, 6, 5], rng.choice(["", " ", "-"]))
    return grouped(digits, [4] * 4, rng.choice(["", " ", "-"]))


def iban(rng: random.Random) -> str:
    country, bank, size = rng.choice(
        [("DE", "", 22), ("GB", "NWBK", 22), ("FR", "", 27), ("NL", "ABNA", 18), ("NO", "", 15)]
    )
    account = bank + some(rng, DIGITS, size - 4 - len(bank))
    values = "".join(str(int(c, 36)) for c in account + country + "00")
    code = f"{country}{98 - int(values) % 97:02d}{account}"
    return grouped(code, [4] * 9, rng.choice(["", " "]))


def us_ssn(rng: random.Random) -> str:
    return f"{rng.randint(100, 665)}-{rng.randint(10, 99)}-{rng.randint(1000, 9999)}"


def uk_nino(rng: random.Random) -> str:
    pair = rng.choice(["AB", "CE", "HJ", "PY", "SX", "WR"])
    return grouped(pair + some(rng, DIGITS, 6) + rng.choice("ABCD"), [2] * 5, rng.choice(["", " "]))


def br_cpf(rng: random.Random) -> str:
    digits = [int(d) for d in some(rng, DIGITS, 9)]
    for _ in range(2):
        rest = sum(d * w for d, w in zip(digits, range(len(digits) + 1, 1, -1), strict=True)) % 11
        digits.append(0 if rest < 2 else 11 - rest)
    d = "".join(map(str, digits))
    return f"{d[:3]}.{d[3:6]}.{d[6:9]}-{d[9:]}"


def cn_id(rng: random.Random) -> str:
    body = f"110105{rng.randint(1940, 2010)}{rng.randint(1, 12):02d}{rng.randint(1, 28):02d}"
    body += some(rng, DIGITS, 3)
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    return body + "10X98765432"[sum(int(d) * w for d, w in zip(body, weights, strict=True)) % 11]


def fr_nir(rng: random.Random) -> str:
    body = f"{rng.randint(1, 2)}{rng.randint(40, 99)}{rng.randint(1, 12):02d}75"
    body += f"{rng.randint(1, 990):03d}{rng.randint(1, 999):03d}"
    return grouped(f"{body}{97 - int(body) % 97:02d}", [1, 2, 2, 2, 3, 3, 2], rng.choice(["", " "]))


def it_cf(rng: random.Random) -> str:
    code = some(rng, "BCDFGLMNPRSTV", 6) + number(rng, 2) + rng.choice("ABCDEHLMPRST")
    code += f"{rng.randint(1, 31):02d}{rng.choice('ABCDEFGHIL')}{number(rng, 3)}"
    # The place of a letter in this order is its value at an odd position; digits are A to J.
    order = "BAKPLCQDREVOSFTGUHMINJWZYX"
    letters = [chr(ord("A") + int(c)) if c.isdigit() else c for c in code]
    total = sum(order.index(c) for c in letters[::2])
    total += sum(UPPER.index(c) for c in letters[1::2])
    return code + UPPER[total % 26]


def ipv4(rng: random.Random) -> str:
    return f"{rng.choice([52, 81, 93, 145, 185, 212])}." + ".".join(
        str(rng.randint(1, 254)) for _ in range(3)
    )


def ipv6(rng: random.Random) -> str:
    groups = [f"{rng.randrange(1, 65536):x}" for _ in range(6)]
    return rng.choice(
        [
            f"2a02:26f0:{':'.join(groups)}",
            f"2a01:4f8:{groups[0]}:{groups[1]}::{groups[2]}",
            f"2607:f8b0:{groups[0]}::1",
        ]
    )


def private_key(rng: random.Random) -> str:
    kind = rng.choice(["", "RSA ", "EC ", "OPENSSH "])
    body = "\n".join(some(rng, ALNUM + "+/", 64) for _ in range(6))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


TOKENS: dict[str, Callable[[random.Random], str]] = {
    "aws_key": lambda rng: "AKIA" + some(rng, UPPER + "234567", 16),
    "github_token": lambda rng: f"gh{rng.choice('pousr')}_{some(rng, ALNUM, 36)}",
    "gitlab_token": lambda rng: f"glpat-{some(rng, ALNUM, 20)}",
    "slack_token": lambda rng: f"xoxb-{number(rng, 12)}-{number(rng, 12)}-{some(rng, ALNUM, 24)}",
    "google_key": lambda rng: f"AIza{some(rng, ALNUM + '_-', 34)}x",
    "stripe_key": lambda rng: f"sk_live_{some(rng, ALNUM, 24)}",
    "huggingface_token": lambda rng: f"hf_{some(rng, LETTERS, 34)}",
    "npm_token": lambda rng: f"npm_{some(rng, ALNUM, 36)}",
    "pypi_token": lambda rng: f"pypi-AgEIcHlwaS5vcmc{some(rng, ALNUM + '_-', 80)}",
    "sendgrid_key": lambda rng: f"SG.{some(rng, ALNUM, 22)}.{some(rng, ALNUM, 43)}",
    "llm_key": lambda rng: f"sk-proj-{some(rng, ALNUM, 48)}",
    "web_token": lambda rng: (
        f"eyJ{some(rng, ALNUM, 30)}.eyJ{some(rng, ALNUM, 60)}.{some(rng, ALNUM, 43)}"
    ),
}
PERSONAL: dict[str, Callable[[random.Random], str]] = {
    "email": email,
    "phone": phone,
    "card": card,
    "iban": iban,
    "us_ssn": us_ssn,
    "uk_nino": uk_nino,
    "br_cpf": br_cpf,
    "cn_id": cn_id,
    "fr_nir": fr_nir,
    "it_cf": it_cf,
    "ipv4": ipv4,
    "ipv6": ipv6,
    "private_key": private_key,
}
# Kind of value and what stands around it; {} is where it goes.
FRAMES = (
    "Please send the form to {}, or come by.",
    "It was given as {}.",
    "Name: A. Person\nEntry: {}\nCity: Lyon",
    "| id | value |\n| 1 | {} |",
    'record = {{"name": "A", "value": "{}"}}',
    "({})",
    "see <a>{}</a> for more",
    "{}",
    "VALUE='{}'  # as of 2024-03-01",
    "first,{},last",
)
FRAMES_OF_KIND = {
    "phone_after_word": (
        "Phone: {}",
        "call us on {} today",
        "Tel. {}",
        "Fax number: {}",
        "cell {}",
    ),
    "aws_secret": ("aws_secret_access_key = {}\n", 'AWS_SECRET_ACCESS_KEY="{}"'),
    "azure": ("AccountName=a;AccountKey={};EndpointSuffix=x",),
    "password": ("postgres://admin:{}@db.internal.net:5432/app",),
    "ip_port": ("connect to {}:8080 now", "http://{}/index.html", "ssh root@{}"),
}
CONTEXTUAL: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "phone_after_word": ("phone", phone_after_word),
    "aws_secret": ("aws_key", lambda rng: some(rng, ALNUM + "/+", 39) + "a"),
    "azure": ("azure_key", lambda rng: some(rng, ALNUM + "+/", 86) + "=="),
    "password": ("password", lambda rng: some(rng, ALNUM, 12)),
    "ip_port": ("ipv4", ipv4),
}


# --- What must be left alone.
def failing_luhn(rng: random.Random) -> str:
    digits = luhn_completed("4" + some(rng, DIGITS, 14))
    return grouped(digits[:-1] + str((int(digits[-1]) + 1) % 10), [4] * 4, rng.choice(["", " "]))


def hex_digest(rng: random.Random) -> str:
    return some(rng, "0123456789abcdef", rng.choice([7, 32, 40, 64]))


def failing_iban(rng: random.Random) -> str:
    code = iban(rng)
    return code[:-1] + str((int(code[-1]) + 1) % 10)


LOOKALIKES: tuple[Callable[[random.Random], str], ...] = (
    failing_luhn,
    failing_iban,
    hex_digest,
    lambda rng: (
        f"version {rng.randint(1, 20)}.{rng.randint(0, 99)}.{number(rng, 2)}.{number(rng, 2)}"
    ),
    lambda rng: (
        f"v{rng.randint(1, 20)}.{rng.randint(100, 250)}.{rng.randint(0, 9)}.{rng.randint(0, 250)}"
    ),
    lambda rng: f"Chrome/{rng.randint(80, 130)}.0.{rng.randint(0, 250)}.{rng.randint(0, 200)}",
    lambda rng: f"libfoo-{rng.randint(1, 9)}.{rng.randint(100, 200)}.3.{rng.randint(0, 99)}.tar.gz",
    lambda rng: f"package=={rng.randint(1, 9)}.{rng.randint(100, 200)}.0.{rng.randint(0, 9)}",
    lambda rng: f"1.3.6.1.4.1.{rng.randint(1, 60000)}.{rng.randint(1, 200)}",
    lambda rng: (
        f"section {rng.randint(1, 9)}.{rng.randint(1, 9)}.{rng.randint(1, 9)}.{rng.randint(1, 9)}"
    ),
    lambda rng: (
        f"{rng.choice(['10.0', '192.168', '127.0'])}.{rng.randint(0, 9)}.{rng.randint(0, 250)}"
    ),
    lambda rng: f"{rng.randint(1, 12):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}",
    lambda rng: ":".join(some(rng, "0123456789abcdef", 2) for _ in range(6)),
    lambda rng: "std::vector<int>::iterator, dead::beef and ::1",
    lambda rng: f"ISBN 978-0-{number(rng, 3)}-{number(rng, 5)}-{rng.randint(0, 9)}",
    lambda rng: f"ISBN 0-{number(rng, 3)}-{number(rng, 5)}-{rng.choice('0123456789X')}",
    lambda rng: f"ISSN {number(rng, 4)}-{number(rng, 4)}",
    lambda rng: f"{rng.randint(1900, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
    lambda rng: f"{rng.randint(1, 28):02d}/{rng.randint(1, 12):02d}/{rng.randint(1900, 2030)}",
    lambda rng: (
        f"{rng.randint(1, 28):02d}.{rng.randint(1, 12):02d}.{rng.randint(1990, 2030)} 10:30"
    ),
    lambda rng: (
        f"2024-0{rng.randint(1, 9)}-{rng.randint(10, 28)}T10:{rng.randint(10, 59)}:00.123456Z"
    ),
    lambda rng: f"t={number(rng, 10)}; n = {number(rng, 13)}",
    lambda rng: f"range({number(rng, 10)}, {number(rng, 10)})",
    lambda rng: f"0x{number(rng, 10)} and id_{number(rng, 10)} and 1_212_555_{number(rng, 4)}",
    lambda rng: f"x = {rng.random() * 1e6:.9f} + {rng.random():.15f}",
    lambda rng: f"[{number(rng, 3)}, {number(rng, 3)}, {number(rng, 4)}]",
    lambda rng: "\n".join(f"{number(rng, 3)} {number(rng, 3)} {number(rng, 4)}" for _ in range(2)),
    lambda rng: f"{rng.randint(1, 9)},{number(rng, 3)},{number(rng, 3)},{number(rng, 3)}",
    lambda rng: f"+{rng.randint(1, 9)}.{number(rng, 9)}e-05",
    lambda rng: (
        f"{number(rng, 8)}-{number(rng, 4)}-4{number(rng, 3)}-8{number(rng, 3)}-{number(rng, 12)}"
    ),
    lambda rng: f"{number(rng, 5)}-{number(rng, 4)}",
    lambda rng: f"CAS {number(rng, 5)}-{number(rng, 2)}-{rng.randint(0, 9)}",
    lambda rng: f"order no. {number(rng, 11)}",
    lambda rng: "react@18.2.0, icon@2x.png, @app.route, x@self.weight, git@github.com:a/b.git",
    lambda rng: "0000 0000 0000 0000 and 000-00-0000 and 111.111.111-11",
    lambda rng: f"sk_test_{some(rng, ALNUM, 24)} and sk-learn-contrib and xoxo-love",
    lambda rng: "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0B\n-----END PUBLIC KEY-----",
    lambda rng: "ftp://user:password@host.example/ and https://$USER:${PASS}@host/",
    lambda rng: f"AKIA{some(rng, UPPER, 8)} and AIzaSy{some(rng, ALNUM, 10)} and ghp_short",
    lambda rng: "00 01 02 03 04 05 06 07 08 09 0a 0b",
    lambda rng: f"{number(rng, 4)}-{number(rng, 4)} pages, pp. {number(rng, 3)}-{number(rng, 3)}",
)
FILLER = (
    "The committee met again in the autumn and agreed on the next steps.",
    "def run(self, value=None):\n    return self.items[value]",
    "Water boils at 100 degrees, and ice melts at 0.",
    "Copyright 1999-2024 The Authors, volume 12, number 3.",
)


def planted(seed: int) -> Planted:
    """One document: a few values, a few lookalikes, and text between them."""
    rng = random.Random(seed)
    pieces: list[tuple[str, str | None]] = []
    kinds = [*PERSONAL.items(), *TOKENS.items()]
    for _ in range(4):
        if rng.random() < 0.2:
            name = rng.choice(list(CONTEXTUAL))
            kind, make = CONTEXTUAL[name]
            frame = rng.choice(FRAMES_OF_KIND[name])
        else:
            # Half of all e-mail, phone or address: what the web is full of.
            kind, make = rng.choice(kinds if rng.random() < 0.5 else kinds[:2] + kinds[10:12])
            frame = rng.choice(FRAMES).replace("{{", "{").replace("}}", "}")
        before, _, after = frame.partition("{}")
        pieces += [(f"\n{before}", None), (make(rng), kind), (f"{after}\n", None)]
        pieces.append((f"{rng.choice(FILLER)}\n{rng.choice(LOOKALIKES)(rng)}\n", None))
    text, spans = "", []
    for piece, planted in pieces:
        if planted is not None:
            spans.append((len(text), len(text) + len(piece), planted))
        text += piece
    return Planted(text, spans)
