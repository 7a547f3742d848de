"""Built folders of known tokens, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cdrmix.data.shards import (
    TokenizerInfo,
    new_manifest,
    smallest_dtype,
    write_file,
    write_manifest,
    write_shards,
)


def write_token_folder(
    folder: Path,
    splits: Mapping[str, Sequence[Sequence[int]]],
    *,
    vocab_size: int = 4096,
    max_tokens: int = 2**27,
) -> Path:
    """A folder with one document per sequence of ids, 3 bytes of text per token.

    Args:
        splits: documents by split, or by `split/domain` for another domain than code.
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
    file = write_file(folder / "tokenizer.json", b"{}")
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
