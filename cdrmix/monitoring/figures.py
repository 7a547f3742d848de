"""A plot of curves on a page, or a line that says why there is none."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdrmix.monitoring import page
from cdrmix.monitoring.plots import Curve, Mark, line_plot


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
