"""Held-out loss by domain against its definition, token by token."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cdrmix.config.load import load_config
from cdrmix.corpus.encode import write_roles
from cdrmix.data.loader import split_documents
from cdrmix.data.shards import read_manifest, write_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.evaluation.perplexity import Evaluation, evaluate, held_out_rows
from cdrmix.models.backbone import Backbone
from tests.small_run import CONFIG, SMALL
from tests.unit.data.token_folder import write_token_folder

LENGTH = 16
# Documents in manifest order; no sample begins where a domain does, and one is inside a sample.
DOCUMENTS = {
    "code": [37, 41],
    "few": [5],
    "prose": [29, 90],
    "web": [53],
}


@pytest.fixture(scope="module")
def model() -> Backbone:
    settings = (*SMALL, "model.vocab_size=300", "model.init_std_scale=5")  # losses that differ
    model = Backbone(load_config(CONFIG, settings).model)
    model.initialize(seed=7)
    return model


def held_out(folder: Path, *domains: str, max_tokens: int = 2**27) -> TokenDataset:
    ids = cycle(range(1, 300))
    splits = {
        f"validation/{domain}": [[*islice(ids, size - 1), 0] for size in DOCUMENTS[domain]]
        for domain in domains
    }
    folder = write_token_folder(folder, splits, vocab_size=300, max_tokens=max_tokens)
    return TokenDataset(folder, "validation", LENGTH)


@torch.no_grad()
def by_definition(
    model: Backbone, dataset: TokenDataset, domains: list[str], max_tokens: int, *, apart: bool
) -> dict[str, tuple[float, int]]:
    """Mean nats and number of predicted tokens by domain, from the domain of each token."""
    of_token = list(
        chain.from_iterable([domain] * sum(DOCUMENTS[domain]) for domain in sorted(domains))
    )
    nats = defaultdict(list)
    for number in held_out_rows(dataset, max_tokens).tolist():
        row = dataset.rows(np.array([number]))
        labels, segments = split_documents(row, 0) if apart else (row[:, 1:], None)
        ids = None if segments is None else torch.from_numpy(segments)
        logits = model.logits(model.eval()(torch.from_numpy(row[:, :-1]), segment_ids=ids).hidden)
        each = F.cross_entropy(logits[0], torch.from_numpy(labels[0]), reduction="none")
        for place, value in enumerate(each.tolist()):
            if labels[0, place] >= 0:
                nats[of_token[number * LENGTH + place + 1]].append(value)
    return {name: (math.fsum(values) / len(values), len(values)) for name, values in nats.items()}


def mean_of_domains(result: Evaluation) -> float:
    return sum(each.loss * each.tokens for each in result.domains) / result.tokens


@pytest.mark.parametrize("max_shard", [2**27, 23])
@pytest.mark.parametrize("apart", [False, True])
def test_each_token_counts_for_the_domain_of_its_document(
    model: Backbone, tmp_path: Path, max_shard: int, apart: bool
) -> None:
    dataset = held_out(tmp_path, *DOCUMENTS, max_tokens=max_shard)
    found = evaluate(model, dataset, max_tokens=10_000, batch_size=3, segment_documents=apart)
    asked = by_definition(model, dataset, [*DOCUMENTS], 10_000, apart=apart)
    assert [each.domain for each in found.domains] == sorted(DOCUMENTS)
    assert {each.domain: each.tokens for each in found.domains} == {
        name: count for name, (_, count) in asked.items()
    }
    for each in found.domains:
        assert each.loss == pytest.approx(asked[each.domain][0], rel=1e-5)
        assert each.perplexity == pytest.approx(math.exp(each.loss))
    assert sum(each.tokens for each in found.domains) == found.tokens
    assert mean_of_domains(found) == pytest.approx(found.loss, rel=1e-13)


def test_a_domain_of_which_nothing_was_evaluated_is_left_out(
    model: Backbone, tmp_path: Path
) -> None:
    dataset = held_out(tmp_path, *DOCUMENTS)
    found = evaluate(model, dataset, max_tokens=LENGTH, batch_size=3)
    asked = by_definition(model, dataset, [*DOCUMENTS], LENGTH, apart=False)
    assert {each.domain for each in found.domains} == asked.keys() < DOCUMENTS.keys()
    assert mean_of_domains(found) == pytest.approx(found.loss, rel=1e-13)


def test_the_table_and_the_json_have_a_row_for_each_domain(model: Backbone, tmp_path: Path) -> None:
    found = evaluate(model, held_out(tmp_path, *DOCUMENTS), max_tokens=10_000, batch_size=8)
    rows = found.as_json()["domains"]
    assert [[*row] for row in rows] == [["domain", "loss", "perplexity", "tokens"]] * 4
    lines = found.table().splitlines()
    assert [line.split() for line in lines[4:9]] == [
        ["domain", "loss", "perplexity", "tokens"],
        *(
            [each.domain, f"{each.loss:.4f}", f"{each.perplexity:.2f}", f"{each.tokens}"]
            for each in found.domains
        ),
    ]
    assert max(map(len, lines[:9])) <= 80


def test_a_data_set_of_one_domain_has_the_result_that_it_had(
    model: Backbone, tmp_path: Path
) -> None:
    dataset = held_out(tmp_path, "prose")
    found = evaluate(model, dataset, max_tokens=10_000, batch_size=3)
    fields = ["loss", "perplexity", "bits_per_byte", "tokens", "layers"]
    assert [*found.as_json()] == fields and "domain" not in found.table()
    [(loss, count)] = by_definition(model, dataset, ["prose"], 10_000, apart=False).values()
    assert (found.loss, found.tokens) == (pytest.approx(loss, rel=1e-5), count)


def test_each_token_counts_for_its_objective(model: Backbone, tmp_path: Path) -> None:
    eos, pre, suf, mid = 0, 1, 2, 3
    text, fim = [*range(50, 61), eos], [pre, *range(4, 9), suf, 9, 10, mid, *range(11, 16), eos]
    chain_of_thought = [*range(100, 119), eos]
    documents = {"validation/a": [text, fim, chain_of_thought, fim, text, text]}
    folder = write_token_folder(tmp_path, documents, vocab_size=300)
    kinds = {id(text): 12 * "t", id(fim): 10 * "f" + 6 * "m"}
    kinds[id(chain_of_thought)] = 5 * "p" + 6 * "w" + 9 * "a"
    of_token = "".join(kinds[id(document)] for document in documents["validation/a"])
    roles = np.array([max("tpwa".find(letter), 0) for letter in of_token], dtype=np.uint8)
    manifest = read_manifest(folder)
    (shard,) = write_roles(folder, manifest.shards, [roles])
    write_manifest(folder, manifest.model_copy(update={"shards": (shard,)}))
    dataset = TokenDataset(folder, "validation", LENGTH)
    plain = evaluate(model, dataset, max_tokens=10_000, batch_size=3)
    found = evaluate(model, dataset, max_tokens=10_000, batch_size=3, fim_ids=(pre, suf, mid))
    assert plain.objectives == []
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)
    nats: dict[str, list[float]] = defaultdict(list)
    for number in range(dataset.num_samples):
        row = torch.from_numpy(dataset.rows(np.array([number])))
        with torch.no_grad():
            logits = model.logits(model.eval()(row[:, :-1]).hidden)
        each = F.cross_entropy(logits[0], row[0, 1:], reduction="none")
        for place, value in enumerate(each.tolist()):
            letter = of_token[number * LENGTH + place + 1]
            for name in ("fim", "fim_middle") if letter == "m" else (_NAMES[letter],):
                nats[name].append(value)
    assert {part.objective: part.tokens for part in found.objectives} == {
        name: len(values) for name, values in nats.items()
    }
    for part in found.objectives:
        assert part.loss == pytest.approx(math.fsum(nats[part.objective]) / part.tokens, rel=1e-5)
    assert [*found.as_json()["objectives"][0]] == ["objective", "loss", "tokens"]
    assert any(line.startswith("fim_middle") for line in found.table().splitlines())
    beside = held_out(tmp_path / "domains", *DOCUMENTS)
    options = {"max_tokens": 10_000, "batch_size": 3}
    with_kinds = evaluate(model, beside, **options, fim_ids=())
    assert with_kinds.objectives == [], "all of it is text"
    assert mean_of_domains(with_kinds) == pytest.approx(with_kinds.loss, rel=1e-13)
    without = evaluate(model, beside, **options)
    assert [each.tokens for each in with_kinds.domains] == [each.tokens for each in without.domains]
    assert with_kinds.loss == pytest.approx(without.loss, rel=1e-6)


_NAMES = {"t": "text", "p": "prompt", "w": "thought", "a": "answer", "f": "fim"}
