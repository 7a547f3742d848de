"""Formats for objectives, from a recipe to tokens and back to texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cdrmix.data.build import build_dataset
from cdrmix.data.export_tar import export_tars
from cdrmix.data.shards import read_lengths, read_manifest
from cdrmix.data.tokenizer import load_tokenizer
from tests.unit.test_read import texts

SENTENCE = "The reader of part {n} finds that with every page the story of the {n}th ship goes on. "


def write_recipe(folder: Path, sources: list[dict[str, object]], **more: object) -> Path:
    values = {
        "sources": sources,
        "steps": ["normalise"],
        "tokenizer": {"vocab_size": 400},
        "shards": {"validation_share": 0.2, "max_tokens": 500},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(values | more))
    return file


def documents(folder: Path, split: str, domain: str) -> list[list[int]]:
    """Tokens of each document of a built folder."""
    manifest = read_manifest(folder)
    shards = [s for s in manifest.shards if (s.split, s.domain) == (split, domain)]
    tokens = [np.fromfile(folder / f"{shard.stem}.bin", np.uint16) for shard in shards]
    lengths = [length for shard in shards for length in read_lengths(folder / f"{shard.stem}.idx")]
    pieces = np.split(np.concatenate(tokens), np.cumsum(lengths)[:-1])
    whole: list[list[int]] = [[]]
    for piece in pieces:
        whole[-1] += piece.tolist()
        if whole[-1][-1] == manifest.eos_id:
            whole.append([])
    return whole[:-1]


def test_a_recipe_rearranges_training_documents_for_infilling(tmp_path: Path) -> None:
    given = [SENTENCE.format(n=n) for n in range(60)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in given)
    (tmp_path / "rows.jsonl").write_text(rows)
    sources = [
        {"name": name, "type": "local", "path": str(tmp_path / "rows.jsonl"), "domain": name}
        for name in ("code", "prose")
    ]
    fim = {"domains": ["code"], "rate": 1, "spm_rate": 0.5}
    out = tmp_path / "out"
    build_dataset(write_recipe(tmp_path, sources, fim=fim), out, workers=1)
    prefix = load_tokenizer(out).special_id("<|fim_prefix|>")
    begins = {
        (split, domain): {ids[0] == prefix for ids in documents(out, split, domain)}
        for split in ("train", "validation")
        for domain in ("code", "prose")
    }
    assert begins.pop(("train", "code")) == {True}
    assert set.union(*begins.values()) == {False}
    export_tars(out, tmp_path / "tars")
    assert sorted(texts(tmp_path / "tars")) == sorted(2 * given)
