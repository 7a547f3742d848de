"""The loader: the same global batches at any data-parallel size, and an exact position."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cdrmix.config.schema import MixtureConfig
from cdrmix.data import read_ahead
from cdrmix.data.document import KINDS
from cdrmix.data.loader import (
    IGNORED_LABEL,
    Loader,
    label_kinds,
    next_targets,
    split_documents,
)
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError, PlanError, StateError
from cdrmix.objectives import language_model
from tests.unit.data.token_folder import write_counting_folder, write_token_folder

# Sample i of the counting folder begins with token i * LENGTH.
LENGTH = 4


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """1,003 samples, a prime-ish number that no batch divides, in seven shards."""
    folder = write_counting_folder(tmp_path, 1003 * LENGTH + 1, max_tokens=600)
    return TokenDataset(folder, "train", LENGTH)


def make_loader(dataset: TokenDataset | MixedDataset, **changes: Any) -> Loader:
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


def test_an_order_in_windows_reads_few_shards_at_a_time(dataset: TokenDataset) -> None:
    loader = make_loader(dataset, window_samples=100)
    drawn = list(
        itertools.chain(*(global_batch([loader]) for _ in range(dataset.num_samples // 16)))
    )
    assert len(set(drawn)) == len(drawn)
    for start in range(0, 900, 100):
        assert max(drawn[start : start + 100]) - min(drawn[start : start + 100]) == 99
    assert drawn != sorted(drawn)


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


def test_close_does_not_wait_for_a_file_server(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = threading.Event()
    answers = threading.Event()
    original = dataset.rows

    def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if indices[0] > 0:  # of the second batch
            is_asked.set()
            answers.wait(60)
        return original(indices)

    monkeypatch.setattr(read_ahead, "_CLOSE_SECONDS", 0.05)
    loader = make_loader(dataset, prefetch=1, shuffle=False)
    monkeypatch.setattr(dataset, "rows", rows)
    loader.next()
    assert is_asked.wait(30)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 20
    reading = [each for each in threading.enumerate() if each.name.startswith("read-ahead")]
    assert reading and all(each.daemon for each in reading), "an interpreter would wait for it"
    answers.set()
    for thread in reading:
        thread.join(30)
        assert not thread.is_alive()


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
        ({"window_samples": 64}, "order: .* this run has 'shuffled by 64 samples'"),
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
    assert f"{dataset.manifest_digest[:12]} in the checkpoint" in str(caught.value)
    assert f"{other.manifest_digest[:12]} here" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
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


def test_the_order_without_a_mixture_is_what_it_always_was(dataset: TokenDataset) -> None:
    drawn = make_loader(dataset).sample_rows(0, 3000)[:, 0] // LENGTH
    digest = hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()
    assert digest.startswith(
        "8ac688b5dd83bfc6"
    )  # checkpoints of earlier versions go on in this order


@pytest.fixture
def two_domains(tmp_path: Path) -> Path:
    """100 samples of code from token 0 on, 60 of prose from token 1,000 on."""
    documents = {
        "train/code": [range(100 * LENGTH + 1)],
        "train/prose": [range(1000, 1000 + 60 * LENGTH + 1)],
    }
    return write_token_folder(tmp_path / "domains", documents)


def mixed(folder: Path, **weights: float) -> MixedDataset:
    config = MixtureConfig.model_validate({"phases": ({"weights": weights},)})
    return MixedDataset(folder, "train", LENGTH, config)


def test_a_mixture_is_the_same_at_any_number_of_ranks_and_position(two_domains: Path) -> None:
    dataset = mixed(two_domains, code=0.25, prose=0.75)
    alone = make_loader(dataset, micro_batch_size=16)
    expected = [global_batch([alone]) for _ in range(30)]
    state = make_loader(dataset).state_dict()
    drawn = []
    for data_size, num_steps in [(8, 3), (4, 7), (16, 15), (2, 5)]:
        loaders = [make_loader(dataset, data_size=data_size, data_rank=r) for r in range(data_size)]
        for loader in loaders:
            loader.load_state_dict(state)
        drawn += [global_batch(loaders) for _ in range(num_steps)]
        state = loaders[0].state_dict()
    assert drawn == expected
    prose = [sample for batch in expected for sample in batch if sample >= 250]
    assert len(prose) == 0.75 * 30 * 16
    assert sorted(prose[:60]) == sorted(prose[60:120]) == list(range(250, 310))


def test_a_position_in_another_mixture_is_refused(two_domains: Path) -> None:
    one, other = mixed(two_domains, code=1.0, prose=1.0), mixed(two_domains, code=1.0, prose=2.0)
    state = make_loader(one).state_dict()
    with pytest.raises(StateError, match=f"mixture: the checkpoint has '{one.mixture[:12]}") as e:
        make_loader(other).load_state_dict(state)
    assert other.mixture[:12] in str(e.value)
    assert "data.mixture" in str(e.value)
    plain = TokenDataset(two_domains, "train", LENGTH)
    with pytest.raises(StateError, match="this run has None"):
        make_loader(plain).load_state_dict(state)
    before_mixtures = make_loader(plain).state_dict()
    del before_mixtures["mixture"]
    make_loader(plain).load_state_dict(before_mixtures)


def test_documents_of_a_sample_are_numbered_and_their_borders_not_predicted() -> None:
    eos, row = 0, [5, 6, 0, 7, 0, 0, 8, 9, 3]
    labels, segment_ids = split_documents(np.array([[row]]), eos)
    assert segment_ids.tolist() == [[[0, 0, 0, 1, 1, 2, 3, 3]]]
    assert labels.tolist() == [[[6, 0, -100, 0, -100, -100, 9, 3]]]
    assert IGNORED_LABEL == language_model.IGNORED_LABEL


def test_a_batch_with_documents_apart_differs_in_nothing_else(tmp_path: Path) -> None:
    documents = [[*range(start, start + 7), 0] for start in range(1, 900, 9)]
    dataset = TokenDataset(write_token_folder(tmp_path, {"train": documents}), "train", LENGTH)
    plain, apart = make_loader(dataset), make_loader(dataset, segment_documents=True)
    for _ in range(5):
        usual, batch = plain.next(), apart.next()
        assert usual.keys() == {"input_ids", "labels"}
        assert batch["segment_ids"].shape == batch["labels"].shape == (16, 1, LENGTH)
        assert batch["segment_ids"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], usual["input_ids"])
        border = usual["input_ids"] == 0
        assert border.any()
        assert torch.equal(batch["labels"] == IGNORED_LABEL, border)
        assert torch.equal(batch["labels"][~border], usual["labels"][~border])
        assert torch.equal(batch["segment_ids"].diff(dim=-1), border[..., :-1].long())


def test_further_targets_stay_in_the_document_and_the_sample() -> None:
    eos, row = 0, np.array([5, 6, 0, 7, 8, 9, 3])
    targets = next_targets(row, row[1:], 3, eos)
    assert targets.tolist() == [
        [6, 0, -100],  # the next document is not seen from this one
        [0, -100, -100],
        [7, -100, -100],  # EOS itself is of the document that it ends
        [8, 9, 3],
        [9, 3, -100],  # beyond the sample
        [3, -100, -100],
    ]


def test_further_targets_equal_their_definition() -> None:
    rows = np.random.default_rng(0).integers(0, 4, (3, 2, 20))
    labels, _ = split_documents(rows, 0)
    targets = next_targets(rows, labels, 5, 0)
    assert np.array_equal(targets[..., 0], labels)
    for a, b, t, i in itertools.product(range(3), range(2), range(19), range(1, 5)):
        row = rows[a, b]
        seen = t + 1 + i < 20 and not (row[t : t + 1 + i] == 0).any()
        assert targets[a, b, t, i] == (row[t + 1 + i] if seen else IGNORED_LABEL)


def test_a_batch_has_as_many_targets_as_asked_for(dataset: TokenDataset) -> None:
    batch = make_loader(dataset, micro_batch_size=2, num_targets=6).next()
    assert batch["targets"].shape == (8, 2, LENGTH, 6)
    assert batch["targets"].dtype == torch.int64
    assert torch.equal(batch["targets"][..., 0], batch["labels"])
    assert torch.equal(batch["targets"][..., 0, 1], batch["labels"][..., 1])
    assert (batch["targets"][..., LENGTH:] == IGNORED_LABEL).all(), "a sample is no longer"
    assert batch.keys() == {"input_ids", "labels", "targets"}


# Tokens of made-up rows: end of a document, the three of infilling, and any text.
EOS, PRE, SUF, MID, ANY = 0, 1, 2, 3, 9
_OF_LETTER = dict(zip("tpwafm", KINDS, strict=True))


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        # prefix, suffix, middle; text before and behind
        ([ANY, EOS, PRE, ANY, SUF, ANY, MID, ANY, ANY, EOS, ANY, ANY], "ttfffffmmmtt"),
        # suffix first: prefix and middle stand behind the mark of the middle, here empty
        ([PRE, SUF, ANY, MID, EOS, PRE, SUF, MID, ANY, ANY, EOS, ANY], "ffffmfffmmmt"),
        # behind a BOS, which is any token; two in a row, the second cut by the end
        ([ANY, PRE, ANY, SUF, MID, ANY, EOS, ANY, PRE, ANY, ANY, ANY], "fffffmmfffff"),
        # the head is outside: with the suffix or the middle inside it is told, without it is text
        ([ANY, ANY, SUF, ANY, MID, ANY, EOS, ANY, EOS, ANY, ANY, ANY], "fffffmmttttt"),
        ([MID, ANY, ANY, EOS, ANY, ANY, EOS, PRE, SUF, MID, ANY, ANY], "fmmmtttfffmm"),
        ([ANY, ANY, ANY, ANY, ANY, ANY, EOS, ANY, EOS, ANY, ANY, ANY], "tttttttttttt"),
    ],
)
def test_kinds_of_labels_are_told_by_the_tokens_of_infilling(tokens: list[int], kinds: str) -> None:
    expected = [_OF_LETTER[letter] for letter in kinds[1:]]
    rows = np.array([[ANY] * len(tokens), tokens, [PRE] + (len(tokens) - 1) * [MID]])
    found = label_kinds(
        rows.reshape(3, 1, -1), np.zeros_like(rows).reshape(3, 1, -1), EOS, (1, 2, 3)
    )
    assert [KINDS[kind] for kind in found[1, 0]] == expected
    assert not found[0].any(), "a row beside is judged by itself"
    # Roles of a chain of thought come first, and without these tokens they are all there is.
    roles = np.zeros(len(tokens), dtype=np.int64)
    roles[4] = 2
    of_roles = label_kinds(np.array(tokens), roles, EOS, (1, 2, 3))
    assert [KINDS[kind] for kind in of_roles] == [*expected[:3], "thought", *expected[4:]]
    assert label_kinds(np.array(tokens), roles, EOS, ()).tolist() == roles[1:].tolist()


def test_the_loader_adds_the_kinds_of_its_rows(tmp_path: Path) -> None:
    document = [PRE, 5, SUF, 6, MID, 7, EOS]
    folder = write_token_folder(tmp_path, {"train": 8 * [document]}, vocab_size=300)
    dataset = TokenDataset(folder, "train", len(document))
    batch = make_loader(dataset, global_batch_size=4, fim_ids=(PRE, SUF, MID)).next()
    assert batch["kinds"].dtype == torch.uint8
    assert {"".join("tpwafm"[kind] for kind in row) for row in batch["kinds"].flatten(0, 1)} == {
        "ffffmmf"
    }
    assert "kinds" not in make_loader(dataset).next()
