"""Chains of thought: parts that are read, kept apart, and known by their tokens' roles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cdrmix.config.schema import TokenWeights
from cdrmix.corpus.encode import write_roles
from cdrmix.data.document import ROLES, encoded, fields_of, joined, parted
from cdrmix.data.loader import Loader
from cdrmix.data.shards import read_manifest, write_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.unit.corpus.test_read import read
from tests.unit.data.token_folder import write_counting_folder

PARTS = ("What is 6 x 7?", "Six sevens: 7, 14, ... 42.\n", "42")
FIELDS = {"prompt": "question", "thought": "steps.text", "answer": "answer"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train_tokenizer(PARTS, 300).to_str())
    return load_tokenizer(folder)


def test_parts_are_joined_by_special_tokens_and_come_back(tokenizer: Tokenizer) -> None:
    ids, roles = encoded(joined(*PARTS), tokenizer)
    assert len(ids) == len(roles)
    prompt, thought, answer = map(tokenizer.encode, PARTS)
    assert ids == [
        *prompt,
        tokenizer.role_id("thought"),
        *thought,
        tokenizer.role_id("answer"),
        *answer,
    ]
    names = [ROLES[role] for role in roles]
    assert names == ["prompt"] * len(prompt) + ["thought"] * (1 + len(thought)) + ["answer"] * (
        1 + len(answer)
    )
    assert fields_of(ids, tokenizer) == dict(
        zip(("prompt", "thought", "answer"), PARTS, strict=True)
    )
    assert fields_of(tokenizer.encode("<|thought|> <|answer|>"), tokenizer) is None


@pytest.mark.parametrize(
    "text", ["", "a<|thought|>b", "a<|answer|>b<|thought|>c", joined("a", "b<|answer|>", "c")]
)
def test_parts_that_were_taken_apart_are_none(text: str) -> None:
    assert parted(text) is None
    assert parted(joined(*PARTS)) == PARTS


def test_rows_give_their_fields_and_what_does_not_fit_is_set_aside(tmp_path: Path) -> None:
    whole = {"question": "q", "steps": {"text": ""}, "answer": "a"}
    rows = [
        whole,
        whole | {"answer": None},
        whole | {"answer": " \n"},
        whole | {"question": 7},
        whole | {"question": "is <|eos|> a token?"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "table.csv").write_text("question,other\nq,a\n")
    (tmp_path / "text.txt").write_text("a text")
    documents, aside = read(tmp_path, chain_of_thought=FIELDS)
    assert [d.text for d in documents] == ["q<|thought|><|answer|>a"]
    assert aside == [
        ("rows.jsonl", 1, "no text in field 'answer'"),
        ("rows.jsonl", 2, "empty prompt or answer"),
        ("rows.jsonl", 3, "field 'question' holds no text"),
        ("rows.jsonl", 4, "name of a special token in the text"),
        ("table.csv", None, "no column 'steps.text'"),
        ("text.txt", None, "no fields for a chain of thought"),
    ]


def test_columns_of_a_table_are_found(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"question": ["q"], "steps": [{"text": "t"}], "answer": ["a"], "more": [1]}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    documents, aside = read(tmp_path, chain_of_thought=FIELDS)
    assert not aside
    assert parted(documents[0].text) == ("q", "t", "a")


def test_the_loader_weighs_each_label_by_its_role(tmp_path: Path) -> None:
    folder = write_counting_folder(tmp_path, 41, max_tokens=12)
    manifest = read_manifest(folder)
    roles = np.arange(41, dtype=np.uint8) % 4  # token n is n, its role n % 4
    pieces = [roles[:5], roles[5:5], roles[5:38], roles[38:]]
    shards = write_roles(folder, manifest.shards, pieces)
    assert [shard.roles.bytes for shard in shards] == [12, 12, 12, 5]
    write_manifest(folder, manifest.model_copy(update={"shards": tuple(shards)}))
    dataset = TokenDataset(folder, "train", 8)
    weights = TokenWeights(text=1, prompt=0.25, thought=0.5, answer=2)
    for micro_batch_size, data_size in ((1, 1), (2, 1), (1, 2)):
        for rank in range(data_size):
            loader = Loader(
                dataset,
                global_batch_size=4,
                micro_batch_size=micro_batch_size,
                data_rank=rank,
                data_size=data_size,
                seed=1,
                shuffle=True,
                token_weights=weights,
                prefetch=0,
            )
            batch = loader.next()
            expected = np.array([1, 0.25, 0.5, 2], np.float32)[batch["labels"].numpy() % 4]
            assert batch["weights"].numpy().tolist() == expected.tolist()
            assert batch["weights"].shape == batch["labels"].shape


def test_tokens_of_shards_without_roles_are_text(tmp_path: Path) -> None:
    dataset = TokenDataset(write_counting_folder(tmp_path, 41), "train", 8)
    assert not dataset.roles(np.arange(5)).any()
