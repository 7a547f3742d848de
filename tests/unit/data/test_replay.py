"""Old data among new: exact shares, one order at any number of ranks, and its identity."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.config.cpt import ReplayConfig
from cdrmix.config.load import load_config
from cdrmix.config.schema import MixtureConfig
from cdrmix.data.loader import Loader
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.replay import ReplayDataset, check_tokenizers
from cdrmix.data.shards import Manifest, read_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError, StateError
from tests.unit.data.token_folder import write_token_folder

LENGTH = 4
# Tokens from 10,000 on are old.
NEW, OLD = 97, 31


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    sizes = {"new": (0, NEW), "old": (10_000, OLD)}
    made = [
        write_token_folder(
            tmp_path / name,
            {"train": [range(begin, begin + LENGTH * size + 1)]},
            vocab_size=30_000,
            max_tokens=150,
        )
        for name, (begin, size) in sizes.items()
    ]
    return made[0], made[1]


def dataset(folders: tuple[Path, Path], share: float = 0.25) -> ReplayDataset:
    new, old = (TokenDataset(folder, "train", LENGTH) for folder in folders)
    return ReplayDataset(new, old, ReplayConfig(fraction=share, source="old").share)


def loader(data: ReplayDataset, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1, "data_rank": 0}
    arguments |= {"data_size": 1, "seed": 5, "shuffle": True, "prefetch": 0}
    return Loader(data, **(arguments | changes))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.1, 0.25, 1 / 3, 0.437, 0.9999])
def test_any_stretch_has_its_share_to_within_one_sample(
    folders: tuple[Path, Path], share: float
) -> None:
    data = dataset(folders, share)
    for start in (0, 12_345, 10**12):
        numbers = np.arange(start, start + 20_000)
        is_old = np.diff(np.append(data.num_old(numbers), data.num_old(numbers[-1:] + 1)))
        assert set(is_old.tolist()) <= {0, 1}
        total = np.concatenate([[0], np.cumsum(is_old)])
        for length in (1, 7, 16, 1000, 20_000):
            counts = total[length:] - total[:-length]
            assert np.abs(counts - share * length).max() < 1 + 1e-4 * length * 1e-4


def test_each_data_set_keeps_its_own_epochs(folders: tuple[Path, Path]) -> None:
    data = dataset(folders)
    places = data.order(np.arange(4 * OLD), 5)
    old = places[places >= NEW] - NEW
    assert sorted(old.tolist()) == list(range(OLD))  # one epoch of it
    new = places[places < NEW]
    assert len(set(new[:NEW].tolist())) == min(NEW, len(new))
    # in the order that either has alone
    alone = data.old.order(np.arange(OLD), 5)
    assert old.tolist() == alone.tolist()


def test_rows_are_of_the_data_set_that_the_order_names(folders: tuple[Path, Path]) -> None:
    data = dataset(folders)
    rows = loader(data).sample_rows(0, 400)
    is_old = rows[:, 0] >= 10_000
    assert (np.diff(rows, axis=1) == 1).all()
    assert is_old.tolist() == [(n + 1) // 4 > n // 4 for n in range(400)]
    data.expect(np.arange(NEW + OLD).reshape(4, -1))
    assert not data.roles(np.array([0, NEW])).any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_order_and_go_on_in_it(folders: tuple[Path, Path], ranks: int) -> None:
    def batch(loaders: list[Loader]) -> list[int]:
        rows = [each.next()["input_ids"][..., 0] for each in loaders]
        return torch.stack(rows, dim=1).flatten().tolist()

    alone = loader(dataset(folders), micro_batch_size=8)
    together = [loader(dataset(folders), data_rank=r, data_size=ranks) for r in range(ranks)]
    for _ in range(30):
        assert batch(together) == batch([alone])
    state = together[0].state_dict()
    assert state["samples_consumed"] == 240
    resumed = loader(dataset(folders), micro_batch_size=4)
    resumed.load_state_dict(state)
    assert batch([resumed]) == batch(together)


def test_another_share_or_other_old_data_are_refused(folders: tuple[Path, Path]) -> None:
    state = loader(dataset(folders)).state_dict()
    with pytest.raises(StateError, match="1/10 of the samples") as caught:
        loader(dataset(folders, 0.1)).load_state_dict(state)
    assert "cpt.replay" in str(caught.value)
    swapped = ReplayDataset(dataset(folders).new, dataset(folders).new, Fraction(1, 4))
    with pytest.raises(StateError, match="replay: "):
        loader(swapped).load_state_dict(state)
    plain = Loader(dataset(folders).new, global_batch_size=8, micro_batch_size=8, data_rank=0,
                   data_size=1, seed=5, shuffle=True, prefetch=0)  # fmt: skip
    with pytest.raises(StateError, match="replay: "):
        plain.load_state_dict(state)
    # of a checkpoint from before there was replay
    old_state = {key: value for key, value in plain.state_dict().items() if key != "replay"}
    plain.load_state_dict(old_state)


def test_samples_are_counted_by_data_set_and_domain(tmp_path: Path) -> None:
    tokens = {f"train/{name}": [range(LENGTH * 50 + 1)] for name in ("books", "code")}
    folder = write_token_folder(tmp_path / "two", tokens)
    one = write_token_folder(tmp_path / "one", {"train/web": [range(LENGTH * 50 + 1)]})
    weights = MixtureConfig.model_validate({"phases": [{"weights": {"books": 1, "code": 3}}]})
    mixed = MixedDataset(folder, "train", LENGTH, weights)
    plain, web = (TokenDataset(each, "train", LENGTH) for each in (folder, one))
    quarter = Fraction(1, 4)
    assert ReplayDataset(web, mixed, quarter).drawn(0, 64) == {
        "new": 48, "replay/books": 4, "replay/code": 12
    }  # fmt: skip
    assert ReplayDataset(mixed, web, quarter).drawn(64, 128) == {
        "books": 12, "code": 36, "replay/web": 16
    }  # fmt: skip
    assert ReplayDataset(web, plain, quarter).drawn(0, 10) == {"new": 8, "replay/all": 2}


def test_another_tokenizer_is_refused(folders: tuple[Path, Path]) -> None:
    new, old = map(read_manifest, folders)
    data = load_config("model_configs/cdrmix-core-tiny.yaml").data
    check_tokenizers(new, old, data=data, key="cpt.replay.source", folder=folders[1])
    other = old.model_copy(
        update={"tokenizer": old.tokenizer.model_copy(update={"sha256": "0" * 64})}
    )
    with pytest.raises(DataError, match="another tokenizer than data.path"):
        check_tokenizers(new, other, data=data, key="cpt.replay.source", folder=folders[1])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # saved again by another program
        ({"sha256": "0" * 64}, None),
        ({"sha256": "0" * 64, "content_sha256": "2" * 64}, "another tokenizer than data.path"),
        ({"sha256": "0" * 64, "content_sha256": None}, "another tokenizer than data.path"),
        ({"document_prefix": (5,)}, r"document_prefix \[5\] there, \[\] here"),
        ({"eos_id": 7}, "eos_id 7 there, 0 here"),
    ],
)
def test_tokenizers_are_compared_by_what_decides_the_ids(
    folders: tuple[Path, Path], changes: dict[str, Any], told: str | None
) -> None:
    def foreign(folder: Path, changes: dict[str, Any]) -> Manifest:
        manifest = read_manifest(folder)
        values: dict[str, Any] = {"kind": "foreign", "content_sha256": "1" * 64, **changes}
        eos_id = values.pop("eos_id", manifest.eos_id)
        tokenizer = manifest.tokenizer.model_copy(update=values)
        return manifest.model_copy(update={"tokenizer": tokenizer, "eos_id": eos_id})

    new, old = foreign(folders[0], {}), foreign(folders[1], changes)
    data = load_config("model_configs/cdrmix-core-tiny.yaml").data
    outcome: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if told is not None:
        outcome = pytest.raises(DataError, match=told)
    with outcome:
        check_tokenizers(new, old, data=data, key="cpt.replay.source", folder=folders[1])
