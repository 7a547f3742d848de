"""Pages of text that fit the terminal they go to: wrapped lines, tables, sizes in their units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from cdrmix.log import columns, styled, visible_width, wrapped

_GAP = "  "  # between the columns of a table
# Narrowest column of a table, where no word of it is longer.
_NARROWEST = 8
# Units with their sizes, and the bytes from which they are taken: people compare in GiB.
_SIZE_UNITS = (("TiB", 2**40, 10 * 2**40), ("GiB", 2**30, 2**30), ("MiB", 2**20, 0))
_FLOP_UNITS = (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9))


class Page:
    """Lines for one stream. A terminal gets its width and colours; in a pipe no line is wrapped."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Starts a page without lines; without a stream it is written as for a pipe."""
        self._stream = stream
        self._width = columns(stream) if stream is not None else None
        self._lines: list[str] = []

    def __str__(self) -> str:
        """Returns the page without a newline at its end."""
        return "\n".join(self._lines)

    def styled(self, text: str, style: str) -> str:
        """Returns text in a style of `cdrmix.log.styled`, if the stream shows any."""
        return text if self._stream is None else styled(text, style, self._stream)

    def add(self, line: str = "", *, hang: int = 0) -> None:
        """Adds a line, wrapped between words; what is left goes below, indented by `hang`."""
        self._lines += wrapped(line, width=self._width, hang=hang)

    def add_title(self, title: str) -> None:
        """Adds a line in bold type, with an empty one above."""
        self._lines += ["", self.styled(title, "bold")]

    def add_table(self, rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """Adds rows of as many cells each, the columns numbered `right` flush right.

        Where the terminal is narrower, cells of the widest columns are wrapped.
        """
        rows = list(rows)
        widths = self._column_widths(rows)
        for row in rows:
            cells = [wrapped(cell, width=width) for cell, width in zip(row, widths, strict=True)]
            for number in range(max(map(len, cells))):
                parts = []
                for column, (lines, width) in enumerate(zip(cells, widths, strict=True)):
                    part = lines[number] if number < len(lines) else ""
                    padding = " " * (width - visible_width(part))
                    parts.append(padding + part if column in right else part + padding)
                self._lines.append(_GAP.join(parts).rstrip())

    def _column_widths(self, rows: Sequence[Sequence[str]]) -> list[int]:
        by_column = list(zip(*rows, strict=True))  # texts of each column
        widths = [max(map(visible_width, column)) for column in by_column]
        if self._width is None:
            return widths
        words = [
            max((visible_width(word) for cell in column for word in cell.split()), default=0)
            for column in by_column
        ]
        least = [min(each, max(word, _NARROWEST)) for each, word in zip(widths, words, strict=True)]
        room = self._width - len(_GAP) * (len(widths) - 1)
        while sum(widths) > room:
            spare = [width - lowest for width, lowest in zip(widths, least, strict=True)]
            if not any(spare):
                break
            # the widest of those that can give
            widest = max(range(len(widths)), key=lambda n: (spare[n] > 0) * widths[n])
            widths[widest] -= 1
        return widths


def size_text(num_bytes: float) -> str:
    """Formats bytes in the unit that people would take: 8 MiB, 1.1 GiB, 1,937.3 GiB, 26.4 TiB."""
    unit, size, _ = next(each for each in _SIZE_UNITS if num_bytes >= each[2])
    number = num_bytes / size
    if unit == "MiB":
        return f"{number:,.0f} MiB" if number >= 1 else f"{number:.1g} MiB"
    return f"{number:,.1f} {unit}"


def flops_text(flops: float) -> str:
    """Formats floating-point operations: 4.8 PFLOP, 11 EFLOP."""
    fitting = (each for each in _FLOP_UNITS if flops >= each[1])
    unit, size = next(fitting, _FLOP_UNITS[-1])
    number = flops / size
    return f"{number:,.0f} {unit}FLOP" if number >= 9.95 else f"{number:.2g} {unit}FLOP"
