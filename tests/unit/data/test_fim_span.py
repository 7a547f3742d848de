"""Middles of lines and of syntax: whole ones, of all sizes, and what happens to other texts."""

from __future__ import annotations

import ast
import random
import textwrap
from collections import Counter

import pytest

from cdrmix.data.document import Document, FimConfig, rearranged, restored
from cdrmix.data.fim_span import middle_of_characters, middle_of_lines, middle_of_syntax
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

SOURCE = '''# A comment, with an umlaut: ä.
import os


@cached
def f(a, b="ä"):
    """Say ä."""
    return f"{a!r} {b:>{a}}" + b  # trailing


class C:
    x: int = 1\r\n
    def g(self): return [self.x for _ in "日本"]
'''


def draws(count: int = 300) -> list[tuple[float, float]]:
    chance = random.Random(0)
    return [(chance.random(), chance.random()) for _ in range(count)]


@pytest.mark.parametrize("text", ["a\nb\nc", "a\r\nb\rc\n", "\n\n", "a", SOURCE])
def test_a_middle_of_lines_is_whole_lines(text: str) -> None:
    found = Counter(middle_of_lines(text, each) for each in draws())
    for begin, end in found:
        assert begin < end
        for place in (begin, end):
            assert place in (0, len(text)) or text[place - 1] in "\r\n", repr(text[begin:end])
            assert text[place - 1 : place + 1] != "\r\n", "a line end is whole"
    if text == "a\nb\nc":  # any two of four borders, alike often
        assert sorted(found) == [(0, 2), (0, 4), (0, 5), (2, 4), (2, 5), (4, 5)]
        assert min(found.values()) > 30


def test_an_empty_text_has_an_empty_middle() -> None:
    assert middle_of_lines("", (0.5, 0.5)) == middle_of_characters("", (0.5, 0.5)) == (0, 0)
    assert middle_of_syntax("", (0.5, 0.5)) is None


def test_a_middle_of_syntax_is_an_expression_or_statements() -> None:
    found = {middle_of_syntax(SOURCE, each) for each in draws()}
    texts = set()
    for span in found:
        assert span is not None
        texts.add(middle := SOURCE[slice(*span)])
        assert middle == middle.strip()
        column = span[0] - max(SOURCE.rfind(end, 0, span[0]) + 1 for end in "\r\n")
        ast.parse(textwrap.dedent(" " * column + middle))
    assert {"import os", 'b="ä"'} & texts == {"import os"}, "arguments are no expressions"
    assert any(text.startswith("def f(") for text in texts)
    assert '"日本"' in texts
    assert "self.x" in texts or "self" in texts
    assert not any(text.startswith(("a!r", "{a")) for text in texts), "nothing inside of f-strings"


@pytest.mark.parametrize("text", ["def f(:", "a\0b", "# a comment alone\n", "x" * 300 + "(" * 300])
def test_a_text_without_a_syntax_tree_has_no_middle_of_syntax(text: str) -> None:
    assert middle_of_syntax(text, (0.5, 0.5)) is None


def test_a_byte_order_mark_is_no_part_of_the_program() -> None:
    draw = (0.5, 0.5)
    begin, end = middle_of_syntax(SOURCE, draw) or (0, 0)
    marked = "\ufeff" + SOURCE
    begin_marked, end_marked = middle_of_syntax(marked, draw) or (0, 0)
    assert marked[begin_marked:end_marked] == SOURCE[begin:end] != ""


def test_a_warning_about_somebodys_source_is_not_told() -> None:
    assert middle_of_syntax('x = "\\d"\n', (0.5, 0.5)) is not None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train_tokenizer([SOURCE], 300).to_str())
    return load_tokenizer(folder)


@pytest.mark.parametrize("span", ["characters", "lines", "ast"])
def test_documents_come_back_and_those_that_do_not_parse_are_counted(
    tokenizer: Tokenizer, span: str
) -> None:
    config = FimConfig.model_validate({"rate": 0.9, "span": span})
    counts: Counter[str] = Counter()
    plain = 0
    for number in range(100):
        text = SOURCE if number % 2 else "def f(:\n" * (number % 7)
        document = Document(text, f"s#{number}", "s", "code")
        ids = rearranged(document, config, tokenizer, counts=counts)
        plain += ids is None
        assert ids is None or tokenizer.decode(restored(ids, tokenizer)) == text
    assert counts["drawn"] == 100 - plain
    assert 30 < counts["unparsed"] < 50 if span == "ast" else counts["unparsed"] == 0


def test_keys_that_say_nothing_leave_a_recipe_its_digest() -> None:
    assert FimConfig().model_dump().keys() == {"domains", "rate", "spm_rate", "max_characters"}
    assert "span" in FimConfig(span="ast").model_dump()
