"""Cuts the sources of a recipe into tasks, each named by all that its result follows from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix import __version__
from cdrmix.corpus.recipe import Recipe
from cdrmix.corpus.source import (
    SAVED_DATASET_FILES,
    SourceConfig,
    SourceFile,
    SourceListing,
    file_state,
    find_files,
    local_path,
)
from cdrmix.corpus.steps.read import count_shards
from cdrmix.corpus.task_run import Task
from cdrmix.corpus.text_source import parts_of
from cdrmix.hooks.plugin import plugin_digest

# Enough tasks for many workers to share a small corpus, and no millions of them for a large one:
# each is a folder on a shared file system.
_WANTED_TASKS = 512
_MIN_TASK_BYTES = 2**22
_MAX_TASK_BYTES = 2**28


def make_tasks(
    recipe: Recipe, *, out: Path, task_bytes: int | None = None
) -> tuple[list[Task], dict[str, SourceListing]]:
    """Cuts all sources of a recipe into tasks.

    Args:
        out: folder of the build, which is no part of a source that it lies in.
        task_bytes: files are grouped up to this size, and a larger one is a task by itself; None:
            by the size of the corpus.
    Returns:
        The tasks in corpus order, and the listings of the local sources by name.
    Raises:
        DataError: if a source is missing or empty.
    """
    # Data sets on the hub have no listing: their files are not on this machine.
    listings = {
        source.name: find_files(source, leave_out=out)
        for source in recipe.sources
        if source.type == "local"
        or source.type == "huggingface"
        and any((local_path(source) / name).is_file() for name in SAVED_DATASET_FILES)
    }
    if not task_bytes:
        total = sum(file.state[0] for listing in listings.values() for file in listing.files)
        # A power of two, so that a few more files leave most tasks, and their results, as they are.
        power = (total // _WANTED_TASKS).bit_length()
        task_bytes = min(max(2**power, _MIN_TASK_BYTES), _MAX_TASK_BYTES)
    tasks: list[Task] = []
    for source in recipe.sources:
        # Permission to be empty changes no document, so giving it keeps the work that is done.
        values = source.model_dump(exclude={"allow_empty"})
        if source.is_plugin:
            tasks += _tasks_of_parts(source, values)
        elif source.name not in listings:
            num_shards = count_shards(source)
            # The files of a folder show a change of it; a data set on the hub has its revision.
            folder = local_path(source)
            paths = [path for path in folder.rglob("*") if path.is_file()]
            states = sorted(
                (path.relative_to(folder).as_posix(), *file_state(path)) for path in paths
            )
            for number in range(num_shards):
                shard = (number, num_shards)
                key = content_key(values, shard, states if folder.is_dir() else None)
                tasks.append(Task(source, (), shard, key))
        else:
            for files in _grouped(listings[source.name].files, task_bytes):
                state = [(file.name, file.kind, file.state) for file in files]
                tasks.append(Task(source, tuple(files), None, content_key(values, state)))
    return tasks, listings


def _grouped(files: Sequence[SourceFile], task_bytes: int) -> list[list[SourceFile]]:
    """Cuts files into groups of up to so many bytes, and larger ones into groups of their own."""
    groups: list[list[SourceFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.state[0] > task_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.state[0]
    return groups


def _tasks_of_parts(source: SourceConfig, values: Mapping[str, Any]) -> Iterator[Task]:
    """Cuts a user's source into tasks, of one part each unless it has many."""
    parts = parts_of(source)
    digest = plugin_digest(source.type)
    each = -(-len(parts) // _WANTED_TASKS)
    for start in range(0, len(parts), each):
        some = parts[start : start + each]
        names = tuple(name for name, _ in some)
        yield Task(source, (), None, content_key(values, digest, some), names)


def content_key(*parts: Any) -> str:
    """Returns a name for the result of plain values and this version of the package (hex)."""
    # Another version may give another result for the same values.
    text = json.dumps([__version__, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
