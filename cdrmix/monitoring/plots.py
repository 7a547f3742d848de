"""Figures of curves over steps, as inline SVG in the colours and the font of the page around it.

Matplotlib draws with placeholder colours; each is replaced by a CSS variable of the page, so that
one drawing reads well on a light and on a dark ground. Text stays text. No pyplot: its global
state and its choice of a display backend have no place in a training process.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import IdentityTransform

from cdrmix.monitoring.page import Drawing, Figure

MAX_POINTS = 2_000
_SMOOTH_FROM = 200  # points; below that the raw curve is readable by itself
_MARKERS_UP_TO = 40  # points
_LOG_FROM_RATIO = 20  # largest over smallest value
# Room around the axes for their labels, in points; that at the right follows from the labels there.
_LEFT = 56.0
_BOTTOM = 24.0
_TOP = 10.0
_LABEL_GAP = 13.0  # between the labels at the right edge, in points
_LABEL_SIZE = 11.0  # of their letters, in points
_NARROW_LABEL_SIZE = 13.0  # on a narrow page, as page.css has it, which makes the drawing smaller
_LABEL_CHARACTER = 0.58  # width of one of their characters, by the size of the letters, generously
_MOST_OF_NAME = 20  # characters of a course's name, inside of its drawing
_LINE_HEIGHT = 17.0  # of a score with its interval, in points
_TICK_STEPS = (1, 2, 2.5, 5, 10)  # times a power of ten
# Colours of curves, of which the first ones are further apart.
COLORS = tuple(f"c{number}" for number in range(1, 9))
# Placeholder colour -> CSS variable. Greys that no colour of the page's palette equals.
_PLACEHOLDERS = {
    name: f"#{i:02d}{i:02d}{i:02d}"
    for i, name in enumerate(("ink", "muted", "grid", *COLORS), start=1)
}


@dataclass(frozen=True)
class Curve:
    """One line over steps. `color` is one of COLORS; NaN and infinite values are not drawn."""

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


@dataclass(frozen=True)
class Course:
    """A line over two measures that change together; ends and points are steps of a run.

    Points where either is NaN or infinite are not drawn. `color` is c1 to c4.
    """

    label: str
    steps: np.ndarray
    across: np.ndarray
    up: np.ndarray
    color: str


@dataclass(frozen=True)
class Span:
    """A score with the ends of its interval, None where it has none. `color` is c1 to c4."""

    label: str
    score: float
    low: float | None
    high: float | None
    color: str


@dataclass(frozen=True)
class Moment:
    """A vertical line at a step from which on something is different."""

    label: str
    step: float
    short: str = ""  # label where there is no room for the other


def plot(
    title: str,
    unit: str,
    key: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    narrow: tuple[int, int] | None = None,
    **options: Any,
) -> Figure:
    """Draws the curves that have finite points; the figure has no drawing where none has.

    `key` and `options` are those of `line_plot`; `narrow` is the size of a second drawing, for a
    page that is too narrow for the first.
    """
    drawable = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not drawable:
        return Figure(title, unit, None)
    num_hidden = sum(int((~np.isfinite(curve.values)).sum()) for curve in curves)
    options |= {"label": f"{title} over steps", "marks": marks}
    small = None
    if narrow is not None:
        small = line_plot(
            f"{key}-narrow",
            drawable,
            **{**options, "size": narrow, "label_size": _NARROW_LABEL_SIZE},
        )
    return Figure(title, unit, line_plot(key, drawable, **options), num_hidden, small)


def line_plot(
    key: str,
    curves: Sequence[Curve],
    *,
    label: str,
    marks: Sequence[Mark] = (),
    moments: Sequence[Moment] = (),
    size: tuple[int, int] = (540, 230),
    text: Callable[[float], str] = "{:#.4g}".format,
    limits: tuple[float | None, float | None] = (None, None),
    label_size: float = _LABEL_SIZE,
) -> Drawing:
    """Draws the curves.

    Args:
        key: prefix of the ids in the drawing; unique on the page.
        curves: each with a finite value.
        label: description for readers who cannot see the picture.
        moments: ascending; those outside of the curves' steps are left out.
        size: width and height in points; the page scales it.
        text: format of a value, on the axis and in the labels at the right edge.
        limits: lower and upper end of the axis; None leaves it to the data, which are then drawn
            on a logarithmic axis where they span more than a factor of 20.
        label_size: size of the labels' letters on the page, in points of the drawing.
    """
    # Defaults, not the user's matplotlibrc, and a fixed salt for the ids, which are hashes: equal
    # runs have equal pages.
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": key}]):
        width, height = size
        canvas = Canvas(figsize=(width / 72, height / 72), dpi=72)
        axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
        drawn = []
        ends = [*marks]  # name, height and colour of each right end
        for curve in curves:
            can_be_drawn = np.isfinite(curve.values)
            values = curve.values[can_be_drawn]
            drawn.append(replace(curve, steps=curve.steps[can_be_drawn], values=values))
            last = _draw_curve(axes, drawn[-1])
            ends.append(Mark(f"{curve.label} {text(last)}".strip(), last, curve.color))
        for mark in marks:
            color = _PLACEHOLDERS[mark.color]
            axes.axhline(mark.value, color=color, linewidth=1, linestyle=(0, (4, 3)))
        right = 12.0 + _LABEL_CHARACTER * label_size * max(len(end.label) for end in ends)
        top = _TOP + (_LABEL_GAP if moments else 0.0)
        inner = (width - _LEFT - right, height - _BOTTOM - top)
        axes.set_position((_LEFT / width, _BOTTOM / height, inner[0] / width, inner[1] / height))
        _lay_out_axes(axes, drawn, marks, text, limits)
        _label_right_edge(axes, ends, label_size)
        _draw_moments(axes, moments, label_size)
        svg = _svg(canvas)
    return _for_page(svg, key, label)


def plane_plot(
    key: str,
    courses: Sequence[Course],
    *,
    label: str,
    across: str,
    up: str,
    size: tuple[int, int] = (540, 300),
    text: Callable[[float], str] = "{:#.3g}".format,
) -> Drawing:
    """Draws courses over a plane through the origin, their first and last steps marked.

    Args:
        key: prefix of the ids in the drawing; unique on the page.
        courses: each with a finite point.
        label: description for readers who cannot see the picture.
        across, up: names of the two measures, written along the axes.
        size: width and height in points; the page scales it.
        text: format of a value on the axes.
    """
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": key}]):
        width, height = size
        canvas = Canvas(figsize=(width / 72, height / 72), dpi=72)
        # Room for the names: of `up` above the axes, of `across` below its ticks.
        low, high = 1.75 * _BOTTOM, _TOP + 1.5 * _LABEL_GAP
        place = (_LEFT / width, low / height, 1 - (_LEFT + 12) / width, 1 - (low + high) / height)
        axes = canvas.add_axes(place)
        for line in (axes.axhline, axes.axvline):
            line(0, color=_PLACEHOLDERS["muted"], linewidth=1, linestyle=(0, (4, 3)))
        for course in courses:
            _draw_course(axes, course)
        axes.margins(0.12, 0.12)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(text, value)))
        _set_frame(axes, "both")
        names: dict[str, Any] = {"fontsize": _NARROW_LABEL_SIZE, "color": _PLACEHOLDERS["ink"]}
        canvas.text(0.01, 1 - 4 / height, f"{up} ↑", verticalalignment="top", **names)
        canvas.text(1 - 12 / width, 3 / height, f"{across} →", horizontalalignment="right", **names)
        svg = _svg(canvas)
    return _for_page(svg, key, label)


def interval_plot(
    key: str,
    groups: Sequence[tuple[str, Sequence[Span]]],
    *,
    label: str,
    width: int = 540,
    text: Callable[[float], str] = "{:#.4g}".format,
) -> Drawing:
    """Draws scores with their intervals below each other, each on a line of its own.

    Args:
        key: prefix of the ids in the drawing; unique on the page.
        groups: names, and the finite scores of each.
        label: description for readers who cannot see the picture.
        width: in points; the page scales it.
        text: format of a score, on the axis and beside its line.
    """
    lines: list[str | Span] = []
    for name, of_group in groups:
        lines += [name, *of_group]
    spans = [line for line in lines if isinstance(line, Span)]
    height = _TOP + _BOTTOM + _LINE_HEIGHT * len(lines)
    character = _LABEL_CHARACTER * _LABEL_SIZE
    left = 24.0 + character * min(max(len(span.label) for span in spans), _MOST_OF_NAME)
    right = 16.0 + character * max(len(text(span.score)) for span in spans)
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": key}]):
        canvas = Canvas(figsize=(width / 72, height / 72), dpi=72)
        inner = (1 - (left + right) / width, 1 - (_TOP + _BOTTOM) / height)
        axes = canvas.add_axes((left / width, _BOTTOM / height, *inner))
        axes.set_ylim(len(lines) - 0.5, -0.5)
        for place, line in enumerate(lines):
            _draw_line_of_intervals(axes, place, line, text)
        ends = [e for s in spans for e in (s.low, s.score, s.high) if e is not None]
        if min(ends) > 0 and max(ends) / min(ends) > _LOG_FROM_RATIO:
            axes.set_xscale("log")
        else:
            axes.margins(x=0.04)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
        axes.xaxis.set_minor_locator(NullLocator())  # after the scale, which brings its own
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(text, value)))
        axes.yaxis.set_major_locator(NullLocator())
        _set_frame(axes, "x")
        svg = _svg(canvas)
    return _for_page(svg, key, label)


def _draw_line_of_intervals(
    axes: Axes, place: int, line: str | Span, text: Callable[[float], str]
) -> None:
    """Draws the name of a group, or a score with its interval, label and value."""
    across = axes.get_yaxis_transform()  # x in shares of the axes, y a line
    options: dict[str, Any] = {"verticalalignment": "center", "fontsize": _LABEL_SIZE}
    if isinstance(line, str):
        options |= {"color": _PLACEHOLDERS["ink"], "fontweight": "bold"}
        axes.text(0, place, line, transform=across, **options)
        return
    options |= {"color": _PLACEHOLDERS[line.color], "textcoords": "offset points"}
    if line.low is not None and line.high is not None:
        ends = [line.low, line.high]
        axes.plot(ends, [place, place], color=options["color"], linewidth=2.2, alpha=0.55)
    axes.plot([line.score], [place], "o", color=options["color"], markersize=6)
    name = line.label
    if len(name) > _MOST_OF_NAME:
        name = f"{name[: _MOST_OF_NAME - 1]}…"
    for label, x, shift, side in ((name, 0, -8, "right"), (text(line.score), 1, 8, "left")):
        beside: dict[str, Any] = {"xycoords": across, "horizontalalignment": side}
        axes.annotate(label, (x, place), (shift, 0), **beside, **options)


def _draw_course(axes: Axes, course: Course) -> None:
    """Draws a course with a point for each step, and the names of its first and last one."""
    can_be_drawn = np.isfinite(course.across) & np.isfinite(course.up)
    steps, x, y = (values[can_be_drawn] for values in (course.steps, course.across, course.up))
    color = _PLACEHOLDERS[course.color]
    few = len(x) <= _MARKERS_UP_TO
    axes.plot(x, y, color=color, linewidth=1.7, marker="o" if few else None, markersize=3.5)
    axes.plot(x[:1], y[:1], "o", markersize=8, markerfacecolor="none", color=color)
    axes.plot(x[-1:], y[-1:], "o", markersize=8, color=color)
    # Beside the line: it mostly leaves its first point upwards, and the last name stands on the
    # other side than the point before.
    name = f"{course.label[:_MOST_OF_NAME]} " if course.label else ""
    falls = len(y) > 1 and y[-2] > y[-1]
    ends = [(0, (9, -8), "left"), (len(x) - 1, (12, -13 if falls else 13), "right")]
    for end, offset, side in ends[: min(len(x), 2)]:
        axes.annotate(
            f"step {steps[end]:,.0f}" if end == 0 else f"{name}step {steps[end]:,.0f}",
            (x[end], y[end]),
            offset,
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="center",
            fontsize=_LABEL_SIZE,
            color=color,
        )


def decimate(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduces to MAX_POINTS: lowest and highest of each stretch, so spikes stay."""
    if len(values) <= MAX_POINTS:
        return steps, values
    edges = np.linspace(0, len(values), MAX_POINTS // 2 + 1).astype(int)
    # A mean of each stretch would hide the very spikes that a reader looks for.
    extremes = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        stretch = values[begin:end]
        extremes += [begin + int(stretch.argmin()), begin + int(stretch.argmax())]
    places = np.unique(extremes)
    return steps[places], values[places]


def _draw_curve(axes: Axes, curve: Curve) -> float:
    """Draws a curve, and its moving average where there are many points; returns its last value."""
    values = curve.values
    color = _PLACEHOLDERS[curve.color]
    is_smoothed = curve.smooth and len(values) >= _SMOOTH_FROM
    axes.plot(
        *decimate(curve.steps, values),
        color=color,
        linewidth=0.8 if is_smoothed else 1.7,
        alpha=0.3 if is_smoothed else 1.0,
        marker="o" if len(values) <= _MARKERS_UP_TO else None,
        markersize=3.5,
    )
    if not is_smoothed:
        return float(values[-1])
    # Centred mean over a fortieth of the points; over fewer at both ends. By running sums: such a
    # window, summed anew at each point, would be quadratic.
    half = max(len(values) // 80, 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    center = np.arange(len(values))
    begin = np.maximum(center - half, 0)
    end = np.minimum(center + half + 1, len(values))
    trend = (total[end] - total[begin]) / (end - begin)
    axes.plot(*decimate(curve.steps, trend), color=color, linewidth=1.9)
    return float(trend[-1])


def _lay_out_axes(
    axes: Axes,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    text: Callable[[float], str],
    limits: tuple[float | None, float | None],
) -> None:
    steps = np.concatenate([curve.steps for curve in curves])
    values = np.concatenate([curve.values for curve in curves])
    # A single step has no extent, and matplotlib warns of equal ends of an axis.
    spread = max(float(steps.max() - steps.min()), 1.0)
    axes.set_xlim(steps.min() - 0.015 * spread, steps.max() + 0.015 * spread)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_TICK_STEPS, integer=True))
    is_wide = values.min() > 0 and values.max() / values.min() > _LOG_FROM_RATIO
    if limits == (None, None) and is_wide:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
    axes.yaxis.set_minor_locator(NullLocator())  # after the scale, which brings its own
    low, high = limits
    if low == 0 and high is None:  # matplotlib's own margin is a share of the values' range
        top = max(values.max(), *(mark.value for mark in marks), 0.0)
        high = 1.08 * top if top > 0 else 1.0
    axes.set_ylim(low, high)

    grid = _PLACEHOLDERS["grid"]
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(grid)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=11, labelcolor=_PLACEHOLDERS["muted"], pad=5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(text, value)))


def _set_frame(axes: Axes, lines: Literal["x", "both"]) -> None:
    """Draws lines at the ticks of one axis or both, in place of a frame."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(axis=lines, color=_PLACEHOLDERS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=11, labelcolor=_PLACEHOLDERS["muted"], pad=5)


def _tick(text: Callable[[float], str], value: float) -> str:
    """Writes a value without trailing zeros among its decimals: 2.500% becomes 2.5%; 1,000 and
    2.5e-10 stay."""
    label = text(value)
    has_decimals = "." in label and "e" not in label
    return re.sub(r"\.?0+(?=%?$)", "", label) if has_decimals else label


def _label_right_edge(axes: Axes, ends: Sequence[Mark], size: float) -> None:
    """Writes each label beside the end of its line, pushed apart where they would overlap."""
    heights = [float(axes.transData.transform((0, end.value))[1]) for end in ends]
    right, top = map(float, axes.transAxes.transform((1, 1)))
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # Upwards first, then down again from the top edge, which the highest label may have crossed.
    for lower, upper in zip(order, order[1:], strict=False):
        heights[upper] = max(heights[upper], heights[lower] + _LABEL_GAP)
    heights[order[-1]] = min(heights[order[-1]], top)
    for upper, lower in zip(order[::-1], order[-2::-1], strict=False):
        heights[lower] = min(heights[lower], heights[upper] - _LABEL_GAP)
    for end, height in zip(ends, heights, strict=True):
        axes.text(
            right + 8,
            height,
            end.label,
            transform=IdentityTransform(),
            color=_PLACEHOLDERS[end.color],
            fontsize=size,
            verticalalignment="center",
        )


def _draw_moments(axes: Axes, moments: Sequence[Moment], size: float) -> None:
    """Draws vertical lines, each with its label at the top, where that covers no other label."""
    first, last = axes.get_xlim()
    low = axes.get_ylim()[0]  # any height would do; 0 has none on a logarithmic axis
    left, right = (float(axes.transAxes.transform((end, 0))[0]) for end in (0, 1))
    top = float(axes.transAxes.transform((0, 1))[1])
    free_from = left
    muted = _PLACEHOLDERS["muted"]
    for moment in moments:
        if not first <= moment.step <= last:
            continue
        axes.axvline(moment.step, color=muted, linewidth=1, linestyle=(0, (1, 2)))
        place = float(axes.transData.transform((moment.step, low))[0])
        for label in (moment.label, moment.short):
            width = _LABEL_CHARACTER * size * len(label)
            # Beginning at its line where the right edge leaves room, else ending there.
            side = "left" if place + width <= right else "right"
            begin = place if side == "left" else place - width
            if label and begin >= free_from:
                axes.text(
                    place,
                    top + 4,
                    label,
                    transform=IdentityTransform(),
                    color=muted,
                    fontsize=size,
                    horizontalalignment=side,
                )
                free_from = begin + width
                break


def _svg(canvas: Canvas) -> str:
    """Writes the file that matplotlib makes of a drawing."""
    buffer = io.StringIO()
    # No date and no version of matplotlib, which would differ between equal runs.
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return buffer.getvalue()


def _for_page(svg: str, key: str, label: str) -> Drawing:
    """Reduces matplotlib's file to what a page needs: unique ids, CSS variables, no fixed size."""
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    shapes = re.sub(r"^.*?<svg[^>]*>|</svg>\s*$", "", svg, flags=re.S)
    shapes = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", shapes, flags=re.S
    )
    # Ids are unique within one drawing only; a page holds many.
    shapes = re.sub(r'\bid="', f'id="{key}-', shapes)
    shapes = re.sub(r'(?:xlink:)?href="#', f'href="#{key}-', shapes)
    shapes = shapes.replace("url(#", f"url(#{key}-")
    shapes = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", shapes)
    for name, placeholder in _PLACEHOLDERS.items():
        shapes = shapes.replace(placeholder, f"var(--{name})")
    return Drawing(label, view_box[1], re.sub(r"\n\s*", "\n", shapes).strip())
