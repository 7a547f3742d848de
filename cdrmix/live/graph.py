"""Curves as characters: eight dots of braille to a cell, or one mark where a terminal has ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLANK = 0x2800
# Bits of a braille character by column and row of its dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_SPIKE = 2.0  # times the usual distance from the lowest to the highest of a column
_MANY = 200  # values, from which on a column holds several


@dataclass(frozen=True)
class Graph:
    """Rows of a curve, the first one on top, and the values at its upper and lower edge."""

    rows: Sequence[str]
    high: float
    low: float


def graph(
    steps: np.ndarray, values: np.ndarray, *, width: int, height: int, ascii_only: bool = False
) -> Graph | None:
    """Draws a curve over its steps in cells; None without two finite values.

    Where many values share a column of dots, their median is drawn, and values that stand out far
    more than its noise as spikes. Few spikes far above all else are cut at the upper edge.
    """
    is_finite = np.isfinite(values)
    steps, values = steps[is_finite], values[is_finite]
    if len(values) < 2 or width < 1 or height < 1:
        return None
    across, up = (1, 1) if ascii_only else (2, 4)
    begins, lows, middles, highs = _stretches(steps, values, width * across)
    low, high = _edges(values, middles)
    span = (high - low) or 1.0
    dots = np.zeros((height * up, width * across), dtype=bool)

    def row(value: float) -> int:
        return min(max(int((value - low) / span * height * up), 0), height * up - 1)

    before = None
    noise = np.median(highs - lows)  # of most columns
    for column, least, middle, most in zip(begins, lows, middles, highs, strict=True):
        first = last = row(middle)
        if most - middle > _SPIKE * noise:
            last = row(most)
        if middle - least > _SPIKE * noise:
            first = row(least)
        if before is not None:  # joined to the column before, where the curve would have gaps
            first, last = min(first, before + 1), max(last, before - 1)
        dots[first : last + 1, column] = True
        before = row(middle)
    return Graph(_characters(dots[::-1], ascii_only=ascii_only), high, low)


def _stretches(
    steps: np.ndarray, values: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Columns from the first with a value to the last, and lowest, middle and highest value."""
    offsets = (steps - steps[0]) / ((steps[-1] - steps[0]) or 1.0)
    columns = np.minimum((offsets * count).astype(int), count - 1)
    taken, begins = np.unique(columns, return_index=True)
    parts = np.split(values, begins[1:])
    figures = np.array([(part.min(), np.median(part), part.max()) for part in parts]).T
    # a straight line where no value is
    every = np.arange(taken[0], taken[-1] + 1)
    middles = np.interp(every, taken, figures[1])
    lows, highs = middles.copy(), middles.copy()
    lows[taken - taken[0]], highs[taken - taken[0]] = figures[0], figures[2]
    return every, lows, middles, highs


def _edges(values: np.ndarray, middles: np.ndarray) -> tuple[float, float]:
    """Lower and upper edge: the lowest and the highest value, but not those of few spikes."""
    low, high = float(values.min()), float(values.max())
    if len(values) < _MANY:
        return low, high
    of_middles = float(middles.max() - middles.min())
    least, most = np.quantile(values, [0.002, 0.998])
    room = of_middles or float(most - least)
    return max(low, float(middles.min()) - room), min(high, float(middles.max()) + room)


def _characters(dots: np.ndarray, *, ascii_only: bool) -> list[str]:
    """Rows of characters, of which a cell is 2 x 4 dots, or one."""
    if ascii_only:
        return ["".join("*" if dot else " " for dot in row) for row in dots]
    codes = np.full((dots.shape[0] // 4, dots.shape[1] // 2), _BLANK)
    for across, bits in enumerate(_DOTS):
        for down, bit in enumerate(bits):
            codes += bit * dots[down::4, across::2]
    return ["".join(map(chr, row)).replace(chr(_BLANK), " ") for row in codes]


def sparkline(values: np.ndarray, *, width: int, ascii_only: bool = False) -> str:
    """Draws the mean of each of `width` stretches as a bar of one cell; empty without values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    means = [part.mean() for part in np.array_split(finite, min(width, len(finite)))]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if ascii_only else _BARS
    span = (high - low) or 1.0
    return "".join(bars[min(int((mean - low) / span * len(bars)), len(bars) - 1)] for mean in means)
