"""Token shards to texts in WebDataset's tar files, for other trainers and other tokenizers."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cdrmix.data.chain_of_thought import fields_of
from cdrmix.data.fim import restored
from cdrmix.data.folders import new_folder
from cdrmix.data.shards import (
    REBUILD,
    Manifest,
    ShardInfo,
    read_lengths,
    read_manifest,
    verify_shards,
)
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer
from cdrmix.errors import DataError


class _Text(NamedTuple):
    """A document: the shard that it begins in, its number there, and its tokens without EOS."""

    shard: ShardInfo
    number: int
    ids: list[int]


def export_tars(folder: Path, out: Path) -> int:
    """Write the documents of a built folder, a tar file per shard.

    A document is `<shard>-<number>.txt` and `.json`, the latter with its split and domain; one that
    was rearranged for infilling is in its own order again, and a chain of thought is in `.json`
    alone, as prompt, thought and answer. Equal folders give equal bytes. A source of type local
    reads the tar files again.

    Args:
        folder: of token shards; it is verified first.
        out: folder to make.
    Returns:
        Documents written.
    Raises:
        DataError: if `folder` is not a whole built folder, or `out` exists or cannot be written.
    """
    if out.exists():
        raise DataError(f"{out}: exists already. Give another --out.")
    manifest = read_manifest(folder)
    verify_shards(folder, manifest)
    tokenizer = load_tokenizer(folder)
    num_documents = 0
    try:
        with new_folder(out) as new:
            for stem, texts in itertools.groupby(
                _documents(folder, manifest), lambda text: text.shard.stem
            ):
                num_documents += _write_tar(new / f"{stem}.tar", texts, tokenizer)
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror}.") from error
    return num_documents


def _documents(folder: Path, manifest: Manifest) -> Iterator[_Text]:
    """The documents of all shards; those that were cut at the end of one are whole again."""
    begun: _Text | None = None
    for shard in manifest.shards:
        lengths = read_lengths(folder, shard)
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        tokens = np.memmap(folder / f"{shard.stem}.bin", dtype=dtype, mode="r")
        end = 0
        for number, length in enumerate(lengths.tolist()):
            piece = tokens[end : end + length].tolist()
            end += length
            begun = begun or _Text(shard, number, [])
            begun.ids.extend(piece)
            if piece[-1] == manifest.eos_id:
                del begun.ids[-1]
                yield begun
                begun = None
    if begun is not None:
        raise DataError(f"{folder}: its last document does not end with EOS. {REBUILD}")


def _write_tar(path: Path, texts: Iterator[_Text], tokenizer: Tokenizer) -> int:
    num_documents = 0
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for text in texts:
            key = f"{text.shard.stem}-{text.number:08d}"
            fields = {"split": text.shard.split, "domain": text.shard.domain}
            parts = fields_of(text.ids, tokenizer)
            if parts is None:
                content = tokenizer.decode(restored(text.ids, tokenizer))
                _add(archive, f"{key}.txt", content.encode())
            _add(archive, f"{key}.json", json.dumps(fields | (parts or {})).encode())
            num_documents += 1
    return num_documents


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its time is 0, its owner nobody in particular
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
