"""Samples of token shards: a permutation of any size, a memory-mapped stream, and its samples.

The permutation needs no memory (a keyed Feistel network with cycle walking): it can be evaluated at
any position, so the order of an epoch of 10^12 samples is known without a shuffled list, and
resuming costs nothing. A stream reads whole batches at once.
"""

# n samples, T sequence length (tokens)

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cdrmix.data.remote import RemoteFile, remote_files
from cdrmix.data.shards import (
    MANIFEST_FILE,
    Dtype,
    Manifest,
    ShardInfo,
    file_problem,
    manifest_digest,
    read_manifest,
)
from cdrmix.errors import DataError

# An odd constant without structure: 2^64 over the golden ratio, and the finaliser of MurmurHash3.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MURMUR = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)
# Three Feistel rounds per half. tests/unit/data/test_permutation.py holds the statistics that fewer
# rounds fail.
_NUM_ROUNDS = 6
MAX_SIZE = 2**62
_READ_SUFFIXES = ("bin", "roles")  # by training
# An open map holds a file descriptor, of which a process often has 1,024.
_MAX_OPEN_SHARDS = 256


class Permutation:
    """Bijection on 0 .. size - 1, the same for the same size and key on every machine.

    Args:
        size: number of positions; a ValueError if not 1 to 2^62.
        key: integers that choose the permutation, e.g. (seed, epoch).
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size = {size}: allowed are 1 to 2^62")
        self.size = size
        digest = hashlib.sha512(",".join(str(part) for part in key).encode()).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8")[:_NUM_ROUNDS]
        # The smallest power of two that holds every position, so that a walk takes under two
        # steps on average; at least two bits, so that no half is empty.
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Images of `indices` (any shape, int64, 0 <= index < size), same shape, int64."""
        images = self._feistel(np.asarray(indices, dtype=np.int64).astype(np.uint64).ravel())
        # An image beyond the end is permuted again until it falls inside, which stays one to one.
        walking = np.flatnonzero(images >= self.size)
        while walking.size:
            images[walking] = self._feistel(images[walking])
            walking = walking[images[walking] >= self.size]
        return images.astype(np.int64).reshape(np.shape(indices))

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass over the power-of-two domain; the halves encrypt each other in turn."""
        low = values & self._low_mask
        high = values >> self._low_bits
        for number, key in enumerate(self._round_keys):
            half, other = (high, low) if number % 2 else (low, high)
            mask = self._low_mask if number % 2 else self._high_mask
            # Hash of each value under the key; uint64 arithmetic wraps around by intent.
            hashed = (half ^ key) * _GOLDEN
            hashed ^= hashed >> _SHIFT
            hashed *= _MURMUR
            hashed ^= hashed >> _SHIFT
            other ^= hashed & mask
        return (high << self._low_bits) | low


def permute_epochs(
    numbers: NDArray[np.int64], size: int, key: tuple[int, ...] | None, *, window: int | None = None
) -> NDArray[np.int64]:
    """Position of each number within its epoch, permuted; numbers count on over epochs of `size`.

    Args:
        numbers: any shape, 0 or more.
        key: each epoch is permuted under (*key, epoch). None: stored order.
        window: permute windows of that many positions, and positions within each; None: all.
            The rest behind the last whole window stays there, in an order of its own.
    """
    epochs, indices = np.divmod(numbers, size)
    if key is None:
        return indices
    # A block of numbers may span epochs: each has a permutation of its own.
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        epoch_key = (*key, epoch)
        if window is None:
            indices[in_epoch] = Permutation(size, epoch_key)(indices[in_epoch])
            continue
        num_whole = size // window
        places, offsets = np.divmod(indices[in_epoch], window)
        whole = places < num_whole
        if num_whole:
            places[whole] = Permutation(num_whole, (*epoch_key, 0))(places[whole])
        # Each window has a key of its own; equal orders in all of them would repeat patterns.
        for place in np.unique(places).tolist():
            within = places == place
            length = window if place < num_whole else size - num_whole * window
            offsets[within] = Permutation(length, (*epoch_key, 1 + place))(offsets[within])
        indices[in_epoch] = places * window + offsets
    return indices


class TokenStream:
    """Tokens of some shards of a built folder, or their roles, end to end."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[ShardInfo],
        dtype: Dtype | Literal["uint8"],
        *,
        suffix: Literal["bin", "roles"] = "bin",
    ) -> None:
        self._folder = folder
        self._shards = shards
        self._suffix = suffix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._begins = [0, *self._ends]
        self._remote = remote_files(folder)
        max_open = _MAX_OPEN_SHARDS
        if self._remote is not None:
            # A file evicted from the cache keeps its room on the disk while it is mapped.
            largest = max((shard.bin.bytes for shard in shards), default=1)
            max_open = min(max_open, max(1, self._remote.max_bytes // largest))
        self._tokens = lru_cache(maxsize=max_open)(self._map)

    def rows(self, positions: list[int], length: int) -> NDArray[np.int64]:
        """Reads `length` tokens from each position on, [n, length]; DataError if a shard is bad."""
        rows = np.empty((len(positions), length), dtype=np.int64)
        pieces = []
        begin = end = shard = 0
        for position in positions:
            if not begin <= position < end:  # rows of one shard in a row look it up once
                shard = bisect_right(self._ends, position)
                begin = self._begins[shard]
                end = self._ends[shard]
                tokens = self._tokens(shard)
            pieces.append(tokens[position - begin : position - begin + length])
            # A row may go on in the shards after it.
            missing = length - len(pieces[-1])
            following = shard
            while missing:
                following += 1
                pieces.append(self._tokens(following)[:missing])
                missing -= len(pieces[-1])
        if pieces:
            # Copied and cast in one pass: 11 us for 8 rows of 2,048; row by row takes 12, and a
            # gather, or a cast of gathered rows, 15 to 21.
            np.concatenate(pieces, out=rows.reshape(-1))
        return rows

    def expect(self, positions: NDArray[np.int64]) -> None:
        """Announces positions that are read soon, in this order; remote shards are copied ahead."""
        if self._remote is not None:
            shards = np.searchsorted(self._ends, positions.ravel(), side="right")
            # The order of first use decides which shards are copied while there is room.
            first_uses = np.sort(np.unique(shards, return_index=True)[1])
            files = [self._file(i, suffix) for i in shards[first_uses] for suffix in _READ_SUFFIXES]
            self._remote.expect(list(filter(None, files)))

    def _map(self, shard: int) -> NDArray[Any]:
        """Maps one shard into memory; a truncated one would be a SIGBUS when it is read."""
        file = self._file(shard, self._suffix)
        if file is None:  # roles of plain text
            return np.broadcast_to(np.zeros(1, self._dtype), self._shards[shard].tokens)
        if self._remote is not None:
            with self._remote.held(file) as path:
                return np.memmap(path, dtype=self._dtype, mode="r").view(np.ndarray)
        path = self._folder / file.name
        problem = file_problem(path, file.bytes, file.sha256, mode="size")
        if problem:
            raise DataError(f"{problem.text}\n{problem.advice}".rstrip())
        return np.memmap(path, dtype=self._dtype, mode="r").view(np.ndarray)

    def _file(self, shard: int, suffix: str) -> RemoteFile | None:
        info = self._shards[shard]
        file = info.files().get(suffix)
        return RemoteFile(f"{info.stem}.{suffix}", file.bytes, file.sha256) if file else None


def domain_tokens(manifest: Manifest, split: str) -> dict[str, int]:
    """Tokens of a split by domain, sorted by its name."""
    tokens: Counter[str] = Counter()
    for shard in manifest.shards:
        if shard.split == split:
            tokens[shard.domain] += shard.tokens
    return dict(sorted(tokens.items()))


def fim_window(manifest: Manifest) -> int | None:
    """Tokens of the windows by which documents for infilling were placed; None: by none."""
    window = manifest.source.get("fim_window_tokens")
    return window if isinstance(window, int) and window > 0 else None


def _remedy(split: str) -> str:
    # The recipe decides how much is held out: a larger corpus is not the only way to more of it.
    share = ", or raise shards.validation_share of its recipe and build it again"
    return share if split == "validation" else ""


class SplitDataset:
    """A split of a built folder as samples of T + 1 tokens; a DataError if it is missing.

    Its shards follow each other in manifest order and are cut as one stream, or domain by domain,
    each cut by itself. Training documents that were placed by a window are always cut so.
    """

    num_samples: int  # in the split
    mixture: str | None = None  # digest and domains of the mixture, None without one
    replay: str | None = None  # share and digest of old data among the samples, None without them
    domains: tuple[str, ...]  # with a token in the split, sorted

    def __init__(
        self, folder: Path, split: str, sequence_length: int, *, by_domain: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.split = split
        self.sequence_length = sequence_length
        self.manifest = read_manifest(self.folder)
        self.manifest_digest = manifest_digest(self.manifest)
        totals = self.manifest.splits.get(split)
        if totals is None:
            raise DataError(
                f"{self.folder / MANIFEST_FILE}: no split '{split}'. "
                f"Splits here: {', '.join(self.manifest.splits) or 'none'}. "
                f"A corpus of few documents may lack one; use a larger corpus{_remedy(split)}."
            )
        # UTF-8 bytes of text, for bits per byte
        self.bytes_per_token = totals.text_bytes / max(1, totals.tokens)
        shards = [shard for shard in self.manifest.shards if shard.split == split]
        tokens = [totals.tokens]
        if by_domain or (split == "train" and fim_window(self.manifest) is not None):
            shards.sort(key=lambda shard: shard.domain)
            tokens = [*domain_tokens(self.manifest, split).values()]
        self._cut(tokens)
        self.domains = tuple(sorted({shard.domain for shard in shards if shard.tokens}))
        places = {domain: place for place, domain in enumerate(self.domains)}
        # Of no use for a shard without a token, which no position is in.
        self._shard_domains = np.array([places.get(shard.domain, 0) for shard in shards])
        self._shard_ends = np.cumsum([shard.tokens for shard in shards])
        self._stream = TokenStream(self.folder, shards, self.manifest.dtype)
        self._roles = TokenStream(self.folder, shards, "uint8", suffix="roles")

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads samples by number, [n] -> [n, T + 1], int64; an IndexError beyond the last."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.num_samples:
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {self.num_samples}")
        return self._stream.rows(self._positions(indices).tolist(), self.sequence_length + 1)

    def roles(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Roles of the tokens of `rows(indices)`, of the same shape; see `ShardInfo`."""
        return self._roles.rows(self._positions(indices).tolist(), self.sequence_length + 1)

    def label_domains(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Domain of each token that samples predict, [n] -> [n, T], an index into `domains`.

        By the borders of the shards, each of which has one domain: a sample may span several.
        """
        labels = self._positions(indices)[:, None] + np.arange(1, self.sequence_length + 1)
        return self._shard_domains[np.searchsorted(self._shard_ends, labels, side="right")]

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Announces samples that are read soon, any shape; see `TokenStream`."""
        self._stream.expect(self._positions(indices))

    def drawn(self, start: int, stop: int) -> dict[str, int]:
        """Samples of each domain in global samples start .. stop - 1; empty without a mixture."""
        return {}

    def _cut(self, tokens: Sequence[int]) -> None:
        """Cuts streams of so many tokens, one behind the other, into samples, each by itself.

        The tail of a stream that is shorter than a sample is left out.
        """
        sizes = [max(0, count - 1) // self.sequence_length for count in tokens]
        self._begins = np.cumsum([0, *sizes])
        self.num_samples = int(self._begins[-1])
        # Stream after stream, a sample is T tokens further than the one before it, except for the
        # tails of earlier streams.
        self._shifts = np.cumsum([0, *tokens])[:-1] - self._begins[:-1] * self.sequence_length

    def _positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """First token of each sample in all streams."""
        streams = np.searchsorted(self._begins, indices, side="right") - 1
        return indices * self.sequence_length + self._shifts[streams]


class TokenDataset(SplitDataset):
    """Samples of a split: its shards, in manifest order, are one stream cut into equal pieces.

    Sample i is the tokens i * T to i * T + T, T + 1 of them: neighbours share one token, so that
    every token but the first is predicted exactly once. A tail shorter than T is left out. A split
    too short for one sample is a DataError. For documents placed by a window see `SplitDataset`.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int) -> None:
        super().__init__(folder, split, sequence_length)
        num_tokens = self.manifest.splits[split].tokens
        if self.num_samples == 0:
            parts = len(self._begins) - 1
            cut = f", in {parts} domains that are cut each by itself," if parts > 1 else ""
            raise DataError(
                f"{self.folder / MANIFEST_FILE}: split '{split}' has {num_tokens} tokens{cut} and "
                f"one sample of training.sequence_length = {sequence_length} needs "
                f"{sequence_length + 1}. Use a larger corpus or a shorter "
                f"sequence_length{_remedy(split)}."
            )

    def order(
        self, numbers: NDArray[np.int64], seed: int | None, window: int | None = None
    ) -> NDArray[np.int64]:
        """Sample at each global sample number; window as of `permute_epochs`.

        `seed` is the key of a permutation per epoch; None: stored order.
        """
        # The keys must not change: a checkpoint stores a position in this order, not the order.
        key = None if seed is None else (seed,)
        return permute_epochs(numbers, self.num_samples, key, window=window)
