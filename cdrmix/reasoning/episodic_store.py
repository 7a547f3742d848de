"""An episodic index on disk: one folder per save, digested, written aside and then renamed.

    FOLDER/00000007/   keys.safetensors  values.safetensors  entries.jsonl  manifest.json

A save appears whole or not at all, and the one before it is removed only after that: a process
killed at any point leaves at least one whole save, of which the newest is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from cdrmix.config.reasoning import EvictionConfig
from cdrmix.data.folders import new_folder, remove_unfinished, sync
from cdrmix.errors import StateError
from cdrmix.reasoning.episodic_index import Entry, EpisodicIndex

FORMAT = 2
_KEYS = "keys.safetensors"
_VALUES = "values.safetensors"
_ENTRIES = "entries.jsonl"
_MANIFEST = "manifest.json"
_FILES = (_KEYS, _VALUES, _ENTRIES)
_REQUIRED = {"tokenizer", "key_size", "encoder", "count", "next_id"}


def save_index(index: EpisodicIndex, folder: Path) -> Path:
    """Writes the entries, without segments that are only proposed.

    Args:
        index: its entries are saved.
        folder: of this index alone; made if missing. One process saves at a time.
    Returns:
        Folder of this save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _saves(folder)
    out = folder / f"{int(earlier[-1].name) + 1 if earlier else 1:08}"
    remove_unfinished(out)  # the folder's lock is held, so that nobody else is writing it
    tokens = [torch.tensor(entry.tokens, dtype=torch.int64) for entry in index.entries]
    ends = torch.tensor([len(row) for row in tokens], dtype=torch.int64).cumsum(0)
    flat = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    with new_folder(out) as unfinished:
        # not `save_file`, which reports a full disk by an error that is no OSError
        (unfinished / _KEYS).write_bytes(save({"keys": index.keys.contiguous()}))
        (unfinished / _VALUES).write_bytes(save({"tokens": flat, "ends": ends}))
        with (unfinished / _ENTRIES).open("w", encoding="utf-8") as file:
            for entry in index.entries:
                row = dataclasses.asdict(entry)
                del row["tokens"]
                file.write(json.dumps(row) + "\n")
        manifest = {
            "format": FORMAT,
            "encoder": index.encoder,
            "tokenizer": index.tokenizer,
            "key_size": index.keys.shape[1],
            "count": len(index),
            "next_id": index.next_id,
            "sha256": {name: _digest(unfinished / name) for name in _FILES},
        }
        text = json.dumps(manifest, indent=1) + "\n"
        (unfinished / _MANIFEST).write_text(text, encoding="utf-8")
        # contents first: the rename that follows must not reach the disk before them
        for name in (*_FILES, _MANIFEST):
            sync(unfinished / name)
    # only now, so that a reader finds a whole save at any time
    for old in earlier:
        shutil.rmtree(old)
    return out


def has_index(folder: Path) -> bool:
    """Returns True if `save_index` has saved here."""
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
    """Loads the newest save for a model; arguments as of `EpisodicIndex`.

    A smaller `max_tokens` than that of the save evicts entries at the next commit.

    Raises:
        StateError: if there is none, it is damaged, or of another encoder, tokenizer or key size.
    """
    saves = _saves(folder)
    if not saves:
        raise StateError(f"{folder}: no episodic memory was saved here")
    newest = saves[-1]
    manifest = _read_manifest(newest)
    # another encoder's keys have other directions, and another tokenizer's ids other words
    expected = {"tokenizer": tokenizer, "key_size": key_size, "encoder": encoder}
    differ = [
        f"{name} is {manifest[name]!r}, but the model's is {ours!r}"
        for name, ours in expected.items()
        if manifest[name] != ours
    ]
    if differ:
        raise StateError(
            f"{newest}: {'; '.join(differ)}: its entries mean nothing to this model. Use the model "
            "that it was written with, or another folder"
        )
    try:
        keys = load_file(newest / _KEYS)["keys"]
        values = load_file(newest / _VALUES)
        bounds = itertools.pairwise([0, *values["ends"].tolist()])
        rows = (newest / _ENTRIES).read_text(encoding="utf-8").splitlines()
        entries = [
            Entry(tokens=tuple(values["tokens"][begin:end].tolist()), **json.loads(row))
            for row, (begin, end) in zip(rows, bounds, strict=True)
        ]
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


def _read_manifest(save: Path) -> dict[str, Any]:
    """Reads the manifest of a save, and checks its files against their digests."""
    try:
        manifest = json.loads((save / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if missing := _REQUIRED - manifest.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        digests = {name: manifest["sha256"][name] for name in _FILES}
        changed = [name for name, sha256 in digests.items() if _digest(save / name) != sha256]
    except OSError as error:
        raise StateError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{save / _MANIFEST}: not a manifest ({error})") from None
    if changed:
        raise StateError(
            f"{save}: {', '.join(changed)} changed since it was written (sha256 differs). "
            "Remove the folder to start with an empty memory"
        )
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
