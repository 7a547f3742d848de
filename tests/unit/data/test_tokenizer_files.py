"""Files of tokenizers: copies, manifests, and the comparison with a model's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.data.shards import (
    Manifest,
    manifest_digest,
    new_manifest,
    read_manifest,
    verify_shards,
    write_manifest,
)
from cdrmix.data.special_tokens import Choices
from cdrmix.data.tokenizer import load_tokenizer, train_tokenizer
from cdrmix.data.tokenizer_files import check_tokenizer, copy_tokenizer
from cdrmix.errors import DataError
from tests.foreign_tokenizers import make_folder

CHOICES = Choices(eos_token="<|im_end|>", roles={"memory": "<tool_call>"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "byte_level")


def copied(source: Path, out: Path, choices: Choices | None = None) -> Manifest:
    out.mkdir()
    info = copy_tokenizer(source, out, choices)
    eos_id = load_tokenizer(out).eos_id
    manifest = new_manifest([], vocab_size=600, tokenizer=info, eos_id=eos_id, source={})
    write_manifest(out, manifest)
    return manifest


def test_a_copy_needs_no_choices_and_says_what_it_holds(source: Path, tmp_path: Path) -> None:
    manifest = copied(source, tmp_path / "data", CHOICES)
    info = manifest.tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "data" / name).read_bytes() == (source / name).read_bytes()
    assert info.digests() == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (tmp_path / "data").iterdir()
        if path.name != "manifest.json"
    }
    assert (info.kind, info.document_prefix, info.pad_id) == ("foreign", (), 501)
    again = load_tokenizer(tmp_path / "data")
    given = load_tokenizer(source, CHOICES)
    assert (again.eos_id, again.roles) == (given.eos_id, given.roles) == (501, again.roles)
    assert again.role_id("memory") == again.vocab_size - 4
    assert read_manifest(tmp_path / "data") == manifest
    assert copied(tmp_path / "data", tmp_path / "next") == manifest, "a copy of a copy"


def test_each_file_is_verified(source: Path, tmp_path: Path) -> None:
    manifest = copied(source, tmp_path / "data")
    verify_shards(tmp_path / "data", manifest)
    (tmp_path / "data" / "tokenizer_roles.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer_roles\.json: altered"):
        verify_shards(tmp_path / "data", manifest)
    with pytest.raises(DataError, match=r"tokenizer_roles\.json: not of this version: eos: Field"):
        load_tokenizer(tmp_path / "data")
    other = {"eos": "</s>", "pad": "</s>", "prefix": [], "roles": {}}
    (tmp_path / "data" / "tokenizer_roles.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match=r"names '</s>', which tokenizer\.json beside it does not"):
        load_tokenizer(tmp_path / "data")


def test_nothing_is_written_for_a_tokenizer_without_eos(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="no EOS"):
        copy_tokenizer(tmp_path / "model", tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_our_own_tokenizer_is_described_as_ever(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    train_tokenizer(["aaaa"], 300).save(str(tmp_path / "model" / "tokenizer.json"))
    manifest = copied(tmp_path / "model", tmp_path / "data")
    assert set(manifest.model_dump(exclude_defaults=True)["tokenizer"]) == {
        *("file", "sha256", "num_tokens")
    }
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        *("manifest.json", "tokenizer.json")
    }
    with pytest.raises(DataError, match="trained by this package, which decides"):
        load_tokenizer(tmp_path / "model", CHOICES)


def test_a_manifest_of_an_earlier_version_keeps_its_digest() -> None:
    folder = Path("tests/data/earlier_run/data")
    manifest = read_manifest(folder)
    values = json.loads((folder / "manifest.json").read_bytes())
    text = json.dumps(values, sort_keys=True)
    assert manifest_digest(manifest) == hashlib.sha256(text.encode()).hexdigest()


def test_a_manifest_names_no_other_files(source: Path, tmp_path: Path) -> None:
    copied(source, tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    values = json.loads(path.read_bytes())
    files = values["tokenizer"]["files"]
    files["../tokenizer_config.json"] = files.pop("tokenizer_config.json")
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="not a manifest of this version: tokenizer.files"):
        read_manifest(tmp_path / "data")


def as_pairs(values: dict[str, Any], *, joined: bool) -> None:
    merges = values["model"]["merges"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    values["model"]["merges"] = [" ".join(pair) for pair in pairs] if joined else pairs


@pytest.mark.parametrize(
    "change",
    [
        lambda values: None,
        lambda values: values.update(truncation={"direction": "Right", "max_length": 5,
                                                 "strategy": "LongestFirst", "stride": 0}),
        lambda values: values.update(post_processor=None),
        lambda values: values["model"].pop("ignore_merges", None),
        lambda values: values["model"].update(end_of_word_suffix=""),
        lambda values: values["added_tokens"].reverse(),
        lambda values: as_pairs(values, joined=True),
        lambda values: as_pairs(values, joined=False),
    ],
)  # fmt: skip
def test_the_same_ids_in_another_layout_are_the_same_tokenizer(
    source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    manifest = copied(source, tmp_path / "data")
    check_tokenizer(manifest, source)
    values = json.loads((source / "tokenizer.json").read_bytes())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(values.items()))))
    check_tokenizer(manifest, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["model"]["merges"].reverse(),
        lambda values: values["added_tokens"].pop(),
        lambda values: values.update(normalizer={"type": "NFC"}),
        lambda values: values["pre_tokenizer"].update(add_prefix_space=True),
        lambda values: values["model"].update(byte_fallback=True),
    ],
)
def test_another_tokenizer_than_the_models_is_refused(
    source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    manifest = copied(source, tmp_path / "data")
    values = json.loads((source / "tokenizer.json").read_bytes())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    with pytest.raises(DataError) as raised:
        check_tokenizer(manifest, tmp_path)
    for each in (digest, manifest.tokenizer.sha256):
        assert f"{each[:12]} " in str(raised.value)


def test_a_model_without_a_whole_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    manifest = copied(source, tmp_path / "data")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read: No such file"):
        check_tokenizer(manifest, tmp_path)
    for text in ("{", "[]", '{"model": 1}', '{"model": {"merges": 3}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
            check_tokenizer(manifest, tmp_path)
