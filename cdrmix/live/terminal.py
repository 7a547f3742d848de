"""Views of runs for a terminal: one run with its curves, or several as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cdrmix.live.facts import (
    UNKNOWN,
    Fact,
    eta_text,
    facts,
    plain,
    progress_text,
    state_level,
    state_text,
)
from cdrmix.live.graph import graph, sparkline
from cdrmix.live.status import Status
from cdrmix.monitoring.metric_columns import MetricColumns
from cdrmix.monitoring.sinks import duration

_STYLES = {"": "", "good": "green", "warn": "yellow", "bad": "bold red"}
_GRAPH_COLUMNS = 60  # of the narrowest curve beside another
_FACT_COLUMNS = 38  # of the narrowest figure with its name
_NAME_COLUMNS = 16
_EDGE_COLUMNS = 9  # left of a curve, for the values at its edges
_LEAST_ROWS, _MOST_ROWS = 3, 16  # of a curve
_SPARK_COLUMNS = 20
# Metric, title and format of the curves, the first that there is room for.
_CURVES = (
    ("loss", "loss", "{:.4g}"),
    ("stage_b/loss", "loss of Stage B", "{:.4g}"),
    ("eval/loss", "held-out loss", "{:.4g}"),
    ("tokens_per_second", "tokens per second", "{:,.0f}"),
    ("grad_norm", "gradient norm", "{:.3g}"),
    ("moe/routing_entropy_bits", "routing entropy, bits", "{:.3f}"),
    ("moe/overflow_fraction", "overflow", "{:.2%}"),
)
# Columns of a table that a narrow terminal leaves out, the first of them first.
_DISPENSABLE = ("overflow", "entropy", "curve", "tokens/s", "done", "line", "held-out")
# Metrics whose series are shown.
SERIES = (*(metric for metric, *_ in _CURVES), "step_seconds")


@dataclass(frozen=True)
class Size:
    """Room for a view, and whether its characters must be ASCII."""

    width: int
    height: int
    ascii_only: bool = False


def run_view(status: Status, metrics: MetricColumns, size: Size) -> list[Text]:
    """Lines of one run, no more than there is room for."""
    head = [_title(status, size.width), _progress(status, size)]
    if status.why:
        head.append(Text(plain(status.why), "dim"))
    below = _fact_lines(list(facts(status)), size.width)
    warnings = [
        Text(f"{line.time[5:]} {plain(line.text)}", "yellow" if line.level == "WARNING" else "red")
        for line in status.warnings
    ]
    room = size.height - len(head) - len(below) - len(warnings)
    lines = [*head, *_curves(metrics, size, room), *below, *warnings]
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
        line.no_wrap = True
    return lines[: max(size.height, 1)]


def _title(status: Status, width: int) -> Text:
    state = state_text(status)
    name = plain(status.name)
    if status.variant and status.variant not in status.name:
        name = f"{name}  {plain(status.variant)}"
    title = Text(name, "bold")
    title.truncate(max(width - len(state) - 2, 8), overflow="ellipsis", pad=True)
    return Text.assemble(title, "  ", (state, _STYLES[state_level(status)]))


def _progress(status: Status, size: Size) -> Text:
    left = progress_text(status)
    share = status.share
    right = "" if share is None else f"{share:4.0%}"
    if status.state == "running":
        right += f"  ETA {eta_text(status)}"
    cells = size.width - len(left) - len(right) - 4
    if share is None or cells < 4:
        return Text(f"{left}  {right}".rstrip())
    full, empty = ("#", "-") if size.ascii_only else ("━", "─")
    done = int(share * cells)
    bar = [(full * done, "cyan"), (empty * (cells - done), "dim")]
    return Text.assemble(f"{left}  ", *bar, f"  {right}")


def _curves(metrics: MetricColumns, size: Size, room: int) -> list[Text]:
    """Curves side by side and below each other, as the room allows."""
    shown = [curve for curve in _CURVES if len(metrics.series(curve[0])[0]) > 1]
    across = max(1, min(size.width // _GRAPH_COLUMNS, len(shown)))
    lines_of = _LEAST_ROWS + 3  # its title, the steps, and an empty line
    down = max(1, min(room // (2 * lines_of), -(-len(shown) // across)))
    rows = min(room // down - 3, _MOST_ROWS)
    if rows < 1 or not shown:
        return [Text()] if room > 0 else []
    width = (size.width - 2 * (across - 1)) // across
    lines: list[Text] = []
    for number in range(down):
        beside = shown[number * across : (number + 1) * across]
        drawn = [_curve(metrics, curve, width, rows, size.ascii_only) for curve in beside]
        if drawn:
            lines += [Text("  ").join(parts) for parts in zip(*drawn, strict=True)]
    return lines


def _curve(
    metrics: MetricColumns, curve: tuple[str, str, str], width: int, rows: int, ascii_only: bool
) -> list[Text]:
    """Lines of a curve, all of one width: title, rows with the values at the edges, steps."""
    metric, title, spec = curve
    steps, values = metrics.series(metric)
    drawn = graph(steps, values, width=width - _EDGE_COLUMNS, height=rows, ascii_only=ascii_only)
    newest = Text.assemble((title, "bold"), f" {spec.format(values[-1])}")
    lines = [newest]
    if drawn is None:
        lines += [Text() for _ in range(rows + 1)]
    else:
        edges = {0: spec.format(drawn.high), rows - 1: spec.format(drawn.low)}
        for number, row in enumerate(drawn.rows):
            edge = edges.get(number, "").rjust(_EDGE_COLUMNS - 1)
            lines.append(Text.assemble((edge, "dim"), " ", (row, "cyan")))
        first, last = f"{steps[0]:,.0f}", f"{steps[-1]:,.0f}"
        gap = width - _EDGE_COLUMNS - len(first) - len(last)
        lines.append(Text(" " * _EDGE_COLUMNS + first + " " * max(gap, 1) + last, "dim"))
    lines.append(Text())
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def _fact_lines(shown: Sequence[Fact], width: int) -> list[Text]:
    """Figures in columns of equal width, read from top to bottom; long ones on lines of their own
    below."""
    across = max(1, width // _FACT_COLUMNS)
    room = width // across
    cells = [
        Text.assemble((f"{fact.name:{_NAME_COLUMNS}}", "dim"), (fact.value, _STYLES[fact.level]))
        for fact in shown
    ]
    long = [cell for cell in cells if cell.cell_len >= room]
    short = [cell for cell in cells if cell.cell_len < room]
    down = -(-len(short) // across)
    lines = []
    for number in range(down):
        line = Text()
        for cell in short[number::down]:
            line.append_text(cell)
            line.append(" " * (room - cell.cell_len))
        line.rstrip()
        lines.append(line)
    return [*lines, *long]


def table_view(runs: Sequence[tuple[Status, MetricColumns]], size: Size) -> list[Text]:
    """Lines of several runs, one for each; columns that do not fit are left out."""
    rows = [_cells(status, metrics, size) for status, metrics in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    widths = {
        name: max(cell_len(text) for text in [name, *(cell.plain for cell in column)])
        for name, column in columns.items()
    }
    names = list(columns)
    for name in _DISPENSABLE:
        if sum(widths[each] + 2 for each in names) - 2 > size.width:
            names.remove(name)
    # what is still too wide is the name of a run
    others = sum(widths[name] + 2 for name in names if name != "run")
    widths["run"] = max(8, min(widths["run"], size.width - others))
    heads = {name: Text(name, "dim") for name in names}
    lines = [
        Text("  ").join(_fitted(row[name], widths[name], name) for name in names)
        for row in [heads, *rows]
    ]
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
        line.no_wrap = True
    if len(lines) > size.height:
        hidden = len(lines) - size.height + 1
        lines = [*lines[: size.height - 1], Text(f"and {hidden} more", "dim")]
    return lines


def _fitted(cell: Text, width: int, column: str) -> Text:
    """A cell of one width; text to the left, numbers to the right."""
    cell.truncate(width, overflow="ellipsis")
    gap = " " * (width - cell_len(cell.plain))
    is_text = column in ("run", "state", "curve")
    return Text.assemble(cell, gap) if is_text else Text.assemble(gap, cell)


def _cells(status: Status, metrics: MetricColumns, size: Size) -> dict[str, Text]:
    """Cells of a run by column."""

    def value(metric: str, spec: str) -> Text:
        number = status.values.get(metric)
        return Text(UNKNOWN if number is None else spec.format(number))

    age = status.newest_seconds
    losses = metrics.series("loss")[1]
    return {
        "run": Text(plain(status.name)),
        "state": Text(state_text(status), _STYLES[state_level(status)]),
        "step": Text(f"{status.step:,}"),
        "done": Text(UNKNOWN if status.share is None else f"{status.share:.0%}"),
        "loss": value("loss", "{:.4f}"),
        "held-out": value("eval/loss", "{:.4f}"),
        "tokens/s": value("tokens_per_second", "{:,.0f}"),
        "ETA": Text(eta_text(status)),
        "line": Text(UNKNOWN if age is None else duration(age), "bold red" * status.is_late),
        "entropy": value("moe/routing_entropy_bits", "{:.2f}"),
        "overflow": value("moe/overflow_fraction", "{:.1%}"),
        "curve": Text(sparkline(losses, width=_SPARK_COLUMNS, ascii_only=size.ascii_only), "cyan"),
    }
