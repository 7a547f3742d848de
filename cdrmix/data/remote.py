"""Files behind a URL, copied to a bounded folder of this machine before they are asked for.

All processes of a machine share the folder. A file is there whole or not at all: it is copied
beside its name, under a lock, compared with its sha256, and renamed. What was used longest ago goes
first when room is needed; who still has it mapped is not disturbed by that.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cdrmix.config.redaction import REDACTED, redacted_text
from cdrmix.data.folders import locked
from cdrmix.errors import DataError, UnreachableDataError
from cdrmix.log import get_logger

_ATTEMPTS = 7  # 1, 2, 4 ... 32 seconds apart: a minute in all
_TIMEOUT_SECONDS = 60
_CHUNK_BYTES = 2**20
_REFUSED_CODES = range(400, 500)  # the server is there and will not give it
_PASSING_CODES = (408, 425, 429)
_OWN_SCHEMES = ("http", "https", "file")

# URL and size by folder, of `remember`.
_remembered: dict[Path, tuple[str, int]] = {}

_logger = get_logger(__name__)


class RemoteFile(NamedTuple):
    """A file of a remote folder: its name there, size in bytes and sha256 (hex)."""

    name: str
    bytes: int
    sha256: str


class RemoteFiles:
    """Files of one remote folder, in a folder of this machine.

    Args:
        url: of the remote folder.
        cache: folder of this machine; `<name>`s in it are whole.
        max_bytes: most that files of this folder take up together.
    Attributes:
        max_bytes: as given.
    """

    def __init__(self, url: str, cache: Path, max_bytes: int) -> None:
        self._url = url
        self._cache = cache
        self.max_bytes = max_bytes
        self._verified: set[str] = set()  # by this process: a copy may be of an earlier run
        self._coming: list[RemoteFile] = []
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def held(self, file: RemoteFile) -> Iterator[Path]:
        """A file that stays while the context lasts; waits for it where it is still to come.

        Raises:
            DataError: if it cannot be copied, or is not what it should be.
        """
        path = self._cache / file.name
        try:
            with locked(self._lock_of(file.name), blocking=True):
                if not self._is_good(path, file):
                    self._copy(file, path)
                os.utime(path)
                yield path
        except OSError as error:
            raise DataError(
                f"data.cache_folder: {error.filename or path}: {error.strerror}"
            ) from error

    def expect(self, files: Sequence[RemoteFile]) -> None:
        """Copy these files, in the order in which they are needed, without waiting for them; as
        many of them as there is room for."""
        with self._guard:
            self._coming = list(files)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._read_ahead, name="shards-ahead", daemon=True
                )
                self._thread.start()

    def _read_ahead(self) -> None:
        room = self.max_bytes
        while True:
            with self._guard:
                if not self._coming or self._coming[0].bytes > room:
                    self._thread = None
                    return
                file = self._coming.pop(0)
            room -= file.bytes
            try:
                with self.held(file):
                    pass
            except DataError as error:
                # Who needs the file tries again, and tells.
                _logger.warning("reading ahead: %s", error)

    def _is_good(self, path: Path, file: RemoteFile) -> bool:
        if file.name in self._verified and path.exists():
            return True
        try:
            with path.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
        except FileNotFoundError:
            return False
        if found == file.sha256:
            self._verified.add(file.name)
        return found == file.sha256

    def _copy(self, file: RemoteFile, path: Path) -> None:
        partial = path.with_name(f".{file.name}.partial")  # the lock is ours
        with locked(self._cache / ".room", blocking=True):
            self._make_room(file)
            with partial.open("wb") as opened:
                opened.truncate(file.bytes)  # so that others count it
        copy(f"{self._url}/{file.name}", partial, file.sha256, max_bytes=file.bytes)
        partial.replace(path)
        self._verified.add(file.name)

    def _make_room(self, file: RemoteFile) -> None:
        # Damaged, else it would not be copied.
        (self._cache / file.name).unlink(missing_ok=True)
        found: list[tuple[int, int, Path]] = []  # time of use, bytes
        for entry in self._cache.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed since, by who copies it
                if _is_copy(entry):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry))
        used = sum(size for _, size, _ in found)
        for _, _, entry in sorted(found):
            if used + file.bytes <= self.max_bytes:
                return
            used -= self._evict(entry)

    def _evict(self, entry: Path) -> int:
        """Remove a file, or what a killed process left of one, unless it is held; bytes freed."""
        name = entry.name.removeprefix(".").removesuffix(".partial")
        with locked(self._lock_of(name), blocking=False) as free:
            if not free or not entry.exists():
                return 0
            size = entry.stat().st_size
            entry.unlink()
            return size

    def _lock_of(self, name: str) -> Path:
        return self._cache / ".locks" / name


def remember(folder: Path, url: str, max_bytes: int) -> None:
    """Tell this process that a folder is the cache of a remote one.

    Not by a file in the folder: one that somebody else made could then name a URL.
    """
    _remembered[folder.resolve()] = (url, max_bytes)


def remote_files(folder: Path) -> RemoteFiles | None:
    """The files behind a folder that this process was told of; None for any other folder."""
    known = _remembered.get(folder.resolve())
    return None if known is None else RemoteFiles(known[0], folder, known[1])


def _is_copy(entry: Path) -> bool:
    return entry.name.removesuffix(".partial").endswith((".bin", ".roles"))


def copy(
    url: str,
    path: Path,
    sha256: str | None,
    *,
    max_bytes: int,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Copy what a URL names into a file.

    Args:
        sha256: what its digest must be (hex); None: it is not known.
        max_bytes: size that it has, or may have; nothing beyond is fetched.
    Raises:
        DataError: if it is not there, is something else, or cannot be stored.
        UnreachableDataError: if it stays out of reach.
    """
    shown = redacted_text(url)
    if REDACTED in url:
        raise DataError(
            f"{url}: a snapshot holds no credentials. Give the URL with them, such as --set "
            "data.path=URL"
        )
    for attempt in range(_ATTEMPTS):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        try:
            found = _copy_once(url, path, max_bytes)
        except (OSError, http.client.HTTPException) as error:
            if not _may_pass(error):
                raise DataError(f"{shown}: {_told(error)}") from error
            is_other = False
            problem = _told(error)
        else:
            if found is None:
                is_other = True
                problem = f"has more than {max_bytes} bytes"
            elif sha256 in (None, found):
                return
            else:
                is_other = True
                problem = f"its sha256 is {found}, the manifest says {sha256}"
        _logger.warning("%s: %s (attempt %d of %d)", shown, problem, attempt + 1, _ATTEMPTS)
    kind = DataError if is_other else UnreachableDataError
    raise kind(
        f"{shown}: {problem}; {_ATTEMPTS} attempts. Look at the server and the network, and start "
        "again to go on from the newest checkpoint."
    )


def _copy_once(url: str, path: Path, max_bytes: int) -> str | None:
    """Copy, wait until it is on the disk; its sha256, or None where it is longer than allowed."""
    digest = hashlib.sha256()
    # Without cutting it first, so that the room that was reserved for it stays reserved.
    mode = "r+b" if path.exists() else "wb"
    with _open(url) as source, path.open(mode) as target:
        while chunk := source.read(_CHUNK_BYTES):
            if target.tell() + len(chunk) > max_bytes:
                return None
            target.write(chunk)
            digest.update(chunk)
        target.truncate()
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


def _open(url: str) -> BinaryIO:
    if url.partition("://")[0] in _OWN_SCHEMES:
        opened: BinaryIO = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
        return opened
    import fsspec

    try:
        found: BinaryIO = fsspec.open(url, "rb").open()
    except (ValueError, ImportError) as error:  # an unknown scheme, or one with a package to add
        raise DataError(
            f"{redacted_text(url)}: {error}. Known without another package: file, http and https; "
            "others need the fsspec package for them, such as s3fs or gcsfs."
        ) from None
    return found


def _may_pass(error: Exception) -> bool:
    """Whether it is worth another attempt."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _PASSING_CODES or error.code not in _REFUSED_CODES
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    no_hope = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    full = isinstance(error, OSError) and error.errno in (28, 122)  # ENOSPC, EDQUOT: ours
    return not (isinstance(error, no_hope) or full)


def _told(error: Exception) -> str:
    return redacted_text(str(error)) or type(error).__name__
