"""A limit on the processor time that one document may take.

A recipe's sources cut into tasks: groups of files, or parts of a stream.

A task is named by everything that its documents follow from, so that what has been done for it is
found again, and never taken for something else.
"""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from cdrmix import __version__
from cdrmix.corpus.recipe import Recipe
from cdrmix.corpus.source import (
    SetAside,
    SourceConfig,
    SourceFile,
    SourceListing,
    find_files,
    is_saved_dataset,
    local_path,
)
from cdrmix.corpus.steps.read import read_file
from cdrmix.data.document import Document

# The slowest steps read some hundred kB of ordinary text a second, and documents have 32 MiB at
# most unless a recipe allows more.
DOCUMENT_SECONDS = 300.0


class TooSlow(Exception):
    """A document took longer than allowed; raised wherever the process is then."""


class Deadline:
    """Raises `TooSlow` where too much time passes between two calls of `begin`; a context.

    Time of the processor in this process, so that a busy machine and a slow disk change nothing.
    Python hears signals in its main thread alone: in another one there is no limit.
    """

    def __init__(self, seconds: float = DOCUMENT_SECONDS) -> None:
        self._seconds = seconds
        self._is_usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_usable:
            self._before = signal.signal(signal.SIGVTALRM, self._raise)
            self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def begin(self) -> None:
        """Begin the next document."""
        if self._is_usable:
            # Again and again: an exception raised in a destructor is lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, self._seconds)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {self._seconds:g} s of processor time")


_WANTED_TASKS = 512
_MIN_TASK_BYTES = 2**22
_MAX_TASK_BYTES = 2**28


@dataclass(frozen=True)
class Task:
    """Documents that are read, stepped and encoded together by one process.

    Attributes:
        source: where they are from.
        files: files to read, in order; none for a part of a stream.
        shard: (number, of how many) part of a stream; None for files.
        key: names the task by its content (hex).
    """

    source: SourceConfig
    files: tuple[SourceFile, ...]
    shard: tuple[int, int] | None
    key: str

    def read(
        self,
        set_aside: SetAside,
        *,
        left_out: Collection[str] = (),
        begin: Callable[[str], None] = lambda name: None,
    ) -> Iterator[Document]:
        """Read the task's documents, in order.

        Args:
            set_aside: told of what cannot be read, and of files that take too long.
            left_out: names of files, or of the shard, that ended a process and are not read.
            begin: told of each name before it is read.
        """
        for name, documents in self._parts(set_aside):
            if name in left_out:
                set_aside(name, None, "ended the process that read it", "most likely by its size")
                continue
            begin(name)
            try:
                yield from documents
            except TooSlow as error:  # while reading: what steps raise does not come by here
                set_aside(name, None, "takes too long to read", str(error))

    def _parts(self, set_aside: SetAside) -> Iterator[tuple[str, Iterator[Document]]]:
        if self.shard is not None:
            from cdrmix.corpus.steps.read import read_shard, shard_name

            yield shard_name(self.shard[0]), read_shard(self.source, *self.shard, set_aside)
        for file in self.files:
            yield file.name, read_file(file, self.source, set_aside)


def make_tasks(
    recipe: Recipe, *, out: Path, task_bytes: int | None = None
) -> tuple[list[Task], dict[str, SourceListing]]:
    """Tasks in corpus order, and what was met where files were looked for (by source).

    Args:
        out: folder of the build, which is no part of a source that it lies in.
        task_bytes: files are put together up to this size; a larger file is a task of its own.
            None: by the size of the corpus.
    Raises:
        DataError: if a source is missing or empty.
    """
    found = {
        source.name: find_files(source, leave_out=out)
        for source in recipe.sources
        if not _streams(source)
    }
    task_bytes = task_bytes or _task_bytes(found.values())
    tasks: list[Task] = []
    for source in recipe.sources:
        if source.name not in found:
            tasks += _stream_tasks(source)
            continue
        for files in _grouped(found[source.name].files, task_bytes):
            state = [(file.name, file.kind, file.state) for file in files]
            tasks.append(Task(source, tuple(files), None, content_key(source.model_dump(), state)))
    return tasks, found


def content_key(*parts: Any) -> str:
    """Name for what follows from plain values and this version of the package (hex)."""
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _streams(source: SourceConfig) -> bool:
    return source.type == "huggingface" and not is_saved_dataset(local_path(source))


def _task_bytes(found: Iterable[SourceListing]) -> int:
    """Some hundred tasks for a usual corpus, so that many workers share a small one and a large one
    has no millions of them. A power of two, so that a few files more leave tasks as they are."""
    total = sum(file.state[0] for met in found for file in met.files)
    power = (total // _WANTED_TASKS).bit_length()
    return min(max(2**power, _MIN_TASK_BYTES), _MAX_TASK_BYTES)


def _stream_tasks(source: SourceConfig) -> Iterator[Task]:
    from cdrmix.corpus.steps.read import count_shards

    num_shards = count_shards(source)
    # Of a folder, the files say whether it is still the same; of the hub, the revision.
    folder = local_path(source)
    state = sorted(_states(folder)) if folder.is_dir() else None
    for number in range(num_shards):
        shard = (number, num_shards)
        yield Task(source, (), shard, content_key(source.model_dump(), shard, state))


def _states(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            yield path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns


def _grouped(files: Iterable[SourceFile], task_bytes: int) -> Iterator[list[SourceFile]]:
    group: list[SourceFile] = []
    size = 0
    for file in files:
        if group and size + file.state[0] > task_bytes:
            yield group
            group = []
            size = 0
        group.append(file)
        size += file.state[0]
    if group:
        yield group
