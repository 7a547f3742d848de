"""A keyed permutation of 0 .. size - 1 that needs no memory: Feistel with cycle walking.

Any position can be asked for at any time, so the order of an epoch of 10^12 samples is known
without a shuffled list, and resuming costs nothing.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

# An odd constant without structure: 2^64 over the golden ratio, and the finaliser of MurmurHash3.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MURMUR = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)

# Three Feistel rounds per half. tests/unit/test_permutation.py holds the statistics that fewer
# rounds fail.
_NUM_ROUNDS = 6

MAX_SIZE = 2**62


class Permutation:
    """Bijection on 0 .. size - 1, the same for the same size and key on every machine.

    Args:
        size: number of positions, 1 to 2^62.
        key: integers that choose the permutation, e.g. (seed, epoch).
    Raises:
        ValueError: if size is out of range.
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
        walking = np.flatnonzero(images >= self.size)
        while walking.size:
            images[walking] = self._feistel(images[walking])
            walking = walking[images[walking] >= self.size]
        return images.astype(np.int64).reshape(np.shape(indices))

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass over the power-of-two domain; the halves take turns in hiding each other."""
        low, high = values & self._low_mask, values >> self._low_bits
        for number, key in enumerate(self._round_keys):
            if number % 2:
                low ^= _mix(high, key) & self._low_mask
            else:
                high ^= _mix(low, key) & self._high_mask
        return (high << self._low_bits) | low


def permute_epochs(
    numbers: NDArray[np.int64],
    size: int,
    key: tuple[int, ...] | None,
    *,
    window: int | None = None,
) -> NDArray[np.int64]:
    """Position within its epoch of each number that counts on over epochs of `size`.

    Args:
        numbers: any shape, 0 or more.
        key: each epoch is permuted under (*key, epoch). None: none is.
        window: permute windows of that many positions, and positions within each; None: all.
    """
    epochs, indices = np.divmod(numbers, size)
    if key is not None:
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            of_epoch = (*key, epoch)
            indices[chosen] = (
                Permutation(size, of_epoch)(indices[chosen])
                if window is None
                else _permute_windows(indices[chosen], size, of_epoch, window)
            )
    return indices


def _permute_windows(
    indices: NDArray[np.int64], size: int, key: tuple[int, ...], window: int
) -> NDArray[np.int64]:
    """What is left over behind the last whole window, [..], stays there, in an order of its own."""
    num_whole = size // window
    places, offsets = np.divmod(indices, window)
    whole = places < num_whole
    if num_whole:
        places[whole] = Permutation(num_whole, (*key, 0))(places[whole])
    for place in np.unique(places).tolist():
        within = places == place
        length = window if place < num_whole else size - num_whole * window
        offsets[within] = Permutation(length, (*key, 1 + place))(offsets[within])
    return places * window + offsets


def _mix(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash of each value under `key`; uint64 arithmetic wraps around by intent."""
    hashed = (half ^ key) * _GOLDEN
    hashed ^= hashed >> _SHIFT
    hashed *= _MURMUR
    hashed ^= hashed >> _SHIFT
    return hashed
