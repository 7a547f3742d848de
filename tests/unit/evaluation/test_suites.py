"""Suites over held-out text on a tiny model: perplexity, routing and infill."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.lm_harness import harness_model
from cdrmix.evaluation.perplexity import evaluate
from cdrmix.evaluation.suite import Judged, Request, suite_of
from cdrmix.evaluation.suites.infill import Infill
from cdrmix.evaluation.suites.perplexity import Perplexity
from cdrmix.evaluation.suites.routing import Routing, check_of
from cdrmix.evaluation.trained import TrainedModel, load_trained
from cdrmix.monitoring.suite_results import SuiteResult, read_result, store_result
from cdrmix.parallel.topology import ALONE
from tests.made_run import made_run
from tests.unit.data.token_folder import write_token_folder

TEXTS = [f"def f{i}(x): return x\n" * (1 + 3 * i) for i in range(6)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    root = tmp_path_factory.mktemp("judged")
    made_run(root, "model.init_std_scale=4")
    return load_trained(root)


@pytest.fixture(scope="module")
def judged(run: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """A hybrid of experts with a recurrence, with held-out documents of two domains."""
    ids = [[*run.tokenizer.encode(text), run.tokenizer.eos_id] for text in TEXTS]
    splits = {"validation/code": ids[:4], "validation/prose": ids[4:]}
    folder = write_token_folder(tmp_path_factory.mktemp("data"), splits, vocab_size=320)
    return Judged(
        model=run.model,
        tokenizer=run.tokenizer,
        config=run.config,
        topology=ALONE,
        max_length=run.config.training.sequence_length,
        batch_size=2,
        source="a run",
        step=run.step,
        weights="trained",
        data=folder,
    )


def scores(result: SuiteResult) -> dict[tuple[str, str], float]:
    found = {(row.task, row.metric): row.score for row in result.rows}
    assert len(found) == len(result.rows), "each row has a name of its own"
    return found


@pytest.fixture(scope="module")
def measured(judged: Judged) -> SuiteResult:
    return Perplexity().measure(judged, Request(limit=99))


def test_rows_of_packed_samples_are_the_evaluation_of_a_run(
    judged: Judged, measured: SuiteResult
) -> None:
    assert judged.data is not None
    dataset = TokenDataset(judged.data, "validation", 64)
    plain = evaluate(judged.model, dataset, max_tokens=99 * 64, batch_size=2)
    shown = json.loads(json.dumps(measured.as_json()))
    fields = json.loads(json.dumps(plain.as_json()))
    assert fields.keys() < shown.keys()
    assert shown["layers"] == fields["layers"]
    for name in ("loss", "perplexity", "bits_per_byte", "tokens"):
        assert shown[name] == pytest.approx(fields[name], rel=1e-6), name
    found = scores(measured)
    assert found["packed", "nats_per_token"] == pytest.approx(plain.loss, rel=1e-6)
    assert found["packed", "bits_per_byte"] == pytest.approx(plain.bits_per_byte, rel=1e-6)
    assert found["packed", "perplexity"] == pytest.approx(plain.perplexity, rel=1e-5)
    for domain in plain.domains:
        loss = found[f"packed:{domain.domain}", "nats_per_token"]
        assert loss == pytest.approx(domain.loss, rel=1e-6)
    row = measured.rows[0]
    assert (row.task, row.n) == ("packed", dataset.num_samples)
    assert row.low is not None and row.low < row.score < row.high


def test_documents_are_counted_once_by_domain(judged: Judged, measured: SuiteResult) -> None:
    found = scores(measured)
    tokens = [len(judged.tokenizer.encode(text)) for text in TEXTS]
    sizes = [len(text.encode()) for text in TEXTS]
    settings = measured.settings
    assert (settings["tokens"], settings["bytes"]) == (sum(tokens), sum(sizes))
    assert settings["documents"] == 6
    assert (settings["window"], settings["stride"]) == (64, 32)
    assert settings["prefix_token"] == judged.tokenizer.eos_id
    for task in ("documents", "documents-carried", "documents-reset"):
        of_domains = {"code": slice(0, 4), "prose": slice(4, 6)}
        nats = sum(
            found[f"{task}:{domain}", "nats_per_token"] * sum(tokens[which])
            for domain, which in of_domains.items()
        )
        assert found[task, "nats_per_token"] == pytest.approx(nats / sum(tokens), rel=1e-12)
        bits = nats / math.log(2) / sum(sizes)
        assert found[task, "bits_per_byte"] == pytest.approx(bits, rel=1e-12)
        assert found[task, "perplexity"] == pytest.approx(math.exp(nats / sum(tokens)))
    for row in measured.rows:
        if row.task.startswith("documents"):
            assert row.low is not None and row.low <= row.score <= row.high
            assert row.n == {"": 6, "code": 4, "prose": 2}[row.task.partition(":")[2]]
    longer = sum(count > 64 for count in tokens)
    assert (settings["state"], settings["longer_documents"]) == ("carried and reset", longer)
    ways = {found[task, "bits_per_byte"] for task in ("documents", "documents-carried")}
    assert len({*ways, found["documents-reset", "bits_per_byte"]}) == 3


def test_evaluation_changes_neither_weights_nor_random_numbers(judged: Judged) -> None:
    before = {name: p.clone() for name, p in judged.model.state_dict().items()}  # type: ignore[attr-defined]
    torch.manual_seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for suite in (Perplexity(), Routing()):
        suite.measure(judged, Request(limit=3))
    after = judged.model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.random.get_state()[1].tolist() == states[1]


def test_bits_per_byte_are_those_of_the_harness(
    run: TrainedModel, judged: Judged, tmp_path: Path
) -> None:
    from lm_eval.api.instance import Instance

    texts = [*TEXTS, "naïve Ödön: 東京\n" * 9, "x"]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=i)
        for i, text in enumerate(texts)
    ]
    nats = -sum(harness_model(run).loglikelihood_rolling(requests, disable_tqdm=True))
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    request = Request(tasks=file, options={"stride": 64})
    result = Perplexity().measure(judged, request)
    found = scores(result)
    assert not any(task.startswith("packed") for task, _ in found)
    assert found["documents", "bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    assert [*result.settings["digests"]] == ["texts.jsonl"]
    # a control: half windows see more of the text
    halves = scores(Perplexity().measure(judged, Request(tasks=file)))
    assert halves["documents", "bits_per_byte"] != pytest.approx(expected, rel=1e-4)


def test_another_tokenizer_reads_the_same_texts(judged: Judged, tmp_path: Path) -> None:
    assert judged.data is not None
    other = tmp_path / "other"
    other.mkdir()
    train_tokenizer(["return x\n def"], 266).save(str(other / TOKENIZER_FILE))
    folder = tmp_path / "data"
    ids = [[*load_tokenizer(other).encode(text), 0] for text in TEXTS]
    write_token_folder(folder, {"validation": ids}, vocab_size=320)
    (folder / TOKENIZER_FILE).write_bytes((other / TOKENIZER_FILE).read_bytes())
    foreign = dataclasses.replace(judged, data=folder, tokenizer_digest="f" * 64)
    result = Perplexity().measure(foreign, Request(limit=99))
    mine = Perplexity().measure(judged, Request(limit=99))
    assert result.settings["packed"].startswith("left out")
    assert result.settings["bytes"] == mine.settings["bytes"]
    ours, theirs = scores(mine), scores(result)
    name = ("documents", "bits_per_byte")
    assert theirs[name] == pytest.approx(ours[name], rel=1e-6), "it is the same model and text"
    for suite in (Infill(), Routing()):
        with pytest.raises(DataError, match="in tokens of another tokenizer"):
            suite.measure(foreign, Request())


def test_the_number_of_documents_is_limited(judged: Judged) -> None:
    result = Perplexity().measure(judged, Request(limit=2))
    assert result.settings["documents"] == 2
    assert result.settings["packed"]["samples"] == 2
    again = Perplexity().measure(judged, Request(limit=2))
    assert again == result, "the same ones each time"
    seeds = {
        Perplexity().measure(judged, Request(limit=2, seed=seed)).settings["bytes"]
        for seed in range(4)
    }
    assert len(seeds) > 1, "others by the seed"
    few = Perplexity().measure(judged, Request(options={"max_tokens": 600}))
    assert few.settings["tokens"] <= 150 < sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "wide"}, "window = wide is no number of tokens"),
        ({"stride": 0}, "stride = 0 is no number of tokens"),
        ({"window": 8, "stride": 9}, "a stride of 9 tokens would leave out some"),
    ],
)
def test_windows_that_cannot_be_are_refused_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Perplexity().check(Request(options=options))


def test_what_is_missing_is_told(judged: Judged, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a window of 65 tokens is longer than the model's"):
        Perplexity().measure(judged, Request(options={"window": 65}))
    without = dataclasses.replace(judged, data=None, no_data="a run: it is not there")
    for suite in (Perplexity(), Routing(), Infill()):
        with pytest.raises(DataError, match="a run: it is not there"):
            suite.measure(without, Request())
    with pytest.raises(DataError, match="is no text"):
        Perplexity().check(Request(tasks=tmp_path / "none.txt"))
    for suite in (Routing(), Infill()):
        with pytest.raises(ConfigError, match="reads no tasks"):
            suite.check(Request(tasks=tmp_path))
    with pytest.raises(ConfigError, match="Give 2 or more"):
        Infill().check(Request(limit=1))


def test_routing_is_told_against_its_bounds(judged: Judged, tmp_path: Path) -> None:
    result = Routing().measure(judged, Request(options={"max_tokens": 10_000}))
    found = scores(result)
    layers = result.details["layers"]
    assert len(layers) == 4
    for layer in layers:
        name, shares = f"layer {layer['layer']}", np.array(layer["utilisation"])
        assert found[name, "utilisation_min"] == shares.min()
        assert found[name, "utilisation_max"] == shares.max()
        assert found[name, "utilisation_cv"] == pytest.approx(shares.std() / shares.mean())
        assert found[name, "overflow"] == layer["overflow_fraction"]
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
        assert found[name, "entropy_bits"] == pytest.approx(entropy, abs=1e-5)
    for row in result.rows:
        assert row.low is not None and row.low <= row.high
        assert row.n == math.ceil(result.settings["samples"] / 2)
    checks = result.details["checks"]
    assert len(checks) == 8
    for check in checks:
        bound = {"overflow": 0.05, "entropy_bits": 2.5}[check["metric"]]
        assert check["bound"] == pytest.approx(bound)
        is_below = check["score"] < bound
        assert check["passed"] == (is_below == (check["metric"] == "overflow"))
    assert result.details["passed"] == all(check["passed"] for check in checks)
    lines = result.table().splitlines()[-8:]
    assert all(
        ("within the" in line) == check["passed"] for line, check in zip(lines, checks, strict=True)
    )
    # as a run keeps it
    path = store_result(tmp_path, result)
    assert read_result(path).rows == result.rows
    assert read_result(path).notes == result.notes


def test_bounds_of_other_numbers_of_experts_are_the_same_share() -> None:
    assert check_of("layer 0", "entropy_bits", 2.51, 8).passed
    assert not check_of("layer 0", "entropy_bits", 2.5, 8).passed
    assert check_of("layer 0", "entropy_bits", 3.4, 16).bound == pytest.approx(2.5 / 3 * 4)
    assert not check_of("layer 0", "overflow", 0.05, 8).passed
    assert "OUTSIDE OF the bound < 0.05" in check_of("layer 0", "overflow", 0.06, 8).line()


def test_a_dense_model_has_no_routing(judged: Judged, tmp_path: Path) -> None:
    made_run(tmp_path, "model.moe=null")
    dense = dataclasses.replace(judged, model=load_trained(tmp_path).model)
    with pytest.raises(ConfigError, match="a run: has no experts"):
        Routing().measure(dense, Request())


def test_suites_are_found_by_name() -> None:
    kinds = {name: type(suite_of(name)) for name in ("perplexity", "infill", "routing")}
    assert kinds == {"perplexity": Perplexity, "infill": Infill, "routing": Routing}
    assert suite_of("reasoning").check(Request()) is None
