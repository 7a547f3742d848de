"""Files of a run directory as they change: each is read again only where it has changed.

Nothing is written, and nothing but regular files is opened: a run directory may be somebody else's,
and a link in it lead to a file of the reader's, or a pipe block forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from cdrmix.cluster.start_records import STARTS_FOLDER
from cdrmix.config.redaction import redacted
from cdrmix.config.resuming import SNAPSHOT
from cdrmix.config.schema import Config

T = TypeVar("T")

METRICS = "metrics.jsonl"
LOG = "train.log"
_CHECKPOINTS = "checkpoints"
# Each of these makes a folder a run directory.
_SIGNS = (METRICS, SNAPSHOT, LOG, STARTS_FOLDER)
# Of the files of a run that a reader opens.
_SUFFIXES = (".json", ".jsonl", ".yaml", ".log", ".html")
# What a run that has not begun, or was refused, leaves.
_BEFORE_A_RUN = {".lock", LOG, "launch"}
_MOST_BYTES = 2**26  # of a small file
_LOG_BYTES = 2**16  # at the end of train.log
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (INFO|WARNING|ERROR|CRITICAL) (.*)")
_DEEPEST = 4  # folders below the one that holds runs
# characters: libyaml's parser ends the process with a segmentation fault at 32,000 nested brackets
_MOST_FOR_LIBYAML = 2**13
_MOST_FOLDERS = 20_000  # looked into for runs


@dataclass(frozen=True)
class LogLine:
    """A line of train.log."""

    time: str
    level: str
    text: str


class RunFolder:
    """Small files of a run directory."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self._kept: dict[str, tuple[tuple[int, ...] | None, Any]] = {}

    def json(self, name: str) -> Mapping[str, Any]:
        """Content of a JSON file; empty where it is missing or holds no object."""
        return self._read(name, _json_object, {})

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """Records of the first start and of the newest, which may be the same."""
        with contextlib.suppress(OSError):
            names = sorted(
                (int(entry.name[:-5]), entry.name)
                for entry in os.scandir(self.path / STARTS_FOLDER)
                if re.fullmatch(r"\d{4,18}\.json", entry.name)
            )
            chosen = dict.fromkeys([names[0][1], names[-1][1]]) if names else {}
            return [self.json(f"{STARTS_FOLDER}/{name}") for name in chosen]
        return []

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the configuration, without secrets; empty where there is none to read."""
        return self._read(SNAPSHOT, _yaml_object, {})

    @property
    def config(self) -> Config | None:
        """The configuration; None where it is missing, or of another version."""
        return self._read(SNAPSHOT, lambda text: _valid(_yaml_object(text)), None)

    @property
    def log(self) -> list[LogLine]:
        """Last lines of train.log that open with a time."""
        return self._read(LOG, _log_lines, [], last_bytes=_LOG_BYTES)

    @property
    def checkpoint(self) -> tuple[int, float] | None:
        """Step and time (seconds since 1970) of the checkpoint that was saved last."""
        times: list[tuple[float, int]] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path / _CHECKPOINTS):
                if re.fullmatch(r"\d{1,15}", entry.name):
                    times.append((entry.stat().st_mtime, int(entry.name)))
        return max(times)[::-1] if times else None

    def changed(self, name: str) -> float | None:
        """Time of the last change of a file (seconds since 1970); None where there is none."""
        with contextlib.suppress(OSError):
            return os.stat(self.path / name).st_mtime
        return None

    def text(self, name: str) -> str:
        """Text of a small file; empty where it cannot be read."""
        return self._read(name, str, "")

    def _read(
        self, name: str, parse: Callable[[str], T], otherwise: T, *, last_bytes: int | None = None
    ) -> T:
        """Parsed text of a file, or of its end."""
        key = f"{name}:{parse.__qualname__}"
        try:
            with open_regular(self.path / name) as file:
                found = os.fstat(file.fileno())
                mark = (found.st_ino, found.st_size, found.st_mtime_ns)
                if self._kept.get(key, (None,))[0] == mark:
                    return self._kept[key][1]
                if last_bytes is not None:
                    file.seek(max(0, found.st_size - last_bytes))
                value = parse(file.read(last_bytes or _MOST_BYTES).decode(errors="replace"))
        except OSError:
            return otherwise
        self._kept[key] = (mark, value)
        return value


def open_regular(path: Path) -> Any:
    """Opens a file for reading, as bytes; raises OSError for a link and for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, "rb")


def is_run(path: Path) -> bool:
    """True for a folder in which a run has begun, whose files are files and not links."""
    try:
        entries = {entry.name: entry for entry in os.scandir(path)}
    except OSError:
        return False
    if not any(name in entries for name in _SIGNS):
        return False
    files = (entry for name, entry in entries.items() if Path(name).suffix in _SUFFIXES)
    return all(entry.is_file(follow_symlinks=False) for entry in files)


def may_become_run(path: Path) -> bool:
    """True for a folder that a run may begin in: one that is empty, or is not there yet."""
    try:
        return {entry.name for entry in os.scandir(path)} <= _BEFORE_A_RUN
    except FileNotFoundError:
        return path.absolute().parent.is_dir()
    except OSError:
        return False


def runs_below(root: Path) -> Iterator[Path]:
    """Yields the run directories in a folder and in folders of it, by name.

    Follows no links, and does not look into runs and hidden folders.
    """
    if is_run(root):
        yield root
        return
    waiting = [(root, 0)]
    for _ in range(_MOST_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.pop()
        inner = []
        for path in _folders_in(folder):
            if is_run(path):
                yield path
            elif depth < _DEEPEST:
                inner.append((path, depth + 1))
        waiting += reversed(inner)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            ]
    except OSError:
        return []
    return [folder / name for name in sorted(found)]


def began(folder: RunFolder) -> datetime | None:
    """Time of the first start of a run; of one of an earlier version, without a record, that of the
    newest; None before any."""
    with contextlib.suppress(IndexError, KeyError, TypeError, ValueError):
        return datetime.fromisoformat(folder.starts[0]["began"]).astimezone()
    described = folder.changed(SNAPSHOT)
    return None if described is None else datetime.fromtimestamp(described).astimezone()


def _json_object(text: str) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    return {}


def _yaml_object(text: str) -> Mapping[str, Any]:
    with contextlib.suppress(yaml.YAMLError, RecursionError, AttributeError, TypeError, ValueError):
        fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(text, fast if len(text) <= _MOST_FOR_LIBYAML else yaml.SafeLoader)
        if isinstance(content, dict):
            return redacted(content)
    return {}


def _valid(values: Mapping[str, Any]) -> Config | None:
    try:
        return Config.model_validate(values)
    except ValidationError:
        return None


def _log_lines(text: str) -> list[LogLine]:
    found = (_LOG_LINE.fullmatch(line) for line in text.split("\n"))
    return [LogLine(*match.groups()) for match in found if match]
