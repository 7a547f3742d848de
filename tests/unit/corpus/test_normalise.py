"""Text as it should have arrived."""

import pytest

from cdrmix.corpus.steps.normalise import Normalise
from cdrmix.errors import ConfigError
from tests.unit.corpus.document_steps import reason_for, text_after


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a\r\nb\rc\u2028d\x0be\x0cf", "a\nb\nc\nd\ne\nf"),
        ("\ufeffzero\u200bwidth and soft\xadhyphen", "zerowidth and softhyphen"),
        ("if admin:\u202e # safe\u2066", "if admin: # safe"),
        ("one\x00two\x07", "onetwo"),
        ("tab\tand\nline stay", "tab\tand\nline stay"),
        (
            "family 👨\u200d👩\u200d👧 and می\u200cخواهم",
            "family 👨\u200d👩\u200d👧 and می\u200cخواهم",
        ),
        ("cafe\u0301", "café"),
        ("a\u0000\u030a", "å"),
        ("split \ud83d\ude00 pair", "split 😀 pair"),
        ("a lone \ud800 half", "a lone \ufffd half"),
    ],
)
def test_text_is_brought_into_one_form(given: str, expected: str) -> None:
    assert text_after(Normalise(), given) == expected
    assert text_after(Normalise(), expected) == expected


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize(
    "text",
    [
        "It’s a “naïve” café – 5 £ … 20 €",
        "Привет, мир",
        "日本語のテキスト",
        "smile 😀",
        "Ünïcödé",
        "x ≥ y → z™",
        "Ελληνικά",
    ],
)
def test_utf8_read_as_a_western_encoding_is_undone(text: str, encoding: str) -> None:
    # What Windows-1252 cannot decode, readers take as Latin-1, as browsers do.
    misread = "".join(
        bytes([byte]).decode(encoding, "replace").replace("\ufffd", chr(byte))
        for byte in text.encode("utf-8")
    )
    assert misread != text
    assert text_after(Normalise(), misread) == text
    assert text_after(Normalise(repair_encoding=False), "caf\xc3\xa9") == "caf\xc3\xa9"


def test_quotes_of_windows_that_became_controls_are_quotes_again() -> None:
    assert text_after(Normalise(), "\x93quoted\x94, it\x92s fine") == "“quoted”, it’s fine"


@pytest.mark.parametrize(
    "text",
    ["« au CAFÉ»", "le café…” dit-il", "SÃO PAULO, NÃO", "20 Å…", "für 5 €“", "Đà Nẵng", "naïve"],
)
def test_right_text_is_not_repaired(text: str) -> None:
    assert text_after(Normalise(), text) == text


def test_normal_form_is_a_choice() -> None:
    assert text_after(Normalise(form="NFKC"), "ﬁne x²") == "fine x2"
    assert text_after(Normalise(), "ﬁne x²") == "ﬁne x²"
    assert text_after(Normalise(form=None), "cafe\u0301") == "cafe\u0301"
    with pytest.raises(ConfigError, match="NFC, NFKC, null"):
        Normalise(form="NFX")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("\x00\x00", "empty"),
        ("\ufeff", "empty"),
        ("U\x00T\x00F\x00-\x001\x006\x00", "binary"),
        ("PNG \x89\x00\x01\x02\x03\x04\x05 and more", "binary"),
        ("what \ufffd\ufffd\ufffd is \ufffd\ufffd", "undecodable"),
        ("raw \udce9\udce8\udce0\udcff", "undecodable"),
    ],
)
def test_what_is_no_text_is_dropped(text: str, reason: str) -> None:
    assert reason_for(Normalise(), text) == reason


def test_text_with_an_accident_is_kept() -> None:
    assert text_after(Normalise(), "a\x00b \ufffd c") == "ab \ufffd c"
