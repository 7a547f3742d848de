"""The loader: the same global batches at any data-parallel size, and an exact position."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.data.loader import Loader
from cdrmix.data.shards import TokenDataset
from cdrmix.errors import DataError, PlanError, StateError
from tests.unit.token_folder import write_counting_folder

# Sample i of the counting folder begins with token i * LENGTH.
LENGTH = 4


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """1,003 samples, a prime-ish number that no batch divides, in seven shards."""
    folder = write_counting_folder(tmp_path, 1003 * LENGTH + 1, max_tokens=600)
    return TokenDataset(folder, "train", LENGTH)


def make_loader(dataset: TokenDataset, **changes: Any) -> Loader:
    arguments = {
        "global_batch_size": 16,
        "micro_batch_size": 1,
        "data_rank": 0,
        "data_size": 1,
        "seed": 5,
        "shuffle": True,
        "prefetch": 0,
    }
    return Loader(dataset, **(arguments | changes))


def samples_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which sample of the data set each row is, [A, B]."""
    return batch["input_ids"][..., 0] // LENGTH


def global_batch(loaders: list[Loader]) -> list[int]:
    """The samples of one step over all ranks, in the order of their global numbers."""
    per_rank = [samples_of(loader.next()) for loader in loaders]
    return torch.stack(per_rank, dim=1).flatten().tolist()  # [A, W, B]


def test_a_batch_is_int64_and_its_labels_are_the_next_tokens(dataset: TokenDataset) -> None:
    batch = make_loader(dataset, micro_batch_size=2, data_size=2, data_rank=1).next()
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 2, LENGTH)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)


def test_rank_r_takes_b_consecutive_samples_of_each_micro_step(dataset: TokenDataset) -> None:
    loader = make_loader(
        dataset, shuffle=False, global_batch_size=24, micro_batch_size=3, data_size=4, data_rank=2
    )
    assert samples_of(loader.next()).tolist() == [[6, 7, 8], [18, 19, 20]]
    assert samples_of(loader.next()).tolist() == [[30, 31, 32], [42, 43, 44]]


def test_one_process_with_a_larger_micro_batch_takes_the_same_micro_steps(
    dataset: TokenDataset,
) -> None:
    alone = make_loader(dataset, micro_batch_size=8)
    ranks = [
        make_loader(dataset, micro_batch_size=2, data_size=4, data_rank=rank) for rank in range(4)
    ]
    for _ in range(3):
        shared = torch.cat([samples_of(loader.next()) for loader in ranks], dim=1)
        assert torch.equal(samples_of(alone.next()), shared)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_sample_once_and_rolls_into_the_next(
    dataset: TokenDataset, shuffle: bool
) -> None:
    loader = make_loader(dataset, shuffle=shuffle)
    num_samples = dataset.num_samples
    drawn = list(itertools.chain(*(global_batch([loader]) for _ in range(3 * num_samples // 16))))
    epochs = [drawn[:num_samples], drawn[num_samples : 2 * num_samples]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_samples))
    assert (epochs[0] == epochs[1]) is not shuffle
    assert (epochs[0] == sorted(epochs[0])) is not shuffle


def test_a_batch_larger_than_the_data_set_spans_epochs(tmp_path: Path) -> None:
    small = TokenDataset(write_counting_folder(tmp_path, 3 * LENGTH + 1), "train", LENGTH)
    drawn = global_batch([make_loader(small, global_batch_size=8)])
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [0, 1, 2]
    assert drawn[6] != drawn[7]


def test_ranks_8_4_16_2_within_an_epoch_repeat_nothing_and_miss_nothing(
    dataset: TokenDataset,
) -> None:
    steps = dataset.num_samples // 16
    alone = make_loader(dataset, micro_batch_size=16)
    expected = [global_batch([alone]) for _ in range(steps)]
    state: dict[str, Any] = make_loader(dataset).state_dict()
    drawn: list[list[int]] = []
    for data_size, num_steps in [(8, 10), (4, 7), (16, 20), (2, steps - 37)]:
        loaders = [
            make_loader(dataset, data_size=data_size, data_rank=rank, prefetch=2)
            for rank in range(data_size)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        drawn += [global_batch(loaders) for _ in range(num_steps)]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        for loader in loaders:
            loader.close()
    assert drawn == expected
    assert len(set(itertools.chain(*drawn))) == 16 * steps


def test_what_is_read_ahead_is_not_consumed(dataset: TokenDataset) -> None:
    loader = make_loader(dataset, prefetch=3)
    assert loader.samples_consumed == 0
    first = global_batch([loader])
    assert loader.samples_consumed == 16
    state = loader.state_dict()
    second, third = global_batch([loader]), global_batch([loader])
    loader.load_state_dict(state)
    assert [global_batch([loader]), global_batch([loader])] == [second, third]
    assert first != second
    loader.close()


def test_reading_ahead_changes_no_batch(dataset: TokenDataset) -> None:
    ahead, plain = make_loader(dataset, prefetch=2), make_loader(dataset)
    assert [global_batch([ahead]) for _ in range(70)] == [global_batch([plain]) for _ in range(70)]
    ahead.close()


def test_a_far_position_is_reached_at_once(dataset: TokenDataset) -> None:
    far = dataset.num_samples * 10**9 + 5
    loader = make_loader(dataset)
    loader.load_state_dict(loader.state_dict() | {"samples_consumed": far})
    epoch_end = global_batch([loader])
    assert loader.samples_consumed == far + 16
    assert len(set(epoch_end)) == 16


def test_close_ends_the_thread_even_when_it_waits_for_room(dataset: TokenDataset) -> None:
    before = threading.active_count()
    loaders = [make_loader(dataset, prefetch=2) for _ in range(3)]
    loaders[0].next()
    loaders[1].next()
    for loader in loaders:
        loader.close()
        loader.close()
    assert threading.active_count() == before


def test_an_error_of_the_thread_is_raised_by_next_as_it_is(dataset: TokenDataset) -> None:
    for path in dataset.folder.glob("*.bin"):
        path.unlink()
    loader = make_loader(dataset, prefetch=2)
    with pytest.raises(DataError, match=r"\.bin: cannot be read: No such file"):
        loader.next()
    assert loader.samples_consumed == 0
    loader.close()


def test_a_batch_that_cannot_be_shared_out_is_refused(dataset: TokenDataset) -> None:
    with pytest.raises(PlanError, match=r"global_batch_size = 16 .* 3 \* 2"):
        make_loader(dataset, micro_batch_size=3, data_size=2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 6}, "seed: the checkpoint has 5, this run has 6"),
        ({"shuffle": False}, "order: the checkpoint has 'shuffled', this run has 'sequential'"),
    ],
)
def test_a_position_in_another_order_is_refused(
    dataset: TokenDataset, change: dict[str, Any], complaint: str
) -> None:
    state = make_loader(dataset).state_dict()
    with pytest.raises(StateError, match=complaint):
        make_loader(dataset, **change).load_state_dict(state)


def test_a_position_in_another_data_set_is_refused(dataset: TokenDataset, tmp_path: Path) -> None:
    state = make_loader(dataset).state_dict()
    other = TokenDataset(write_counting_folder(tmp_path / "other", 4013), "train", LENGTH)
    with pytest.raises(StateError) as caught:
        make_loader(other).load_state_dict(state)
    assert dataset.manifest_digest in str(caught.value)
    assert other.manifest_digest in str(caught.value)
    longer = TokenDataset(dataset.folder, "train", 2 * LENGTH)
    with pytest.raises(StateError, match="sequence_length: the checkpoint has 4, this run has 8"):
        make_loader(longer).load_state_dict(state)


def test_the_state_survives_json_and_another_layout_of_batches(dataset: TokenDataset) -> None:
    loader = make_loader(dataset)
    global_batch([loader])
    state = loader.state_dict()
    assert state["samples_consumed"] == 16
    resumed = make_loader(dataset, micro_batch_size=4, data_size=2, data_rank=1)
    resumed.load_state_dict(state)
    expected = np.array(global_batch([loader])).reshape(2, 2, 4)[:, 1]
    assert samples_of(resumed.next()).tolist() == expected.tolist()
