"""Built folders of known tokens, for tests of what reads them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cdrmix.data.shards import (
    TokenizerInfo,
    new_manifest,
    read_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
    write_shards,
)
from cdrmix.data.token_dataset import TokenDataset


def write_token_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Sequence[int]]],
    *,
    vocab_size: int = 4096,
    max_tokens: int = 2**27,
    tokenizer_file: bytes = b"{}",
) -> Path:
    """A folder with one document per sequence of ids, 3 bytes of text per token.

    Args:
        splits: documents by split, or by `split/domain` for another domain than code.
        tokenizer_file: content of tokenizer.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for name, documents in splits.items():
        split, _, domain = name.partition("/")
        shards += write_shards(
            folder,
            ((np.array(ids), 3 * len(ids)) for ids in documents),
            split=split,
            domain=domain or "code",
            dtype=smallest_dtype(vocab_size),
            max_tokens=max_tokens,
        )
    file = write_file(folder / "tokenizer.json", tokenizer_file)
    tokenizer = TokenizerInfo(file="tokenizer.json", sha256=file.sha256, num_tokens=300)
    manifest = new_manifest(
        shards, vocab_size=vocab_size, tokenizer=tokenizer, eos_id=0, source={"text": "counting"}
    )
    write_manifest(folder, manifest)
    return folder


def write_counting_folder(folder: Path, num_tokens: int, *, max_tokens: int = 2**27) -> Path:
    """A training split whose tokens are 0, 1, 2, ...: a row names the place it is from."""
    return write_token_folder(
        folder, {"train": [range(num_tokens)]}, vocab_size=num_tokens, max_tokens=max_tokens
    )


def write_backwards(folder: Path, corpus: Path, *, length: int) -> Path:
    """Some rows of a data set backwards, by its own tokenizer: other data for the same model.

    Args:
        length: tokens of a row.
    """
    folder.mkdir()
    manifest = read_manifest(corpus)
    shutil.copy(corpus / "tokenizer.json", folder)
    shards = []
    for split in ("train", "validation"):
        dataset = TokenDataset(corpus, split, length)
        rows = dataset.rows(np.arange(min(40, dataset.num_samples)))[:, ::-1]
        documents = ((row, 3 * len(row)) for row in rows)
        shards += write_shards(folder, documents, split=split, domain="new", dtype=manifest.dtype)
    made = new_manifest(
        shards,
        vocab_size=manifest.vocab_size,
        tokenizer=manifest.tokenizer,
        eos_id=manifest.eos_id,
        source={"text": "backwards"},
    )
    write_manifest(folder, made)
    return folder
