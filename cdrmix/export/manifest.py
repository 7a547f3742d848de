"""The list of an exported folder's files with their digests, and the comparison with it."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdrmix.checkpoint.files import FileRecord, digest, read_json, write_json
from cdrmix.errors import StateError

MANIFEST_FILE = "MANIFEST.json"


def refuse_existing(out: Path) -> None:
    """Raises StateError if there is something where an export is to be written."""
    if os.path.lexists(out):
        raise StateError(f"{out}: exists, and an export is never written over. Give another --out")


def write_export_manifest(folder: Path, records: Mapping[str, FileRecord]) -> FileRecord:
    """Writes path, size in bytes and sha256 of each file, sorted by path; gives its own record."""
    files = [
        {"path": path, "size": record["bytes"], "sha256": record["sha256"]}
        for path, record in sorted(records.items())
    ]
    return write_json(folder / MANIFEST_FILE, {"files": files})


def verify_export(
    folder: Path, *, part: int = 0, parts: int = 1, max_digested_bytes: float = math.inf
) -> tuple[int, int]:
    """Compares every file of an exported folder with its manifest.

    Args:
        folder: the export.
        part: number of the share of digests that is compared here, of `parts` shares.
        parts: number of processes that share the digests out.
        max_digested_bytes: larger files are compared by their sizes alone.
    Returns:
        Number of files, the manifest not counted, and their bytes.
    Raises:
        StateError: naming each file that is missing, extra or changed.
    """
    expected = read_export_manifest(folder)
    there = {
        str(Path(parent, name).relative_to(folder))
        for parent, folders, files in os.walk(folder)
        # a link to a folder is not entered: it counts as a file, which no export has
        for name in (*files, *(each for each in folders if Path(parent, each).is_symlink()))
    } - {MANIFEST_FILE}
    problems = [f"{path}: missing" for path in sorted(expected.keys() - there)]
    problems += [f"{path}: extra, not in {MANIFEST_FILE}" for path in sorted(there - set(expected))]
    # By size, in turn: each share gets about as many bytes.
    largest_first = sorted(expected, key=lambda path: (-expected[path][0], path))
    digested = {
        path for path in largest_first[part::parts] if expected[path][0] <= max_digested_bytes
    }
    for path in sorted(expected.keys() & there):
        size, sha256 = expected[path]
        reason = _difference(folder / path, size, sha256 if path in digested else None)
        problems += [f"{path}: {reason}"] if reason else []
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise StateError(
            f"{folder}: differs from what was exported in {len(problems)} of "
            f"{len(expected.keys() | there)} files:\n{listed}\nCopy them again, or export anew"
        )
    return len(expected), sum(size for size, _ in expected.values())


def _difference(path: Path, size: int, sha256: str | None) -> str:
    """Difference of a file from its record, by its size alone without a digest; empty for none."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "changed, not a regular file"
        if status.st_size != size:
            return f"changed, {status.st_size:,} bytes instead of {size:,}"
        is_same = sha256 is None or digest(path) == sha256
        return "" if is_same else "changed, its sha256 differs"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def read_export_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file of an export by its name there; StateError if it tells none."""
    path = folder / MANIFEST_FILE
    try:
        files: Any = read_json(path)["files"]
        return {str(file["path"]): (int(file["size"]), str(file["sha256"])) for file in files}
    except FileNotFoundError:
        raise StateError(
            f"{folder}: holds no {MANIFEST_FILE}. Give a folder that `cdrmix export` has written"
        ) from None
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"{path}: not the manifest of an export ({type(error).__name__}: {error}). Copy it "
            "again, or export anew"
        ) from error
