"""An episodic index on disk: one folder per save, digested, written aside and then renamed.

    FOLDER/00000007/   keys.safetensors  values.safetensors  entries.jsonl  manifest.json

A save appears whole or not at all; the one before it is removed only after that. Whoever dies in
between leaves at least one whole save, and the newest is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from cdrmix.config.reasoning import EvictionConfig
from cdrmix.data.folders import new_folder, remove_unfinished
from cdrmix.errors import StateError
from cdrmix.reasoning.episodic_index import Entry, EpisodicIndex

FORMAT = 2
_KEYS = "keys.safetensors"
_VALUES = "values.safetensors"
_ENTRIES = "entries.jsonl"
_MANIFEST = "manifest.json"
_TOLD = {"tokenizer", "key_size", "encoder", "count", "next_id"}


def save_index(index: EpisodicIndex, folder: Path) -> Path:
    """Write the accepted entries; what is only proposed is not saved.

    Args:
        index: what to save.
        folder: of this index alone; made if missing. One process saves at a time.
    Returns:
        The folder of this save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _saves(folder)
    out = folder / f"{int(earlier[-1].name) + 1 if earlier else 1:08}"
    remove_unfinished(out)
    with new_folder(out) as unfinished:
        _write(index, unfinished)
    for old in earlier:
        shutil.rmtree(old)
    return out


def has_index(folder: Path) -> bool:
    """Whether `save_index` has saved here."""
    return bool(_saves(folder))


def load_index(
    folder: Path,
    *,
    encoder: str,
    tokenizer: str,
    key_size: int,
    max_tokens: int,
    eviction: EvictionConfig | None = None,
) -> EpisodicIndex:
    """The newest save.

    Args:
        folder: as given to `save_index`.
        encoder: digest of the encoder whose queries will come.
        tokenizer: digest of the tokenizer that reads the segments' ids.
        key_size: of its keys.
        max_tokens: capacity from now on; entries leave at the next commit if they are more.
        eviction: how those that leave are chosen.
    Raises:
        StateError: if there is none, if it is damaged, or if it is of another encoder, tokenizer or
            size.
    """
    saves = _saves(folder)
    if not saves:
        raise StateError(f"{folder}: no episodic memory was saved here")
    newest = saves[-1]
    manifest = _read_manifest(newest)
    wanted = {"tokenizer": tokenizer, "key_size": key_size, "encoder": encoder}
    differ = [
        f"{what} is {manifest[what]!r}, but the model's is {ours!r}"
        for what, ours in wanted.items()
        if manifest[what] != ours
    ]
    if differ:
        raise StateError(
            f"{newest}: {'; '.join(differ)}: its entries mean nothing to this model. Use the model "
            "that it was written with, or another folder"
        )
    try:
        keys = load_file(newest / _KEYS)["keys"]
        entries = _read_entries(newest)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise StateError(f"{newest}: not what this version writes ({error})") from None
    if not len(keys) == len(entries) == manifest["count"]:
        raise StateError(
            f"{newest}: {len(keys)} keys for {len(entries)} entries, and its manifest says "
            f"{manifest['count']}"
        )
    index = EpisodicIndex(
        key_size=key_size,
        max_tokens=max_tokens,
        encoder=encoder,
        tokenizer=tokenizer,
        eviction=eviction,
    )
    index.restore(keys, entries, next_id=manifest["next_id"])
    return index


def _saves(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def _write(index: EpisodicIndex, folder: Path) -> None:
    tokens = [torch.tensor(entry.tokens, dtype=torch.int64) for entry in index.entries]
    ends = torch.tensor([len(row) for row in tokens], dtype=torch.int64).cumsum(0)
    flat = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    # `save_file` reports a full disk by an error that is no OSError
    (folder / _KEYS).write_bytes(save({"keys": index.keys.contiguous()}))
    (folder / _VALUES).write_bytes(save({"tokens": flat, "ends": ends}))
    with (folder / _ENTRIES).open("w", encoding="utf-8") as file:
        for entry in index.entries:
            row = dataclasses.asdict(entry)
            del row["tokens"]
            file.write(json.dumps(row) + "\n")
    names = (_KEYS, _VALUES, _ENTRIES)
    manifest = {
        "format": FORMAT,
        "encoder": index.encoder,
        "tokenizer": index.tokenizer,
        "key_size": index.keys.shape[1],
        "count": len(index),
        "next_id": index.next_id,
        "sha256": {name: _digest(folder / name) for name in names},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name in (*names, _MANIFEST):
        _sync(folder / name)


def _read_manifest(save: Path) -> dict[str, Any]:
    """The manifest of a save whose files are as they were written."""
    try:
        manifest = json.loads((save / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if missing := _TOLD - manifest.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        digests = {name: manifest["sha256"][name] for name in (_KEYS, _VALUES, _ENTRIES)}
        altered = [name for name, sha256 in digests.items() if _digest(save / name) != sha256]
    except OSError as error:
        raise StateError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{save / _MANIFEST}: not a manifest ({error})") from None
    if altered:
        raise StateError(
            f"{save}: {', '.join(altered)} changed since it was written (sha256 differs). "
            "Remove the folder to start with an empty memory"
        )
    return manifest


def _read_entries(save: Path) -> list[Entry]:
    values = load_file(save / _VALUES)
    ends = values["ends"].tolist()
    rows = (save / _ENTRIES).read_text(encoding="utf-8").splitlines()
    entries = []
    for row, (begin, end) in zip(rows, itertools.pairwise([0, *ends]), strict=True):
        tokens = tuple(values["tokens"][begin:end].tolist())
        entries.append(Entry(tokens=tokens, **json.loads(row)))
    return entries


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
