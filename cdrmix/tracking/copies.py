"""Makes a tracker's copy of a run anew from its metrics.jsonl."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.config.load import load_config
from cdrmix.config.plugin import is_plugin
from cdrmix.config.plugin_folder import PLUGINS, use_plugin_folder
from cdrmix.config.redaction import REDACTED, redacted
from cdrmix.config.resuming import SNAPSHOT
from cdrmix.config.tracking import TrackerConfig, name_of
from cdrmix.config.yaml_text import parse_yaml
from cdrmix.errors import ConfigError, StateError
from cdrmix.tracking.choice import check_trackers
from cdrmix.tracking.feed import Feed, close_feeds
from cdrmix.tracking.tracker import METRICS, Line, timed_lines
from cdrmix.tracking.writer import LAST_STEP, WRITER_LOG, job_of, locked, make_tracker

_FOLDER = "tracking"  # in the run directory
_MOST_WAITING = 5_000  # lines in memory on their way to the tracker
_AT_FDCWD = -100  # of Linux: paths are as they stand
_RENAME_EXCHANGE = 2


class Copied(NamedTuple):
    """A copy that was made."""

    tracker: str
    folder: str
    lines: int
    first_step: int
    last_step: int


def folder_of(run_dir: Path, tracker: str) -> Path:
    """Returns the folder of a tracker in a run directory."""
    return run_dir / _FOLDER / tracker


def command_to_copy(run_dir: Path, tracker: str) -> str:
    """Command of a shell that makes a tracker's copy anew."""
    return shlex.join(["cdrmix", "track", str(run_dir), "--to", tracker])


def copy_run(
    run_dir: Path, use: str, *, out: Path | None, config_file: Path | None = None
) -> Copied:
    """Makes the copy of a run, finished or still going, with all lines that it has by now.

    The one before stays as it is until the new one is whole.

    Args:
        use: the tracker, as in TrackerConfig.
        out: folder for the copy, new or of an earlier one; None: the tracker's in the run
            directory, with the options that the run has for it.
        config_file: configuration with options and folder of plug-ins, in place of the run's own,
            which holds no secrets.
    Raises:
        ConfigError: if the tracker is not installed or refuses its options, a secret among them is
            missing, or its code lies in the run directory.
        StateError: if the run cannot be read, the copy cannot be written, or the run itself is
            writing it.
    """
    metrics = run_dir / METRICS
    if not metrics.is_file():
        raise StateError(f"{metrics}: not found. Give a run directory, which holds {METRICS}")
    lines = timed_lines(metrics)
    if not lines:
        raise StateError(f"{metrics}: holds no line yet, of which a copy could be made")
    config = _config_of(run_dir)
    tracker = TrackerConfig(use=use, options={} if out else _options(config, use))
    if config_file is not None:
        # It also makes its folder of plug-ins importable.
        trackers = load_config(config_file).monitoring.trackers or ()
        tracker = next((each for each in trackers if each.use == use), tracker)
    elif is_plugin(use):
        _use_plugins_of(run_dir, config)
    if REDACTED in json.dumps(tracker.options):
        raise ConfigError(
            f"monitoring.trackers, {use}: {run_dir / SNAPSHOT} holds no secrets of its options. "
            "Give --config with the file of the run's first start, or have the class read them "
            "from the environment"
        )
    place = (out or folder_of(run_dir, name_of(use))).absolute()
    check_trackers([tracker], place)
    make_tracker(tracker)  # a class of a user's, and its options
    made = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with ExitStack() as stack:
            if place.exists():
                _check_replaceable(place, stack, run_dir=run_dir)
            made.mkdir(parents=True)
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            job = job_of(tracker, run_dir, made, config=config, place=place)
            _write(Feed(job, name=use, most_lines=None), lines)
            _exchange(made, place)
    except OSError as error:
        raise StateError(f"{place}: cannot be written ({error.strerror})") from error
    return Copied(use, str(place), len(lines), lines[0].step, lines[-1].step)


def _config_of(run_dir: Path) -> dict[str, Any]:
    """Reads the configuration of a run, without secrets; empty if it has none."""
    path = run_dir / SNAPSHOT
    if not path.is_file():
        return {}
    values = parse_yaml(path.read_text(encoding="utf-8"), place=str(path))
    return redacted(values) if isinstance(values, dict) else {}


def _use_plugins_of(run_dir: Path, config: dict[str, Any]) -> None:
    """Makes the run's own folder of plug-ins importable. Refuses one that lies in the run, as run
    directories are handed on, and must not run code."""
    folder = config.get(PLUGINS)
    if not isinstance(folder, str):
        return
    if Path(folder).resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(
            f"{run_dir / SNAPSHOT}: {PLUGINS} = {folder} lies in the run itself, which may be of "
            "anyone. Look at its code, copy the folder to another place beside a configuration, "
            "and give that by --config"
        )
    use_plugin_folder(Path(folder))


def _options(config: dict[str, Any], use: str) -> dict[str, Any]:
    """Returns the options that a run has for a tracker."""
    trackers = config.get("monitoring", {}).get("trackers") or []
    return next((each["options"] for each in trackers if each["use"] == use), {})


def _check_replaceable(place: Path, stack: ExitStack, *, run_dir: Path) -> None:
    """Refuses a folder that is no tracker's, or in which the run itself is writing."""
    names = {path.name for path in place.iterdir()} if place.is_dir() else {place.name}
    if names and not names & {LAST_STEP, WRITER_LOG}:
        raise StateError(f"{place}: exists and is no copy of a tracker. Give another --out")
    if not stack.enter_context(locked(place, waits=False)):
        raise StateError(
            f"{place}: the run is writing here, {run_dir}. Give another folder by --out, or "
            "wait for the end of the run"
        )


def _write(feed: Feed, lines: list[Line]) -> None:
    """Has a tracker write all lines. Raises StateError if it has not."""
    try:
        for line in lines:
            feed.write(line.values, at=line.time)
            while feed.num_waiting > _MOST_WAITING:
                time.sleep(0.01)
                feed.is_over()
    finally:
        close_feeds([feed], seconds=None)
    if feed.why is not None or feed.written != len(lines):
        raise StateError(
            f"tracker {feed.name}: {feed.why or 'it ended early'}. Of {len(lines)} lines "
            f"{feed.written} were written; the copy before, if any, stays as it was"
        )


def _exchange(made: Path, place: Path) -> None:
    """Puts a folder in the place of another, in one step where the file system can."""
    if not place.exists():
        made.rename(place)
        return
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = (_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(place))
    if renameat2 is None or renameat2(*paths, _RENAME_EXCHANGE) != 0:
        old = made.with_suffix(".old")
        place.rename(old)
        made.rename(place)
        old.rename(made)  # where the caller removes it
