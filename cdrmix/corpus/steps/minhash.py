"""Word shingles and the signatures made of them: MinHash in bands, or SimHash.

A word is a run of letters, digits and underscores in any script; a character of a script that is
written without spaces is a word by itself. Case, punctuation and white space do not count.
Shingles are hashed for many texts at once, without a Python object per word.

Either method signs texts: each gets keys (two texts with a key in common are candidates) and a
sketch, by which candidates are verified. Signatures depend on nothing but the text. n texts,
N shingles, K keys, S bytes of sketch, P permutations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from cdrmix.errors import DataError

T = TypeVar("T")
Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]
Sketches = NDArray[np.uint8]
# Most characters of a call: arrays of 8 bytes per character then stay within a core's cache.
MAX_CHARACTERS = 2**17
_SEPARATOR, _LETTER, _WORD = range(3)
# Scripts written without spaces: Thai and Lao, Burmese, Khmer, kana, and the ideographs.
_UNSPACED = (
    *((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3040, 0x3100)),
    *((0x3400, 0xA000), (0xF900, 0xFB00), (0x20000, 0x323B0)),
)
# An odd base has an inverse modulo 2^64, so that the hash of a word does not depend on its place.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_MURMUR = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)


def in_batches(
    items: Iterable[T], size: Callable[[T], int], *, max_items: int | None = None
) -> Iterator[list[T]]:
    """Groups consecutive items of at most `MAX_CHARACTERS` together, or one that is larger."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and (total + size(item) > MAX_CHARACTERS or len(batch) == max_items):
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def shingle_hashes(texts: Sequence[str], num_words: int) -> tuple[Hashes, Integers]:
    """Hashes all runs of `num_words` words in each text, the same on every machine.

    A text with fewer words has one shingle of all its words.

    Args:
        texts: n texts, of at most `MAX_CHARACTERS` together or a single longer one.
    Returns:
        Hashes of all texts [N], with repetitions, and the first shingle of each text [n + 1].
    """
    lowered = [text.lower() for text in texts]
    codes = np.frombuffer("\n".join(lowered).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = np.zeros(len(codes) + 2, dtype=np.uint8)  # a separator before and behind the texts
    kinds[1:-1] = _character_kinds()[codes]
    inside = kinds[1:-1]
    # A word ends wherever a letter is not followed by a letter, and begins accordingly.
    starts = np.flatnonzero((inside == _WORD) | ((inside == _LETTER) & (kinds[:-2] != _LETTER)))
    ends = np.flatnonzero((inside == _WORD) | ((inside == _LETTER) & (kinds[2:] != _LETTER))) + 1
    # Hashes of words are differences of prefix sums of code * base^place.
    powers, inverses = _powers(max(MAX_CHARACTERS, 1 << len(codes).bit_length()))
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes.astype(np.uint64) * powers[: len(codes)], out=sums[1:])
    words = mix((sums[ends] - sums[starts]) * inverses[starts])
    # The line end behind each text is counted with it.
    behind = np.cumsum([len(text) + 1 for text in lowered])
    bounds = np.concatenate([[0], np.searchsorted(starts, behind)])  # first word of each text
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
        start = int(bounds[number])
        end = int(bounds[number + 1])
        hashes[start] = (words[start:end] * weights[1 : 1 + end - start]).sum()
        complete[start] = True
    per_text = np.where(counts >= num_words, counts - num_words + 1, np.minimum(counts, 1))
    return mix(hashes[complete]), np.concatenate([[0], np.cumsum(per_text)])


def mix(values: Hashes) -> Hashes:
    """Scatters values over 64 bits, one to one; uint64 arithmetic wraps around by intent."""
    mixed = values ^ (values >> _SHIFT)
    mixed *= _MURMUR
    mixed ^= mixed >> _SHIFT
    return mixed


@lru_cache(maxsize=1)
def _character_kinds() -> NDArray[np.uint8]:
    """Separator, letter of a word, or a word by itself, for each code point."""
    kinds = np.full(0x110000, _SEPARATOR, dtype=np.uint8)
    last = max(end for _, end in _UNSPACED)
    letters = [code for code in range(last) if chr(code).isalnum() or chr(code) == "_"]
    kinds[letters] = _LETTER
    for start, end in _UNSPACED:
        kinds[start:end] *= _WORD  # separators are 0, and stay so
    return kinds


@lru_cache(maxsize=2)
def _powers(count: int) -> Hashes:
    """base^i and base^-i modulo 2^64 for i < count, [2, count]."""
    factors = np.full((2, count), [[_BASE], [_BASE_INVERSE]], dtype=np.uint64)
    factors[:, 0] = 1
    return np.cumprod(factors, axis=1)


NO_KEY = 0  # of a text without words, which is a duplicate of nothing
_SEED = 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Chance that two bytes of a sketch are equal although their minima are not.
_BYTE_COLLISION = 1 / 256
# SimHash cuts its 64 bits into six blocks. Three differing bits leave three blocks whole, so that
# each choice of three blocks makes a key.
_BLOCKS = (11, 11, 11, 11, 10, 10)
_WHOLE_BLOCKS = 3
_BLOCK_MASKS = [
    ((1 << size) - 1) << (end - size)
    for size, end in zip(_BLOCKS, accumulate(_BLOCKS), strict=True)
]
_KEY_MASKS = np.array([sum(some) for some in combinations(_BLOCK_MASKS, _WHOLE_BLOCKS)], np.uint64)


class Signatures(NamedTuple):
    """Signatures of n texts."""

    keys: Hashes  # [n, K]; `NO_KEY` in those of a text without words
    sketches: Sketches  # [n, S]


@dataclass(frozen=True)
class MinHash:
    """MinHash over word shingles; a pair of Jaccard similarity J becomes a candidate with
    probability 1 - (1 - J^rows)^bands: .92 at .8, .10 at .5 and .003 at .35 with 14 x 8.
    """

    shingle_words: int = 5
    num_bands: int = 14  # keys per text
    rows_per_band: int = 8  # minima that must all be equal for a key to be
    # Smallest estimated similarity of a duplicate; the estimate over 112 minima has a standard
    # error of .05 at .5. 0: every candidate is one.
    min_jaccard: float = 0.6

    def __post_init__(self) -> None:
        counts = asdict(self)
        del counts["min_jaccard"]
        if wrong := [f"{name} = {value}" for name, value in counts.items() if value < 1]:
            raise DataError(f"minhash: {', '.join(wrong)}: allowed are 1 and more.")
        if not 0 <= self.min_jaccard <= 1:
            raise DataError(f"minhash: min_jaccard = {self.min_jaccard}: allowed are 0 to 1.")

    @property
    def num_keys(self) -> int:
        """Keys per text, K."""
        return self.num_bands

    @property
    def sketch_bytes(self) -> int:
        """Bytes of sketch per text, S."""
        return self.num_bands * self.rows_per_band

    def sign(self, texts: Sequence[str]) -> Signatures:
        """Keys are hashes of bands; the sketch is one byte of each minimum."""
        # 32 bits each, a row per piece; the largest number for a piece without words.
        rows, counts, firsts = _summaries_of_pieces(
            texts,
            self.shingle_words,
            lambda hashes, bounds: np.array(
                RMinHash.digest_matrix_from_flat_token_hashes(
                    hashes, bounds.astype(np.uint64), self.sketch_bytes, _SEED
                ).to_rows(),
                dtype=np.uint64,
            ),
        )
        minima = np.minimum.reduceat(rows, firsts, axis=0)  # [n, P]
        bands = minima.reshape(len(texts), self.num_bands, self.rows_per_band)
        keys = np.empty((len(texts), self.num_bands), dtype=np.uint64)
        # The band's number goes in, so that equal minima in different bands do not match.
        keys[:] = np.arange(1, self.num_bands + 1, dtype=np.uint64)
        for row in range(self.rows_per_band):
            keys = mix((keys ^ bands[..., row]) * _GOLDEN)
        keys = np.maximum(keys, NO_KEY + 1)
        keys[np.add.reduceat(counts, firsts) == 0] = NO_KEY
        return Signatures(keys, (mix(minima * _GOLDEN) & np.uint64(0xFF)).astype(np.uint8))

    def agree(self, a: Sketches, b: Sketches) -> NDArray[np.bool_]:
        """Compares sketches: true where enough bytes are equal for `min_jaccard`."""
        share = _BYTE_COLLISION + self.min_jaccard * (1 - _BYTE_COLLISION)
        return (a == b).mean(axis=1) >= (share if self.min_jaccard else 0)

    def describe(self) -> dict[str, Any]:
        """Plain values that signatures must have in common to be compared."""
        description = {"method": "minhash", "algorithm": RMinHash.ALGORITHM_VERSION} | asdict(self)
        del description["min_jaccard"]  # a threshold on signatures, no part of them
        return description


@dataclass(frozen=True)
class SimHash:
    """SimHash of 64 bits over word shingles. No faster than MinHash, and at a distance of 3 it
    finds about half of the pairs of Jaccard similarity .8: a cheap extra signal.
    """

    num_keys: ClassVar[int] = len(_KEY_MASKS)
    sketch_bytes: ClassVar[int] = 8
    shingle_words: int = 3
    max_distance: int = 3  # most differing bits of duplicates

    def __post_init__(self) -> None:
        if self.shingle_words < 1:
            wrong = f"shingle_words = {self.shingle_words}"
            raise DataError(f"simhash: {wrong}: allowed are 1 and more.")
        if not 0 <= self.max_distance <= len(_BLOCKS) - _WHOLE_BLOCKS:
            wrong = f"max_distance = {self.max_distance}: allowed are 0 to 3 of 64 bits"
            raise DataError(f"simhash: {wrong}; for less similar texts take minhash.")

    def sign(self, texts: Sequence[str]) -> Signatures:
        """Keys are the bits of three blocks out of six, a key per choice."""

        def votes_of(hashes: Hashes, bounds: Integers) -> Integers:
            # Number of shingles of each piece that have each bit set, [pieces, 64].
            votes = np.zeros((len(bounds) - 1, 64), dtype=np.int64)
            bits = np.unpackbits(hashes.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)
            # reduceat takes an empty range for its first element, so empty pieces are left out.
            filled = np.flatnonzero(np.diff(bounds))
            if filled.size:
                votes[filled] = np.add.reduceat(bits, bounds[filled], axis=0, dtype=np.int64)
            return votes

        votes, counts, firsts = _summaries_of_pieces(texts, self.shingle_words, votes_of)
        votes = np.add.reduceat(votes, firsts, axis=0)  # [n, 64]
        counts = np.add.reduceat(counts, firsts)
        sketches = np.packbits(2 * votes > counts[:, None], axis=1)
        values = sketches.view("<u8").astype(np.uint64)  # [n, 1]
        numbers = np.arange(1, self.num_keys + 1, dtype=np.uint64)
        keys = np.maximum(mix(mix(values & _KEY_MASKS) ^ (numbers * _GOLDEN)), NO_KEY + 1)
        keys[counts == 0] = NO_KEY
        return Signatures(keys, sketches)

    def agree(self, a: Sketches, b: Sketches) -> NDArray[np.bool_]:
        """Compares sketches: true where at most `max_distance` bits differ."""
        return np.unpackbits(a ^ b, axis=1).sum(axis=1) <= self.max_distance

    def describe(self) -> dict[str, Any]:
        """Plain values that signatures must have in common to be compared."""
        return {"method": "simhash", "shingle_words": self.shingle_words}


def _summaries_of_pieces(
    texts: Sequence[str], num_words: int, summarise: Callable[[Hashes, Integers], NDArray[Any]]
) -> tuple[NDArray[Any], Integers, Integers]:
    """Summarises texts in pieces of bounded size, so that any length takes bounded memory.

    A cut loses a few shingles of some ten thousand.

    Args:
        summarise: from hashes and bounds of the shingles of p pieces to one row per piece.
    Returns:
        Summary of each piece [p, ...], its number of shingles [p], first piece of each text [n].
    """
    starts = [range(0, max(len(text), 1), MAX_CHARACTERS) for text in texts]
    firsts = np.cumsum([0, *map(len, starts)])[:-1]
    places = ((text, start) for text, some in zip(texts, starts, strict=True) for start in some)
    summaries = []
    counts = []
    # Cut when their group is hashed, so that a long text is not copied as a whole.
    for group in in_batches(places, lambda x: min(len(x[0]) - x[1], MAX_CHARACTERS)):
        pieces = [text[start : start + MAX_CHARACTERS] for text, start in group]
        hashes, bounds = shingle_hashes(pieces, num_words)
        summaries.append(summarise(hashes, bounds))
        counts.append(np.diff(bounds))
    return np.concatenate(summaries), np.concatenate(counts), firsts


Method = MinHash | SimHash
