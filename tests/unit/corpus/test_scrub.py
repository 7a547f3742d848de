"""Personal data and secrets, among what only looks like them."""

import time
from collections import Counter

import pytest

from cdrmix.corpus.steps.scrub import KINDS, Scrub, find_private, scrub
from cdrmix.errors import ConfigError
from tests.unit.corpus.document_steps import document, run
from tests.unit.corpus.planted_pii import CONTEXTUAL, LOOKALIKES, PERSONAL, TOKENS, planted

SEEDS = range(400)


def test_planted_values_are_found_and_lookalikes_are_not() -> None:
    found, missed, wrong = Counter[str](), Counter[str](), Counter[str]()
    for seed in SEEDS:
        example = planted(seed)
        expected, spans = set(example.spans), set(find_private(example.text))
        found.update(kind for *_, kind in spans & expected)
        missed.update(kind for *_, kind in expected - spans)
        wrong.update(kind for *_, kind in spans - expected)
    assert found.total() + missed.total() == 4 * len(SEEDS)
    assert found.total() / (found.total() + missed.total()) >= 0.98, missed
    assert found.total() / (found.total() + wrong.total()) >= 0.95, wrong
    # No kind hides behind the more frequent ones.
    assert all(found[kind] >= 0.9 * (found[kind] + missed[kind]) for kind in found | missed)
    assert {*PERSONAL, *TOKENS, *(kind for kind, _ in CONTEXTUAL.values())} == found.keys()


def test_what_begins_like_an_iban_and_goes_on_with_punctuation_is_none() -> None:
    for text in ("GB82 WEST 1234's account", "DE89370400440532-13000 0", "BE71096123456769."):
        assert [kind for *_, kind in find_private(text)] == ["iban"] * text.startswith("BE")


def test_every_kind_is_planted() -> None:
    planted_kinds = {*PERSONAL, *TOKENS, *(kind for kind, _ in CONTEXTUAL.values())}
    assert planted_kinds == set(KINDS)
    assert len(LOOKALIKES) > 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mail a.b+c@mail.example.com.", "Mail <EMAIL>."),
        ("<a href='mailto:o'neill@dcu.ie'>", "<a href='mailto:<EMAIL>'>"),
        ("Tel: +44 20 7946 0958, fax 020 7946 0959", "Tel: <PHONE>, fax <PHONE>"),
        ("pay 4111 1111 1111 1111 or 378282246310005", "pay <CARD> or <CARD>"),
        ("GB82 WEST 1234 5698 7654 32 is hers", "<IBAN> is hers"),
        ("078-05-1120", "<US_SSN>"),
        ("NINO AB 12 34 56 C.", "NINO <UK_NINO>."),
        ("CPF 529.982.247-25", "CPF <BR_CPF>"),
        ("11010519491231002X", "<CN_ID>"),
        ("1 85 05 78 006 084 91", "<FR_NIR>"),
        ("RSSMRA85T10A562S", "<IT_CF>"),
        ("from 93.184.216.34:443 and [2606:2800:220:1:248:1893:25c8:1946]",
         "from <IPV4>:443 and [<IPV6>]"),
        ("AKIAIOSFODNN7EXAMPLE", "<AWS_KEY>"),
        ("postgres://app:kN8s-2xQ@db.example.net/x", "postgres://app:<PASSWORD>@db.example.net/x"),
        ("key: -----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIrYSSNQFaA2\n", "key: <PRIVATE_KEY>\n"),
        (r'"-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----\n"',
         r'"<PRIVATE_KEY>\n"'),
    ],
)  # fmt: skip
def test_value_is_replaced_and_its_surroundings_stay(text: str, expected: str) -> None:
    assert scrub(text)[0] == expected


@pytest.mark.parametrize(
    "text",
    ["version 10.120.30.4", "release 2.130.4.1", "192.168.1.10", "224.0.0.1", "999.1.2.3",
     "1.3.6.1.4.1.311.88", "pip install x==1.220.3.4", "12:34:56", "00:1a:2b:3c:4d:5e", "2004::",
     "2001:db8::1", "978-0-306-40615-7", "0-306-40615-2", "2024-01-02", "01/02/2024", "08540-1234",
     "4111 1111 1111 1112", "9f86d081884c7d659a2feaa0c55ad015", "+35236450.6", "call 2024-01-02",
     "1700000000 1699999999999", "f(2125550187)", "00 01 02 03 04 05 06 07", "icon@2x.png",
     "react@18.2.0", "y = x@self.weight", "git@github.com:a/b.git", "@property", "DE00 1234",
     "000-12-3456", "666-12-3456", "sk-learn", "https://user:password@host.example/"],
)  # fmt: skip
def test_lookalike_stays(text: str) -> None:
    assert scrub(text) == (text, Counter())


def test_plain_text_stays() -> None:
    text = "Nothing here, nothing there. " * 100
    assert find_private(text) == []
    assert scrub(text)[0] == text


def test_step_counts_what_it_replaced() -> None:
    text = "a@example.org, b@example.org and 93.184.216.34"
    passed, reasons = run(Scrub(), [document(text), document("nothing")])
    assert passed[0].text == "<EMAIL>, <EMAIL> and <IPV4>"
    assert [d.metadata for d in passed] == [{"scrubbed": {"email": 2, "ipv4": 1}}, {}]
    assert reasons == []


def test_scrubbed_text_has_nothing_left_to_find() -> None:
    for seed in range(50):
        text, counts = scrub(planted(seed).text)
        assert counts.total() >= 4
        assert find_private(text) == []


HOSTILE = ("eyJ", "eyJaaaaaaaaaa.", "-----BEGIN PRIVATE KEY-----", "4111 1111 1111 1111 ", "1 ",
           "0", "A", "a@a.", "GB12 ", "0171 ", "(0", "2a02:", "8.8.4.4 ", "://a:b", "phone ",
           "xoxb-", "secret_access_key=")  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_grows_with_the_text_and_no_faster(piece: str) -> None:
    text = (piece * 150_000)[:150_000]
    began = time.process_time()
    find_private(text)
    assert time.process_time() - began < 1.5  # takes 0.2 or less; squares took longer


def test_keys_side_by_side_are_two() -> None:
    begin, end = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    key = f"{begin}\nProc-Type: 4,ENCRYPTED\n\nAAAA\n{end}"
    assert scrub(f"{key}\nand\n{key}\n")[0] == "<PRIVATE_KEY>\nand\n<PRIVATE_KEY>\n"


def test_kinds_are_a_choice() -> None:
    text = "a@example.org from 93.184.216.34"
    passed, _ = run(Scrub(kinds=["ipv4"]), [document(text)])
    assert passed[0].text == "a@example.org from <IPV4>"
    with pytest.raises(ConfigError, match="names: unknown. Known: aws_key"):
        Scrub(kinds=["names"])
