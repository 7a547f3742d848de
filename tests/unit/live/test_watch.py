"""Views for a terminal, and `cdrmix watch --once`."""

import json
import re

import numpy as np
import pytest
from rich.cells import cell_len

from cdrmix.cli import main
from cdrmix.live.graph import graph, sparkline
from cdrmix.live.terminal import Size
from cdrmix.live.watch import _view, watched
from tests.live_run import LiveRun


@pytest.fixture
def run(tmp_path) -> LiveRun:
    made = LiveRun(tmp_path / "20261122-080910-1ff9ca8c")
    made.log(*range(1, 101), **{"eval/loss": 7.5, "grad_norm": 0.7})
    made.tell("WARNING", "warning: a disk is nearly full \x1b[2J")
    made.save(100)
    return made


def view(size: Size, *runs: LiveRun) -> list[str]:
    now = [run.now() for run in watched([run.path for run in runs], may_wait=True)]
    return [line.plain for line in _view(now, size)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (120, 40), (200, 60), (20, 5)])
def test_a_view_fits_its_terminal(run, width, height):
    lines = view(Size(width, height), run)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert "20261122" in lines[0]


def test_a_small_terminal_shows_all_figures(run):
    text = "\n".join(view(Size(80, 24), run))
    for part in ("running", "step 100 of 400", "25%", "ETA 2m30s", "loss", "7.0000", "7.5000"):
        assert part in text
    for part in ("12,000", "0.5 s", "checkpoint", "newest line", "a disk is nearly full", "health"):
        assert part in text
    assert "\x1b" not in text


def test_a_large_terminal_shows_more_curves(run):
    titles = ["held-out loss 7.5", "tokens per second 12,000", "gradient norm 0.7"]
    of_small, of_large = ("\n".join(view(Size(*s), run)) for s in ((80, 24), (200, 50)))
    assert [title in of_small for title in titles] == [False] * 3
    assert [title in of_large for title in titles] == [True] * 3


def test_a_terminal_without_unicode_gets_ascii(run):
    lines = view(Size(80, 24, ascii_only=True), run)
    assert "\n".join(lines).replace("\ufffd", "").isascii()
    assert any("*" in line for line in lines)


def test_several_runs_are_a_table_in_the_width(run, tmp_path):
    other = LiveRun(tmp_path / "other")
    for width in (50, 80, 200):
        lines = view(Size(width, 24), run, other)
        assert len(lines) == 3
        assert max(map(cell_len, lines)) <= width
        assert "step" in lines[0]
        assert "7.0000" in lines[1]
        assert ("curve" in lines[0]) == (width == 200)


def test_more_runs_than_rows_are_counted(tmp_path):
    runs = [LiveRun(tmp_path / f"run-{number}") for number in range(9)]
    assert view(Size(80, 5), *runs)[-1] == "and 6 more"


def test_once_prints_plain_text(run, capsys):
    assert main(["watch", "--once", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "step 100 of 400" in out
    assert not re.search("[\x00-\x08\x0b-\x1f]", out)


def test_json_is_one_object_with_numbers(run, capsys):
    run.log(101, loss=float("nan"))
    assert main(["watch", "--once", "--json", str(run.path)]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    assert (found["state"], found["step"], found["num_steps"]) == ("running", 101, 400)
    assert found["values"]["loss"] == "NaN"
    assert found["checkpoint"]["step"] == 100


def test_a_wrong_folder_is_told_in_one_message(run, tmp_path, capsys):
    def message(path) -> str:
        assert main(["watch", "--once", str(path)]) == 2
        return capsys.readouterr().err

    assert "not found" in message(tmp_path / "nothing")
    assert str(run.path) in message(tmp_path), "a folder of runs names them"
    (tmp_path / "empty").mkdir()
    assert "is no run directory" in message(tmp_path / "empty")
    assert "not found" in message(tmp_path / "no" / "folder")


def test_a_run_is_followed_from_before_its_beginning_over_a_resume(tmp_path):
    (followed,) = watched([tmp_path / "later"], may_wait=True)
    assert followed.now()[0].state == "waiting"
    run = LiveRun(tmp_path / "later")
    assert followed.now()[0].state == "running"
    run.log(1, 2, 3)
    assert followed.now()[0].step == 3
    whole = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "new").write_text(whole[0])
    (run.path / "new").replace(run.path / "metrics.jsonl")
    run.log(2, loss=1.5)
    status, metrics = followed.now()
    assert (status.step, metrics.series("loss")[1].tolist()) == (2, [7.99, 1.5])


def test_a_curve_is_drawn_from_its_lowest_to_its_highest():
    steps = np.arange(10.0)
    drawn = graph(steps, steps, width=5, height=2)
    assert drawn is not None
    assert (drawn.low, drawn.high) == (0, 9)
    assert [row.strip() != "" for row in drawn.rows] == [True, True]
    assert drawn.rows[0][0] == " "
    assert drawn.rows[1][-1] == " "


def test_noise_is_drawn_as_its_median_and_a_spike_stays():
    noise = np.random.default_rng(0)
    values = 5 + noise.normal(0, 0.01, 50_000)
    calm = graph(np.arange(50_000.0), values, width=40, height=8)
    values[25_000] = 5.3
    spiky = graph(np.arange(50_000.0), values, width=40, height=8)
    assert calm is not None
    assert spiky is not None
    marks = [sum(map(str.isspace, "".join(drawn.rows))) for drawn in (calm, spiky)]
    assert spiky.rows[0].strip(), "the spike reaches the upper edge"
    assert marks[0] > 150, "and noise does not fill the picture"


@pytest.mark.parametrize(
    "values", [[], [1.0], [float("nan")] * 9, [2.0, 2.0, 2.0], [1.0, float("inf"), 2.0]]
)
def test_curves_of_little_are_no_fault(values):
    steps = np.arange(float(len(values)))
    drawn = graph(steps, np.array(values), width=10, height=3)
    assert (drawn is None) == (np.isfinite(values).sum() < 2)
    assert len(sparkline(np.array(values), width=5)) <= 5
