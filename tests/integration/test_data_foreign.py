"""Data sets with the tokenizer of another model: from a recipe to batches, and back to texts."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cdrmix.checkpoint.trained_run import newest_checkpoint
from cdrmix.cli import main
from cdrmix.config.schema import DataConfig
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.encode import export_tars
from cdrmix.data.document import ROLES
from cdrmix.data.loader import Loader
from cdrmix.data.remote_folder import local_folder
from cdrmix.data.shards import (
    Manifest,
    check_vocab,
    manifest_digest,
    read_lengths,
    read_manifest,
    verify_shards,
)
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import ConfigError, DataError
from cdrmix.evaluation.trained import continue_text, evaluate_run
from cdrmix.export.exported_run import export_run
from tests.foreign_tokenizers import make_folder
from tests.harness import run_ranks
from tests.small_run import arguments, start

LAST_ID = 70_000  # more than uint16 holds
PLAIN = [f" Part {n} of the story: <s> the {n}th ship  goes on.\n" for n in range(60)]
CHAINS = [
    {"prompt": f"What is {n} + 1?", "thought": f" Count </s> from {n}.\n", "answer": f"{n + 1}"}
    for n in range(30)
]


def write_recipe(folder: Path, tokenizer: dict[str, Any], **more: Any) -> Path:
    for name, rows in (("plain", [{"text": text} for text in PLAIN]), ("chains", CHAINS)):
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    sources = [
        {"name": name, "type": "local", "path": str(folder / f"{name}.jsonl"), "domain": domain}
        for name, domain in (("plain", "prose"), ("chains", "maths"))
    ]
    values = {
        "sources": [sources[0], sources[1] | {"chain_of_thought": {}}],
        "steps": [],
        "tokenizer": tokenizer,
        "fim": {"domains": ["prose"], "rate": 0.7},
        "shards": {"validation_share": 0.2, "max_tokens": 500},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(values | more))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with BOS and an id beyond uint16."""
    folder = make_folder(tmp_path_factory.mktemp("model"), "sentencepiece")
    values = json.loads((folder / "tokenizer.json").read_bytes())
    values["model"]["vocab"]["never seen in text"] = LAST_ID
    (folder / "tokenizer.json").write_text(json.dumps(values, indent=1))
    return folder


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    recipe = write_recipe(folder, {"path": str(model)})
    build_dataset(recipe, folder / "out", workers=1)
    return folder / "out"


def documents(folder: Path, manifest: Manifest) -> list[list[int]]:
    """Tokens of each document, those that shards have cut whole again."""
    whole: list[list[int]] = [[]]
    for shard in manifest.shards:
        tokens = np.fromfile(folder / f"{shard.stem}.bin", "<u4")
        for piece in np.split(tokens, np.cumsum(read_lengths(folder, shard))[:-1]):
            whole[-1] += piece.tolist()
            if whole[-1][-1] == manifest.eos_id:
                whole.append([])
    assert whole.pop() == []
    return whole


def test_a_data_set_has_the_tokens_of_the_model(built: Path, model: Path, tmp_path: Path) -> None:
    manifest, tokenizer = read_manifest(built), load_tokenizer(built)
    verify_shards(built, manifest)
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", LAST_ID + 1)
    assert manifest.tokenizer.num_tokens == LAST_ID + 1
    assert manifest.tokenizer.document_prefix == (1,)
    assert (built / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    whole = documents(built, manifest)
    assert len(whole) == len(PLAIN) + len(CHAINS)
    special = {tokenizer.eos_id, *tokenizer.document_prefix}
    for ids in whole:
        assert ids[0] == 1 and ids[-1] == 2
        assert special.isdisjoint(ids[1:-1]), "texts name <s> and </s>"
    assert any(ids[1] == tokenizer.role_id("fim_prefix") for ids in whole)
    plain = {tuple(tokenizer.encode(text)) for text in PLAIN}
    assert len(plain.intersection(tuple(ids[1:-1]) for ids in whole)) > 20
    export_tars(built, tmp_path / "tars")
    for tar in (tmp_path / "tars").glob("*.tar"):
        with tarfile.open(tar) as archive:
            # Debian 12's Python 3.11.2 has no filters yet
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(tmp_path / "tars", **safely)
    texts = [path.read_bytes().decode() for path in (tmp_path / "tars").glob("*.txt")]
    assert sorted(texts) == sorted(PLAIN)
    rows = [json.loads(path.read_bytes()) for path in (tmp_path / "tars").glob("*.json")]
    parts = [{key: row[key] for key in CHAINS[0]} for row in rows if "prompt" in row]
    assert sorted(parts, key=str) == sorted(CHAINS, key=str)


def test_roles_of_tokens_lie_beside_them(built: Path) -> None:
    manifest, tokenizer = read_manifest(built), load_tokenizer(built)
    of_domain = [shard for shard in manifest.shards if shard.domain == "maths"]
    tokens = np.concatenate([np.fromfile(built / f"{s.stem}.bin", "<u4") for s in of_domain])
    roles = np.concatenate([np.fromfile(built / f"{s.stem}.roles", np.uint8) for s in of_domain])
    assert len(tokens) == len(roles)
    for id, role in ((1, "prompt"), (2, "answer")):
        assert set(roles[tokens == id].tolist()) == {ROLES.index(role)}
    for role in ("thought", "answer"):
        assert (roles[tokens == tokenizer.role_id(role)] == ROLES.index(role)).all()


def test_equal_builds_are_equal_and_a_url_brings_all_files(
    built: Path, model: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, {"path": str(model)})
    again = build_dataset(recipe, tmp_path / "out", workers=2)
    assert [shard.bin for shard in again.shards] == [s.bin for s in read_manifest(built).shards]
    assert again.tokenizer == read_manifest(built).tokenizer
    data = DataConfig(path=f"file://{built}", cache_folder=str(tmp_path / "cache"))
    folder = local_folder(data, 16)
    assert manifest_digest(read_manifest(folder)) == manifest_digest(read_manifest(built))
    assert load_tokenizer(folder).document_prefix == (1,)
    digests = again.tokenizer.digests()
    assert digests == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in digests
    }


def test_the_recipe_names_eos_and_roles(model: Path, tmp_path: Path) -> None:
    tokenizer = {
        "path": str(model),
        "eos_token": "[THINK]",
        "add_bos": False,
        "roles": {"thought": "</s>", "answer": "<s>"},
    }
    manifest = build_dataset(write_recipe(tmp_path, tokenizer), tmp_path / "out", workers=1)
    loaded = load_tokenizer(tmp_path / "out")
    assert manifest.eos_id == loaded.eos_id != 2
    assert (loaded.roles["thought"], loaded.roles["answer"], loaded.document_prefix) == (2, 1, ())
    whole = documents(tmp_path / "out", manifest)
    assert sum(1 in ids and 2 in ids for ids in whole) == len(CHAINS)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({}, "tokenizer.path: the tokenizer has no token for thought, answer, fim_prefix, "),
        ({"eos_token": "</nope>"}, "tokenizer.eos_token = '</nope>' is not in the vocabulary"),
        (
            {"roles": {"thougt": "[SEP]"}},
            "roles.thougt: unknown key. Did you mean 'thought'?",
        ),
        ({"path": None, "eos_token": "[SEP]"}, "are for an existing one; give path too"),
    ],
)
def test_what_does_not_fit_is_told_before_the_build(
    tmp_path: Path, tokenizer: dict[str, Any], message: str
) -> None:
    folder = make_folder(tmp_path / "model", "wordpiece")
    recipe = write_recipe(tmp_path, {"path": str(folder)} | tokenizer)
    with pytest.raises(ConfigError) as raised:
        build_dataset(recipe, tmp_path / "out", workers=1)
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_build_without_eos_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model", "sentencepiece")
    (folder / "tokenizer_config.json").unlink()
    recipe = write_recipe(tmp_path, {"path": str(folder)})
    out = tmp_path / "out"
    assert main(["data", "build", "--config", str(recipe), "--out", str(out)]) != 0
    said = capsys.readouterr().err
    assert said.count("no EOS") == 1 and "tokenizer.eos_token" in said
    assert not out.exists()


def test_a_data_set_is_inspected(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(built)]) == 0
    assert "tokens" in capsys.readouterr().out


def test_batches_are_within_the_vocabulary(built: Path) -> None:
    dataset = TokenDataset(built, "train", 32)
    loader = Loader(
        dataset,
        global_batch_size=4,
        micro_batch_size=4,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=False,
        segment_documents=True,
        prefetch=0,
    )
    batch = loader.next()
    tokenizer = load_tokenizer(built)
    tokens = batch["input_ids"][0, 0].tolist()
    ends = [place for place, id in enumerate(tokens[:-1]) if id == tokenizer.eos_id]
    assert ends and all(tokens[place + 1] == 1 for place in ends), "BOS begins each document"
    numbers = batch["segment_ids"][0, 0].tolist()
    assert all(numbers[place] < numbers[place + 1] for place in ends)
    check_vocab(read_manifest(built), LAST_ID + 1)
    with pytest.raises(DataError, match=rf"at least {LAST_ID + 1}"):
        check_vocab(read_manifest(built), LAST_ID)


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a tokenizer that has BOS; a small vocabulary, as its embedding is."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_folder(folder / "model", "sentencepiece")
    recipe = write_recipe(folder, {"path": str(tokenizer)})
    build_dataset(recipe, folder / "data", workers=1)
    argv = arguments(folder / "data", folder / "run", "--set", "model.vocab_size=640")
    assert run_ranks(start, 1, argv) == [0]
    return folder / "run"


def test_a_run_keeps_its_tokenizer(run_dir: Path, tmp_path: Path) -> None:
    data = run_dir.parent / "data"
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer_roles.json"):
        assert (run_dir / name).read_bytes() == (data / name).read_bytes()
    state = json.loads((newest_checkpoint(run_dir).path / "state.json").read_text())
    assert state["tokenizer"] == read_manifest(data).tokenizer.sha256
    text = continue_text(run_dir, "def main", max_new_tokens=12, temperature=0, seed=0)
    evaluation = evaluate_run(run_dir, data=str(data))
    assert evaluation.loss > 0
    export_run(run_dir, tmp_path / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    ours = load_tokenizer(run_dir)
    assert theirs("def main").input_ids == [1, *ours.encode("def main")]
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<s>", "</s>", "</s>")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert isinstance(text, str)
