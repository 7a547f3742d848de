"""Episodic memory across texts: an index in a folder, and its entries as episodes see them.

A segment that the agent writes becomes an entry once its text is over: until then, and if anything
fails, the folder stays as it was. Each save is a folder of its own, written aside and then renamed:

    FOLDER/00000007/   keys.safetensors  values.safetensors  entries.jsonl  manifest.json

A save appears whole or not at all, and the one before it is removed only after that: a process
killed at any point leaves at least one whole save, of which the newest is read.
"""

# N episodes, E entries, M segments written, K key dimensions, k entries for a query

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cdrmix.data.folders import locked, new_folder, remove_unfinished, sync
from cdrmix.data.shards import check_regular, read_regular
from cdrmix.errors import ConfigError, DataError, StateError
from cdrmix.log import get_logger
from cdrmix.reasoning.episodic_index import DUPLICATE_COSINE, Entry, EpisodicIndex, FaissCache
from cdrmix.reasoning.memory_reader import MemoryReader
from cdrmix.reasoning.shared_words import words_of
from cdrmix.reasoning.working_memory import weights_digest

logger = get_logger(__name__)

# Parameters that keys depend on beside the backbone's, which `plastic` includes. Slots and agent
# are not among them: an index stays valid while the policy alone is trained.
_KEY_PARTS = ("plastic.", "retrieval.")
FORMAT = 2
_KEYS = "keys.safetensors"
_VALUES = "values.safetensors"
_ENTRIES = "entries.jsonl"
_MANIFEST = "manifest.json"
_FILES = (_KEYS, _VALUES, _ENTRIES)
_MAX_MANIFEST_BYTES = 2**20
_REQUIRED = {"tokenizer", "key_size", "encoder", "count", "next_id"}


class Earlier:
    """Entries of an index as segments that stand before those of a text.

    Segments are numbered by the entries' places, so the index must not change meanwhile. It is
    searched exactly, or by FAISS; raises ConfigError if that is not installed. `decode` makes text
    of tokens.
    """

    def __init__(
        self, index: EpisodicIndex, *, faiss: bool, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.index = index
        self.words = [words_of(decode(entry.tokens)) for entry in index.entries]
        self._search = FaissCache(index).search if faiss else index.search

    def find(
        self, queries: Tensor, written: Tensor, is_written: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """Finds the entries nearest to each query, without those that the text has replaced.

        Args:
            queries: unit vectors, [N, K].
            written: keys of the segments written from this text, [N, M, K].
            is_written: False for empty places, [N, M].
            count: most entries for each query.
        Returns:
            Places of entries, -1 where fewer are near enough, and cosines, [N, k] each.
        """
        found = self._search(queries, top_k=count)
        places, scores = (part.to(queries.device) for part in found)
        keys = self.index.keys[found.places.clamp(min=0)].to(queries.device)  # [N, k, K]
        # the commit after this text would refresh such an entry: its old text no longer holds
        alike = (keys @ written.transpose(1, 2)).masked_fill(~is_written.unsqueeze(1), -1.0)
        stale = (alike > DUPLICATE_COSINE).any(2)
        return places.masked_fill(stale, -1), scores


class Writing(NamedTuple):
    """Segment that the agent wrote; `score` is the probability with which it did, key is [K]."""

    key: Tensor
    tokens: list[int]
    offset: int
    score: float


class Kept(NamedTuple):
    """Changes of an index by a text."""

    num_added: int  # new entries
    refreshed: list[tuple[int, ...]]  # new tokens of entries from before the text
    evicted: list[tuple[int, ...]]  # tokens of entries that gave way


def keep(
    index: EpisodicIndex, written: list[Writing], *, read: list[int], num_steps: int, source: str
) -> Kept:
    """Commits the segments that the agent wrote, and notes which entries it read.

    Args:
        written: in the order of the text.
        read: places of entries that stood in the window.
        num_steps: actions of the episode, by which entries age.
        source: name of the text.
    """
    # the index has no clock of its own: time is the actions of all texts together
    now = max((entry.last_used for entry in index.entries), default=0) + num_steps
    # before the commit, which may evict what was read and move the places of the others
    index.touch(read, step=now)
    before = {entry.id: entry.tokens for entry in index.entries}
    for each in written:
        index.propose(each.key, each.tokens, offset=each.offset, source=source, score=each.score)
    commit = index.commit(step=now)
    after = {entry.id: entry.tokens for entry in index.entries}
    # a text may refresh the same entry twice, and also its own new entries, which are no news.
    # Only old entries can be evicted: new ones go last, and a text writes no more than fits.
    refreshed = [after[id] for id in dict.fromkeys(commit.refreshed) if id in before]
    return Kept(len(commit.added), refreshed, [before[id] for id in commit.evicted])


@contextlib.contextmanager
def opened(
    folder: Path, reader: MemoryReader, *, tokenizer: str, make: bool
) -> Iterator[EpisodicIndex]:
    """Opens the index of a folder, and saves it at the end if it changed.

    Other processes wait for their turn meanwhile.

    Args:
        folder: of this index alone.
        reader, tokenizer: its encoder makes the keys; digest of the tokenizer of the entries.
        make: start an empty index where there is none.
    Raises:
        StateError: if there is none and none is to be made, it is damaged, of another encoder, key
            size or tokenizer, or the folder cannot be used.
        ConfigError: if the reader's capacity does not hold a segment.
    """
    memory = reader.config.memory
    if memory.max_tokens < reader.segment_tokens:
        raise ConfigError(
            f"{folder}: stage_b.memory.max_tokens = {memory.max_tokens} of the model has no room "
            f"for a segment of {reader.segment_tokens} tokens. Try a model with a larger one"
        )
    if not make and not _saves(folder):
        raise StateError(
            f"{folder}: no episodic memory was saved here. Read a text into it first: give "
            "--prompt or --file"
        )
    encoder = weights_digest(
        (name, tensor) for name, tensor in reader.named_parameters() if name.startswith(_KEY_PARTS)
    )
    index = EpisodicIndex(
        key_size=memory.summary_dim,
        max_tokens=memory.max_tokens,
        encoder=encoder,
        tokenizer=tokenizer,
        eviction=memory.eviction,
    )
    with contextlib.ExitStack() as stack:
        # not around the yield: a fault of the caller's own files is not one of this folder
        with _disk_faults(folder):
            # a second process would save over the entries of the first; it first tries without
            # blocking, so that a wait is announced
            lock = folder / ".lock"
            if not stack.enter_context(locked(lock, blocking=False)):
                logger.info("%s: another process uses it; waiting", folder)
                stack.enter_context(locked(lock, blocking=True))
            is_saved = load_index(index, folder, vocab_size=reader.backbone.config.vocab_size)
        before = list(index.entries) if is_saved else None
        yield index
        if index.entries != before:
            with _disk_faults(folder):
                save_index(index, folder)


@contextlib.contextmanager
def _disk_faults(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be used: {error.strerror}. Give a folder that can be written to"
        ) from None


def save_index(index: EpisodicIndex, folder: Path) -> Path:
    """Writes the entries, without segments that are only proposed, and returns this save's folder.

    `folder` is of this index alone, and made if missing. One process saves at a time.
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
            "key_size": index.key_size,
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


def load_index(index: EpisodicIndex, folder: Path, *, vocab_size: int) -> bool:
    """Fills an empty index from the newest save; returns False if there is none.

    A smaller `max_tokens` than that of the save evicts entries at the next commit. Token ids must
    be below `vocab_size`: an index may have been made by somebody else.

    Raises:
        StateError: if it is damaged, or of another encoder, tokenizer or key size.
    """
    saves = _saves(folder)
    if not saves:
        return False
    newest = saves[-1]
    manifest = _read_manifest(newest)
    # another encoder's keys have other directions, and another tokenizer's ids other words
    ours = {"tokenizer": index.tokenizer, "key_size": index.key_size, "encoder": index.encoder}
    differ = [
        f"{name} is {manifest[name]!r}, but the model's is {value!r}"
        for name, value in ours.items()
        if manifest[name] != value
    ]
    if differ:
        raise StateError(
            f"{newest}: {'; '.join(differ)}: its entries mean nothing to this model. Use the model "
            "that it was written with, or another folder"
        )
    try:
        keys, entries = _read_entries(newest, manifest, vocab_size=vocab_size)
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise StateError(f"{newest}: not what this version writes ({error})") from None
    index.restore(keys, entries, next_id=manifest["next_id"])
    return True


def _read_entries(
    save: Path, manifest: dict[str, Any], *, vocab_size: int
) -> tuple[Tensor, list[Entry]]:
    """Raises ValueError for what a search, an embedding or a terminal could not take."""
    keys = load_file(save / _KEYS)["keys"]
    values = load_file(save / _VALUES)
    tokens, ends = values["tokens"], values["ends"]
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or ends.dim() != 1:
        raise ValueError(f"{_VALUES}: tokens and ends must be lists of integers")
    bounds = list(itertools.pairwise([0, *ends.tolist()]))
    if any(begin > end for begin, end in bounds) or (bounds and bounds[-1][1] != len(tokens)):
        raise ValueError(f"{_VALUES}: ends do not cut the tokens into segments")
    rows = (save / _ENTRIES).read_text(encoding="utf-8").splitlines()
    if len(rows) != len(bounds):
        raise ValueError(f"{len(rows)} entries for {len(bounds)} segments")
    entries = [
        Entry(tokens=tuple(tokens[begin:end].tolist()), **json.loads(row))
        for row, (begin, end) in zip(rows, bounds, strict=True)
    ]
    if keys.shape != (manifest["count"], manifest["key_size"]) or len(keys) != len(entries):
        raise ValueError(
            f"keys of shape {list(keys.shape)} for {len(entries)} entries, and its manifest says "
            f"{manifest['count']} of size {manifest['key_size']}"
        )
    if keys.dtype != torch.float32 or not bool(((keys.norm(dim=1) - 1).abs() < 1e-3).all()):
        raise ValueError(f"{_KEYS}: keys must be unit vectors in float32")
    last = -1
    for entry in entries:
        numbers = (entry.offset, entry.id, entry.last_used, entry.num_reads)
        # a bool is an int to Python, not here
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{_ENTRIES}: offset, id, last_used, num_reads are {numbers}")
        if not isinstance(entry.source, str) or not 0 <= entry.score <= 1:
            raise ValueError(f"{_ENTRIES}: entry {entry.id} has no source or score of 0 to 1")
        if not all(0 <= token < vocab_size for token in entry.tokens):
            raise ValueError(f"{_VALUES}: entry {entry.id} has ids outside of 0 to {vocab_size}")
        if entry.id <= last:
            raise ValueError(f"{_ENTRIES}: id {entry.id} follows {last}")
        last = entry.id
    if type(manifest["next_id"]) is not int or manifest["next_id"] <= last:
        raise ValueError(f"{_MANIFEST}: next_id is {manifest['next_id']!r} after id {last}")
    return keys, entries


def _saves(folder: Path) -> list[Path]:
    """Folders of the saves, the newest last. Raises StateError if one is a link."""
    if not folder.is_dir():
        return []
    saves = [path for path in folder.iterdir() if re.fullmatch("[0-9]{8}", path.name)]
    for path in saves:
        if path.is_symlink():  # what it leads to would be read here, and deleted after a save
            raise StateError(f"{path}: is a link. Replace it by the folder that it points to")
    return sorted(path for path in saves if path.is_dir())


def _read_manifest(save: Path) -> dict[str, Any]:
    """Reads the manifest of a save, and checks its files against their digests."""
    try:
        for name in (*_FILES, _MANIFEST):
            if (save / name).is_symlink():
                raise DataError(f"{save / name}: is a link.")
            check_regular(save / name)
        manifest = json.loads(read_regular(save / _MANIFEST, _MAX_MANIFEST_BYTES))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if missing := _REQUIRED - manifest.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        digests = {name: manifest["sha256"][name] for name in _FILES}
        changed = [name for name, sha256 in digests.items() if _digest(save / name) != sha256]
    except OSError as error:
        raise StateError(f"{error.filename}: {error.strerror}") from None
    except DataError as error:  # a link leads elsewhere, and a pipe never ends
        raise StateError(
            f"{error} Remove the folder {save} to start with an empty memory"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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
