import contextlib
import fcntl
import io
import json
import logging
import math
import os
import re
import struct
import termios
import threading
from pathlib import Path
from typing import TextIO

import pytest
from tqdm import tqdm

from cdrmix import log
from cdrmix.errors import StateError
from cdrmix.monitoring.metrics import record
from cdrmix.monitoring.sinks import (
    MetricsFile,
    Progress,
    duration,
    read_metrics,
    write_json_atomic,
    write_text_atomic,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def written(path: Path, steps: range) -> bytes:
    with contextlib.closing(MetricsFile(path)) as lines:
        for step in steps:
            lines.write(record(step=step, loss=1 / step))
    return path.read_bytes()


def test_floats_keep_their_full_precision(path):
    written(path, range(1, 50))
    assert [line["loss"] for line in read_metrics(path)] == [1 / step for step in range(1, 50)]


def test_a_line_is_on_file_before_the_next_is_written(path):
    with contextlib.closing(MetricsFile(path)) as lines:
        for step in (1, 2):
            lines.write(record(step=step))
            lines.sync()
            assert len(read_metrics(path)) == step


def test_values_that_are_not_finite_are_valid_json_and_come_back(path):
    with contextlib.closing(MetricsFile(path)) as lines:
        lines.write(record(step=1, loss=math.nan, grad_norm=math.inf, learning_rate=-math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (line,) = read_metrics(path)
    assert math.isnan(line["loss"])
    assert (line["grad_norm"], line["learning_rate"]) == (math.inf, -math.inf)


def test_a_resumed_file_equals_one_that_was_never_interrupted(tmp_path):
    whole = written(tmp_path / "whole.jsonl", range(1, 9))
    resumed = tmp_path / "resumed.jsonl"
    written(resumed, range(1, 7))
    with open(resumed, "a") as killed:
        killed.write('{"step": 7, "lo')
    with contextlib.closing(MetricsFile(resumed)) as lines:
        lines.truncate_after(4)
        for step in range(5, 9):
            lines.write(record(step=step, loss=1 / step))
    assert resumed.read_bytes() == whole
    assert [line["step"] for line in read_metrics(tmp_path / "resumed.cut-1.jsonl")] == [5, 6]
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == ["resumed.cut-1.jsonl", "resumed.jsonl", "whole.jsonl"]


def test_a_whole_last_line_without_its_newline_is_kept(path):
    path.write_text('{"step": 1}\n{"step": 2}')
    with contextlib.closing(MetricsFile(path)) as lines:
        lines.truncate_after(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_line_in_the_middle_is_dropped_with_a_warning(path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cdrmix"), "propagate", True)
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n[2]\n{"step": 3}\n')
    with contextlib.closing(MetricsFile(path)) as lines:
        lines.truncate_after(3)
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert "dropped 2 unreadable lines" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "metrics.jsonl", tmp_path / "none" / "metrics.jsonl"):
        with pytest.raises(StateError, match=f"{path}: cannot be written"):
            MetricsFile(path)
        with pytest.raises(StateError, match=f"{path}: cannot be written"):
            write_json_atomic(path, {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_said_in_one_message():
    with (
        pytest.raises(StateError, match="/dev/full: cannot be written: No space left on device"),
        contextlib.closing(MetricsFile(Path("/dev/full"))) as lines,
    ):
        lines.write(record(step=1))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "metrics.json"
    write_json_atomic(path, {"seconds": math.inf, "layers": [{"share": math.nan}]})
    assert json.loads(path.read_text()) == {"seconds": "Infinity", "layers": [{"share": "NaN"}]}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"not": object()})
    with pytest.raises(TypeError):
        write_text_atomic(path, b"bytes")  # type: ignore[arg-type] # fails after the temporary file was opened
    assert "Infinity" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


LINE = record(
    step=120,
    loss=5.12341,
    learning_rate=1.8713e-3,
    grad_norm=0.8123,
    tokens_per_second=12345.4,
    memory_peak_bytes=2**30,
)
EVALUATION = {"eval/loss": 4.5, "eval/perplexity": 90.0171, "eval/bits_per_byte": 2.0134}


def test_plain_lines_show_step_loss_rate_norm_speed_memory_and_time_left():
    stream = io.StringIO()
    progress = Progress(400, initial=80, stream=stream)
    progress.update(119)
    progress.update(120, LINE)
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(
        "step 120/400  loss 5.1234  lr 1.87e-03  grad 0.81  12,345 tok/s  mem 1.0 GiB  eta "
    )


def test_plain_lines_show_the_parts_of_a_loss_behind_it():
    parts = {"objective/text/loss": 5.25, "objective/fim_middle/loss": 4.5}
    stream = io.StringIO()
    Progress(400, stream=stream).update(120, LINE | parts | {"objective/answer/loss": 2.125})
    assert "loss 5.1234  text 5.250  answer 2.125  lr 1.87e-03" in stream.getvalue()


def test_an_evaluation_has_a_line_of_its_own():
    stream = io.StringIO()
    Progress(400, stream=stream).update(120, LINE | EVALUATION)
    assert stream.getvalue().splitlines()[1] == (
        "eval 120/400  loss 4.5000  perplexity 90.02  2.013 bits/byte"
    )


def read_terminal(master: int) -> str:
    """All that was written to the terminal; its end reads as an error, EIO."""
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass
    os.close(master)
    return shown.decode()


def test_a_terminal_gets_a_bar_that_moves_with_every_step():
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(slave, "w") as stream:
        progress = Progress(400, initial=80, stream=stream)
        progress.update(120, LINE | EVALUATION)
        progress.update(121)
        progress.close()
    shown = read_terminal(master)
    bars = [part for part in shown.replace("\r", "\n").split("\n") if "400 |" in part]
    assert bars[0].startswith("80/400 |")
    assert bars[-1].startswith("121/400 |") and "loss 5.1234 lr 1.87e-03 grad 0.81" in bars[-1]
    assert all(len(bar) <= 100 for bar in bars)
    assert "eval 120/400  loss 4.5000" in shown


def shown_and_logged(width: int | None, log_file: Path) -> tuple[str, list[str]]:
    """What a logged step with an evaluation prints, and the lines of the log's file; width None: to
    a pipe."""
    root = logging.getLogger("cdrmix")
    before = list(root.handlers), root.level
    root.handlers.clear()
    log.configure()
    log.log_to_file(log_file)
    stream: TextIO = io.StringIO()
    master = None
    if width is not None:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        stream = open(slave, "w")  # noqa: SIM115
    progress = Progress(400, stream=stream)
    progress.step_done(120, 0.5)
    progress.update(120, LINE | EVALUATION)
    progress.close()
    shown = stream.getvalue() if isinstance(stream, io.StringIO) else ""
    stream.close()
    if master is not None:
        shown = read_terminal(master).replace("\r\n", "\n")
    for handler in root.handlers:
        handler.close()
    root.handlers[:], level = before
    root.setLevel(level)
    return shown, log_file.read_text().splitlines()


@pytest.mark.parametrize("width", [None, 0, 100])
def test_the_log_has_the_lines_of_a_pipe_whatever_the_terminal_shows(
    tmp_path: Path, width: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    shown, logged = shown_and_logged(width, tmp_path / "train.log")
    (step, evaluation) = (line.partition(" INFO ")[2] for line in logged)
    assert step.startswith("step 120/400  loss 5.1234  lr 1.87e-03")
    assert evaluation.startswith("eval 120/400  loss 4.5000")
    if width != 100:  # without a width, a terminal has no room for a bar
        assert shown == f"{step}\n{evaluation}\n"
    else:
        assert step not in shown and shown.count(evaluation) == 1 and "120/400 |" in shown
    assert capfd.readouterr().err == "", "the stream has shown them"


def bars_on_terminal(width: int) -> list[str]:
    """The bars of a run of four steps, of which the third is logged, on a terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with open(slave, "w") as stream:
        progress = Progress(400, tokens_per_step=1000, stream=stream)
        for step, loss in ((1, 9.5), (2, 8.5)):
            progress.step_done(step, 0.5)
            progress.loss_known(loss)
        progress.step_done(3, 0.5)
        progress.update(3, LINE | {"step": 3})
        progress.step_done(4, 0.25)
        progress.loss_known(4.25)
        progress.update(2)  # the run went back
        progress.close()
    shown = read_terminal(master)
    return [part for part in shown.replace("\r", "\n").split("\n") if "400 |" in part]


def test_the_bar_shows_the_loss_and_the_speed_of_each_step():
    bars = bars_on_terminal(100)
    for step, loss, speed in (
        (1, "9.5000", "2,000"),
        (2, "8.5000", "2,000"),
        (4, "4.2500", "2,286"),
    ):
        newest = [bar for bar in bars if bar.startswith(f"{step}/400 |") and "loss" in bar]
        assert any(f"loss {loss}" in bar and f"{speed} tok/s" in bar for bar in newest), bars
    assert "eta" in bars[-2] and "loss" not in bars[-1], "of steps that do not count"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, ("loss", "lr", "grad", "tok/s", "mem", "eta")),
        (80, ("loss", "lr", "grad", "tok/s", "eta")),
        (60, ("loss", "grad", "tok/s", "eta")),
        (40, ("loss", "eta")),
    ],
)
def test_a_narrow_terminal_leaves_whole_metrics_out(width, shown):
    logged = next(bar for bar in bars_on_terminal(width) if "loss 5.1234" in bar)
    words = logged.rpartition("| ")[2].split()
    assert [word for word in words if word[0].isalpha() and word not in ("GiB", "tok/s")] == [
        name for name in shown if name != "tok/s"
    ]
    assert ("tok/s" in words) == ("tok/s" in shown)
    assert len(logged.rstrip()) <= width and words[-2] == "eta"


@pytest.mark.parametrize("width", [12, 20, 24, 30])
def test_a_very_narrow_terminal_shows_whole_numbers_or_none(width):
    bars = bars_on_terminal(width)
    assert all(len(bar) <= width for bar in bars)
    for bar in bars:
        text = bar.rpartition("| ")[2].strip()
        assert re.fullmatch(r"(loss \d\.\d{4})?( ?eta \d+(m\d\d)?s)?", text), bar


def test_plain_lines_are_those_of_logged_steps_alone():
    stream = io.StringIO()
    progress = Progress(400, tokens_per_step=1000, stream=stream)
    progress.step_done(1, 0.5)
    progress.loss_known(9.5)
    progress.update(2, LINE)
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert "loss 5.1234" in line and "12,345 tok/s" in line


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0s"), (59.6, "1m00s"), (130, "2m10s"), (3_900, "1h05m"), (273_600, "3d04h")],
)
def test_durations_show_their_two_leading_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_goes_on_when_its_reader_is_gone(is_terminal):
    class Stream(io.StringIO):
        is_read = True

        def isatty(self) -> bool:
            return is_terminal

        def write(self, text: str) -> int:
            if not self.is_read:
                raise BrokenPipeError
            return super().write(text)

    stream = Stream()
    progress = Progress(10, stream=stream)
    progress.update(1, record(step=1, loss=1.0))
    assert stream.getvalue()
    stream.is_read = False
    progress.update(2, record(step=2, loss=1.0))
    others = threading.Thread(target=lambda: tqdm.write("", file=io.StringIO()), daemon=True)
    others.start()
    others.join(5)
    assert not others.is_alive(), "what other threads write must not wait for a lock"
    progress.close()
