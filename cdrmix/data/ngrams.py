"""Entropy of token n-grams: how varied a domain's tokens are, in bounded memory.

Counted exactly over a sample of bounded size: all tokens of a small domain, else windows spread
evenly over it. No count exceeds the sample, so the entropy of long n-grams is at most its
logarithm: compare domains by equal samples, and look at trigrams as a lower bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.steps.shingles import mix
from cdrmix.data.token_dataset import TokenStream

MAX_TOKENS = 2**23  # 64 MB as int64; the peak is about six times that
_WINDOW_TOKENS = 2**14
_ORDERS = (1, 2, 3)


def ngram_entropy(
    stream: TokenStream, num_tokens: int, eos_id: int, *, max_tokens: int = MAX_TOKENS
) -> dict[str, Any]:
    """Entropy of the n-grams of a stream, n = 1, 2 and 3; those that cross an EOS are left out.

    Args:
        num_tokens: tokens in the stream.
        max_tokens: most tokens looked at.
    Returns:
        `tokens` looked at (count), and by n as text: `entropy_bits` of an n-gram, and `distinct`
        n-grams (count).
    """
    rows = _sample(stream, num_tokens, max_tokens)
    entropy_bits: dict[str, float] = {}
    distinct: dict[str, int] = {}
    for n in _ORDERS:
        counts = _counts(rows, n, eos_id)
        total = max(1, int(counts.sum()))
        bits = np.log2(total) - float((counts * np.log2(counts)).sum()) / total
        entropy_bits[str(n)], distinct[str(n)] = round(float(bits), 4), len(counts)
    return {"tokens": rows.size, "entropy_bits": entropy_bits, "distinct": distinct}


def _sample(stream: TokenStream, num_tokens: int, max_tokens: int) -> NDArray[np.int64]:
    """Tokens [windows, length]; n-grams do not go from one row to the next."""
    if num_tokens <= max_tokens:
        return stream.rows([0], num_tokens)
    length = min(_WINDOW_TOKENS, max_tokens)
    starts = np.linspace(0, num_tokens - length, max_tokens // length).astype(np.int64)
    return stream.rows(starts.tolist(), length)


def _counts(rows: NDArray[np.int64], n: int, eos_id: int) -> NDArray[np.int64]:
    """How often each distinct n-gram occurs.

    N-grams are told apart by 64 bits: of 2^23, any two share them with a chance of 2e-6.
    """
    length = max(0, rows.shape[1] - n + 1)
    keys = np.zeros((len(rows), length), dtype=np.uint64)
    inside = np.ones(keys.shape, dtype=bool)
    for place in range(n):
        tokens = rows[:, place : place + length]
        keys = mix(keys + tokens.astype(np.uint64) + np.uint64(1))
        if place < n - 1:
            inside &= tokens != eos_id
    return np.unique(keys[inside], return_counts=True)[1]
