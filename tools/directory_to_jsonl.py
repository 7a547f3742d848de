"""A directory as JSON lines: every file that `cdrmix data build` can read, in numbered shards.

python tools/directory_to_jsonl.py DIRECTORY --out FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cdrmix.corpus.source import SourceConfig, find_files
from cdrmix.corpus.steps.read import read_file
from cdrmix.data.document import Document
from cdrmix.data.folders import new_folder
from cdrmix.errors import EXIT_DONE, DataError, TrainingError


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a directory's texts as JSON lines.")
    parser.add_argument("directory", type=Path, help="what to read")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--name", default="directory", help="source in the ids; default directory")
    parser.add_argument("--domain", default="prose", help="domain of the texts; default prose")
    parser.add_argument(
        "--shard-mb", type=float, default=256, help="size of a shard before gzip; default 256"
    )
    parser.add_argument("--gzip", action="store_true", help="compress the shards")
    return parser.parse_args(arguments)


def write_directory(args: argparse.Namespace) -> tuple[int, int]:
    """Write shards and set_aside.jsonl; all of it appears, or nothing.

    Returns:
        Number of documents written, and of files and rows set aside.
    Raises:
        DataError: if there is nothing to read, or `out` exists or cannot be written.
    """
    if args.out.exists():
        raise DataError(f"{args.out}: exists. Give a folder that is to be made.")
    try:
        source = SourceConfig(
            name=args.name, type="local", path=str(args.directory), domain=args.domain
        )
    except ValidationError as error:
        wrong = ", ".join(f"--{problem['loc'][0]} {problem['input']}" for problem in error.errors())
        raise DataError(f"{wrong}: allowed are names of a-z, 0-9, _ and -.") from None
    set_aside: list[dict[str, Any]] = []
    try:
        with new_folder(args.out) as folder:
            shards = Shards(folder, int(args.shard_mb * 1e6), compress=args.gzip)
            for document in _documents(source, set_aside):
                shards.add(document)
            shards.close()
            lines = "".join(json.dumps(entry) + "\n" for entry in set_aside)
            (folder / "set_aside.jsonl").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{error.filename or args.out}: {error.strerror}") from error
    return shards.num_documents, len(set_aside)


def _documents(source: SourceConfig, set_aside: list[dict[str, Any]]) -> Iterator[Document]:
    def note(file: str, row: int | None, reason: str, detail: str) -> None:
        set_aside.append({"file": file, "row": row, "reason": reason, "detail": detail})

    found = find_files(source)
    for name, reason in found.unreadable:
        note(name, None, reason, "")
    for file in found.files:
        yield from read_file(file, source, note)


class Shards:
    """Files `documents-00000.jsonl[.gz]` of at most `max_bytes`, a longer document apart."""

    def __init__(self, folder: Path, max_bytes: int, *, compress: bool) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._compress = compress
        self._file: Any = None
        self._size = self._number = 0
        self.num_documents = 0

    def add(self, document: Document) -> None:
        """Write one document."""
        entry = {"id": document.id, "text": document.text} | document.metadata
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        if self._file is None or self._size + len(line) > self._max_bytes:
            self._next()
        self._file.write(line)
        self._size += len(line)
        self.num_documents += 1

    def close(self) -> None:
        """End the last shard."""
        if self._file is not None:
            self._file.close()

    def _next(self) -> None:
        self.close()
        path = self._folder / f"documents-{self._number:05d}.jsonl{'.gz' * self._compress}"
        # Without a time inside, equal directories give equal files.
        self._file = gzip.GzipFile(path, "wb", mtime=0) if self._compress else path.open("wb")
        self._size = 0
        self._number = self._number + 1


def main(arguments: list[str]) -> int:
    """Parse and write; returns the exit code."""
    args = parse(arguments)
    try:
        num_documents, num_set_aside = write_directory(args)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.out}: {num_documents:,} documents; {num_set_aside:,} set aside")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
