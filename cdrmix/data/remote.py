"""Files behind a URL, copied ahead of use to a bounded folder of this machine.

All processes of a machine share the folder. A file is there whole or not at all: it is copied
beside its name, under a lock, compared with its sha256, and renamed. The least recently used files
go first when room is needed; a process that still has one mapped is not disturbed by that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import BinaryIO, NamedTuple

from cdrmix.config.redaction import REDACTED, redacted_text
from cdrmix.data.folders import locked
from cdrmix.errors import DataError, UnreachableDataError
from cdrmix.log import get_logger

_ATTEMPTS = 7  # 1, 2, 4 ... 32 seconds apart: a minute in all
_TIMEOUT_SECONDS = 60
_CHUNK_BYTES = 2**20
_REFUSED_CODES = range(400, 500)  # the server answers and refuses
_PASSING_CODES = (408, 425, 429)  # of these: time-out, too early, too many requests
_BUILTIN_SCHEMES = ("http", "https", "file")
# Faults that no further attempt cures: a missing or forbidden file, a full disk of this machine.
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

_logger = get_logger(__name__)


class RemoteFile(NamedTuple):
    """A file of a remote folder: name in it, size in bytes and sha256 (hex)."""

    name: str
    bytes: int
    sha256: str


@dataclass
class CacheSize:
    """Size that this process lets the copies of a remote folder take (bytes)."""

    most: int  # as configured
    least: int  # that the order of the samples needs
    bytes: int  # at present


_remembered: dict[Path, tuple[str, CacheSize]] = {}  # URL and size by folder, set by `remember`


class RemoteFiles:
    """Files of the remote folder `url`, in a folder of this machine of limited size."""

    def __init__(self, url: str, cache: Path, size: CacheSize) -> None:
        self._url = url
        self._cache = cache
        self._size = size
        self._verified: set[str] = set()  # by this process: a copy may be of an earlier run
        self._pending: list[RemoteFile] = []
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def max_bytes(self) -> int:
        """Size that the copies may take at present (bytes)."""
        return self._size.bytes

    def shrink(self) -> None:
        """Drops the copies used longest ago that are beyond the present size."""
        with locked(self._cache / ".room", blocking=True):
            self._evict(0)

    @contextlib.contextmanager
    def held(self, file: RemoteFile) -> Iterator[Path]:
        """Keeps a file in the cache while the context lasts; copies it first if it is not there.

        Raises:
            DataError: if it cannot be copied, or differs from what it should be.
        """
        path = self._cache / file.name
        try:
            with locked(self._lock_of(file.name), blocking=True):
                if file.name not in self._verified and path.exists():
                    with path.open("rb") as stream:
                        if hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256:
                            self._verified.add(file.name)
                        else:
                            _logger.warning("%s: damaged (sha256 differs); copied again", path)
                if file.name not in self._verified or not path.exists():
                    self._copy(file, path)
                os.utime(path)
                yield path
        except OSError as error:
            place = error.filename or path
            raise DataError(f"data.cache_folder: {place}: {error.strerror}") from error

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Copies in the background, in this order, as many of the files as there is room for."""
        with self._guard:
            self._pending = list(files)
            if self._thread is None or not self._thread.is_alive():
                name = "shards-ahead"
                self._thread = threading.Thread(target=self._read_ahead, name=name, daemon=True)
                self._thread.start()

    def _read_ahead(self) -> None:
        room = self.max_bytes
        while True:
            with self._guard:
                if not self._pending or self._pending[0].bytes > room:
                    self._thread = None
                    return
                file = self._pending.pop(0)
            room -= file.bytes
            try:
                with self.held(file):
                    pass
            except DataError as error:
                # The reader of the file tries again, and fails with this error.
                _logger.warning("reading ahead: %s", error)

    def _copy(self, file: RemoteFile, path: Path) -> None:
        """Copies a file whose lock this process holds, after evicting others to make room."""
        self._verified.discard(file.name)
        partial = path.with_name(f".{file.name}.partial")
        # One process at a time makes room and reserves it.
        with locked(self._cache / ".room", blocking=True):
            path.unlink(missing_ok=True)  # damaged, else it would not be copied
            self._evict(file.bytes)
            with partial.open("wb") as stream:
                stream.truncate(file.bytes)  # so that others count it
        copy(f"{self._url}/{file.name}", partial, file.sha256, max_bytes=file.bytes)
        partial.replace(path)
        self._verified.add(file.name)

    def _evict(self, room: int) -> None:
        """Makes room (bytes) by dropping copies, under the lock for that."""
        entries: list[tuple[int, int, Path]] = []  # time of use, bytes
        for entry in self._cache.iterdir():
            if entry.name.removesuffix(".partial").endswith((".bin", ".roles")):
                # Another process may have renamed it since.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry))
        used = sum(size for _, size, _ in entries)
        for _, _, entry in sorted(entries):
            if used + room <= self.max_bytes:
                break
            # Its lock is free unless a process copies or holds it: an unfinished file with a free
            # lock is of a killed process.
            name = entry.name.removeprefix(".").removesuffix(".partial")
            with locked(self._lock_of(name), blocking=False) as free:
                if free and entry.exists():
                    used -= entry.stat().st_size
                    entry.unlink()

    def _lock_of(self, name: str) -> Path:
        return self._cache / ".locks" / name


def remember(folder: Path, url: str, *, max_bytes: int, least_bytes: int) -> None:
    """Registers a folder as the cache of a remote one, in this process."""
    # Not by a file in the folder: one that somebody else made could then name a URL.
    _remembered[folder.resolve()] = (url, CacheSize(max_bytes, least_bytes, max_bytes))


def is_in_use() -> bool:
    """True if this process reads a remote folder."""
    return bool(_remembered)


def cache_size(folder: Path) -> CacheSize | None:
    """Size of a cache that was registered by `remember`, which may be changed within its bounds;
    None for any other folder."""
    entry = _remembered.get(folder.resolve())
    return None if entry is None else entry[1]


def remote_files(folder: Path) -> RemoteFiles | None:
    """Files behind a folder that was registered by `remember`; None for any other folder."""
    entry = _remembered.get(folder.resolve())
    return None if entry is None else RemoteFiles(entry[0], folder, entry[1])


def copy(url: str, path: Path, sha256: str | None, *, max_bytes: int) -> None:
    """Copies the content of a URL into a file.

    Args:
        sha256: expected digest (hex); None: it is not known.
        max_bytes: nothing beyond is fetched.
    Raises:
        DataError: if it does not exist, differs from what it should be, or cannot be stored.
        UnreachableDataError: if it stays out of reach.
    """
    safe_url = redacted_text(url)
    if REDACTED in url:
        advice = "Give the URL with them, such as --set data.path=URL"
        raise DataError(f"{url}: a snapshot holds no credentials. {advice}")
    for attempt in range(_ATTEMPTS):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        try:
            digest = _copy_once(url, path, max_bytes)
        except (OSError, http.client.HTTPException) as error:
            problem = redacted_text(str(error)) or type(error).__name__
            if _is_permanent(error):
                raise DataError(f"{safe_url}: {problem}") from error
            failure: type[DataError] = UnreachableDataError
        else:
            if digest is not None and sha256 in (None, digest):
                return
            failure = DataError
            problem = f"its sha256 is {digest}, the manifest says {sha256}"
            if digest is None:
                problem = f"has more than {max_bytes} bytes"
        _logger.warning("%s: %s (attempt %d of %d)", safe_url, problem, attempt + 1, _ATTEMPTS)
    raise failure(
        f"{safe_url}: {problem}; {_ATTEMPTS} attempts. Look at the server and the network, and "
        "start again to go on from the newest checkpoint."
    )


def _copy_once(url: str, path: Path, max_bytes: int) -> str | None:
    """Copies and fsyncs; returns the sha256, or None if it is longer than allowed."""
    if url.partition("://")[0] in _BUILTIN_SCHEMES:
        source: BinaryIO = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    else:
        import fsspec

        try:
            source = fsspec.open(url, "rb").open()
        except (ValueError, ImportError) as error:  # an unknown scheme, or a package is missing
            raise DataError(
                f"{redacted_text(url)}: {error}. Known without another package: file, http and "
                "https; others need the fsspec package for them, such as s3fs or gcsfs."
            ) from None
    digest = hashlib.sha256()
    # Without truncating it first, so that the room that was reserved for it stays reserved.
    mode = "r+b" if path.exists() else "wb"
    with source, path.open(mode) as target:
        while chunk := source.read(_CHUNK_BYTES):
            if target.tell() + len(chunk) > max_bytes:
                return None
            target.write(chunk)
            digest.update(chunk)
        target.truncate()
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


def _is_permanent(error: Exception) -> bool:
    """Tells errors that no further attempt can cure."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _REFUSED_CODES and error.code not in _PASSING_CODES
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    is_full = isinstance(error, OSError) and error.errno in _FULL_DISK
    return isinstance(error, _PERMANENT_ERRORS) or is_full
