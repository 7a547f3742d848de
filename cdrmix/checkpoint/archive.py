"""Archive of a run's checkpoints: an object store, or a folder of another file system.

    <archive>/<run directory's name>/<step>/   the files of checkpoints/<step>, manifest.json last

An object without its manifest is no checkpoint, so an upload that ends in the middle leaves none.
Every file is read back and compared with its digest before the manifest is written. No torch: a
start is checked by this before it is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from cdrmix.checkpoint.candidates import STEP_FOLDER, step_of
from cdrmix.checkpoint.files import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    NOT_A_MANIFEST,
    FileRecord,
    parsed_manifest,
    read_manifest,
)
from cdrmix.config.redaction import REDACTED, redacted_text
from cdrmix.data.folders import open_new, sync
from cdrmix.errors import ConfigError, InfrastructureError, StateError, TrainingError
from cdrmix.log import get_logger

T = TypeVar("T")
logger = get_logger(__name__)
# Of a store's manifest: thousands of ranks have two files each.
_MOST_MANIFEST_BYTES = 64 * 2**20
# Pauses before a failed upload is repeated, unless a newer checkpoint waits.
UPLOAD_RETRY_SECONDS = (4.0, 30.0)


class Archive:
    """Folder of one run's checkpoints behind `url`, a folder or a URL.

    Every method raises InfrastructureError if the store does not answer, or answers with an error,
    and StateError for damage. `answer_seconds` is the longest time without progress.
    """

    def __init__(self, url: str, *, answer_seconds: float) -> None:
        """Raises ConfigError if the URL is none that can be read here."""
        self.url = url.rstrip("/")
        self.shown = redacted_text(self.url)
        self._seconds = answer_seconds
        self._progress = time.monotonic()
        if REDACTED in url:
            raise ConfigError(
                f"{self.shown}: a snapshot holds no credentials. Give the URL with them, such as "
                "--set checkpoint.tiers.archive.path=URL"
            )
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:  # an unknown scheme, or a package is missing
            raise ConfigError(
                f"{self.shown}: {redacted_text(str(error))}. Known without another package: a "
                "folder; others need the fsspec package for them, such as s3fs or gcsfs"
            ) from None
        except Exception as error:  # of any package
            raise self._failed("cannot be opened", error) from error
        protocol = self._files.protocol
        self._is_local = "file" in ([protocol] if isinstance(protocol, str) else protocol)

    def steps(self) -> list[int]:
        """Steps of the checkpoints, newest first: those that have a manifest."""
        return self._answered("cannot be listed", self._list_steps)

    def save_numbers(self) -> dict[int, int]:
        """Number of the save of each checkpoint, by step, that of the last one saved first."""

        def read() -> dict[int, int]:
            numbers = {}
            for step in self._list_steps():
                with suppress(*NOT_A_MANIFEST):
                    numbers[step] = self._manifest(step)[1][0]
            return dict(sorted(numbers.items(), key=lambda each: -each[1]))

        return self._answered("cannot be listed", read)

    def check_writable(self) -> None:
        """Raises ConfigError if nothing can be written there, as with a wrong URL or without
        rights."""
        probe = f"{self._root}/.probe-{uuid4().hex[:8]}"

        def write() -> None:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"cdrmix")
            self._files.rm_file(probe)

        try:
            self._answered("cannot be written", write)
        except InfrastructureError as error:
            cause = error.__cause__
            if isinstance(cause, TimeoutError | ConnectionError):
                raise
            raise ConfigError(
                f"checkpoint.tiers.archive: {error}. Give a folder or URL that this user can "
                "write to"
            ) from cause

    def upload(self, checkpoint: Path) -> None:
        """Copies a whole checkpoint; its manifest last, once all others compare."""
        step = step_of(checkpoint)
        _, records = read_manifest(checkpoint)
        place = f"{self._root}/{step}"

        def copy() -> None:
            self._remove(step)  # of an upload that did not end
            self._files.makedirs(place, exist_ok=True)
            for name, record in records.items():
                self._put(checkpoint / name, f"{place}/{name}", record)
            content = (checkpoint / MANIFEST_FILE).read_bytes()
            temporary = f"{place}/{MANIFEST_FILE}"
            if self._is_local:
                # A store has an object whole or not at all; a folder needs a rename for that.
                with open_new(Path(f"{temporary}.tmp")) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(f"{temporary}.tmp", temporary)
                for folder in (Path(place), Path(self._root)):
                    sync(folder)
            else:
                self._files.pipe_file(temporary, content)

        self._answered(f"step {step} cannot be archived", copy)

    def fetch(self, step: int, folder: Path) -> None:
        """Copies the files of a checkpoint into a folder, durably, its manifest last. Raises
        StateError if one is not that of the manifest."""
        place = f"{self._root}/{step}"

        def copy() -> None:
            self._files.invalidate_cache()
            try:
                content, (_, records) = self._manifest(step)
            except NOT_A_MANIFEST as error:
                raise StateError(f"{self.shown}/{step}: not a manifest ({error})") from error
            for name, record in records.items():
                there = self._files.open(f"{place}/{name}", "rb")
                with there as source, open_new(folder / name) as target:
                    copied = self._copied(source, target)
                    target.flush()
                    os.fsync(target.fileno())
                self._compare(f"{place}/{name}", copied, record)
            with open_new(folder / MANIFEST_FILE) as target:
                target.write(content)
                target.flush()
                os.fsync(target.fileno())
            sync(folder)

        self._answered(f"step {step} cannot be fetched", copy)

    def drop_others(self, keep: int | None) -> None:
        """Removes checkpoints older than the newest `keep`; none for None."""
        if keep is None:
            return
        older = self.steps()[keep:]

        def remove() -> None:
            for step in older:
                self._remove(step)

        self._answered("cannot be cleared", remove)

    def _manifest(self, step: int) -> tuple[bytes, tuple[int, dict[str, FileRecord]]]:
        """Text of a checkpoint's manifest, and its content; fails with NOT_A_MANIFEST."""
        path = f"{self._root}/{step}/{MANIFEST_FILE}"
        content: bytes = self._files.cat_file(path, 0, _MOST_MANIFEST_BYTES)
        self._progress = time.monotonic()
        return content, parsed_manifest(json.loads(content))

    def _list_steps(self) -> list[int]:
        self._files.invalidate_cache()
        try:
            names = [name.rstrip("/") for name in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        steps = [name for name in names if STEP_FOLDER.fullmatch(Path(name).name)]
        whole = [name for name in steps if self._files.exists(f"{name}/{MANIFEST_FILE}")]
        return sorted((int(Path(name).name) for name in whole), reverse=True)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, its manifest first: what a kill leaves is none."""
        place = f"{self._root}/{step}"
        for path in (f"{place}/{MANIFEST_FILE}", place):
            with suppress(FileNotFoundError):
                self._files.rm(path, recursive=path == place)
        self._progress = time.monotonic()

    def _put(self, source: Path, target: str, record: FileRecord) -> None:
        """Copies a file, and reads it back."""
        with source.open("rb") as file, self._files.open(target, "wb") as there:
            copied = self._copied(file, there)
            if self._is_local:
                there.flush()
                os.fsync(there.fileno())
        self._compare(str(source), copied, record)
        self._files.invalidate_cache()
        with self._files.open(target, "rb") as there:
            self._compare(target, self._copied(there, None), record)

    def _copied(self, source: IO[bytes], target: IO[bytes] | None) -> FileRecord:
        """Size and digest of what is read and, with a target, written."""
        sha256 = hashlib.sha256()
        num_bytes = 0
        while chunk := source.read(CHUNK_BYTES):
            sha256.update(chunk)
            num_bytes += len(chunk)
            if target is not None:
                target.write(chunk)
            self._progress = time.monotonic()
        return {"bytes": num_bytes, "sha256": sha256.hexdigest()}

    def _compare(self, path: str, copied: FileRecord, record: FileRecord) -> None:
        if copied != record:
            raise StateError(f"{redacted_text(path)}: its content has changed (sha256 differs)")

    def _answered(self, what: str, action: Callable[[], T]) -> T:
        """Returns the result of `action`, which runs in a thread: packages for stores have no time
        limit in common."""
        results: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

        def run() -> None:
            try:
                results.put((action(), None))
            except Exception as error:
                results.put((None, error))

        self._progress = time.monotonic()
        threading.Thread(target=run, name="archive-call", daemon=True).start()
        while True:
            left = self._progress + self._seconds - time.monotonic()
            try:
                result, error = results.get(timeout=max(left, 0.0))
                break
            except queue.Empty:
                if self._progress + self._seconds <= time.monotonic():
                    cause = TimeoutError(f"no answer for {self._seconds:g} s")
                    raise self._failed(what, cause) from cause
        if error is None:
            return result
        if isinstance(error, TrainingError):
            raise error
        raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> InfrastructureError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        told = redacted_text(reason) or type(error).__name__
        return InfrastructureError(f"{self.shown}: {what}: {told}")


class Uploads:
    """Uploads of a run's checkpoints by a thread of this process, one at a time, the newest first.

    What fails is a warning. A checkpoint that waits for the one before is left out when a newer
    one is there.
    """

    def __init__(self, archive: Archive, *, every_steps: int | None, keep: int | None) -> None:
        self._archive = archive
        self._every_steps = every_steps or 1
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._under_way: Path | None = None
        self._is_closed = False
        self._last_step: int | None = None  # uploaded, or tried
        self.steps: list[int] = []  # in the archive, as far as known
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    @property
    def pinned(self) -> frozenset[int]:
        """Steps whose checkpoints are still to be read."""
        with self._changed:
            paths = (self._waiting, self._under_way)
            return frozenset(step_of(path) for path in paths if path is not None)

    def offer(self, checkpoint: Path, *, is_last: bool = False) -> None:
        """Has a checkpoint archived if it is due; returns at once."""
        step = step_of(checkpoint)
        with self._changed:
            last = self._last_step
            # After a rollback steps begin again.
            is_due = last is None or step < last or step - last >= self._every_steps
            if step != last and (is_due or is_last):
                self._waiting = checkpoint
                self._last_step = step
                self._changed.notify_all()

    def finish(self, *, seconds: float) -> None:
        """Waits for the uploads for so long, and tells of one that is not done."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._under_way:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    left = self._waiting or self._under_way
                    assert left is not None, "the condition of the loop"
                    self._warn(left, f"not done within {seconds:.0f} s")
                    break

    def close(self) -> None:
        """Ends the thread after the upload under way, without waiting for it."""
        with self._changed:
            self._is_closed = True
            self._waiting = None
            self._changed.notify_all()

    def _run(self) -> None:
        with suppress(InfrastructureError):
            self.steps = self._archive.steps()
        while True:
            with self._changed:
                self._under_way = None
                self._changed.notify_all()
                while self._waiting is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
                self._under_way, self._waiting = self._waiting, None
            self._upload(self._under_way)

    def _upload(self, checkpoint: Path) -> None:
        began = time.monotonic()
        for seconds in (*UPLOAD_RETRY_SECONDS, None):
            try:
                self._archive.upload(checkpoint)
                self._archive.drop_others(self._keep)
                self.steps = self._archive.steps()
            except (TrainingError, OSError, *NOT_A_MANIFEST) as error:
                if seconds is None or self._waiting is not None:
                    self._warn(checkpoint, str(error))
                    return
                logger.info("%s; tried again in %.0f s", error, seconds)
                time.sleep(seconds)
            else:
                break
        where = f"{self._archive.shown}/{checkpoint.name}"
        logger.info("archived %s in %.2f s", where, time.monotonic() - began)

    def _warn(self, checkpoint: Path, why: str) -> None:
        self.failures += 1
        logger.warning(
            "warning: checkpoint.tiers.archive: has no checkpoint of step %s: %s",
            *(checkpoint.name, why),
        )
