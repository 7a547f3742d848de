"""The settings of one source of a data recipe, and the search for its files."""

from __future__ import annotations

import codecs
import json
import os
import stat
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cdrmix.config.plugin import NameOrPlugin, is_plugin
from cdrmix.config.section import Section
from cdrmix.errors import DataError

STANDARD_LIBRARY = "python:stdlib"
# `save_to_disk` of the package `datasets` writes one of these into its folder.
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")
# Installed packages lie below the standard library, under licences of their own.
_INSTALLED_FOLDERS = ("site-packages", "dist-packages")
_SUFFIXES = {
    "text": ".txt .text .md .markdown .rst",
    "html": ".html .htm .xhtml",
    "docx": ".docx",
    "json": ".json",
    "jsonl": ".jsonl .ndjson",
    "csv": ".csv",
    "tsv": ".tsv",
    "tar": ".tar",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "code": ".py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .rs .go .java .kt .scala .js .jsx "
    ".mjs .ts .tsx .cs .fs .vb .rb .php .pl .pm .lua .r .jl .swift .m .mm .hs .ml .mli .ex .exs "
    ".erl .clj .el .lisp .scm .f .f90 .f95 .for .sql .sh .bash .zsh .ps1 .bat .cmake .gradle .mk "
    ".proto .thrift .tex .css .scss .vue .toml .yaml .yml .ini .cfg .diff .patch .s .asm .v .sv "
    ".vhd .zig .nim .d .dart .groovy .tcl .awk .sed .vim",
}
_KIND_OF_SUFFIX = {
    suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()
}
# Source code by its whole name, for lack of a suffix.
_CODE_FILES = {"Makefile", "Dockerfile", "CMakeLists.txt", "Rakefile", "Gemfile", "configure.ac"}
# Compiled files, and third-party packages, in the middle of source code.
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}


# Keys that only sources of ours read.
_OF_FILES = (
    *("path", "encoding", "skip", "subset", "split", "revision", "retries"),
    "max_documents_per_second",
)


class ChainOfThoughtConfig(Section):
    """Keys or columns with the parts of a chain of thought; dots lead into nested objects."""

    prompt: str = Field("prompt", description="Key of the question.")
    thought: str = Field("thought", description="Key of the thought.")
    answer: str = Field("answer", description="Key of the answer.")


class SourceConfig(Section):
    """One source of documents: its place, its format and the limits of reading."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="Short name in reports and document ids: a-z, 0-9, _ and -.",
    )
    type: Annotated[str, NameOrPlugin(("local", "huggingface"))] = Field(
        description="local: a file or folder. huggingface: a data set saved to disk or streamed. "
        "package.module:Name: a TextSource of yours."
    )
    path: str = Field(
        "",
        exclude_if=lambda value: not value,
        description="local: a file or folder, or python:stdlib for the standard library of this "
        "Python. huggingface: a folder, or the name of a data set on the hub.",
    )
    options: dict[str, Any] = Field(
        {},
        exclude_if=lambda value: not value,
        description="Options of a source of yours, which its class checks.",
    )
    domain: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="Kind of text, such as code, prose, web or reference; shards are by domain.",
    )
    text_field: str = Field(
        "text", description="Key or column with the text; dots lead into nested objects."
    )
    chain_of_thought: ChainOfThoughtConfig | None = Field(
        None, description="Fields of documents in three parts; null: documents of one text."
    )
    metadata_fields: tuple[str, ...] = Field(
        ("url", "title", "language", "license"),
        description="Keys or columns stored beside the text, if a row has them; dots lead into "
        "nested objects, and the last part is the name.",
    )
    encoding: str = Field("utf-8", description="Encoding of text files.")
    encoding_errors: Literal["set_aside", "replace"] = Field(
        "set_aside",
        description="For bytes that are not valid in that encoding: set the file or row aside, or "
        "replace them with U+FFFD.",
    )
    # Steps hold a document in memory several times over, in each worker.
    max_document_bytes: int = Field(
        2**25, ge=1, description="Largest text file, row or line to read (bytes)."
    )
    skip: tuple[str, ...] = Field(
        (), description="Patterns of files to skip, such as */test/*; * also matches slashes."
    )
    subset: str | None = Field(None, description="Configuration of a Hugging Face data set.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    revision: str | None = Field(None, description="Commit of a data set on the hub; pin it.")
    # The default bridges three minutes without a connection: 1 + 2 + ... + 32 + 60 + 60 s.
    retries: int = Field(
        8, ge=0, description="Attempts after a failed read of a stream, 1, 2, 4 ... 60 s apart."
    )
    max_documents_per_second: float | None = Field(
        None, gt=0, description="Largest rate at which each worker reads a stream."
    )
    allow_empty: bool = Field(
        False,
        # Left out where it says nothing, so that folders of recipes without it stay theirs.
        exclude_if=lambda value: not value,
        description="Build even if no document of this source is left; false: an error.",
    )

    @property
    def is_plugin(self) -> bool:
        """True for a source of a user's."""
        return is_plugin(self.type)

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Returns the names of the fields that make up a document's text, in order."""
        parts = self.chain_of_thought
        return (self.text_field,) if parts is None else (parts.prompt, parts.thought, parts.answer)

    @field_validator("encoding")
    @classmethod
    def _encoding_exists(cls, encoding: str) -> str:
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise ValueError(f"'{encoding}' is not an encoding; try utf-8 or latin-1") from None
        return encoding

    @model_validator(mode="after")
    def _keys_are_read(self) -> SourceConfig:
        if not self.is_plugin:
            if not self.path:
                raise ValueError(f"path: missing; type {self.type} reads a file or folder")
            if self.options:
                raise ValueError(f"options: type {self.type} takes none")
            return self
        fields = type(self).model_fields
        unread = [key for key in _OF_FILES if getattr(self, key) != fields[key].default]
        if unread:
            raise ValueError(
                f"{', '.join(unread)}: not for a source of yours, {self.type}, which takes options"
            )
        return self


# Records an input that cannot be read: (file, row or None for the whole file, reason in a few
# words, detail).
SetAside = Callable[[str, int | None, str, str], None]


@dataclass(frozen=True)
class SourceFile:
    """A file of a source.

    Attributes:
        name: path relative to the source, with slashes.
        kind: format, a key of `_SUFFIXES`.
        state: (size in bytes, time of change in ns); a change of either makes it another file.
    """

    path: Path
    name: str
    kind: str
    state: tuple[int, int]


@dataclass
class SourceListing:
    """Result of the search for the files of one source.

    Attributes:
        files: of a known kind, sorted by name.
        unreadable: (name, reason) of files and folders that cannot be opened.
        other_kinds: number of files of unknown kinds, by suffix.
    """

    files: list[SourceFile] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    other_kinds: dict[str, int] = field(default_factory=dict)

    def add(self, path: Path, name: str) -> None:
        """Adds a file, by the kind that its name says."""
        plain = path.name.lower().removesuffix(".gz").removesuffix(".zst")
        kind = "code" if path.name in _CODE_FILES else _KIND_OF_SUFFIX.get(Path(plain).suffix)
        # These have a compression of their own, and their readers seek, which a stream cannot.
        if plain != path.name.lower() and kind in ("docx", "parquet", "arrow"):
            kind = None
        if kind is None:
            suffix = path.suffix.lower() or "(no suffix)"
            self.other_kinds[suffix] = self.other_kinds.get(suffix, 0) + 1
        elif not stat.S_ISREG(path.stat().st_mode):  # a reader would wait for a pipe for ever
            self.unreadable.append((name, "not a regular file"))
        else:
            self.files.append(SourceFile(path, name, kind, file_state(path)))


def find_files(source: SourceConfig, *, leave_out: Path | None = None) -> SourceListing:
    """Finds the files of a local source, or of a Hugging Face data set saved to disk.

    Follows symbolic links, except one that leads to a folder above it. Skips names that begin with
    a dot.

    Args:
        leave_out: a folder to skip, such as the one that is being built.
    Raises:
        DataError: if the path does not exist, or holds no file of a known kind.
    """
    root = local_path(source)
    if missing := missing_path(source):
        raise DataError(missing)
    listing = SourceListing()
    if source.type == "huggingface":
        for path in saved_arrow_files(root, source.split):
            name = path.relative_to(root).as_posix()
            listing.files.append(SourceFile(path, name, "arrow", file_state(path)))
    elif root.is_file():
        listing.add(root, root.name)
    else:
        skip = [leave_out] if leave_out is not None else []
        if source.path == STANDARD_LIBRARY:
            skip += [root / name for name in _INSTALLED_FOLDERS]
        hidden = {_identity(path) for path in skip if path.exists()}
        _walk(listing, root, source=source, hidden=hidden, above={_identity(root)})
    # The order of a folder's entries differs between file systems; the corpus must not.
    listing.files.sort(key=lambda file: file.name)
    if not listing.files:
        others = ", ".join(f"{n} {suffix}" for suffix, n in sorted(listing.other_kinds.items()))
        unreadable = "; ".join(f"{name}: {reason}" for name, reason in listing.unreadable[:5])
        kinds = (
            "source code" if kind == "code" else suffixes.replace(" ", ", ")
            for kind, suffixes in _SUFFIXES.items()
        )
        # Lists the files that are there instead, so that a wrong path shows.
        raise DataError(
            f"source '{source.name}': {root}: no file that can be read"
            f"{f'; other kinds: {others}' if others else ''}"
            f"{f'; {unreadable}' if unreadable else ''}."
            f" Kinds read: {', '.join(kinds)}; those of text also as .gz and .zst."
        )
    return listing


def missing_path(source: SourceConfig) -> str | None:
    """Says why the path of a source is not to be found on this machine; None if it is."""
    root = local_path(source)
    try:
        if root.exists():
            return None
    except OSError as error:  # a folder above it is closed to this user
        return f"source '{source.name}': {root}: cannot be read: {error.strerror}."
    return (
        f"source '{source.name}': {root}: no such file or folder. Relative paths start at the "
        f"working directory, {Path.cwd()}."
    )


def local_path(source: SourceConfig) -> Path:
    """Returns the path of a source on this machine."""
    if source.path == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    return Path(source.path).expanduser()


def saved_arrow_files(folder: Path, split: str) -> list[Path]:
    """Returns the Arrow files of one split of a data set saved to disk.

    Raises:
        DataError: if it has no such split, or its state.json is damaged.
    """
    part = folder / split if (folder / "dataset_dict.json").is_file() else folder
    try:
        state: dict[str, Any] = json.loads((part / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        # The data set may be of an untrusted author: state.json must not name files elsewhere.
        if others := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{others[0]!r} is not the name of a file in this folder")
        return [part / name for name in names]
    except FileNotFoundError:
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(
            f"{folder}: a data set saved to disk without the split '{split}'. "
            f"It has: {', '.join(splits) or 'none'}."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{part / 'state.json'}: damaged: {error}") from None


def _walk(
    listing: SourceListing,
    folder: Path,
    *,
    source: SourceConfig,
    hidden: set[tuple[int, int]],
    above: set[tuple[int, int]],
) -> None:
    """Adds the files below a folder to a listing.

    Args:
        hidden: identities of folders to skip.
        above: identities of the folder and of those above it.
    """
    root = local_path(source)

    def name_of(path: Path) -> str:
        # A name that is not valid UTF-8 must not stop the files that record it.
        return path.relative_to(root).as_posix().encode(errors="backslashreplace").decode()

    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        listing.unreadable.append((name_of(folder), f"cannot be read: {error.strerror}"))
        return
    for entry in entries:
        path = Path(entry.path)
        name = name_of(path)
        # Names with a dot are version control, caches and editors' files.
        if entry.name.startswith(".") or any(fnmatch(name, pattern) for pattern in source.skip):
            continue
        try:
            identity = _identity(path)
            if not entry.is_dir():
                listing.add(path, name)
                continue
        except OSError as error:
            listing.unreadable.append((name, f"cannot be read: {error.strerror}"))
            continue
        # Compared by device and inode, since a link gives a folder any number of paths.
        if identity in above:
            listing.unreadable.append((name, "symbolic link loop"))
        elif entry.name not in _SKIPPED_FOLDERS and identity not in hidden:
            _walk(listing, path, source=source, hidden=hidden, above=above | {identity})


def file_state(path: Path) -> tuple[int, int]:
    """Returns size (bytes) and time of change (ns) of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
