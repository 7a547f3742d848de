"""Infilling of held-out lines: what is asked, and that the control tells who reads the suffix."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from cdrmix.config.load import load_config
from cdrmix.config.model import ModelConfig
from cdrmix.data.document import Document, FimConfig, rearranged
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from cdrmix.errors import DataError
from cdrmix.evaluation.infilling import evaluate_infilling, line_examples
from cdrmix.evaluation.scoring import Scorer
from cdrmix.evaluation.suite import Judged, Request
from cdrmix.evaluation.suites.infill import Infill
from cdrmix.models.backbone import Backbone
from cdrmix.objectives.language_model import IGNORED_LABEL
from cdrmix.parallel.topology import ALONE
from tests.small_run import CONFIG
from tests.unit.data.token_folder import write_token_folder

NAMES = tuple("abcdefgh")
HEAD = "x\n"


def text_of(name: str) -> str:
    """A head, a line, and the same line again as all that is behind it."""
    return f"{HEAD}{name}\n{name}\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train_tokenizer(["-"], 266).to_str())
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def trained(tokenizer: Tokenizer) -> Backbone:
    """A tiny model, trained on documents of which one line is left out and repeated behind it."""
    config = ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        vocab_size=tokenizer.vocab_size,
        transformer_fraction=0.5,
        moe=None,
        ffn_hidden_size=128,
        init_std_scale=10.0,  # copies after a few steps, and not only after hundreds
    )
    model = Backbone(config)
    model.initialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    chance = random.Random(0)
    fim = FimConfig(rate=1, span="lines")
    documents: list[list[int]] = []
    while len(documents) < 2_000:
        name = chance.choice(NAMES)
        ids = rearranged(Document(text_of(name), str(chance.random()), "s", "code"), fim, tokenizer)
        assert ids is not None
        documents.append([*tokenizer.prefix_ids, *ids, tokenizer.eos_id])
    length = max(map(len, documents))
    for step in range(250):
        batch = chance.sample(documents, 32)
        rows = torch.tensor([ids + [IGNORED_LABEL] * (length - len(ids)) for ids in batch])
        inputs, labels = rows[:, :-1].clamp(min=0), rows[:, 1:]
        logits = model.logits(model(inputs).hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def held_out(tokenizer: Tokenizer, count: int = 16) -> list[list[int]]:
    return [tokenizer.encode(text_of(NAMES[n % len(NAMES)])) for n in range(count)]


def test_a_model_that_reads_the_suffix_does_worse_with_that_of_another(
    trained: Backbone, tokenizer: Tokenizer
) -> None:
    rows = evaluate_infilling(Scorer(trained, tokenizer, 32, 8), held_out(tokenizer))
    assert [row.order for row in rows] == ["psm", "spm"]
    for row in rows:
        assert row.examples == 16
        assert row.exact > 0.8, row
        assert row.low <= row.exact <= row.high
        assert row.other_suffix < row.exact - 0.3, row
        assert row.other_low <= row.other_suffix <= row.other_high < row.low
    untrained = Backbone(trained.config)
    untrained.initialize(seed=0)
    rows = evaluate_infilling(Scorer(untrained, tokenizer, 32, 8), held_out(tokenizer, 4))
    assert max(row.exact for row in rows) == 0


def test_a_line_comes_with_as_much_around_it_as_fits(tokenizer: Tokenizer) -> None:
    text = "".join(f"line {number:02}\n" for number in range(40))
    ids = tokenizer.encode(text)
    (whole,) = line_examples([ids], tokenizer, num_examples=3, window=1_000)
    assert tokenizer.decode([*whole.prefix, *tokenizer.encode(whole.line), *whole.suffix]) == text
    (cut,) = line_examples([ids], tokenizer, num_examples=3, window=100)
    assert cut.line == whole.line
    shown = tokenizer.decode([*cut.prefix, *tokenizer.encode(cut.line), *cut.suffix])
    assert shown in text
    assert shown.endswith("\n")
    assert 60 < len(tokenizer.encode(shown)) <= 100 - 3 - 1 - 4
    assert line_examples([ids], tokenizer, num_examples=3, window=12) == []
    assert line_examples([tokenizer.encode("one line")], tokenizer, num_examples=1, window=99) == []


def test_what_cannot_be_evaluated_is_told(trained: Backbone, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="of 1 held-out documents 1 have a line that fits"):
        evaluate_infilling(Scorer(trained, tokenizer, 32, 8), held_out(tokenizer, 1))
    roles = tokenizer.roles
    try:
        tokenizer.roles = {"thought": 1}
        with pytest.raises(DataError, match="no token for fim_prefix, fim_suffix, fim_middle"):
            evaluate_infilling(Scorer(trained, tokenizer, 32, 8), held_out(tokenizer))
    finally:
        tokenizer.roles = roles


def test_the_suite_has_rows_of_each_order_with_a_control(
    trained: Backbone, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    documents = [[*ids, tokenizer.eos_id] for ids in held_out(tokenizer)]
    folder = write_token_folder(tmp_path, {"validation": documents}, vocab_size=266)
    judged = Judged(
        model=trained,
        tokenizer=tokenizer,
        config=load_config(CONFIG),
        topology=ALONE,
        max_length=32,
        batch_size=1,
        source="a run",
        step=1,
        weights="trained",
        data=folder,
    )
    result = Infill().measure(judged, Request(limit=12))
    tasks = ["psm", "psm-other-suffix", "spm", "spm-other-suffix"]
    assert [(row.task, row.metric, row.n) for row in result.rows] == [
        (task, "exact", 12) for task in tasks
    ]
    psm, control, *_ = result.rows
    assert psm.low is not None and control.high is not None
    assert control.high < psm.low <= psm.score
    shown = json.loads(json.dumps(result.as_json()))["infill"]
    assert [row["order"] for row in shown] == ["psm", "spm"]
    assert (shown[0]["exact"], shown[0]["other_suffix"]) == (psm.score, control.score)
