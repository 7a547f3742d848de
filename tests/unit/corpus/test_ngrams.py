"""Entropy of n-grams against what is known of simple streams."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.corpus.encode import ngram_entropy
from cdrmix.data.shards import read_manifest
from cdrmix.data.token_dataset import TokenStream
from tests.unit.data.token_folder import write_token_folder

EOS = 0


def entropy_of(documents: list[list[int]], folder: Path, **options: int) -> dict[str, Any]:
    write_token_folder(folder, {"train": documents}, max_tokens=1000)
    manifest = read_manifest(folder)
    stream = TokenStream(folder, manifest.shards, manifest.dtype)
    return ngram_entropy(stream, sum(map(len, documents)), EOS, **options)


def counted(documents: list[list[int]], n: int) -> float:
    """Bits, in the plainest terms, of the n-grams whose only EOS is their last token."""
    tokens = [token for document in documents for token in document]
    grams = (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    counts = Counter(gram for gram in grams if EOS not in gram[:-1])
    total = counts.total()
    return -math.fsum(c / total * math.log2(c / total) for c in counts.values())


def test_entropy_is_that_of_plain_counts(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents = [
        [*generator.zipf(1.5, size).clip(1, 50).tolist(), EOS] for size in (1, 2, 700, 900)
    ]
    found = entropy_of(documents, tmp_path)
    for n in (1, 2, 3):
        assert found["entropy_bits"][str(n)] == pytest.approx(counted(documents, n), abs=1e-4)
    assert found["tokens"] == 1607


def test_a_sample_of_bounded_size_is_spread_over_all_shards(tmp_path: Path) -> None:
    documents = [[1 + number] * 1000 for number in range(64)]
    found = entropy_of(documents, tmp_path, max_tokens=32_768)
    assert found["tokens"] == 32_768
    assert found["distinct"]["1"] == pytest.approx(32, abs=3), "windows at both ends"


def test_one_token_repeated_has_no_entropy(tmp_path: Path) -> None:
    found = entropy_of([[7] * 100], tmp_path)
    assert found["entropy_bits"] == {"1": 0.0, "2": 0.0, "3": 0.0}
    assert found["distinct"] == {"1": 1, "2": 1, "3": 1}
    assert entropy_of([[EOS], [EOS]], tmp_path)["distinct"] == {"1": 1, "2": 0, "3": 0}
