"""Token shards on disk: writing, the manifest, verification; token_dataset.py reads samples.

A built folder holds `manifest.json`, `tokenizer.json` and, per split and domain, numbered pairs
`train-code-00000.bin` (token ids, nothing else) and `.idx` (lengths and offsets of documents) in
the layout of DeepSpeed's MMapIndexedDataset (deepspeed/runtime/data_pipeline/data_sampling/
indexed_dataset.py), whose dtype codes are not Megatron-LM's: uint16 is 6 there, 8 in Megatron-LM.
"""

import hashlib
import json
import os
import pwd
import shlex
import stat
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cdrmix.data.folders import open_new
from cdrmix.data.remote import remote_files
from cdrmix.data.tokenizer_base import SideFile
from cdrmix.errors import DataError

MANIFEST_FILE = "manifest.json"
MAX_SHARD_TOKENS = 2**27
SHARD_SUFFIXES = ("bin", "idx", "roles")
# Trillions of tokens in shards of `MAX_SHARD_TOKENS` need some tens of MB.
MAX_MANIFEST_BYTES = 2**28
# A manifest may be untrusted, and its names become names of files and lines of a terminal:
# no separators, no control characters, nothing that begins with a dot or hyphen. 200 characters
# leave room for suffixes below the 255 bytes of a file name.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_VERSION = 1
_IDX_HEADER = "<9sQBQQ"  # magic, version, code of the dtype, number of documents, of bounds
_DTYPE_CODES = {"uint16": 6, "uint32": 7}
REBUILD = (
    "Copy the folder again from where it is whole, or delete it and build it again "
    "(`cdrmix data sample` for the sample corpus)."
)

Dtype = Literal["uint16", "uint32"]
# token ids that end with EOS, and the bytes of their text as UTF-8
Document = tuple[NDArray[Any], int]


class _Record(BaseModel):
    # Unknown keys are refused: a manifest of a later format must not be read by half.
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileInfo(_Record):
    """Size in bytes and sha256 (hex) of one file."""

    bytes: int = Field(ge=0)
    sha256: str


class ShardInfo(_Record):
    """One `.bin/.idx` pair; `text_bytes` is the UTF-8 size of the text behind its tokens.

    `roles` is a third file for documents with parts other than plain text: a byte per token, an
    index into `cdrmix.data.document.ROLES`.
    """

    stem: str = Field(pattern=_NAME)
    split: str = Field(pattern=_NAME)
    domain: str = Field(pattern=_NAME)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    text_bytes: int = Field(ge=0)
    bin: FileInfo
    idx: FileInfo
    roles: FileInfo | None = None

    def files(self) -> dict[str, FileInfo]:
        """Existing files of the shard, by suffix."""
        infos = {"bin": self.bin, "idx": self.idx, "roles": self.roles}
        return {suffix: info for suffix, info in infos.items() if info is not None}


class SplitInfo(_Record):
    """Sums over the shards of one split."""

    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    text_bytes: int = Field(ge=0)


class TokenizerInfo(_Record):
    """The tokenizer that the shards were encoded with; the defaults are those of our own.

    Attributes:
        num_tokens: largest id plus 1.
        content_sha256: of the parts of the file that decide the ids, for comparison with others.
        document_prefix: ids that each document begins with, such as BOS.
        pad_id: token that fills rows.
        files: what lies beside the file and belongs to it.
    """

    file: Literal["tokenizer.json"]
    sha256: str
    num_tokens: int = Field(ge=1)
    kind: Literal["cdrmix", "foreign"] = "cdrmix"
    content_sha256: str | None = None
    document_prefix: tuple[int, ...] = ()
    pad_id: int | None = None
    files: dict[SideFile, FileInfo] = {}

    def digests(self) -> dict[str, str]:
        """sha256 (hex) of all files of the tokenizer, by name."""
        return {self.file: self.sha256} | {name: info.sha256 for name, info in self.files.items()}


class Manifest(_Record):
    """Content of a built folder. `vocab_size` counts the slots asked for, not the tokens in use."""

    format_version: Literal[1]
    vocab_size: int
    tokenizer: TokenizerInfo
    eos_id: int
    dtype: Dtype
    splits: dict[str, SplitInfo]
    shards: tuple[ShardInfo, ...]
    source: dict[str, Any]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        """Checks sizes against each other: readers map files by the number of tokens."""
        stems = {shard.stem for shard in self.shards}
        if len(stems) < len(self.shards):
            raise ValueError("two shards have the same stem")
        for shard in self.shards:
            num_bytes = {"bin": shard.tokens * np.dtype(self.dtype).itemsize, "roles": shard.tokens}
            for suffix, info in shard.files().items():
                if info.bytes != num_bytes.get(suffix, info.bytes):
                    raise ValueError(
                        f"{shard.stem}.{suffix} has {info.bytes} bytes and the shard "
                        f"{shard.tokens} tokens of {self.dtype}"
                    )
        if self.splits != _split_totals(self.shards):
            raise ValueError("splits are not the sums over the shards")
        return self


def smallest_dtype(vocab_size: int) -> Dtype:
    """uint16 if it holds every id below `vocab_size`, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_shards(
    folder: Path,
    documents: Iterable[Document],
    *,
    split: str,
    domain: str,
    dtype: Dtype,
    max_tokens: int = MAX_SHARD_TOKENS,
) -> list[ShardInfo]:
    """Writes documents of one split and domain as numbered shards of `max_tokens`, fsynced."""
    shards = []
    for number, group in enumerate(_group(documents, max_tokens)):
        stem = f"{split}-{domain}-{number:05d}"
        # A cast alone would wrap an id that does not fit.
        largest = np.iinfo(dtype).max
        assert all(ids.min() >= 0 and ids.max() <= largest for ids, _ in group), dtype
        pieces = [ids.astype(np.dtype(dtype).newbyteorder("<")) for ids, _ in group]
        sizes = np.array([len(piece) for piece in pieces], dtype="<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
        offsets = np.concatenate([[0], ends[:-1]]).astype("<i8")
        bounds = np.arange(len(sizes) + 1, dtype="<i8")  # of documents, of one sequence each
        header = struct.pack(
            _IDX_HEADER, _IDX_MAGIC, _IDX_VERSION, _DTYPE_CODES[dtype], len(sizes), len(bounds)
        )
        index = header + sizes.tobytes() + offsets.tobytes() + bounds.tobytes()
        shards.append(
            ShardInfo(
                stem=stem,
                split=split,
                domain=domain,
                tokens=sum(map(len, pieces)),
                documents=len(pieces),
                text_bytes=sum(text_bytes for _, text_bytes in group),
                bin=write_pieces(folder / f"{stem}.bin", pieces),
                idx=write_file(folder / f"{stem}.idx", index),
            )
        )
    return shards


def _group(documents: Iterable[Document], max_tokens: int) -> Iterator[list[Document]]:
    """Groups consecutive documents, as many as fit into one shard."""
    group: list[Document] = []
    tokens = 0
    for ids, text_bytes in documents:
        for start in range(0, len(ids), max_tokens):
            piece = ids[start : start + max_tokens]  # a document may be longer than a shard
            if tokens + len(piece) > max_tokens:
                yield group
                group = []
                tokens = 0
            # The text counts once, with the first piece.
            group.append((piece, text_bytes if start == 0 else 0))
            tokens += len(piece)
    if group:
        yield group


def write_file(path: Path, content: bytes) -> FileInfo:
    """Writes `content` and waits until it is on the disk."""
    return write_pieces(path, [content])


def write_pieces(path: Path, pieces: Iterable[bytes | NDArray[Any]]) -> FileInfo:
    """Writes pieces one after the other and waits until they are on the disk."""
    digest = hashlib.sha256()
    with open_new(path) as file:
        for piece in pieces:
            content = piece if isinstance(piece, bytes) else piece.tobytes()
            file.write(content)
            digest.update(content)
        file.flush()
        os.fsync(file.fileno())
        return FileInfo(bytes=file.tell(), sha256=digest.hexdigest())


def read_lengths(folder: Path, shard: ShardInfo) -> NDArray[np.int32]:
    """Tokens of each document of a shard, from its .idx file; DataError if it does not fit."""
    path = folder / f"{shard.stem}.idx"
    with path.open("rb") as file:
        # The header's own count is ignored: a wrong one would allocate memory before it is noticed.
        file.seek(struct.calcsize(_IDX_HEADER))
        lengths = np.frombuffer(file.read(4 * shard.documents), "<i4")
    if len(lengths) != shard.documents or lengths.min(initial=1) < 1:
        raise DataError(f"{path}: does not hold lengths of {shard.documents} documents. {REBUILD}")
    total = lengths.sum(dtype=np.int64)
    if total != shard.tokens:
        raise DataError(
            f"{path}: its documents have {total} tokens, the shard has {shard.tokens}. {REBUILD}"
        )
    return lengths


def new_manifest(
    shards: Iterable[ShardInfo],
    *,
    vocab_size: int,
    tokenizer: TokenizerInfo,
    eos_id: int,
    source: dict[str, Any],
) -> Manifest:
    """Manifest of shards written for `vocab_size` slots; `source` is the origin of their text."""
    # plain values, without dates or paths of this machine: equal builds are equal byte by byte
    shards = tuple(shards)
    return Manifest(
        format_version=1,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        eos_id=eos_id,
        dtype=smallest_dtype(vocab_size),
        splits=_split_totals(shards),
        shards=shards,
        source=source,
    )


def _split_totals(shards: Iterable[ShardInfo]) -> dict[str, SplitInfo]:
    """Tokens, documents and text bytes per split."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for shard in shards:
        totals[shard.split].update({name: getattr(shard, name) for name in SplitInfo.model_fields})
    return {split: SplitInfo(**sums) for split, sums in totals.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, whole or not at all; equal manifests give equal bytes."""
    # Written last and renamed: a folder with a manifest is complete.
    partial = folder / f"{MANIFEST_FILE}.partial"
    write_file(partial, f"{_as_json(manifest, indent=2)}\n".encode())
    partial.replace(folder / MANIFEST_FILE)


def read_manifest(
    folder: Path, *, given_as: str = "data.path", recipe: str | None = None
) -> Manifest:
    """Reads the manifest of a built folder; a DataError if it is missing or of another format.

    Args:
        given_as: what the user named the folder by: the key, or an argument of a verb.
        recipe: shipped recipe that the folder is to be built by (`data.recipe`), for the advice.
    """
    path = folder / MANIFEST_FILE
    try:
        return Manifest.model_validate_json(read_regular(path, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        sample = "'sample' or " if given_as == "data.path" else ""  # of the key alone
        command = "cdrmix data sample"
        if recipe is not None:
            words = ("--config", f"model_configs/data/{recipe}.yaml", "--out", str(folder))
            command = shlex.join(["cdrmix", "data", "build", *words])
        raise DataError(
            f"{path}: not found. {given_as} must be {sample}a folder of token shards, "
            f"which holds this file; `{command}` builds one."
        ) from None
    except OSError as error:
        raise DataError(unreadable(path, error)) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:5]
        )
        raise DataError(f"{path}: not a manifest of this version: {problems}. {REBUILD}") from None


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file; a DataError if it is of another kind or has more than `max_bytes`."""
    # a pipe in its place would keep the reader waiting for ever
    num_bytes = check_regular(path)
    if num_bytes > max_bytes:
        raise DataError(f"{path}: has {num_bytes} bytes; at most {max_bytes} are read.")
    return path.read_bytes()


def check_regular(path: Path) -> int:
    """Returns the size of a file in bytes; a DataError if it is of another kind, as a pipe."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file.")
    return status.st_size


def manifest_digest(manifest: Manifest) -> str:
    """sha256 (hex) that names the data set: equal for equal content, whatever the folder."""
    return hashlib.sha256(_as_json(manifest).encode()).hexdigest()


def _as_json(manifest: Manifest, *, indent: int | None = None) -> str:
    # Without absent files of shards: data sets from before there were roles keep their digest, and
    # their checkpoints resume.
    return json.dumps(manifest.model_dump(exclude_defaults=True), indent=indent, sort_keys=True)


def check_vocab(manifest: Manifest, vocab_size: int) -> None:
    """Raises a DataError if an embedding of `vocab_size` rows has none for a token id."""
    if manifest.tokenizer.num_tokens > vocab_size:
        raise DataError(
            f"{manifest.tokenizer.file}: the tokenizer of this data set has "
            f"{manifest.tokenizer.num_tokens} tokens, but model.vocab_size = {vocab_size}. "
            f"Set model.vocab_size to at least {manifest.tokenizer.num_tokens} (the data set was "
            f"built for {manifest.vocab_size}), or build one with a smaller vocabulary."
        )


def verify_shards(
    folder: Path,
    manifest: Manifest,
    *,
    part: int = 0,
    parts: int = 1,
    mode: Literal["digest", "size"] = "digest",
) -> None:
    """Compares files with the manifest: sizes, and in mode 'digest' the sha256 as well.

    The shards of a remote folder are digested when they arrive, and not here.

    Args:
        part: share to check, of `parts` shares of the shards, so that ranks divide the work; the
            tokenizer belongs to share 0, and is small enough to be digested in any mode.
    Raises:
        DataError: naming every missing, truncated or altered file of the share.
    """
    problems = [
        file_problem(folder / f"{shard.stem}.{suffix}", info.bytes, info.sha256, mode=mode)
        for shard in (() if remote_files(folder) else manifest.shards[part::parts])
        for suffix, info in shard.files().items()
    ]
    if part == 0:  # one rank is enough for the tokenizer
        problems += tokenizer_problems(folder, manifest)
    found = [problem for problem in problems if problem is not None]
    if found:
        advice = dict.fromkeys(problem.advice for problem in found if problem.advice)
        raise DataError("\n".join([*(problem.text for problem in found), *advice]))


@dataclass(frozen=True)
class FileProblem:
    """A fault of one file, and what to try against it; empty where the text says it."""

    text: str
    advice: str = REBUILD


def tokenizer_problems(folder: Path, manifest: Manifest) -> list[FileProblem]:
    """Returns the faults of the tokenizer's files."""
    problems = (
        file_problem(folder / name, None, sha256, mode="digest")
        for name, sha256 in manifest.tokenizer.digests().items()
    )
    return [problem for problem in problems if problem is not None]


def file_problem(
    path: Path, num_bytes: int | None, sha256: str, *, mode: Literal["digest", "size"]
) -> FileProblem | None:
    """Returns the fault of one file, or None. `num_bytes` None: its size is not known."""
    try:
        actual_bytes = check_regular(path)
        if num_bytes is not None and actual_bytes != num_bytes:
            return FileProblem(f"{path}: has {actual_bytes} bytes, the manifest says {num_bytes}.")
        # Opened in either mode: the size of a file can be seen without the right to read it.
        with path.open("rb") as file:
            if mode == "size":
                return None
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except DataError as error:
        return FileProblem(str(error))
    except PermissionError as error:
        return FileProblem(unreadable(path, error), advice="")  # the file may well be whole
    except OSError as error:
        return FileProblem(unreadable(path, error))
    if actual != sha256:
        text = f"{path}: altered: its sha256 is {actual}, the manifest says {sha256}."
        return FileProblem(text)
    return None


def unreadable(path: Path, error: OSError) -> str:
    """Says that a file cannot be read, and where permission is missing, whose and what to try."""
    text = f"{path}: cannot be read: {error.strerror or error}."
    if not isinstance(error, PermissionError):
        return text
    user = f"this process runs as user {_user_name(os.geteuid())}"
    try:
        # Outermost first: nothing can be asked about what lies in a folder that is closed.
        folders = reversed(path.absolute().parents)
        culprit = next((folder for folder in folders if not os.access(folder, os.X_OK)), path)
        status = culprit.stat()
    except OSError:
        return f"{text} {user[0].upper()}{user[1:]}; ask the owner of the folder for access."
    owner = _user_name(status.st_uid)
    right = "a+r" if culprit == path else "a+x"
    return (
        f"{text} {culprit} belongs to user {owner}, mode {stat.S_IMODE(status.st_mode):04o}; "
        f"{user}. Let its owner run `chmod {right} {shlex.quote(str(culprit))}`, or change the "
        "owner (chown)."
    )


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:  # in containers, a user may have a number only
        return str(uid)
