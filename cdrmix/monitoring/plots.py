"""Curves over steps as inline SVG that takes its colours and font from the page around it.

Matplotlib draws with placeholder colours; each is replaced by a CSS variable of the page, so that
one drawing reads well on a light and on a dark ground. Text stays text. No pyplot: its global
state and its choice of a display backend have no place in a training process.

A plot of curves on a page, or a line that says why there is none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import IdentityTransform

from cdrmix.monitoring import page

MAX_POINTS = 2_000
_SMOOTH_FROM = 200  # points; below that the raw curve is readable by itself
_MARKERS_UP_TO = 40  # points
_LOG_FROM_RATIO = 20  # largest over smallest value
_LABEL_GAP = 13.0  # between the labels at the right edge, in points
_LABEL_CHARACTER = 6.3  # width of one of their characters, in points, generously
_TICK_STEPS = (1, 2, 2.5, 5, 10)  # times a power of ten
# Placeholder colour -> CSS variable. Greys that no colour of the page's palette equals.
_PLACEHOLDERS = {
    name: f"#{i:02d}{i:02d}{i:02d}"
    for i, name in enumerate(("ink", "muted", "grid", "c1", "c2", "c3", "c4"), start=1)
}


@dataclass(frozen=True)
class Curve:
    """One line over steps. `color` is c1 to c4; NaN and infinite values are not drawn."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: str
    smooth: bool = False


@dataclass(frozen=True)
class Mark:
    """A horizontal line that a curve is to be read against."""

    label: str
    value: float
    color: str = "muted"


def line_plot(
    key: str,
    curves: Sequence[Curve],
    *,
    label: str,
    marks: Sequence[Mark] = (),
    size: tuple[int, int] = (540, 230),
    text: Callable[[float], str] = "{:#.4g}".format,
    limits: tuple[float | None, float | None] = (None, None),
) -> str:
    """The curves as one `<svg>` element.

    Args:
        key: prefix of the element's ids; unique on the page.
        curves: at least one with a finite value.
        label: what the picture shows, for readers that cannot see it.
        size: width and height in points; the page scales it.
        text: how a value is written, on the axis and in the labels at the right edge.
        limits: lower and upper end of the axis; None leaves it to the data, which are then drawn
            on a logarithmic axis where they span more than a factor of 20.
    """
    # From the defaults, not from what the user's matplotlibrc makes of them.
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": key}]):
        ends = _line_ends(curves, marks, text)
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72)
        axes = figure.add_axes(_box(size, max(len(end.label) for end in ends)))
        for curve in curves:
            _draw(axes, curve)
        for mark in marks:
            color = _PLACEHOLDERS[mark.color]
            axes.axhline(mark.value, color=color, linewidth=1, linestyle=(0, (4, 3)))
        _scale(axes, curves, marks, limits)
        _dress(axes, text)
        _label_right_edge(axes, ends)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _for_page(buffer.getvalue(), key, label)


def decimate(
    steps: np.ndarray, values: np.ndarray, limit: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points that keep every spike: lowest and highest of each stretch of steps."""
    if len(values) <= limit:
        return steps, values
    edges = np.linspace(0, len(values), limit // 2 + 1).astype(int)
    kept = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        stretch = values[begin:end]
        kept += [begin + int(stretch.argmin()), begin + int(stretch.argmax())]
    chosen = np.unique(kept)
    return steps[chosen], values[chosen]


def finite(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the points that can be drawn."""
    good = np.isfinite(curve.values)
    return curve.steps[good], curve.values[good]


def _box(size: tuple[int, int], label_length: int) -> tuple[float, float, float, float]:
    """Where the axes stand, in fractions of the figure: left, bottom, width, height."""
    left = 56.0
    bottom = 24.0
    top = 10.0
    right = 12.0 + _LABEL_CHARACTER * label_length
    width, height = size
    inner = (width - left - right) / width, (height - bottom - top) / height
    return left / width, bottom / height, *inner


def _draw(axes: Axes, curve: Curve) -> None:
    steps, values = finite(curve)
    color = _PLACEHOLDERS[curve.color]
    smooth = _is_smoothed(curve)
    marker = "o" if len(values) <= _MARKERS_UP_TO else None
    axes.plot(
        *decimate(steps, values),
        color=color,
        linewidth=0.8 if smooth else 1.7,
        alpha=0.3 if smooth else 1.0,
        marker=marker,
        markersize=3.5,
    )
    if smooth:
        axes.plot(*decimate(steps, _moving_average(values)), color=color, linewidth=1.9)


def _is_smoothed(curve: Curve) -> bool:
    return curve.smooth and len(finite(curve)[1]) >= _SMOOTH_FROM


def _moving_average(values: np.ndarray) -> np.ndarray:
    """Centred mean over a fortieth of the points, over what there is of it at both ends."""
    half = max(len(values) // 80, 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    center = np.arange(len(values))
    begin = np.maximum(center - half, 0)
    end = np.minimum(center + half + 1, len(values))
    return (total[end] - total[begin]) / (end - begin)


def _scale(
    axes: Axes,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    limits: tuple[float | None, float | None],
) -> None:
    steps = np.concatenate([finite(curve)[0] for curve in curves])
    values = np.concatenate([finite(curve)[1] for curve in curves])
    spread = max(float(steps.max() - steps.min()), 1.0)
    axes.set_xlim(steps.min() - 0.015 * spread, steps.max() + 0.015 * spread)
    if limits == (None, None) and values.min() > 0:
        axes.set_yscale("log" if values.max() / values.min() > _LOG_FROM_RATIO else "linear")
    low, high = limits
    if low == 0 and high is None:  # matplotlib's own margin is a share of the values' range
        high = 1.08 * max(values.max(), 1e-9, *(mark.value for mark in marks))
    axes.set_ylim(low, high)


def _dress(axes: Axes, text: Callable[[float], str]) -> None:
    muted = _PLACEHOLDERS["muted"]
    grid = _PLACEHOLDERS["grid"]
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(grid)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=11, labelcolor=muted, pad=5)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_TICK_STEPS, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(text(value))))
    axes.yaxis.set_minor_locator(NullLocator())
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))


def _tick(text: str) -> str:
    """A value without the trailing zeros of its decimals: 2.500% is 2.5%, 1,000 stays."""
    return re.sub(r"\.?0+(?=%?$)", "", text) if "." in text else text


def _line_ends(
    curves: Sequence[Curve], marks: Sequence[Mark], text: Callable[[float], str]
) -> list[Mark]:
    """Name, height and colour of each line's right end; a curve's name is followed by its value."""
    ends = list(marks)
    for curve in curves:
        values = finite(curve)[1]
        last = float((_moving_average(values) if _is_smoothed(curve) else values)[-1])
        ends.append(Mark(f"{curve.label} {text(last)}".strip(), last, curve.color))
    return ends


def _label_right_edge(axes: Axes, ends: Sequence[Mark]) -> None:
    """Write each label beside the end of its line, pushed apart where they would overlap."""
    heights = [float(axes.transData.transform((0, end.value))[1]) for end in ends]
    right, top = map(float, axes.transAxes.transform((1, 1)))
    for end, height in zip(ends, _push_apart(heights, top), strict=True):
        axes.text(
            right + 8,
            height,
            end.label,
            transform=IdentityTransform(),
            color=_PLACEHOLDERS[end.color],
            fontsize=11,
            verticalalignment="center",
        )


def _push_apart(heights: Sequence[float], ceiling: float) -> list[float]:
    """Heights at least `_LABEL_GAP` apart and below `ceiling`, in their order."""
    placed = list(heights)
    order = sorted(range(len(placed)), key=lambda i: placed[i])
    for lower, upper in zip(order, order[1:], strict=False):
        placed[upper] = max(placed[upper], placed[lower] + _LABEL_GAP)
    placed[order[-1]] = min(placed[order[-1]], ceiling)
    for upper, lower in zip(order[::-1], order[-2::-1], strict=False):
        placed[lower] = min(placed[lower], placed[upper] - _LABEL_GAP)
    return placed


def _for_page(svg: str, key: str, label: str) -> str:
    """Only the element, with ids of its own, colours and font by CSS variable, no fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    opening = f'<svg class="plot" role="img" aria-label="{label}" {view_box[0]}>'
    svg = re.sub(r"<svg[^>]*>", opening, svg, count=1)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    for name, placeholder in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg).strip()


def plot(
    title: str,
    unit: str,
    key: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    **options: Any,
) -> str:
    """A figure of the curves that have points; a line that says so when none has.

    Args:
        title: of the figure.
        unit: what its values are.
        key: unique on the page.
        curves: what is drawn.
        marks: what to read them against.
        options: of `line_plot`.
    """
    drawable = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not drawable:
        return page.figure(title, unit, page.missing("Nothing has been logged."))
    hidden = sum(int((~np.isfinite(curve.values)).sum()) for curve in curves)
    drawing = line_plot(key, drawable, label=f"{title} over steps", marks=marks, **options)
    note = f"Not drawn, because not finite: {hidden}." if hidden else ""
    return page.figure(title, unit, drawing, note)
