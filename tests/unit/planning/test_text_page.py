"""Pages of text on terminals of several widths, and in a pipe."""

from __future__ import annotations

import io
import os
import re

import pytest

from cdrmix.cli import main
from cdrmix.config.load import shipped
from cdrmix.log import visible_width, wrapped
from cdrmix.planning.text_page import Page, flops_text, size_text

pytestmark = pytest.mark.usefixtures("shared_searches")

LONG = "  - memory: 495.7 GiB of 23.6 GiB a device, NOT within the 90 % that a plan may fill"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Terminal:
    """A terminal with colours, as wide as the test asks."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(request.param))
    return Terminal()


def test_a_line_is_wrapped_between_words_below_its_text() -> None:
    assert wrapped(LONG, width=40, hang=4) == [
        "  - memory: 495.7 GiB of 23.6 GiB a",
        "    device, NOT within the 90 % that a",
        "    plan may fill",
    ]
    assert wrapped(LONG, width=None) == [LONG]


def test_a_number_and_its_unit_stay_together_and_long_words_whole() -> None:
    assert wrapped("takes 320.2 GiB", width=11) == ["takes", "320.2 GiB"]
    assert wrapped("in /a/very/long/path.json it is", width=8) == [
        "in",
        "/a/very/long/path.json",
        "it is",
    ]


def test_a_style_ends_with_each_line_and_goes_on_in_the_next() -> None:
    lines = wrapped("it \x1b[31mdoes NOT fit\x1b[0m here", width=8, hang=2)
    assert lines == [
        "it \x1b[31mdoes\x1b[0m",
        "  \x1b[31mNOT\x1b[0m",
        "  \x1b[31mfit\x1b[0m",
        "  here",
    ]


ROWS = [
    ["", "planned", "exercised"],
    ["ranks with samples of their own", "interleave-x, both kinds of blocks", "yes"],
]


@pytest.mark.parametrize("terminal", [40], indirect=True)
def test_a_table_wraps_its_widest_cells(terminal: Terminal) -> None:
    page = Page(terminal)
    page.add_table(ROWS)
    assert str(page).split("\n") == [
        "               planned         exercised",
        "ranks with     interleave-x,   yes",
        "samples of     both kinds of",
        "their own      blocks",
    ]


def test_in_a_pipe_a_table_keeps_its_width() -> None:
    page = Page(io.StringIO())
    page.add_table(ROWS, right=(2,))
    first, second = str(page).split("\n")
    assert len(first) == len(second) == 31 + 2 + 34 + 2 + 9
    assert second.endswith("blocks        yes")


@pytest.mark.parametrize("terminal", [80, 100], indirect=True)
@pytest.mark.parametrize(
    "flags",
    [
        "core-1b --nodes 1 --gpus-per-node 8 --gpu h100-80",
        "core-200b --nodes 1 --gpus-per-node 8 --gpu rtx4090-24 --explain",
        "reason-40b --nodes 4 --gpus-per-node 8 --gpu-memory-gib 80 --explain",
    ],
)
def test_no_line_of_a_plan_is_wider_than_the_terminal(
    terminal: Terminal, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    name, *rest = flags.split()
    main(["plan", "--config", str(shipped("model_configs") / f"cdrmix-{name}.yaml"), *rest])
    lines = terminal.getvalue().splitlines()
    assert max(map(visible_width, lines)) <= int(os.environ["COLUMNS"])
    assert any("\x1b[" in line for line in lines)


@pytest.mark.parametrize(
    "flags",
    [
        "core-200b --nodes 1 --gpus-per-node 8 --gpu rtx4090-24 --explain",
        "core-tiny --nodes 1 --gpus-per-node 1 --gpu cpu --explain",
        "reason-40b --nodes 4 --gpus-per-node 8 --gpu-memory-gib 80 --explain",
    ],
)
def test_a_plan_is_told_in_units_of_people(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = flags.split()
    main(["plan", "--config", str(shipped("model_configs") / f"cdrmix-{name}.yaml"), *rest])
    page = capsys.readouterr().out
    assert "\x1b[" not in page
    assert not re.search(r"\d[eE][+-]?\d|\bNone\b|\bTrue\b|\bFalse\b|\b0\.0 |\d{5,}", page)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 MiB"),
        (8.4 * 2**20, "8 MiB"),
        (1.1 * 2**30, "1.1 GiB"),
        (1937.3 * 2**30, "1,937.3 GiB"),
        (27 * 2**40, "27.0 TiB"),
    ],
)
def test_sizes_have_the_unit_that_people_take(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("flops", "text"), [(2e8, "0.2 GFLOP"), (4.78e15, "4.8 PFLOP"), (1.09e19, "11 EFLOP")]
)
def test_operations_have_the_unit_that_people_take(flops: float, text: str) -> None:
    assert flops_text(flops) == text
