"""Mixtures: shares kept at every prefix, cursors that miss and repeat nothing, at any position."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cdrmix.config.load import changed_keys, load_config
from cdrmix.config.schema import DataConfig, MixtureConfig
from cdrmix.data.mixture import MixedDataset, Mixture, Phase, check_mixture, draw_sources
from cdrmix.data.shards import read_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError
from tests.unit.data.token_folder import write_token_folder

SIZES = {"books": 40, "code": 1000, "web": 300}


def sources_of(mixture: Mixture, stop: int, start: int = 0) -> np.ndarray:
    return mixture.locate(np.arange(start, stop))[0]


def prefix_counts(mixture: Mixture, stop: int) -> np.ndarray:
    """Samples of each domain before each of the global samples 1 .. stop, [stop, domains]."""
    return np.eye(len(mixture.domains), dtype=int)[sources_of(mixture, stop)].cumsum(axis=0)


@pytest.mark.parametrize("seed", range(6))
def test_counts_in_any_prefix_are_within_one_of_the_shares(seed: int) -> None:
    generator = random.Random(seed)
    names = [f"domain{number}" for number in range(generator.randint(1, 9))]
    parts = [generator.randint(1, 1000) for _ in names]
    parts[0] += 10_000 - sum(parts)  # shares in whole 1/10,000
    weights = dict(zip(names, parts, strict=True))
    mixture = Mixture(dict.fromkeys(names, 5), [Phase(weights)])
    asked = np.arange(1, 25_001)[:, None] * np.array([weights[n] for n in mixture.domains]) / 1e4
    assert np.abs(prefix_counts(mixture, 25_000) - asked).max() < 1


def test_each_phase_keeps_its_shares_and_the_last_goes_on() -> None:
    shares = [{"code": 0.8, "web": 0.2}, {"code": 0.3, "web": 0.3, "books": 0.4}]
    phases = [Phase(shares[0], 777), Phase(shares[1], 1234)]
    mixture = Mixture(SIZES, phases)
    counts = np.vstack([np.zeros(3, int), prefix_counts(mixture, 4000)])
    for start, stop, asked in [
        (0, 777, shares[0]),
        (777, 2011, shares[1]),
        (2011, 4000, shares[1]),
    ]:
        drawn = counts[start : stop + 1] - counts[start]
        wanted = np.array([asked.get(name, 0.0) for name in mixture.domains])
        assert np.abs(drawn - np.arange(len(drawn))[:, None] * wanted).max() < 1


@pytest.mark.parametrize("change", ["step", "linear", "cosine"])
def test_a_domain_is_drawn_in_its_own_order_without_gap_or_repeat(change: str) -> None:
    phases = [
        Phase({"code": 3, "web": 1}, 500),
        Phase({"books": 1, "web": 1}, 3333, change),  # type: ignore[arg-type]
        Phase({"code": 1}),
    ]
    mixture = Mixture(SIZES, phases)
    sources, cursors = mixture.locate(np.arange(6000))
    for source in range(3):
        mine = cursors[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
    for number in (0, 1, 499, 500, 2000, 3832, 3833, 3834, 5999):
        assert mixture.counts(number).tolist() == [
            int((sources[:number] == source).sum()) for source in range(3)
        ]


def test_any_position_is_found_without_those_before_it() -> None:
    mixture = Mixture(SIZES, [Phase({"code": 1, "web": 2}, 5000), Phase({"code": 1, "books": 3})])
    sources, cursors = mixture.locate(np.arange(9000))
    order = np.random.default_rng(0).permutation(9000).reshape(90, 100)
    apart, alone = mixture.locate(order)
    assert np.array_equal(apart, sources[order])
    assert np.array_equal(alone, cursors[order])
    far = 10**12 + 7
    source, cursor = mixture.locate(np.array([far]))
    assert cursor[0] == mixture.counts(far)[source[0]]
    assert abs(mixture.counts(far)[0] / far - 0.75) < 1e-6


@pytest.mark.parametrize("change", ["linear", "cosine"])
@pytest.mark.parametrize("length", [50, 999, 6400, 70_000])
def test_changing_shares_follow_their_curve(change: str, length: int) -> None:
    before, after = {"code": 0.9, "web": 0.1}, {"code": 0.2, "books": 0.5, "web": 0.3}
    mixture = Mixture(SIZES, [Phase(before, 100), Phase(after, length, change)])  # type: ignore[arg-type]
    counts = np.vstack([np.zeros(3, int), prefix_counts(mixture, 100 + length)])
    done = (np.arange(length) + 0.5) / length
    reached = done if change == "linear" else (1 - np.cos(np.pi * done)) / 2
    first, last = (np.array([w.get(n, 0.0) for n in mixture.domains]) for w in (before, after))
    asked = (first + reached[:, None] * (last - first)).cumsum(axis=0)
    drawn = counts[101:] - counts[100]
    # Steps of 1/64 of the phase, or of 100 samples where that is longer, stay this near a curve.
    step = max(length / 64, 100)
    assert np.abs(drawn - asked).max() < 2 + step / 4
    assert np.abs(drawn[-1] - asked[-1]).max() < 2
    assert mixture.target_shares(100 + length).tolist() == pytest.approx(last.tolist())


def test_temperature_raises_small_domains() -> None:
    def shares(temperature: float) -> list[float]:
        found = Mixture(SIZES, [Phase({"code": 9, "web": 1})], temperature=temperature)
        return found.target_shares(0).tolist()

    assert shares(1.0) == pytest.approx([0, 0.9, 0.1])
    assert shares(2.0) == pytest.approx([0, 0.75, 0.25])
    assert shares(1e6) == pytest.approx([0, 0.5, 0.5], abs=1e-5)
    assert shares(0.5) == pytest.approx([0, 81 / 82, 1 / 82])


def test_what_was_asked_and_what_is_drawn_are_shown() -> None:
    mixture = Mixture(
        SIZES, [Phase({"code": 1}, 1000), Phase({"code": 1, "web": 1}, 1000, "linear")]
    )
    shown = draw_sources(mixture, 0, 2000)["domains"]
    assert shown["books"] == {"asked": 0.0, "drawn": 0.0, "samples": 0}
    assert shown["web"]["asked"] == pytest.approx(0.125, abs=1e-4)
    assert shown["web"]["samples"] == pytest.approx(250, abs=1)
    assert sum(domain["samples"] for domain in shown.values()) == 2000


def test_the_digest_names_the_order() -> None:
    def digest(sizes: dict[str, int], *phases: Phase) -> str:
        return Mixture(sizes, phases).digest

    one = digest(SIZES, Phase({"code": 1, "web": 1}))
    assert one == digest(SIZES, Phase({"code": 5, "web": 5}))
    others = [
        digest(SIZES, Phase({"code": 1, "web": 2})),
        digest(SIZES, Phase({"code": 1, "web": 1}, 10), Phase({"code": 1})),
        digest(SIZES | {"web": 301}, Phase({"code": 1, "web": 1})),
    ]
    assert len({one, *others}) == 4


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        ([], "give at least one"),
        ([Phase({"cod": 1})], "no domain cod in this data set. Known: books, code, web"),
        ([Phase({"code": 0})], "one of them above 0"),
        ([Phase({"code": -1, "web": 2})], "weights of 0 or more"),
        ([Phase({"code": float("nan")})], "weights of 0 or more"),
        ([Phase({"code": 1}), Phase({"web": 1})], r"phases\[0\]: only the last"),
        ([Phase({"code": 1}, 0)], "at least one"),
        ([Phase({"code": 1}, 5, "linear")], r"phases\[0\]\.change = linear: needs a phase before"),
        ([Phase({"code": 1}, 5), Phase({"web": 1}, None, "cosine")], "a length of its own"),
        ([Phase({"code": 1, "web": 1e-5})], "domain web has a share of 1e-05; the smallest is"),
    ],
)
def test_a_mixture_that_cannot_be_laid_out_is_refused(phases: list[Phase], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        Mixture(SIZES, phases)


def test_a_phase_has_one_length() -> None:
    with pytest.raises(ValidationError, match="give tokens or samples, not both"):
        MixtureConfig.model_validate({"phases": ({"tokens": 5, "samples": 5},)})


LENGTH = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Domains of 20, 50 and 100 samples; sample i of a domain begins with 10,000 * place + 4i.
    A fourth domain is shorter than a sample."""
    return write_token_folder(
        tmp_path,
        {
            f"train/{name}": [range(10_000 * place, 10_000 * place + LENGTH * size + 1)]
            for place, (name, size) in enumerate([("a", 20), ("b", 50), ("c", 100), ("tiny", 0)])
        },
        vocab_size=60_000,
    )


def mixed(folder: Path, *phases: dict[str, object]) -> MixedDataset:
    config = MixtureConfig.model_validate({"phases": phases})
    return MixedDataset(folder, "train", LENGTH, config)


def places(dataset: MixedDataset, numbers: np.ndarray, seed: int | None) -> list[tuple[int, int]]:
    """(domain, sample in it) at global sample numbers."""
    rows = dataset.rows(dataset.order(numbers, seed))
    assert (np.diff(rows) == 1).all()
    return [(int(first) // 10_000, int(first) % 10_000 // LENGTH) for first in rows[:, 0]]


@pytest.mark.parametrize("seed", [None, 3])
def test_each_domain_is_read_whole_before_it_begins_again(folder: Path, seed: int | None) -> None:
    dataset = mixed(folder, {"weights": {"a": 0.5, "b": 0.25, "c": 0.25}})
    found = places(dataset, np.arange(400), seed)
    for domain, size in enumerate((20, 50, 100)):
        mine = [sample for place, sample in found if place == domain]
        assert len(mine) == (200, 100, 100)[domain]
        epochs = [mine[i : i + size] for i in range(0, len(mine), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert all((epoch == sorted(epoch)) is (seed is None) for epoch in epochs)
    if seed is not None:
        again = [sample for place, sample in found if place == 0]
        assert again[:20] != again[20:40]


def test_a_saved_mixture_is_no_change_of_the_configuration() -> None:
    mixture = {"phases": ({"weights": {"code": 1.0}, "samples": 7}, {"change": "step"})}
    config = MixtureConfig.model_validate(mixture)
    saved = {"mixture": config.model_dump(mode="json")}
    changed = changed_keys(saved, DataConfig(path="a", mixture=config))
    assert "path" in {name for name, _, _ in changed}
    assert not [name for name, _, _ in changed if name.startswith("mixture")]


def test_samples_drawn_between_two_positions_are_those_of_the_order(folder: Path) -> None:
    dataset = mixed(folder, {"weights": {"a": 1, "c": 3}, "samples": 30}, {"weights": {"b": 1}})
    domains = [domain for domain, _ in places(dataset, np.arange(80), seed=1)]
    for start, stop in ((0, 80), (7, 33), (30, 30)):
        counts = Counter(domains[start:stop])
        asked = {name: counts[place] for place, name in enumerate(("a", "b", "c", "tiny"))}
        assert dataset.drawn(start, stop) == asked
    assert TokenDataset(folder, "train", LENGTH).drawn(0, 9) == {}


def test_weights_left_out_are_the_sizes_of_the_domains(folder: Path) -> None:
    found = places(mixed(folder, {}), np.arange(170), seed=1)
    assert draw_sources(mixed(folder, {})._plan, 0, 170)["domains"]["b"]["samples"] == 50
    assert sorted(found) == [(d, i) for d, size in enumerate((20, 50, 100)) for i in range(size)]


def test_tokens_of_a_phase_are_rounded_up_to_samples(folder: Path) -> None:
    dataset = mixed(
        folder, {"weights": {"a": 1.0}, "tokens": 9 * LENGTH + 1}, {"weights": {"c": 1.0}}
    )
    domains = [domain for domain, _ in places(dataset, np.arange(20), None)]
    assert domains == [0] * 10 + [2] * 10


def test_a_domain_too_short_for_a_sample_cannot_be_asked_for(folder: Path) -> None:
    with pytest.raises(DataError, match="domain tiny has a share of 0.5, but too few tokens"):
        mixed(folder, {"weights": {"a": 1.0, "tiny": 1.0}})
    with pytest.raises(IndexError, match="samples 0 to 170 of 170"):
        mixed(folder, {}).rows(np.array([0, 170]))
    with pytest.raises(DataError, match="no split 'test'. Splits here: train"):
        MixedDataset(folder, "test", LENGTH, MixtureConfig())


@pytest.mark.parametrize(
    ("phases", "built", "complaint"),
    [
        ([{"weights": {"cod": 1}}], None, r"phases\[0\].weights: no domain cod in this data set"),
        ([{"weights": {"a": 1, "tiny": 1}}], None, "domain tiny has a share of 0.5, but too few"),
        ([{"change": "linear", "samples": 3}], None, "needs a phase before it"),
        (None, [{"weights": {"old": 1}}], "no domain old in this data set. Known: a, b, c, tiny"),
        ([{"weights": {"a": 1}}], [{"weights": {"old": 1}}], None),
        ([{"weights": {"a": 1}, "tokens": 1}, {"weights": {"b": 1}}], None, None),
        (None, None, None),
    ],
)
def test_a_mixture_is_checked_without_its_shards(
    folder: Path, phases: list[object] | None, built: list[object] | None, complaint: str | None
) -> None:
    manifest = read_manifest(folder)
    for shard in folder.glob("*.bin"):
        shard.unlink()
    if built is not None:
        manifest = manifest.model_copy(update={"source": {"mixture": {"phases": built}}})
    config = load_config("model_configs/cdrmix-core-tiny.yaml")
    mixture = phases and MixtureConfig.model_validate({"phases": phases})
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"mixture": mixture}),
            "training": config.training.model_copy(update={"sequence_length": LENGTH}),
        }
    )
    if complaint is None:
        check_mixture(config, manifest)
    else:
        with pytest.raises(DataError, match=complaint):
            check_mixture(config, manifest)
