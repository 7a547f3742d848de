"""`cdrmix watch`: runs in a terminal, as they go."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cdrmix.errors import StateError
from cdrmix.live.facts import eta_text, plain, progress_text, state_text
from cdrmix.live.run_folder import METRICS, RunFolder, is_run, may_become_run, runs_below
from cdrmix.live.status import Status, status_of
from cdrmix.live.terminal import SERIES, Size, run_view, table_view
from cdrmix.monitoring.metric_columns import GrowingMetrics, MetricColumns
from cdrmix.monitoring.sinks import without_non_finite

_DRAWN_SECONDS = 1.0  # between two drawings at most, so that ages and a resize are followed
_FILE_ROWS = 24  # of a view that goes to no terminal
_MOST_NAMED = 5  # runs in a message


class WatchedRun:
    """A run that is followed, from before its beginning on."""

    def __init__(self, path: Path, name: str) -> None:
        """Reads nothing yet."""
        self._name = name
        self._folder = RunFolder(path)
        self._metrics = GrowingMetrics(path / METRICS, SERIES)

    def now(self) -> tuple[Status, MetricColumns]:
        """Status and metrics, with what was added since the last call."""
        self._metrics.update()
        columns = self._metrics.columns
        return status_of(self._folder, columns, name=self._name), columns


def watched(paths: Sequence[Path], *, may_wait: bool) -> list[WatchedRun]:
    """Runs to follow.

    Args:
        may_wait: a folder that is empty, or not there yet, may become a run.
    Raises:
        StateError: if one is no run directory.
    """
    for path in paths:
        if not is_run(path) and not (may_wait and may_become_run(path)):
            raise StateError(_no_run(path))
    names = [path.resolve().name for path in paths]
    return [
        WatchedRun(path, str(path) if names.count(name) > 1 else name)
        for path, name in zip(paths, names, strict=True)
    ]


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"{path}: not found. Give a run directory, such as experiments/20261122-0811-1ff9ca"
    inside = [] if not path.is_dir() else [str(run) for run in runs_below(path)]
    if inside:
        listed = ", ".join(inside[-_MOST_NAMED:])
        return (
            f"{path}: is no run directory, and holds {len(inside)}. Give some of them: {listed}; "
            f"or see all with `cdrmix serve {path}`"
        )
    return (
        f"{path}: is no run directory, which holds metrics.jsonl and config_snapshot.yaml as "
        "files. Give the folder that `--run-dir` named, or one of experiments/"
    )


def watch(runs: Sequence[WatchedRun], *, once: bool, as_json: bool, interval: float) -> None:
    """Shows runs on stdout until the user ends it (INT), or `once`.

    A terminal shows them in place. Elsewhere, and on a terminal without commands (TERM=dumb), a
    line is printed for each run that has news.

    Args:
        as_json: print an object on a line each time.
        interval: between two looks at the files, in seconds.
    """
    console = Console(highlight=False, soft_wrap=True)
    with _ended_by_signals():
        if as_json:
            _print_json(runs, once=once, interval=interval)
        elif once:
            size = Size(console.width, max(console.height, _FILE_ROWS), _ascii(console))
            for line in _view([run.now() for run in runs], size):
                console.print(line)
        elif console.is_terminal and not console.is_dumb_terminal:
            _show(console, runs, interval)
        else:
            _print_lines(runs, interval)


def _print_json(runs: Sequence[WatchedRun], *, once: bool, interval: float) -> None:
    while True:
        print(json.dumps({"runs": [_json_of(run.now()[0]) for run in runs]}), flush=True)
        if once:
            return
        time.sleep(interval)


def _json_of(status: Status) -> dict[str, Any]:
    saved = status.checkpoint
    own = asdict(status) | {
        "checkpoint": None if saved is None else {"step": saved[0], "age_seconds": saved[1]},
        "warnings": [f"{line.time} {line.level} {line.text}" for line in status.warnings],
    }
    finite: dict[str, Any] = without_non_finite(own)
    return finite


def _show(console: Console, runs: Sequence[WatchedRun], interval: float) -> None:
    """Draws the runs in place until the user ends it; the last view stays behind."""
    looked = -interval
    now: list[tuple[Status, MetricColumns]] = []
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if time.monotonic() - looked >= interval:
                now = [run.now() for run in runs]
                looked = time.monotonic()
            size = Size(console.width, console.height, _ascii(console))
            live.update(Group(*_view(now, size)), refresh=True)
            time.sleep(min(interval, _DRAWN_SECONDS))


def _print_lines(runs: Sequence[WatchedRun], interval: float) -> None:
    """Prints a line for each run that has news."""
    shown: dict[int, tuple[str, int, str]] = {}
    while True:
        for number, run in enumerate(runs):
            status, _ = run.now()
            news = (state_text(status), status.step, status.why)
            if shown.get(number) != news:
                shown[number] = news
                print(_line(status), flush=True)
        time.sleep(interval)


def _line(status: Status) -> str:
    loss = status.values.get("loss", status.values.get("stage_b/loss"))
    parts = [plain(status.name), state_text(status), progress_text(status)]
    parts += [] if loss is None else [f"loss {loss:.4f}"]
    parts += [f"ETA {eta_text(status)}"] if status.eta_seconds is not None else []
    return "  ".join([*parts, plain(status.why)]).rstrip()


def _view(now: Sequence[tuple[Status, MetricColumns]], size: Size) -> list[Text]:
    return run_view(*now[0], size) if len(now) == 1 else table_view(now, size)


def _ascii(console: Console) -> bool:
    return console.options.ascii_only


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ends quietly at an interrupt, and at TERM and HUP too, with the terminal as it was."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
