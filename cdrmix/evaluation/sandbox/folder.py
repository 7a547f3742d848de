"""Folder of a program: measured while it runs, emptied after it.

A program can nest folders deeper than a path can name, and close them to their owner. Emptying
works nevertheless, as it moves what a folder holds up instead of going down.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def is_folder_larger(folder: str, most_bytes: int, most_files: int) -> bool:
    """True if the files of a folder take more than `most_bytes`, or are more than `most_files`.

    Stops at the first that is too much. What vanishes meanwhile, or is nested too deeply to be
    named, counts nothing.
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
        except OSError:
            continue
    return False


def empty_folder(folder: str) -> None:
    """Removes all that a folder holds, at any depth. No process may write there meanwhile.

    Raises:
        OSError: something cannot be removed.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for name in os.listdir(entry.path):
                inner = os.path.join(entry.path, name)
                if os.path.isdir(inner) and not os.path.islink(inner):
                    os.chmod(inner, 0o700)  # moving a folder changes its link to the one above
                    os.rename(inner, os.path.join(folder, secrets.token_hex(8)))
                else:
                    os.unlink(inner)
            os.rmdir(entry.path)


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that it holds, if it is there."""
    if folder.exists():
        empty_folder(str(folder))
        folder.rmdir()
