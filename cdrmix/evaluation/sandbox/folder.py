"""Folder of a program: measured while it runs, emptied after it.

A program can nest folders deeper than a path can name, and close them to their owner. Emptying goes
down and up by descriptors, one at a time.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_folder_larger(folder: str, most_bytes: int, most_files: int) -> bool:
    """True if the files of a folder take more than `most_bytes`, or are more than `most_files`.

    True too if folders are nested deeper than a path can name. Stops at the first that is too much.
    What vanishes meanwhile counts nothing.
    """
    left_bytes, left_files = most_bytes, most_files
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left_files -= 1
                    left_bytes -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if left_files < 0 or left_bytes < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
    return False


def empty_folder(folder: str) -> None:
    """Removes all that a folder holds, at any depth. No process may write there meanwhile.

    Raises:
        OSError: something cannot be removed.
    """
    here = os.open(folder, _FOLDER)
    try:
        above: list[tuple[str, list[str]]] = []  # name of a folder, folders beside it still to do
        inner = _remove_files(here)
        while inner or above:
            if inner:
                name = inner.pop()
                os.chmod(name, 0o700, dir_fd=here)
                above.append((name, inner))
                here = _replaced(here, name)
                inner = _remove_files(here)
            else:
                name, inner = above.pop()
                here = _replaced(here, "..")
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)


def _replaced(here: int, name: str) -> int:
    """Descriptor of a folder in or above another one, which is closed."""
    try:
        return os.open(name, _FOLDER, dir_fd=here)
    finally:
        os.close(here)


def _remove_files(folder: int) -> list[str]:
    """Removes all but the folders; returns the names of those."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that it holds, if it is there."""
    if folder.exists():
        empty_folder(str(folder))
        folder.rmdir()
