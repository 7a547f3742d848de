"""Folders and files that appear whole or not at all, and locks that end with their process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Gives a temporary folder beside `out` that becomes `out` if nothing is raised.

    If another process has made `out` meanwhile, that one stays.
    """
    # Processes of several machines may be at the same task, where a queue starts one again.
    folder = out.parent / f".{out.name}.building-{os.uname().nodename}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process with the same number
    folder.mkdir(parents=True)
    try:
        yield folder
        sync(folder)
        try:
            folder.rename(out)
        except OSError:
            # Not empty: rename replaces an empty folder only, so another process was faster.
            if not out.is_dir():
                raise
            shutil.rmtree(folder)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_unfinished(out: Path) -> None:
    """Removes leftovers of killed processes beside `out`; no process may be building it now."""
    for leftover in out.parent.glob(f".{out.name}.building-*"):
        shutil.rmtree(leftover)


@contextlib.contextmanager
def locked(path: Path, *, blocking: bool) -> Iterator[bool]:
    """Holds the lock file `path`; gives False, without it, if not `blocking` and it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_new(path, keeps_content=True) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def open_new(path: Path, *, keeps_content: bool = False) -> BinaryIO:
    """Opens a file for writing, empty unless `keeps_content`, but never through a link.

    A folder made by somebody else could have a link to any file of the user's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if keeps_content else os.O_TRUNC)
    return open(path, "r+b", opener=lambda name, _: os.open(name, flags, 0o666))


def sync(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
