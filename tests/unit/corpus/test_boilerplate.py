"""Lines of the page, not of its text."""

import pytest

from cdrmix.corpus.steps.normalise import Boilerplate, is_boilerplate
from tests.unit.corpus.document_steps import reason_for, text_after

ARTICLE = """The committee met again in the autumn.

    It agreed on three steps, of which the first was the hardest:
- write down what is known,
- ask those who were there."""


@pytest.mark.parametrize(
    "line",
    ["Please enable JavaScript to view this page.", "We use cookies to improve your visit",
     "Privacy Policy | Terms of Use", "© 2024 Someone. All rights reserved.", "Sign in", "LOG OUT",
     "Read more »", "» Next page", "Share on Facebook", "Follow us on Somewhere", "3 likes",
     "1.2k views", "12 Comments", "Leave a comment", "Add to cart", "Skip to content",
     "Home | News | Sport | Weather | Travel", "Start > Shop > Shoes > Men's shoes"],
)  # fmt: skip
def test_line_of_the_page_is_boilerplate(line: str) -> None:
    assert is_boilerplate(line)


@pytest.mark.parametrize(
    "line",
    [*ARTICLE.split("\n"), "Read more books, my mother said.", "He went home.", "Chapter 3",
     "The search took three days, and the 12 comments that it drew were kind.",
     "either/or, and/or", "a | b", "It is 5 > 4 and 3 > 2 as everyone in this room can tell",
     "In this chapter we learn how programs in JavaScript are run by a browser. " * 3],
)  # fmt: skip
def test_line_of_the_text_is_not(line: str) -> None:
    assert not is_boilerplate(line)


def test_text_stays_as_it_is_between_what_goes() -> None:
    page = f"Home | News | Sport | Weather\nSign in\n\n{ARTICLE}\n\nShare\n\n7 shares\n\nEnd."
    assert text_after(Boilerplate(), page) == f"{ARTICLE}\n\nEnd."
    assert text_after(Boilerplate(), ARTICLE) == ARTICLE


def test_only_the_chosen_domains_are_cleaned() -> None:
    text = "JavaScript\n\nSearch"
    assert text_after(Boilerplate(), text, domain="reference") == text
    assert reason_for(Boilerplate(domains=["reference"]), text, domain="reference") is not None


def test_rules_of_c4_are_a_choice() -> None:
    step = Boilerplate(require_sentence_end=True, min_line_words=3)
    assert text_after(step, "A heading\nOne two three.\nYes.\nAnd so on...\nIs it? “It is.”") == (
        "One two three.\nIs it? “It is.”"
    )


@pytest.mark.parametrize("text", ["Sign in\nRegister", "Menu\n" * 30 + "\nHello.", "\n\n"])
def test_page_without_text_is_dropped(text: str) -> None:
    assert reason_for(Boilerplate(), text) == "only boilerplate"
