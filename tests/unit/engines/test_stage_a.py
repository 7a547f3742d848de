"""Samples of each domain that a run was trained on, of one with passed-over samples too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cdrmix.config.load import load_config
from cdrmix.config.schema import MixtureConfig
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.stage_a import Pretraining, _tokens_between
from cdrmix.engines.training_data import Corpus
from cdrmix.monitoring.health import Health
from cdrmix.parallel.topology import ALONE
from cdrmix.planning.cluster import processes
from cdrmix.planning.profile import choose
from tests.small_run import CONFIG, SMALL
from tests.unit.data.token_folder import write_token_folder

LENGTH = 64
SIZES = {"books": 20, "code": 40}
MIXTURE = MixtureConfig.model_validate({"phases": [{"weights": {"books": 1, "code": 3}}]})


def training_on(folder: Path, mixture: MixtureConfig | None) -> tuple[Pretraining, Any]:
    """A stage with its data alone, and what it needs of a run."""
    tokens = {
        f"train/{name}": [range(10_000 * place, 10_000 * place + LENGTH * size + 1)]
        for place, (name, size) in enumerate(SIZES.items())
    }
    write_token_folder(folder, {**tokens, "validation": [range(100)]}, vocab_size=30_000)
    train: TokenDataset | MixedDataset = TokenDataset(folder, "train", LENGTH)
    if mixture is not None:
        train = MixedDataset(folder, "train", LENGTH, mixture)
    config = load_config(CONFIG, [*SMALL, "training.max_steps=9", "data.prefetch_batches=0"])
    validation = TokenDataset(folder, "validation", LENGTH)
    corpus = Corpus(train.manifest, train, validation, None, folder)  # type: ignore[arg-type]
    stage = Pretraining(config, choose(config, processes(1)), ALONE, corpus)
    return stage, SimpleNamespace(health=Health(config.health, num_experts=8))


def test_samples_that_were_passed_over_are_not_counted_as_trained_on(tmp_path: Path) -> None:
    stage, run = training_on(tmp_path, MIXTURE)
    assert stage._samples_by_domain(run) == {}
    for _ in range(8):
        stage.loader.next()
    rows = stage.loader.sample_rows(0, 64)[:, 0] // 10_000
    for passed_over in ([], [(9, 30)], [(9, 30), (50, 64)]):
        run.health.passed_over = passed_over
        trained = np.ones(64, dtype=bool)
        for first, end in passed_over:
            trained[first:end] = False
        counts = Counter(rows[trained].tolist())
        assert stage._samples_by_domain(run) == {
            f"data/domain/{name}/samples": counts[place] for place, name in enumerate(SIZES)
        }


def test_an_average_of_the_weights_is_evaluated_within_the_same_tokens() -> None:
    plain, averaged = (
        load_config(CONFIG, [*SMALL, "training.max_steps=9", "evaluation.every_steps=100", *more])
        for more in ([], ["training.ema_decay=0.9"])
    )
    read = _tokens_between(plain)
    assert read == int(0.07 * 100 * plain.training.tokens_per_step)
    assert read - 1 <= 2 * _tokens_between(averaged) <= read


def test_without_a_mixture_of_several_domains_nothing_is_added(tmp_path: Path) -> None:
    stage, run = training_on(tmp_path, None)
    stage.loader.next()
    assert stage._samples_by_domain(run) == {}
