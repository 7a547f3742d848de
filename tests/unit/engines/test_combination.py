"""What a run says of its objectives, and of those that its data have no tokens of."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cdrmix.config.load import load_config
from cdrmix.config.objectives import ObjectivesConfig
from cdrmix.corpus.encode import write_roles
from cdrmix.data.shards import read_manifest, write_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.combination import describe_objectives, logger
from cdrmix.engines.training_data import Corpus
from tests.small_run import CONFIG
from tests.unit.data.token_folder import write_token_folder

FIM_IDS = {"fim_prefix": 1, "fim_suffix": 2, "fim_middle": 3}


def corpus(folder: Path, document: list[int], *, roles: bool = False) -> Corpus:
    write_token_folder(folder, {"train": 20 * [document]}, vocab_size=300)
    manifest = read_manifest(folder)
    if roles:
        (shard,) = write_roles(folder, manifest.shards, [np.ones(20 * len(document), np.uint8)])
        write_manifest(folder, manifest.model_copy(update={"shards": (shard,)}))
    train = TokenDataset(folder, "train", 8)
    tokenizer: Any = SimpleNamespace(roles=FIM_IDS)
    return Corpus(train.manifest, train, train, tokenizer, folder)


@pytest.mark.parametrize(
    ("given", "document", "roles", "missing"),
    [
        ([], [5, 6, 0], False, []),
        (["objectives.z_loss=1e-4"], [5, 6, 0], False, []),
        (["objectives.thought=1", "objectives.fim=2"], [5, 6, 0], False, ["thought", "fim"]),
        (["objectives.thought=1", "objectives.fim=2"], [5, 6, 0], True, ["fim"]),
        (["objectives.thought=1", "objectives.fim=2"], [1, 5, 2, 3, 6, 0], True, []),
        (["objectives.answer=0", "objectives.prompt=0"], [5, 6, 0], False, []),
    ],
)
def test_a_weight_without_tokens_is_a_warning_that_names_it(
    given: list[str],
    document: list[int],
    roles: bool,
    missing: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    config = load_config(CONFIG, given)
    with caplog.at_level(logging.INFO, logger.name):
        describe_objectives(config, corpus(tmp_path, document, roles=roles))
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    names = [text.partition("objectives.")[2].partition(" ")[0] for text in told]
    assert sorted(names) == sorted(missing)
    said = [text for text in caplog.messages if text.startswith("objectives: text 1.0, fim ")]
    assert len(said) == bool(given)


def test_a_copy_of_a_configuration_chooses_what_is_no_default() -> None:
    chosen = ObjectivesConfig(thought=1.0, fim=2.0, prompt=0.0)
    assert chosen.chosen() == {"thought": 1.0, "fim": 2.0}
    copy = ObjectivesConfig.model_validate(chosen.model_dump())
    assert copy.chosen() == {"fim": 2.0}
