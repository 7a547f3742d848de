"""Held-out documents: those of a built folder, and texts of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.shards import MANIFEST_FILE, read_manifest
from cdrmix.data.token_dataset import TokenStream
from cdrmix.errors import DataError

# Read of the held-out split, in equal parts from each of its shards: 32 MiB, and thousands of
# documents, of which few hundred are drawn.
_MOST_TOKENS = 2**22
_SUFFIXES = (".txt", ".jsonl")


class HeldOut(NamedTuple):
    """A held-out document of a built folder."""

    tokens: NDArray[np.int64]  # with the ids that each document begins with, without EOS
    domain: str


class Text(NamedTuple):
    """A document of a file."""

    text: str
    domain: str


class Texts(NamedTuple):
    """Documents of files, and the sha256 of each file (hex), by its name in the folder."""

    documents: list[Text]
    digests: dict[str, str]


def held_out_documents(folder: Path) -> list[HeldOut]:
    """Documents of the validation split of a built folder.

    They are held out whole and never rearranged. Of a large split those at the beginning of each
    shard are read. Raises DataError if there are none, or a shard cannot be read.
    """
    manifest = read_manifest(folder)
    shards = [shard for shard in manifest.shards if shard.split == "validation" and shard.tokens]
    if not shards:
        raise DataError(
            f"{folder / MANIFEST_FILE}: holds no held-out documents (split 'validation'). Give "
            "--data with a data set that has some (shards.validation_share of its recipe)"
        )
    stream = TokenStream(folder, shards, manifest.dtype)
    documents: list[HeldOut] = []
    begin = 0
    for shard in shards:
        tokens = stream.rows([begin], min(shard.tokens, _MOST_TOKENS // len(shards)))[0]
        ends = np.flatnonzero(tokens == manifest.eos_id)
        # What is behind the last end is a part of a document.
        pieces = np.split(tokens, ends + 1)[:-1]
        documents += [HeldOut(piece[:-1], shard.domain) for piece in pieces]
        begin += shard.tokens
    return documents


def text_documents(place: Path) -> Texts:
    """Documents of a file, or of all such files below a folder: a whole .txt file, or each line of
    a .jsonl file, whose `text` it is.

    A .jsonl file is a domain, named by its stem, and so are the .txt files of one folder. Documents
    without a character are left out. Raises DataError if there are none, or a file is wrong.
    """
    paths = [place]
    if place.is_dir():
        paths = sorted(path for path in place.rglob("*") if path.suffix in _SUFFIXES)
    if not paths or any(not path.is_file() or path.suffix not in _SUFFIXES for path in paths):
        raise DataError(
            f"{place}: is no text. Give a .txt file, a .jsonl file with a `text` in each line, or "
            "a folder with such files"
        )
    owners: dict[str, Path] = {}
    documents: list[Text] = []
    digests: dict[str, str] = {}
    for path in paths:
        is_whole = path.suffix == ".txt"
        owner = path.parent if is_whole and path != place else path
        domain = owner.resolve().name if owner.is_dir() else owner.stem
        if owners.setdefault(domain, owner) != owner:
            raise DataError(
                f"{place}: {owners[domain]} and {owner} would both be the domain {domain!r}. "
                "Rename one of them"
            )
        content = _read(path)
        name = str(path.relative_to(place)) if path != place else path.name
        digests[name] = hashlib.sha256(content.encode()).hexdigest()
        texts = [content] if is_whole else _texts_of_lines(path, content)
        documents += [Text(text, domain) for text in texts if text]
    if not documents:
        raise DataError(f"{place}: its files have no text. Give files with some")
    return Texts(documents, digests)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as UTF-8 text ({error}). Give a file of text"
        ) from error


def _texts_of_lines(path: Path, content: str) -> Iterator[str]:
    # Other separators of str.splitlines may stand inside of a JSON string.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError) as error:
            text = error
        if not isinstance(text, str):
            raise DataError(
                f"{path}:{number}: is no JSON object with the text of a document under `text`"
            )
        yield text
