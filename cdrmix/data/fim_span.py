"""Choice of the middle of a document that is rearranged for infilling.

A middle of characters begins and ends anywhere (Bavarian et al., arXiv 2207.14255). One of lines is
whole lines, as an editor asks for. One of `ast` is what a node of Python's syntax tree spans, so
that a model learns to write whole expressions and statements (Gong et al., arXiv 2506.00204).
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Literal

Kind = Literal["characters", "lines", "ast"]

# Line ends of Python's grammar: `str.splitlines` knows more, and line numbers would be others.
_LINE_END = re.compile(r"\r\n|\r|\n")


def middle_of_characters(text: str, draws: Sequence[float]) -> tuple[int, int]:
    """Begin and end of a middle, by two numbers from 0 to 1; may be empty, or the whole text."""
    # Either cut may be before the first character or behind the last.
    begin, end = sorted(int(draw * (len(text) + 1)) for draw in draws[:2])
    return begin, end


def middle_of_lines(text: str, draws: Sequence[float]) -> tuple[int, int]:
    """Begin and end of one line or more with their line ends, by two numbers from 0 to 1.

    All pairs of borders of lines are alike likely. Only an empty text has an empty middle.
    """
    borders = line_starts(text)
    if borders[-1] != len(text):
        borders.append(len(text))
    if len(borders) == 1:
        return 0, 0
    first = int(draws[0] * len(borders))
    second = int(draws[1] * (len(borders) - 1))  # of the others
    begin, end = sorted((first, second + (second >= first)))
    return borders[begin], borders[end]


def middle_of_syntax(text: str, draws: Sequence[float]) -> tuple[int, int] | None:
    """Begin and end of a node of Python's syntax tree, by two numbers from 0 to 1.

    The first draws a character, the second one of the expressions and statements around it, so that
    middles of all sizes come up: of all nodes, most are single names. None if the text does not
    parse or has no node.
    """
    spans = _nodes(text)
    if not spans:
        return None
    place = int(draws[0] * len(text))
    around = [span for span in spans if span[0] <= place < span[1]]
    candidates = around or spans  # comments and blanks between statements are in no node
    return candidates[int(draws[1] * len(candidates))]


def line_starts(text: str) -> list[int]:
    """Index of the first character of each line; the last may be the end of the text."""
    return [0, *(match.end() for match in _LINE_END.finditer(text))]


def _nodes(text: str) -> list[tuple[int, int]]:
    """Distinct spans of the expressions and statements of a module, in order; [] if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes and comparisons in somebody's source
            # A byte order mark is no part of a program to the parser of texts.
            mark = len(text) - len(text.removeprefix("\ufeff"))
            text = text[mark:]
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    starts = line_starts(text)

    def index(line: int, column: int) -> int:
        """Character at a column, which the parser counts in bytes."""
        content = text[starts[line - 1] : starts[line] if line < len(starts) else None]
        if content.isascii():
            return starts[line - 1] + column
        return starts[line - 1] + len(content.encode()[:column].decode())

    spans = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr | ast.stmt):
            assert node.end_lineno is not None, "parsed, not made"
            assert node.end_col_offset is not None, "parsed, not made"
            begin = index(node.lineno, node.col_offset)
            spans.add((mark + begin, mark + index(node.end_lineno, node.end_col_offset)))
        # Before Python 3.12 the places of nodes inside an f-string are not those in the text.
        if not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)
    return sorted(spans)
