"""Hashes of word shingles, computed for many texts at once without a Python object per word.

A word is a run of letters, digits and underscores in any script; a character of a script that is
written without spaces is a word by itself. Case, punctuation and white space do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Most characters of a call: arrays of 8 bytes per character then stay within a core's cache.
MAX_CHARACTERS = 2**17

_SEPARATOR, _LETTER, _WORD = 0, 1, 2

# Scripts written without spaces: Thai and Lao, Burmese, Khmer, kana, and the ideographs.
_UNSPACED = (
    (0x0E00, 0x0F00),
    (0x1000, 0x10A0),
    (0x1780, 0x1800),
    (0x3040, 0x3100),
    (0x3400, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, 0x323B0),
)

# An odd base has an inverse modulo 2^64, so that the hash of a word does not depend on its place.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_MURMUR = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)


def shingle_hashes(
    texts: Sequence[str], num_words: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of all runs of `num_words` words in each text, the same on every machine.

    Args:
        texts: n texts, of at most `MAX_CHARACTERS` together or a single longer one.
        num_words: words per shingle; a text with fewer has one shingle of all its words.
    Returns:
        Hashes of all texts [N], with repetitions, and where those of each text begin [n + 1].
    """
    lowered = [text.lower() for text in texts]
    codes = np.frombuffer("\n".join(lowered).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    words, starts = _word_hashes(codes)
    ends = np.cumsum([len(text) + 1 for text in lowered])  # where the next text begins
    bounds = np.concatenate([[0], np.searchsorted(starts, ends)])  # first word of each text
    return _shingles(words, bounds, num_words)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Values scattered over 64 bits, one to one; uint64 arithmetic wraps around by intent."""
    mixed = values ^ (values >> _SHIFT)
    mixed *= _MURMUR
    mixed ^= mixed >> _SHIFT
    return mixed


def _word_hashes(
    codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash and first character of each word: differences of prefix sums of code * base^place."""
    kinds = np.zeros(len(codes) + 2, dtype=np.uint8)
    kinds[1:-1] = _kinds()[codes]
    inside, before, after = kinds[1:-1], kinds[:-2], kinds[2:]
    # A word ends wherever a letter is not followed by a letter, and begins accordingly.
    starts = np.flatnonzero((inside == _WORD) | ((inside == _LETTER) & (before != _LETTER)))
    ends = np.flatnonzero((inside == _WORD) | ((inside == _LETTER) & (after != _LETTER))) + 1
    powers, inverses = _powers(max(MAX_CHARACTERS, 1 << len(codes).bit_length()))
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes.astype(np.uint64) * powers[: len(codes)], out=sums[1:])
    return mix((sums[ends] - sums[starts]) * inverses[starts]), starts


def _shingles(
    words: NDArray[np.uint64], bounds: NDArray[np.int64], num_words: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of shingles within texts, whose words begin at `bounds` [n + 1]."""
    weights, _ = _powers(MAX_CHARACTERS)
    padded = np.concatenate([words, np.zeros(num_words - 1, dtype=np.uint64)])
    hashes = np.zeros(len(words), dtype=np.uint64)
    for place in range(num_words):
        hashes += padded[place : place + len(words)] * weights[place + 1]
    counts = np.diff(bounds)
    complete = np.ones(len(words), dtype=bool)
    for place in range(1, num_words):  # the last words of a text begin no shingle
        complete[bounds[1:][counts >= place] - place] = False
    for number in np.flatnonzero((counts > 0) & (counts < num_words)).tolist():
        start, end = int(bounds[number]), int(bounds[number + 1])
        hashes[start] = (words[start:end] * weights[1 : 1 + end - start]).sum()
        complete[start] = True
    per_text = np.where(counts >= num_words, counts - num_words + 1, np.minimum(counts, 1))
    return mix(hashes[complete]), np.concatenate([[0], np.cumsum(per_text)])


@lru_cache(maxsize=1)
def _kinds() -> NDArray[np.uint8]:
    """For each code point: separator, letter of a word, or a word by itself."""
    kinds = np.full(0x110000, _SEPARATOR, dtype=np.uint8)
    last = max(end for _, end in _UNSPACED)
    letters = [code for code in range(last) if chr(code).isalnum() or chr(code) == "_"]
    kinds[letters] = _LETTER
    for start, end in _UNSPACED:
        kinds[start:end] *= _WORD
    return kinds


@lru_cache(maxsize=2)
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """base^i and base^-i modulo 2^64 for i < count."""
    both = []
    for base in (_BASE, _BASE_INVERSE):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors))
    return both[0], both[1]
