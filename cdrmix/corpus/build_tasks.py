"""Cuts the sources of a recipe into tasks: groups of files, or parts of a stream.

A task has the hash of all its inputs as its name. A finished result is therefore found again, and
never taken for the result of other inputs.
"""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Callable, Collection, Iterator
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
    file_state,
    find_files,
    is_saved_dataset,
    local_path,
)
from cdrmix.corpus.steps.read import count_shards, read_file, read_shard, shard_name
from cdrmix.data.document import Document

# The slowest steps read some hundred kB of ordinary text a second, and documents have 32 MiB at
# most unless a recipe allows more.
DOCUMENT_SECONDS = 300.0
# Enough tasks for many workers to share a small corpus, and no millions of them for a large one:
# each is a folder on a shared file system.
_WANTED_TASKS = 512
_MIN_TASK_BYTES = 2**22
_MAX_TASK_BYTES = 2**28


class TooSlow(Exception):
    """A document took longer than allowed; raised at any place in the code."""


class Deadline:
    """Raises `TooSlow` if too much time passes between two calls of `begin`; a context manager.

    Counts processor time of this process, so a busy machine or a slow disk changes nothing. Python
    delivers signals to its main thread only: there is no limit in another thread.
    """

    def __init__(self, seconds: float = DOCUMENT_SECONDS) -> None:
        self._seconds = seconds
        self._is_usable = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        def raise_too_slow(number: int, frame: FrameType | None) -> None:
            raise TooSlow(f"more than {self._seconds:g} s of processor time")

        if self._is_usable:
            self._before = signal.signal(signal.SIGVTALRM, raise_too_slow)
            self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def begin(self) -> None:
        """Starts the time of the next document."""
        if self._is_usable:
            # Repeated: Python ignores an exception that is raised in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, self._seconds)


@dataclass(frozen=True)
class Task:
    """Documents that one process reads, passes through the steps and encodes.

    Attributes:
        files: files to read, in order; none for a part of a stream.
        shard: (number, of how many) part of a stream; None for files.
        key: hash of all inputs (hex).
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
        """Reads the documents of the task, in order.

        Args:
            set_aside: called for each input that cannot be read, or takes too long.
            left_out: names of files, or of the shard, that ended a process and are not read.
            begin: called with each name before it is read.
        """
        parts: Iterator[tuple[str, Iterator[Document]]]
        if self.shard is not None:
            stream = read_shard(self.source, *self.shard, set_aside)
            parts = iter([(shard_name(self.shard[0]), stream)])
        else:
            parts = ((file.name, read_file(file, self.source, set_aside)) for file in self.files)
        for name, documents in parts:
            if name in left_out:
                set_aside(name, None, "ended the process that read it", "most likely by its size")
                continue
            begin(name)
            # Catches the time of reading only: an exception in a step is not raised in here.
            try:
                yield from documents
            except TooSlow as error:
                set_aside(name, None, "takes too long to read", str(error))


def make_tasks(
    recipe: Recipe, *, out: Path, task_bytes: int | None = None
) -> tuple[list[Task], dict[str, SourceListing]]:
    """Cuts all sources of a recipe into tasks.

    Args:
        out: folder of the build, which is no part of a source that it lies in.
        task_bytes: files are grouped up to this size; None: by the size of the corpus.
    Returns:
        The tasks in corpus order, and the listings of the local sources by name.
    Raises:
        DataError: if a source is missing or empty.
    """
    # Data sets on the hub have no listing: their files are not on this machine.
    listings = {
        source.name: find_files(source, leave_out=out)
        for source in recipe.sources
        if source.type != "huggingface" or is_saved_dataset(local_path(source))
    }
    if not task_bytes:
        total = sum(file.state[0] for listing in listings.values() for file in listing.files)
        # A power of two, so that a few more files leave most tasks, and their results, as they are.
        power = (total // _WANTED_TASKS).bit_length()
        task_bytes = min(max(2**power, _MIN_TASK_BYTES), _MAX_TASK_BYTES)
    tasks: list[Task] = []
    for source in recipe.sources:
        if source.name not in listings:
            tasks += _stream_tasks(source)
            continue
        groups: list[list[SourceFile]] = []
        size = 0
        for file in listings[source.name].files:
            if not groups or size + file.state[0] > task_bytes:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.state[0]
        for files in groups:
            state = [(file.name, file.kind, file.state) for file in files]
            tasks.append(Task(source, tuple(files), None, content_key(source.model_dump(), state)))
    return tasks, listings


def _stream_tasks(source: SourceConfig) -> Iterator[Task]:
    num_shards = count_shards(source)
    # The files of a folder show a change of it; a data set on the hub has its revision.
    folder = local_path(source)
    state = None
    if folder.is_dir():
        files = [path for path in folder.rglob("*") if path.is_file()]
        state = sorted((path.relative_to(folder).as_posix(), *file_state(path)) for path in files)
    for number in range(num_shards):
        shard = (number, num_shards)
        yield Task(source, (), shard, content_key(source.model_dump(), shard, state))


def content_key(*parts: Any) -> str:
    """Returns a name for the result of plain values and this version of the package (hex)."""
    # Another version may give another result for the same values.
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
