"""manifest.json: size and sha256 of every file of a checkpoint, written last, believed first."""

from __future__ import annotations

import re
from pathlib import Path

from cdrmix.checkpoint.files import (
    FileRecord,
    check_plain,
    digest,
    read_json,
    retried,
    write_json,
)

FORMAT = 1
_NAME = "manifest.json"
# A manifest may come from anywhere; no other name is one of a checkpoint's files.
_FILE_NAME = re.compile(r"(rank-[0-9]{5,9}\.(safetensors|json)|index\.json|state\.json)")
_NOT_A_MANIFEST = (ValueError, TypeError, KeyError, AttributeError)


def write_manifest(folder: Path, files: dict[str, FileRecord], *, save: int) -> None:
    """Record `files`, all of a checkpoint's others, and the number of the save, durably."""
    write_json(folder / _NAME, {"format": FORMAT, "save": save, "files": files})


def save_number(folder: Path) -> int | None:
    """Number of the save that wrote a checkpoint, counted through all starts and rollbacks of a
    run; 0 for one of a version that counted none, None where no manifest can be made out.

    Raises:
        InfrastructureError: if the file system fails for now.
    """
    try:
        return _read(folder)[0]
    except (OSError, *_NOT_A_MANIFEST):
        return None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder of any name was once a whole checkpoint."""
    return (folder / _NAME).exists()


def damage(folder: Path, *, part: int = 0, parts: int = 1, with_digests: bool = True) -> list[str]:
    """Reasons why a checkpoint is damaged; empty when it is whole.

    Args:
        folder: the checkpoint.
        part: share of the files to look at, 0 to parts - 1; large files are spread evenly.
        parts: number of shares.
        with_digests: read every byte and compare sha256; else only sizes.
    Raises:
        InfrastructureError: if the file system fails for now, which says nothing of the checkpoint.
    """
    try:
        _, files = _read(folder)
    except (OSError, *_NOT_A_MANIFEST) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a manifest ({error})"
        return [f"{_NAME}: {reason}"]
    largest_first = sorted(files, key=lambda name: -files[name]["bytes"])
    reasons = []
    for name in largest_first[part::parts]:
        path, record = folder / name, files[name]
        try:
            reason = retried(
                lambda path=path, record=record: _file_damage(  # type: ignore[misc]
                    path, record, with_digests=with_digests
                ),
                path,
            )
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            reasons.append(f"{name}: {reason}")
    return reasons


def _read(folder: Path) -> tuple[int, dict[str, FileRecord]]:
    """Number of the save and records of all files."""
    manifest = read_json(folder / _NAME)
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']!r}, this version reads {FORMAT}")
    foreign = [name for name in manifest["files"] if not _FILE_NAME.fullmatch(name)]
    if foreign:
        raise ValueError(f"it lists {foreign[0]!r}, which is no file of a checkpoint")
    if not {"index.json", "state.json"} <= manifest["files"].keys():
        raise ValueError("it does not list index.json and state.json")
    files: dict[str, FileRecord] = {
        name: {"bytes": int(record["bytes"]), "sha256": str(record["sha256"])}
        for name, record in manifest["files"].items()
    }
    return int(manifest.get("save", 0)), files


def _file_damage(path: Path, record: FileRecord, *, with_digests: bool) -> str:
    size = check_plain(path)
    if size != record["bytes"]:
        return f"{size} bytes, {record['bytes']} were written"
    if with_digests and digest(path) != record["sha256"]:
        return "its content has changed (sha256 differs)"
    return ""
