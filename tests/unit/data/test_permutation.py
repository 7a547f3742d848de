"""The order of samples: a bijection at any size, and one that looks like chance."""

from __future__ import annotations

import numpy as np
import pytest

from cdrmix.data.token_dataset import MAX_SIZE, Permutation, permute_epochs

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 97, 1023, 1024, 1025, 4093, 65_535, 65_537, 100_003]


def chi_squared(counts: np.ndarray) -> float:
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [(0, 0), (1234, 7)])
def test_every_position_has_one_image(size: int, key: tuple[int, ...]) -> None:
    images = Permutation(size, key)(np.arange(size))
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


def test_images_at_the_largest_size_are_distinct_and_in_range() -> None:
    rng = np.random.default_rng(0)
    positions = np.unique(rng.integers(0, MAX_SIZE, 100_000))
    images = Permutation(MAX_SIZE, (1, 2))(positions)
    assert len(np.unique(images)) == len(positions)
    assert images.min() >= 0
    assert images.max() < MAX_SIZE


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        Permutation(size, (0,))


def test_an_image_depends_on_its_position_only_not_on_its_company() -> None:
    order = Permutation(1000, (3, 1))
    together = order(np.arange(1000).reshape(10, 100))
    assert together.shape == (10, 100)
    alone = [int(order(np.array([position]))[0]) for position in range(0, 1000, 37)]
    assert together.ravel()[::37].tolist() == alone


def test_the_order_never_changes_between_versions() -> None:
    # Written down once: a checkpoint of yesterday resumes in the order it was trained in.
    images = Permutation(1_000_000, (1234, 0))(np.arange(5))
    assert images.tolist() == [55469, 879102, 745175, 738078, 10351]


def test_seed_and_epoch_both_change_the_order() -> None:
    positions = np.arange(10_000)
    orders = [Permutation(10_000, key)(positions) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for number, order in enumerate(orders):
        for other in orders[number + 1 :]:
            # Two random orders agree in one position on average.
            assert (order == other).sum() < 10


@pytest.mark.parametrize("key", [(0, 0), (1, 0), (5, 3)])
def test_neighbours_are_not_correlated(key: tuple[int, ...]) -> None:
    size = 40_000
    images = Permutation(size, key)(np.arange(size))
    # 4.5 standard deviations of the correlation of unrelated numbers.
    limit = 4.5 / np.sqrt(size)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < limit
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < limit
    # Steps from one image to the next are uniform modulo the size. 99 degrees of freedom: 170 is
    # passed by chance once in 10^5.
    steps = np.diff(images) % size
    assert chi_squared(np.bincount(steps * 100 // size, minlength=100)) < 170


def test_every_stretch_of_an_epoch_draws_from_the_whole_data_set() -> None:
    size, stretches = 100_000, 100
    images = Permutation(size, (9, 9))(np.arange(size)).reshape(stretches, -1)
    tenths = np.stack([np.bincount(row * 10 // size, minlength=10) for row in images])
    # 900 degrees of freedom, standard deviation 42.
    assert chi_squared(tenths) < 900 + 5 * 42


def test_small_permutations_have_no_favourite_place_or_neighbour() -> None:
    size, keys = 8, 4000
    places, pairs = np.zeros((size, size)), np.zeros((size, size))
    for key in range(keys):
        images = Permutation(size, (key,))(np.arange(size))
        places[np.arange(size), images] += 1
        pairs[images[:-1], images[1:]] += 1
    # 49 and 55 degrees of freedom. Four Feistel rounds give 97 for the pairs, three give 351.
    assert chi_squared(places) < 90
    assert chi_squared(pairs[~np.eye(size, dtype=bool)]) < 97


@pytest.mark.parametrize(("size", "window"), [(1000, 64), (1024, 64), (50, 64), (7, 1)])
def test_windows_keep_together_what_is_shuffled_together(size: int, window: int) -> None:
    numbers = np.arange(3 * size)
    images = permute_epochs(numbers, size, (5,), window=window)
    for epoch in images.reshape(3, size):
        assert np.array_equal(np.sort(epoch), np.arange(size))
        for start in range(0, size, window):  # each window is a stretch of stored samples
            part = epoch[start : start + window] // window
            assert len(np.unique(part)) == 1
    alone = [int(permute_epochs(numbers[n : n + 1], size, (5,), window=window)[0]) for n in (0, 6)]
    assert alone == [images[0], images[6]]
    if size == 1000:
        first, second = images[:size], images[size : 2 * size]
        assert not np.array_equal(first, second)
        assert not np.array_equal(first[:window] % window, first[window : 2 * window] % window)
        assert not np.array_equal(first, np.arange(size))


def test_the_order_in_windows_never_changes_between_versions() -> None:
    images = permute_epochs(np.arange(1_000, 1_005), 1_000_000, (1234,), window=4096)
    assert images.tolist() == [719020, 717014, 716946, 717486, 717761]
