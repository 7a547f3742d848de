"""Durable files: digested while they are written, and flushed to the device before they count. The
manifest of a checkpoint holds size and sha256 of its files. It is written last, and read first.

Without torch until a tensor is written: checkpoints are looked for before a start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from cdrmix.data.folders import open_new
from cdrmix.errors import DataError, InfrastructureError, StateError
from cdrmix.log import get_logger

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = get_logger(__name__)
# A system call and a thread hand-over cost little in comparison.
CHUNK_BYTES = 16 * 2**20
# safetensors' names of element types, by those of torch.
SAFETENSORS_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Pauses before a failed read is repeated: a file server that fails over is back within these.
READ_RETRY_SECONDS = (1.0, 4.0, 10.0)
# Errors of the server or the way to it, not of the file. EACCES is one: NFS returns it while a
# Kerberos ticket is renewed. ENOSPC and EDQUOT are not: waiting frees nothing.
_PASSING = {
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "ETIMEDOUT", "EACCES", "EAGAIN", "EINTR", "EBUSY", "ENFILE", "EMFILE"),
        *("ENOTCONN", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH"),
        *("ENETDOWN", "ENETUNREACH", "EREMOTEIO", "ENOLINK", "ESHUTDOWN", "ENODEV", "ENXIO"),
    )
}


def is_passing(error: BaseException | None) -> bool:
    """True for an error of the file system's present state, which is no evidence of damage."""
    return isinstance(error, OSError) and error.errno in _PASSING


def retried(read: Callable[[], T], path: Path) -> T:
    """Calls `read`, again after pauses while the file system fails, and returns its result. Raises
    InfrastructureError naming `path` after the last pause, any other failure at once.

    A failure is an OSError, or a DataError with one as its cause.
    """
    for seconds in (*READ_RETRY_SECONDS, None):
        try:
            return read()
        except (OSError, DataError) as raised:
            error = raised.__cause__ if isinstance(raised, DataError) else raised
            if not isinstance(error, OSError) or not is_passing(error):
                raise
            if seconds is None:
                raise InfrastructureError(
                    f"{error.filename or path}: cannot be read for now: {error.strerror}, tried "
                    f"{len(READ_RETRY_SECONDS) + 1} times. Start again with --resume auto when the "
                    "file system answers. If this file is lost for good, move its checkpoint "
                    "folder away to resume from an older one"
                ) from error
            name = error.filename or path
            logger.warning("%s: %s; read again in %.0f s", name, error.strerror, seconds)
            time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


def read_json(path: Path) -> Any:
    """Content of a JSON file, read as by `retried`. Raises OSError if there is no such plain file,
    ValueError if it is no JSON or nested too deeply."""
    try:
        return json.loads(retried(lambda: plain_file(path).read_text(encoding="utf-8"), path))
    except RecursionError as error:  # the file may come from anywhere
        raise ValueError("nested too deeply") from error


def plain_file(path: Path) -> Path:
    """Returns the path of a regular file. Raises OSError for links, pipes and devices, whose
    content is not the folder's, or never ends."""
    if not stat.S_ISREG(path.lstat().st_mode):
        # EINVAL is not among the passing errors: waiting does not make a file of a link.
        raise OSError(errno.EINVAL, "not a regular file (links are not followed)", str(path))
    return path


class FileRecord(TypedDict):
    """Entry of a manifest for one file."""

    bytes: int
    sha256: str


def write_text(path: Path, text: str) -> FileRecord:
    """Writes `text` durably. Raises OSError naming `path`."""
    return _write(path, [memoryview(text.encode())])


def write_json(path: Path, value: Any) -> FileRecord:
    """Writes `value` as JSON durably. Raises OSError naming `path`."""
    return write_text(path, json.dumps(value, indent=1) + "\n")


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, torch.Tensor]], data: Iterable[torch.Tensor]
) -> FileRecord:
    """Writes a safetensors file durably, with one tensor in host memory at a time.

    `tensors` have distinct keys, the widest element types first: the format allows no gaps, and
    torch needs aligned offsets. `data` are tensors on any device that together hold their bytes.
    """
    assert len({key for key, _ in tensors}) == len(tensors), "a key is there twice"
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, tensor in tensors:
        end = position + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_TYPES[str(tensor.dtype).removeprefix("torch.")]
        offsets = [position, end]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = end
    header = json.dumps(entries).encode()
    # The data begins at a multiple of 8, as the widest element needs it.
    header += b" " * (-len(header) % 8)
    start = memoryview(len(header).to_bytes(8, "little") + header)
    return _write(path, chain([start], (flat_bytes(each).cpu().numpy().data for each in data)))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, uint8, on its device; a view where it is contiguous."""
    import torch

    flat = tensor.detach().reshape(-1).contiguous()
    # A single element counts as contiguous whatever its stride; a byte view does not.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def digest(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path, record: FileRecord) -> None:
    """Copies a file of a checkpoint durably. Raises OSError naming either, StateError if it is not
    the one of its record, by size and digest."""
    with plain_file(source).open("rb") as file:
        read = iter(lambda: memoryview(file.read(CHUNK_BYTES)), b"")
        copied = _write(target, read)
    if copied != record:
        raise StateError(f"{source}: its content has changed (sha256 differs)")


def _write(path: Path, parts: Iterable[memoryview]) -> FileRecord:
    """Writes bytes that are on the device when it returns; errors name `path`."""
    sha256 = hashlib.sha256()
    num_bytes = 0
    try:
        with ThreadPoolExecutor(1) as hasher, open_new(path) as file:
            for part in parts:
                for first in range(0, part.nbytes, CHUNK_BYTES):
                    chunk = part[first : first + CHUNK_BYTES]
                    # hashlib releases the GIL, so that the digest and the write really overlap.
                    hashing = hasher.submit(sha256.update, chunk)
                    try:
                        file.write(chunk)
                    finally:  # the caller may reuse the memory of a chunk
                        hashing.result()
                    del chunk
                num_bytes += part.nbytes
                # Or this tensor would stay in host memory while the next is copied there.
                del part
            # Errors of delayed allocation and of NFS come with fsync: a file counts after it alone.
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return {"bytes": num_bytes, "sha256": sha256.hexdigest()}


# Part of each manifest: a later format is refused here instead of being read wrongly.
FORMAT = 1
# Written last: a folder that has it, under any name, was completed as a checkpoint.
MANIFEST_FILE = "manifest.json"
# A manifest may come from anywhere: a name in it must not lead out of the checkpoint's folder.
_FILE_NAME = re.compile(r"(rank-[0-9]{5,9}\.(safetensors|json)|index\.json|state\.json)")
NOT_A_MANIFEST = (ValueError, TypeError, KeyError, AttributeError)


def save_number(folder: Path) -> int | None:
    """Number of the save that wrote a checkpoint, counted through all starts and rollbacks; 0 of a
    version that did not count, None without a readable manifest. Raises as `retried` does."""
    try:
        return read_manifest(folder)[0]
    except (OSError, *NOT_A_MANIFEST):  # damage, which `damage` reports with its reason
        return None


def damage(folder: Path, *, part: int = 0, parts: int = 1, with_digests: bool = True) -> list[str]:
    """Reasons why a checkpoint is damaged; empty for a whole one. Checks share number `part` of the
    files, of `parts` with about as many bytes each: sizes, and sha256 `with_digests`. Raises
    InfrastructureError if the file system does not answer: no evidence against the files."""
    try:
        _, files = read_manifest(folder)
    except (OSError, *NOT_A_MANIFEST) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a manifest ({error})"
        return [f"{MANIFEST_FILE}: {reason}"]
    # By size, in turn: with one tensor file per rank, each share gets about as many bytes.
    largest_first = sorted(files, key=lambda name: -files[name]["bytes"])
    reasons = []
    for name in largest_first[part::parts]:
        path = folder / name
        try:
            reason = retried(partial(_file_damage, path, files[name], with_digests), path)
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            reasons.append(f"{name}: {reason}")
    return reasons


def read_manifest(folder: Path) -> tuple[int, dict[str, FileRecord]]:
    """Number of the save, and records of all files; fails with NOT_A_MANIFEST, or OSError."""
    return parsed_manifest(read_json(folder / MANIFEST_FILE))


def parsed_manifest(manifest: Any) -> tuple[int, dict[str, FileRecord]]:
    """As `read_manifest`, of a manifest's content, which may come from anywhere; fails with
    NOT_A_MANIFEST."""
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
    # Older versions did not number their saves.
    return int(manifest.get("save", 0)), files


def _file_damage(path: Path, record: FileRecord, with_digests: bool) -> str:
    """Reason why a file differs from its record; empty if it does not."""
    # The size first: it finds truncation without reading the file.
    size = plain_file(path).lstat().st_size
    if size != record["bytes"]:
        return f"{size} bytes, {record['bytes']} were written"
    if with_digests and digest(path) != record["sha256"]:
        return "its content has changed (sha256 differs)"
    return ""
