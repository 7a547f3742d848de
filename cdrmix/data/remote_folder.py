"""A folder of token shards behind a URL as a local folder whose shards are copied on demand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np

from cdrmix.config.schema import DataConfig
from cdrmix.data.folders import locked
from cdrmix.data.remote import copy, remember
from cdrmix.data.shards import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Manifest,
    manifest_digest,
    read_manifest,
)
from cdrmix.data.tokenizer import MAX_TOKENIZER_BYTES
from cdrmix.data.tokenizer_base import MAX_SIDE_BYTES
from cdrmix.errors import DataError, UnreachableDataError
from cdrmix.log import get_logger

logger = get_logger(__name__)


def local_folder(data: DataConfig, sequence_length: int) -> Path:
    """Returns the folder of `data.path`; of a URL, one in the cache with manifest and tokenizer.

    Any number of processes of a machine may call this at once. Where the URL cannot be reached, the
    folder of an earlier start is returned, with a warning; shards that are not in it are copied
    when the URL answers again.

    Raises:
        DataError: if the URL cannot be read, or the cache is too small for the order of samples.
    """
    if "://" not in data.path:
        return Path(data.path)
    url = data.path.rstrip("/")
    cache = Path(data.cache_folder)
    try:
        with locked(cache / ".lock", blocking=True):
            # Named by host and process: on a shared file system others may hold their own.
            new = cache / f".new-{os.uname().nodename}-{os.getpid()}"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            # The folder of this URL's data set, for a start that does not reach it.
            known = cache / f".of-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
            try:
                path = new / MANIFEST_FILE
                try:
                    copy(f"{url}/{MANIFEST_FILE}", path, None, max_bytes=MAX_MANIFEST_BYTES)
                except UnreachableDataError as error:
                    if (earlier := _folder_of(cache, known)) is None:
                        raise
                    least = _check_room(read_manifest(earlier), data, sequence_length)
                    logger.warning("warning: %s Going on with the copies in %s", error, earlier)
                    remember(earlier, url, max_bytes=data.cache_bytes, least_bytes=least)
                    return earlier
                manifest = read_manifest(new)
                least = _check_room(manifest, data, sequence_length)
                tokenizer = manifest.tokenizer
                file, sha256 = tokenizer.file, tokenizer.sha256
                copy(f"{url}/{file}", new / file, sha256, max_bytes=MAX_TOKENIZER_BYTES)
                for side, info in tokenizer.files.items():
                    copy(f"{url}/{side}", new / side, info.sha256, max_bytes=MAX_SIDE_BYTES)
                folder = cache / manifest_digest(manifest)[:16]  # by the content of the data set
                folder.mkdir(exist_ok=True)
                remember(folder, url, max_bytes=data.cache_bytes, least_bytes=least)
                # The manifest last: with it the folder counts as built.
                for name in (file, *tokenizer.files, MANIFEST_FILE):
                    (new / name).replace(folder / name)
                (new / known.name).write_text(folder.name, encoding="utf-8")
                (new / known.name).replace(known)
                return folder
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        problem = f"{error.strerror} ({error.filename})"
        raise DataError(f"data.cache_folder = {cache}: {problem}") from error


def _folder_of(cache: Path, known: Path) -> Path | None:
    """Folder in the cache that an earlier start has filled from a URL, if its manifest is whole."""
    with contextlib.suppress(OSError, DataError):
        folder = cache / Path(known.read_text(encoding="utf-8").strip()).name
        if manifest_digest(read_manifest(folder))[:16] == folder.name:
            return folder
    return None


def _check_room(manifest: Manifest, data: DataConfig, sequence_length: int) -> int:
    """Returns the least size of a cache (bytes); refuses one whose shards would be evicted before
    they are read."""
    train = [shard for shard in manifest.shards if shard.split == "train"]
    sizes = [shard.bin.bytes + (shard.roles.bytes if shard.roles else 0) for shard in train]
    total = sum(sizes)
    shard_bytes = max(sizes, default=0)
    token_bytes = np.dtype(manifest.dtype).itemsize + any(shard.roles for shard in train)
    window_bytes = data.window_samples * sequence_length * token_bytes
    # Per domain the window in use and the next; both may begin and end within a shard.
    domains = len({shard.domain for shard in train})
    needed = {
        "shuffled": total,
        "windowed": domains * 2 * (window_bytes + shard_bytes),
        "sequential": domains * 2 * shard_bytes,
    }[data.order]
    if data.cache_bytes < min(needed, total):
        advice = ", or set data.order = windowed" if data.order == "shuffled" else ""
        raise DataError(
            f"data.cache_bytes = {data.cache_bytes}: data.order = {data.order} needs "
            f"{min(needed, total)} here, where the training split has {total} bytes. Raise it"
            f"{advice}."
        )
    return min(needed, total)
