"""Formats for objectives, from a recipe to tokens and back to texts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cdrmix.config.schema import MixtureConfig
from cdrmix.corpus import task_run
from cdrmix.corpus.build import build_dataset
from cdrmix.corpus.encode import export_tars
from cdrmix.corpus.inspection import read_report
from cdrmix.corpus.recipe_steps import StepConfig
from cdrmix.corpus.source import SourceConfig, find_files
from cdrmix.corpus.task_run import Task, TaskJob, read_record, run_task
from cdrmix.data.document import ROLES, encoded, fields_of, joined
from cdrmix.data.mixture import MixedDataset
from cdrmix.data.shards import read_lengths, read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.data.tokenizer_base import FIM_ROLES
from cdrmix.errors import DataError
from tests.unit.corpus.test_read import read, texts

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
    lengths = [length for shard in shards for length in read_lengths(folder, shard)]
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
    prefix = load_tokenizer(out).role_id("fim_prefix")
    begins = {
        (split, domain): {ids[0] == prefix for ids in documents(out, split, domain)}
        for split in ("train", "validation")
        for domain in ("code", "prose")
    }
    assert begins.pop(("train", "code")) == {True}
    assert set.union(*begins.values()) == {False}
    export_tars(out, tmp_path / "tars")
    assert sorted(texts(tmp_path / "tars")) == sorted(2 * given)


def cut_documents(rows: np.ndarray, folder: Path) -> int:
    """Documents for infilling of which a sample has the beginning and not the end."""
    tokenizer = load_tokenizer(folder)
    marks = [tokenizer.role_id(role) for role in FIM_ROLES]
    count = 0
    for row in rows.tolist():
        *_, last = "".join(map(chr, row)).split(chr(tokenizer.eos_id))
        # A last label may be the first token of a document that begins with the next sample.
        count += len(last) > 1 and any(chr(mark) in last for mark in marks)
    return count


def test_no_sample_cuts_a_document_for_infilling_that_was_placed_by_a_window(
    tmp_path: Path,
) -> None:
    window = 96
    given = [SENTENCE.format(n=n) * (1 + n % 6) for n in range(150)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in given)
    (tmp_path / "rows.jsonl").write_text(rows)
    sources = [
        {"name": name, "type": "local", "path": str(tmp_path / "rows.jsonl"), "domain": domain}
        for name, domain in (("a", "code"), ("b", "code"), ("c", "prose"))
    ]
    found = {}
    for tokens in (None, window):
        fim = {"rate": 0.6, "span": "lines"} | ({"window_tokens": tokens} if tokens else {})
        out = tmp_path / f"out{tokens}"
        build_dataset(write_recipe(tmp_path, sources, fim=fim), out, workers=1)
        verify_shards(out, read_manifest(out))
        for length in (window, 2 * window, window // 2):
            dataset = TokenDataset(out, "train", length)
            found[tokens, length] = cut_documents(dataset.rows(np.arange(dataset.num_samples)), out)
        mixed = MixedDataset(out, "train", window, MixtureConfig(phases=({"weights": None},)))
        found[tokens, "mixed"] = cut_documents(mixed.rows(np.arange(mixed.num_samples)), out)
        export_tars(out, tmp_path / f"tars{tokens}")
        assert sorted(texts(tmp_path / f"tars{tokens}")) == sorted(3 * given)
        counts = read_report(out)["fim"]
        assert counts["drawn"] > counts["rearranged"] > 0 or tokens is None
        assert counts.get("longer than the window", 0) > 0 or tokens is None
        by_source = Counter()
        for of_shard in read_manifest(out).source["shards"].values():
            by_source.update(of_shard)
        assert by_source.total() == sum(shard.documents for shard in read_manifest(out).shards)
    assert [found[window, of] for of in (window, 2 * window, "mixed")] == [0, 0, 0]
    # controls: documents that were not placed, and windows that they were not placed by
    assert min(found[None, of] for of in (window, 2 * window, "mixed")) > 20
    assert found[window, window // 2] > 20


@pytest.mark.parametrize("fim", [{"rate": 1}, {"rate": 1, "window_tokens": 64}])
def test_a_chain_of_thought_keeps_its_roles_beside_other_sources(
    tmp_path: Path, fim: dict[str, int]
) -> None:
    rows = [
        {"prompt": f"What is {n} + 1?", "thought": f"Count from {n}.\n", "answer": f"{n + 1}"}
        for n in range(40)
    ]
    (tmp_path / "chains").mkdir()
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[part::2]]
        (tmp_path / "chains" / f"{part}.jsonl").write_text("".join(lines))
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps({"text": SENTENCE.format(n=n)}) + "\n" for n in range(20))
    )
    common = {"type": "local", "domain": "maths"}
    chains = common | {"name": "chains", "path": str(tmp_path / "chains"), "chain_of_thought": {}}
    plain = common | {"name": "plain", "path": str(tmp_path / "plain.jsonl")}
    recipe = write_recipe(tmp_path, [plain, chains], fim=fim)
    out = tmp_path / "out"
    build_dataset(recipe, out, workers=1)
    manifest, tokenizer = read_manifest(out), load_tokenizer(out)
    verify_shards(out, manifest)
    assert len(manifest.shards) > 2
    found = []
    for split in ("train", "validation"):
        shards = [shard for shard in manifest.shards if shard.split == split]
        roles = np.concatenate([np.fromfile(out / f"{s.stem}.roles", np.uint8) for s in shards])
        position = 0
        for ids in documents(out, split, "maths"):
            own = roles[position : position + len(ids)].tolist()
            position += len(ids)
            fields = fields_of(ids[:-1], tokenizer)
            if fields is None:
                assert set(own) == {0}
                continue
            found.append(fields)
            expected = encoded(joined(**fields), tokenizer)[1]
            assert own == [*expected, ROLES.index("answer")]
        assert position == len(roles)
    assert sorted(found, key=str) == sorted(rows, key=str)
    export_tars(out, tmp_path / "tars")
    again, _ = read(tmp_path / "tars", chain_of_thought={})
    assert sorted(d.text for d in again) == sorted(joined(**row) for row in rows)
    shard = next(out.glob("*.roles"))
    shard.write_bytes(shard.stat().st_size * b"\3")
    with pytest.raises(DataError, match=r"\.roles: altered"):
        verify_shards(out, manifest)


def test_a_step_that_takes_a_chain_apart_drops_it_with_a_reason(tmp_path: Path) -> None:
    row = {"prompt": "Why?", "thought": "Let me think.", "answer": "So."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "x"}))
    source = SourceConfig(
        name="s", type="local", path=str(tmp_path), domain="maths", chain_of_thought={}
    )
    task = Task(source, tuple(find_files(source).files), None, "key")
    job = TaskJob(task, None, None, ((0, StepConfig(name="cut")),), None, tmp_path / "out", False)

    class Cut:
        name = "cut"

        def __call__(self, documents, drop):
            for document in documents:
                document.text = document.text.removesuffix("<|answer|>x")
                yield document

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_run, "make_step", lambda config: Cut())
        run_task(job)
    (counts,) = read_record(tmp_path / "out")["steps"]
    assert (counts["in"], counts["out"]) == (2, 1)
    assert counts["dropped"] == {"parts of the chain of thought lost": 1}
