"""manifest.json: size and sha256 of every file of a checkpoint, written last, believed first."""

from __future__ import annotations

import json
from pathlib import Path

from cdrmix.checkpoint.files import FileRecord, digest, write_json

FORMAT = 1
_NAME = "manifest.json"


def write_manifest(folder: Path, files: dict[str, FileRecord]) -> None:
    """Record `files`, all of a checkpoint's others, durably."""
    write_json(folder / _NAME, {"format": FORMAT, "files": files})


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder of any name was once a whole checkpoint."""
    return (folder / _NAME).exists()


def damage(folder: Path, *, part: int = 0, parts: int = 1, with_digests: bool = True) -> list[str]:
    """What is wrong with a checkpoint; empty when all is well.

    Args:
        folder: the checkpoint.
        part: which share of the files to look at, 0 to parts - 1; large files are spread evenly.
        parts: number of shares.
        with_digests: read every byte and compare sha256; else only sizes.
    """
    try:
        files = _read(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = error.strerror if isinstance(error, OSError) else f"not a manifest ({error})"
        return [f"{_NAME}: {what}"]
    largest_first = sorted(files, key=lambda name: -files[name]["bytes"])
    reasons = []
    for name in largest_first[part::parts]:
        try:
            reason = _file_damage(folder / name, files[name], with_digests=with_digests)
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            reasons.append(f"{name}: {reason}")
    return reasons


def _read(folder: Path) -> dict[str, FileRecord]:
    manifest = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    if not {"index.json", "state.json"} <= manifest["files"].keys():
        raise ValueError("it does not list index.json and state.json")
    return {
        name: {"bytes": int(record["bytes"]), "sha256": str(record["sha256"])}
        for name, record in manifest["files"].items()
    }


def _file_damage(path: Path, record: FileRecord, *, with_digests: bool) -> str:
    size = path.stat().st_size
    if size != record["bytes"]:
        return f"{size} bytes, {record['bytes']} were written"
    if with_digests and digest(path) != record["sha256"]:
        return "its content has changed (sha256 differs)"
    return ""
