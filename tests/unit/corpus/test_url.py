"""One spelling per address, and keys of pages and hosts."""

import pytest

from cdrmix.corpus.steps.url import Url, canonical_url, host_of, url_key
from tests.unit.corpus.document_steps import document, run


def key(url: str) -> str:
    canonical = canonical_url(url)
    assert canonical is not None
    return url_key(canonical)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("HTTP://Example.ORG", "http://example.org/"),
        ("https://example.org:443/a/../b", "https://example.org/b"),
        ("http://example.org:8080/a", "http://example.org:8080/a"),
        ("https://user:secret@example.org./a", "https://example.org/a"),
        ("https://example.org/a?b=2&a=1#part", "https://example.org/a?a=1&b=2"),
        ("https://example.org/a?utm_source=x&id=5&fbclid=y&gclid=z", "https://example.org/a?id=5"),
        ("https://example.org/a;jsessionid=0A1B?PHPSESSID=3", "https://example.org/a"),
        ("https://example.org/straße", "https://example.org/stra%C3%9Fe"),
        ("https://münchen.example/", "https://xn--mnchen-3ya.example/"),
        ("  https://example.org/a b ", "https://example.org/a%20b"),
    ],
)
def test_address_has_one_spelling(url: str, expected: str) -> None:
    assert canonical_url(url) == expected
    assert canonical_url(expected) == expected


@pytest.mark.parametrize("name", ["id", "page", "sid", "pk", "source", "trk", "ref", "wt", "hsab"])
def test_parameters_that_name_a_page_stay(name: str) -> None:
    assert canonical_url(f"https://example.org/?{name}=5") == f"https://example.org/?{name}=5"


@pytest.mark.parametrize(
    "url",
    ["", "no address", "ftp://example.org/a", "javascript:void(0)", "http://", "http://[::1/a",
     "http://example.org:99999/", "http://exa mple.org/", "mailto:a@example.org", "/a/b"],
)  # fmt: skip
def test_what_is_no_web_address_has_no_spelling(url: str) -> None:
    assert canonical_url(url) is None


def test_spellings_of_one_page_share_a_key() -> None:
    pages = [
        "http://www.example.org/a/",
        "https://example.org/a",
        "https://example.org/a/index.html",
    ]
    assert len({key(url) for url in pages}) == 1
    others = ["https://example.org/b", "https://example.org/a?id=1", "https://other.example.org/a"]
    assert len({key(url) for url in [pages[0], *others]}) == 4


def test_step_writes_address_key_and_host() -> None:
    url = "https://WWW.example.org:443/a/?utm_campaign=x"
    passed, reasons = run(Url(), [document("text", url=url)])
    assert passed[0].metadata == {
        "url": "https://www.example.org/a/",
        "url_key": key("https://example.org/a"),
        "host": "example.org",
    }
    assert reasons == []
    assert host_of("https://[2a00::1]:81/") == "2a00::1"


def test_invalid_address_is_dropped_only_when_asked_for() -> None:
    documents = [document("a", url="nowhere"), document("b"), document("c", url=7)]
    passed, reasons = run(Url(), documents)
    assert ([d.text for d in passed], reasons) == (["a", "b", "c"], [])
    passed, reasons = run(Url(drop_invalid=True), documents)
    assert ([d.text for d in passed], reasons) == (["b"], ["invalid url"] * 2)
