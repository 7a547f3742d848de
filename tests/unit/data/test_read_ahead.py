"""Reading ahead by several threads: the same batches at the same positions, within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cdrmix.data.read_ahead import ReadLimits
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError
from tests.unit.data.test_loader import LENGTH, global_batch, make_loader
from tests.unit.data.token_folder import write_counting_folder


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    folder = write_counting_folder(tmp_path, 1003 * LENGTH + 1, max_tokens=600)
    return TokenDataset(folder, "train", LENGTH)


def slowed(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> None:
    """Makes each read of a data set take a time by its first sample."""
    original = dataset.rows

    def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        time.sleep(seconds(int(indices[0])))
        return original(indices)

    monkeypatch.setattr(dataset, "rows", rows)


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_batches_and_position_do_not_depend_on_the_number_of_readers(
    readers: int, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_loader(dataset, segment_documents=True, num_targets=3)
    expected = [plain.next() for _ in range(40)]
    # Later batches are often there before earlier ones.
    slowed(dataset, monkeypatch, lambda sample: 0.004 * (sample % 3))
    loader = make_loader(
        dataset, segment_documents=True, num_targets=3, prefetch=5, readers=readers
    )
    for number, wanted in enumerate(expected):
        found = loader.next()
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert loader.samples_consumed == 16 * (number + 1)
        if number % 7 == 0:  # at any time
            limits = ReadLimits(1 + number % 6, 1 + number % 4, max_bytes=1 << (8 + number % 12))
            loader.set_limits(limits)
    loader.close()


def test_several_readers_read_at_once_and_one_does_not(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    inside = 0
    guard = threading.Lock()
    original = dataset.rows

    def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        nonlocal inside
        with guard:
            inside += 1
            at_once.append(inside)
        time.sleep(0.01)
        with guard:
            inside -= 1
        return original(indices)

    monkeypatch.setattr(dataset, "rows", rows)
    for readers in (1, 3):
        at_once.clear()
        loader = make_loader(dataset, prefetch=6, readers=readers)
        for _ in range(12):
            loader.next()
        loader.close()
        assert max(at_once) == readers


def test_an_error_is_raised_at_its_batch_and_no_earlier(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_loader(dataset)
    expected = [global_batch([plain]) for _ in range(4)]
    original = dataset.rows

    def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if indices[0] == expected[3][0]:
            raise DataError("a shard is gone")
        time.sleep(0.005)
        return original(indices)

    monkeypatch.setattr(dataset, "rows", rows)
    loader = make_loader(dataset, prefetch=6, readers=4)
    assert [global_batch([loader]) for _ in range(3)] == expected[:3]
    for _ in range(2):
        with pytest.raises(DataError, match="a shard is gone"):
            loader.next()
    assert loader.samples_consumed == 3 * 16
    loader.close()


def test_what_is_read_ahead_is_bounded_by_batches_samples_and_bytes(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    original = dataset.rows
    monkeypatch.setattr(
        dataset, "rows", lambda indices: (reads.append(int(indices[0])), original(indices))[1]
    )
    loader = make_loader(dataset, prefetch=8, readers=2, queue_samples=3 * 16 + 5)
    loader.next()
    settle(lambda: len(reads) == 1 + 3)
    loader.set_limits(ReadLimits(8, 2, max_bytes=2 * (loader.batch_bytes or 0)))
    loader.next()
    # Two of the three were kept; one of them is in use now, and the third is read again.
    settle(lambda: len(reads) == 1 + 3 + 1)
    assert reads[4] in reads[:4]
    assert loader.batch_bytes == 16 * (LENGTH + 1) * 8, "inputs and labels are one array"
    # A lower bound gives memory back at once, and what was dropped is read again.
    loader.set_limits(ReadLimits(1))
    plain = make_loader(dataset)
    later = [global_batch([plain]) for _ in range(6)][2:]
    assert [global_batch([loader]) for _ in range(4)] == later
    assert len(reads) > 6 + 1
    loader.close()


def settle(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds, and still does a moment later."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert condition()
