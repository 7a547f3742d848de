"""A source of a data recipe, and the files that a local one consists of."""

from __future__ import annotations

import codecs
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from cdrmix.config.model import Section
from cdrmix.errors import DataError

STANDARD_LIBRARY = "python:stdlib"
_INSTALLED_FOLDERS = ("site-packages", "dist-packages")  # stand in it, and are others' code
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
_CODE_FILES = {"Makefile", "Dockerfile", "CMakeLists.txt", "Rakefile", "Gemfile", "configure.ac"}
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}


class ChainOfThoughtConfig(Section):
    """Keys or columns with the parts of a chain of thought; dots lead into nested objects."""

    prompt: str = Field("prompt", description="What is asked.")
    thought: str = Field("thought", description="The way to the answer.")
    answer: str = Field("answer", description="The answer.")


class SourceConfig(Section):
    """Where documents come from and how they are read."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="Short name in reports and document ids: a-z, 0-9, _ and -.",
    )
    type: Literal["local", "huggingface"] = Field(
        description="local: a file or folder. huggingface: a data set saved to disk or streamed."
    )
    path: str = Field(
        description="local: a file or folder, or python:stdlib for the standard library of this "
        "Python. huggingface: a folder, or the name of a data set on the hub."
    )
    domain: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="Kind of text, such as code, prose, web or reference; shards are by domain.",
    )
    text_field: str = Field(
        "text", description="Key or column with the text; dots lead into nested objects."
    )
    chain_of_thought: ChainOfThoughtConfig | None = Field(
        None, description="Documents of three parts, in fields of their own; null: of one text."
    )
    metadata_fields: tuple[str, ...] = Field(
        ("url", "title", "language", "license"),
        description="Keys or columns kept beside the text, where a row has them; dots lead into "
        "nested objects, and the last part is the name.",
    )
    encoding: str = Field("utf-8", description="Encoding of text files.")
    encoding_errors: Literal["set_aside", "replace"] = Field(
        "set_aside",
        description="What is not valid in that encoding: set the file or row aside, or replace "
        "the bytes with U+FFFD.",
    )
    max_document_bytes: int = Field(
        2**25, ge=1, description="Largest file of text, row or line that is read (bytes)."
    )
    skip: tuple[str, ...] = Field(
        (), description="Patterns of files left out, such as */test/*; * also stands for slashes."
    )
    subset: str | None = Field(None, description="Configuration of a Hugging Face data set.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    revision: str | None = Field(None, description="Commit of a data set on the hub; pin it.")
    retries: int = Field(
        8, ge=0, description="Attempts after a failed read of a stream, 1, 2, 4 ... 60 s apart."
    )
    max_documents_per_second: float | None = Field(
        None, gt=0, description="Largest rate at which each worker reads a stream."
    )

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields that a document's text is made of, in order."""
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


# (file, row or None for the whole file, reason in a few words, what exactly)
SetAside = Callable[[str, int | None, str, str], None]


@dataclass(frozen=True)
class SourceFile:
    """A file of a source; `name` is its path below the source's, with slashes.

    `state` (size in bytes, time of change in ns) tells whether it is still the same file.
    """

    path: Path
    name: str
    kind: str
    state: tuple[int, int]


@dataclass
class SourceListing:
    """What a walk through a source has met.

    Attributes:
        files: what can be tried, sorted by name.
        unreadable: (name, reason) of what could not even be looked at.
        other_kinds: files of suffixes that no reader is for (count by suffix).
    """

    files: list[SourceFile] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    other_kinds: dict[str, int] = field(default_factory=dict)


def find_files(source: SourceConfig, *, leave_out: Path | None = None) -> SourceListing:
    """The files of a local source, or of a Hugging Face data set saved to disk.

    Links are followed; one that leads back to a folder above it is set aside. Names that begin
    with a dot are passed over.

    Args:
        leave_out: a folder that is not looked into, such as the one that is being built.
    Raises:
        DataError: if the path does not exist, or nothing below it is of a kind that can be read.
    """
    root = local_path(source)
    if not root.exists():
        raise DataError(
            f"source '{source.name}': {root}: no such file or folder. Relative paths start at the "
            f"working directory, {Path.cwd()}."
        )
    found = SourceListing()
    if source.type == "huggingface":
        found.files = [
            _source_file(path, path.relative_to(root).as_posix(), "arrow")
            for path in saved_arrow_files(root, source.split)
        ]
    elif root.is_file():
        _add(found, root, root.name)
    else:
        passed_by = [leave_out] if leave_out is not None else []
        if source.path == STANDARD_LIBRARY:
            passed_by += [root / name for name in _INSTALLED_FOLDERS]
        hidden = {_identity(path) for path in passed_by if path.exists()}
        _Walk(found, root, source, hidden).into(root, {_identity(root)})
    found.files.sort(key=lambda file: file.name)
    if not found.files:
        raise DataError(_nothing_found(source, root, found))
    return found


def local_path(source: SourceConfig) -> Path:
    """Path of a source on this machine."""
    if source.path == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    return Path(source.path).expanduser()


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets`' save_to_disk has written this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def saved_arrow_files(folder: Path, split: str) -> list[Path]:
    """Arrow files of one split of a data set saved to disk.

    Raises:
        DataError: if it has no such split, or its state.json is damaged.
    """
    part = folder / split if (folder / "dataset_dict.json").is_file() else folder
    try:
        state: dict[str, Any] = json.loads((part / "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
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


@dataclass(frozen=True)
class _Walk:
    """A walk through the folders of a source; `hidden` are identities of those to pass by."""

    found: SourceListing
    root: Path
    source: SourceConfig
    hidden: set[tuple[int, int]]

    def into(self, folder: Path, above: set[tuple[int, int]]) -> None:
        """Look at what is in a folder, whose identity and those above it are in `above`."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self._set_aside(folder, f"cannot be read: {error.strerror}")
            return
        for entry in entries:
            name = _name(Path(entry.path), self.root)
            skipped = any(fnmatch(name, pattern) for pattern in self.source.skip)
            if not skipped and not entry.name.startswith("."):
                self._look_at(entry, name, above)

    def _look_at(self, entry: os.DirEntry[str], name: str, above: set[tuple[int, int]]) -> None:
        path = Path(entry.path)
        try:
            identity = _identity(path)
            if not entry.is_dir():
                _add(self.found, path, name)
                return
        except OSError as error:
            self._set_aside(path, f"cannot be read: {error.strerror}")
            return
        if identity in above:
            self._set_aside(path, "symbolic link loop")
        elif entry.name not in _SKIPPED_FOLDERS and identity not in self.hidden:
            self.into(path, above | {identity})

    def _set_aside(self, path: Path, reason: str) -> None:
        self.found.unreadable.append((_name(path, self.root), reason))


def _add(found: SourceListing, path: Path, name: str) -> None:
    kind = _kind(path.name)
    if kind is None:
        suffix = path.suffix.lower() or "(no suffix)"
        found.other_kinds[suffix] = found.other_kinds.get(suffix, 0) + 1
    elif not stat.S_ISREG(path.stat().st_mode):  # a pipe would keep a reader waiting for ever
        found.unreadable.append((name, "not a regular file"))
    else:
        found.files.append(_source_file(path, name, kind))


def _kind(name: str) -> str | None:
    """Which reader a file name asks for; None: there is none."""
    plain = name.lower().removesuffix(".gz").removesuffix(".zst")
    kind = "code" if name in _CODE_FILES else _KIND_OF_SUFFIX.get(Path(plain).suffix)
    # These have a compression of their own, and are read in any order.
    return None if plain != name.lower() and kind in ("docx", "parquet", "arrow") else kind


def _source_file(path: Path, name: str, kind: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, name, kind, (status.st_size, status.st_mtime_ns))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _name(path: Path, root: Path) -> str:
    # A name that is not valid UTF-8 must not stop the files that record it.
    return path.relative_to(root).as_posix().encode(errors="backslashreplace").decode()


def _nothing_found(source: SourceConfig, root: Path, found: SourceListing) -> str:
    others = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.other_kinds.items()))
    unreadable = "; ".join(f"{name}: {reason}" for name, reason in found.unreadable[:5])
    return (
        f"source '{source.name}': {root}: no file that can be read"
        f"{f'; other kinds: {others}' if others else ''}{f'; {unreadable}' if unreadable else ''}."
        f" Kinds read: {', '.join(_kinds())}; those of text also as .gz and .zst."
    )


def _kinds() -> Iterator[str]:
    for kind, suffixes in _SUFFIXES.items():
        yield "source code" if kind == "code" else suffixes.replace(" ", ", ")
