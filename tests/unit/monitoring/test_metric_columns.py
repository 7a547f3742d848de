"""Metrics as columns, and the reader of a file that grows, is cut, and is replaced."""

import json
import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cdrmix.errors import StateError
from cdrmix.monitoring import metric_columns
from cdrmix.monitoring.metric_columns import Column, GrowingMetrics, MetricColumns, read_columns
from cdrmix.monitoring.sinks import MetricsFile, read_metrics

MANY = 100_000
KEYS = ("loss", "grad_norm", "tokens_per_second")


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "loss": 10.0 - step / 10, **values}) + "\n"


def append(path: Path, *texts: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(texts))


def losses(growing: GrowingMetrics) -> list[tuple[float, float]]:
    steps, values = growing.columns.series("loss")
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def at(*steps: int) -> list[tuple[float, float]]:
    return [(float(step), 10.0 - step / 10) for step in steps]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_what_is_appended_is_read_on(path):
    growing = GrowingMetrics(path)
    assert not growing.update(), "there is no file yet"
    append(path, line(1), line(2))
    assert growing.update()
    assert not growing.update(), "nothing was added"
    append(path, line(3))
    assert growing.update()
    assert losses(growing) == at(1, 2, 3)
    assert growing.columns.num_records == 3, "each line was read once"


def test_a_half_written_line_waits_for_its_rest(path):
    whole = line(2)
    append(path, line(1), whole[:9])
    growing = GrowingMetrics(path)
    growing.update()
    assert losses(growing) == at(1)
    append(path, whole[9:])
    growing.update()
    assert losses(growing) == at(1, 2)


def test_the_last_call_takes_a_record_without_its_line_end(path):
    append(path, line(1), line(2).rstrip())
    assert read_columns(path).last_step == 2
    append(path, '\n{"step": 3, "lo')
    assert read_columns(path).last_step == 2


def test_a_resume_that_cuts_the_file_shows_each_step_once(path):
    file = MetricsFile(path)
    growing = GrowingMetrics(path)
    for step in (1, 2, 3, 4):
        file.write({"step": step, "loss": 99.0})
    growing.update()
    file.truncate_after(2)
    for step in (3, 4, 5, 6):
        file.write({"step": step, "loss": 1.0})
    growing.update()
    file.close()
    assert losses(growing) == [(1, 99), (2, 99), (3, 1), (4, 1), (5, 1), (6, 1)]


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_file_cut_in_place_is_read_anew(path, length):
    """Its number stays, and its size may be past the offset again before anybody looks."""
    append(path, *(line(step) for step in range(1, 5)))
    growing = GrowingMetrics(path)
    growing.update()
    before = path.stat().st_ino
    path.write_text("".join(line(step, new=1) for step in range(1, length + 1)))
    assert path.stat().st_ino == before
    growing.update()
    assert losses(growing) == at(*range(1, length + 1))
    assert len(growing.columns.series("new")[0]) == length


def test_a_file_that_is_gone_leaves_nothing(path):
    append(path, line(1))
    growing = GrowingMetrics(path)
    growing.update()
    path.unlink()
    assert growing.update()
    assert growing.columns.names == []
    append(path, line(7))
    growing.update()
    assert losses(growing) == at(7)


def test_an_earlier_step_voids_the_later_ones(path):
    append(path, line(1), line(2), line(3), line(2, again=1), line(3, again=1))
    steps, _ = read_columns(path).series("loss")
    assert steps.tolist() == [1, 2, 3]
    assert read_columns(path).series("again")[0].tolist() == [2, 3]


def test_columns_equal_the_records(path):
    rows = [line(1, a=1), line(2, b=2.5), "no record\n", "7\n", line(3, a=float("nan"), b="NaN")]
    append(path, *rows, line(4, b="-Infinity", text="abc", none=None, many=[1]))
    records, columns = read_metrics(path), read_columns(path)
    for name in ("loss", "a", "b"):
        values = [float(r[name]) for r in records if name in r]
        np.testing.assert_array_equal(columns.series(name)[1], values)
    assert columns.latest("a") is not None and math.isnan(columns.latest("a"))
    assert columns.latest("text") is None
    assert columns.latest("never") is None
    assert columns.last_step == 4


def test_whole_numbers_come_back_as_ints(path):
    append(path, line(1, tokens_seen=2**40))
    latest = read_columns(path).latest("tokens_seen")
    assert (latest, type(latest)) == (2**40, int)


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 100_000,
        '{"step": 1e3, "loss": 1}',
        f'{{"step": {"9" * 200}, "loss": 1}}',
        f'{{"step": 2, "x": {"9" * 400}, "loss": "much"}}',
        '{"step": 2}, {"step": 2',
        "\x00\xff",
        '{"step": null}',
        "x" * (3 * 2**20),
    ],
    ids=range(8),
)
def test_hostile_lines_are_passed_over(path, hostile):
    append(path, line(1), hostile + "\n", line(3))
    growing = GrowingMetrics(path)
    growing.update()
    assert losses(growing) == at(1, 3)
    append(path, line(4))
    growing.update()
    assert losses(growing) == at(1, 3, 4)


def test_names_without_end_are_not_all_kept(path):
    append(path, *(line(step, **{f"n{step}": 1}) for step in range(1, 5_001)))
    columns = read_columns(path)
    assert len(columns.names) == metric_columns._MOST_NAMES
    assert columns.last_step == 5_000


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StateError, match="cannot be read"):
        read_columns(tmp_path / "metrics.jsonl")


def test_a_long_column_keeps_its_spikes(monkeypatch):
    monkeypatch.setattr(metric_columns, "_MOST_VALUES", 1_000)
    column = Column()
    steps = np.arange(50_000.0)
    values = np.sin(steps)
    values[[777, 31_234]] = 50, -60
    for begin in range(0, 50_000, 100):
        column.add(steps[begin : begin + 100], values[begin : begin + 100])
    assert len(column.steps) <= 1_000
    assert (np.diff(column.steps) > 0).all()
    kept = dict(zip(column.steps, column.values, strict=True))
    assert (kept[777], kept[31_234], kept[49_999]) == (50, -60, values[-1])


def test_some_metrics_are_kept_whole_and_of_others_the_newest():
    columns = MetricColumns(series_of=("loss",))
    columns.add([{"step": step, "loss": step, "other": -step} for step in range(1, 6)])
    columns.add([{"step": 6, "loss": 6}])
    assert columns.series("loss")[1].tolist() == [1, 2, 3, 4, 5, 6]
    assert columns.series("other")[1].tolist() == [-5]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    template = json.dumps({"step": -1} | dict.fromkeys(KEYS, -2.0))
    with path.open("w") as file:
        for step in range(1, MANY + 1):
            value = f"{10 / step:.17g}"
            file.write(template.replace("-1", str(step), 1).replace("-2.0", value) + "\n")
    return path


def test_100_000_steps_take_little_memory_and_time(long_run):
    """The control reads them as records, which takes the memory that columns are to save."""
    began = time.process_time()
    assert read_columns(long_run).num_records == MANY
    assert time.process_time() - began < 2.0
    tracemalloc.start()
    columns = read_columns(long_run)
    of_columns = tracemalloc.get_traced_memory()[1]
    assert columns.last_step == MANY
    del columns
    tracemalloc.reset_peak()
    with long_run.open() as file:
        records = [json.loads(next(file)) for _ in range(MANY // 100)]
    of_records = 100 * tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(records) == MANY // 100
    assert of_columns < 15e6 < 20e6 < of_records


def test_reading_on_costs_as_much_as_what_was_added(long_run):
    growing = GrowingMetrics(long_run)
    began = time.process_time()
    growing.update()
    whole = time.process_time() - began
    append(long_run, line(MANY + 1))
    began = time.process_time()
    growing.update()
    assert time.process_time() - began < whole / 10
    assert growing.columns.last_step == MANY + 1
