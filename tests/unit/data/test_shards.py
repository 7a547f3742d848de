"""Token shards: the layout, the manifest, what verification finds, and how samples are cut."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.data.shards import (
    check_vocab,
    manifest_digest,
    read_manifest,
    unreadable,
    verify_shards,
    write_shards,
)
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.errors import DataError
from tests.unit.data.token_folder import write_counting_folder, write_token_folder

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0], [14, 0]]


def open_with_deepspeed(stem: Path) -> Any:
    from cdrmix import runtime

    runtime.import_deepspeed()
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    with contextlib.redirect_stdout(io.StringIO()):
        return MMapIndexedDataset(str(stem), skip_warmup=True)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_deepspeed_reads_the_documents_that_were_written(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    documents = [[vocab_size - 1, 1, 0], [0], [2, 3, 4, 5, 0]]
    write_token_folder(tmp_path, {"train": documents}, vocab_size=vocab_size)
    read = open_with_deepspeed(tmp_path / "train-code-00000")
    assert read.dtype == dtype
    assert [read[i].tolist() for i in range(len(read))] == documents
    assert read.doc_idx.tolist() == [0, 1, 2, 3]


def test_a_shard_is_full_before_the_next_begins_and_long_documents_are_cut(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS}, max_tokens=5)
    manifest = read_manifest(folder)
    assert [shard.stem for shard in manifest.shards] == [
        f"train-code-{number:05d}" for number in range(4)
    ]
    assert [shard.tokens for shard in manifest.shards] == [4, 2, 5, 3]
    assert [shard.documents for shard in manifest.shards] == [1, 1, 1, 2]
    assert manifest.splits["train"].text_bytes == 3 * 14
    stored = [np.fromfile(folder / f"{shard.stem}.bin", "<u2") for shard in manifest.shards]
    assert np.concatenate(stored).tolist() == sum(DOCUMENTS, [])


def test_an_id_that_does_not_fit_is_not_wrapped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="uint16"):
        write_shards(
            tmp_path, [(np.array([2**16]), 1)], split="train", domain="code", dtype="uint16"
        )


def test_sizes_and_digests_in_the_manifest_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS, "validation": DOCUMENTS[:1]})
    manifest = read_manifest(folder)
    assert {name: info.tokens for name, info in manifest.splits.items()} == {
        "train": 14,
        "validation": 4,
    }
    for mode in ("size", "digest"):
        verify_shards(folder, manifest, mode=mode)


def test_the_digest_names_the_content_and_not_the_folder(tmp_path: Path) -> None:
    digests = [
        manifest_digest(read_manifest(write_token_folder(tmp_path / name, {"train": documents})))
        for name, documents in [("a", DOCUMENTS), ("b", DOCUMENTS), ("c", DOCUMENTS[1:])]
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_truncated_shard_is_named_with_both_sizes_even_by_size_alone(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS})
    path = folder / "train-code-00000.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"train-code-00000\.bin: has 25 bytes.* says 28"):
        verify_shards(folder, read_manifest(folder), mode="size")


@pytest.mark.parametrize("name", ["train-code-00000.bin", "train-code-00000.idx"])
def test_one_altered_byte_is_found_by_digest(tmp_path: Path, name: str) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS})
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    verify_shards(folder, read_manifest(folder), mode="size")
    with pytest.raises(DataError, match=f"{name}: altered.*sha256(?s:.*)build it again"):
        verify_shards(folder, read_manifest(folder))


@pytest.mark.parametrize("mode", ["size", "digest"])
def test_another_tokenizer_is_found_in_any_mode(tmp_path: Path, mode: str) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS})
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer\.json: altered"):
        verify_shards(folder, read_manifest(folder), mode=mode)


def test_all_damaged_files_of_a_share_are_in_one_report(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS}, max_tokens=5)
    for number in (0, 1, 3):
        (folder / f"train-code-{number:05d}.bin").unlink()
    manifest = read_manifest(folder)
    with pytest.raises(DataError) as caught:
        verify_shards(folder, manifest, part=1, parts=2)
    assert "train-code-00001.bin: cannot be read: No such file" in str(caught.value)
    assert "train-code-00003.bin" in str(caught.value)
    assert "train-code-00000.bin" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "not found.*data sample"),
        (b"", "not a manifest"),
        (b'{"format_version": 1', "not a manifest"),
        (b'{"format_version": 2}', "not a manifest of this version: format_version"),
    ],
)
def test_a_missing_or_broken_manifest_says_what_to_do(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"manifest\.json: {complaint}"):
        read_manifest(tmp_path)


def test_unknown_keys_in_a_manifest_are_refused(tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path, {"train": DOCUMENTS})
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"weights": 1}))
    with pytest.raises(DataError, match="weights"):
        read_manifest(folder)


def test_a_tokenizer_larger_than_the_model_is_refused_and_a_smaller_one_is_not(
    tmp_path: Path,
) -> None:
    manifest = read_manifest(write_token_folder(tmp_path, {"train": DOCUMENTS}))
    check_vocab(manifest, 300)
    with pytest.raises(DataError, match=r"300 tokens.*model\.vocab_size = 299"):
        check_vocab(manifest, 299)


@pytest.mark.parametrize("max_tokens", [2**27, 10, 7, 4, 1])
def test_rows_cut_one_stream_whatever_the_shards(tmp_path: Path, max_tokens: int) -> None:
    length, num_tokens = 6, 50
    folder = write_counting_folder(tmp_path, num_tokens, max_tokens=max_tokens)
    dataset = TokenDataset(folder, "train", length)
    assert dataset.num_samples == (num_tokens - 1) // length == 8
    indices = np.array([7, 0, 3, 3, 5, 1, 2, 4, 6])
    rows = dataset.rows(indices)
    assert rows.dtype == np.int64
    expected = indices[:, None] * length + np.arange(length + 1)
    assert rows.tolist() == expected.tolist()


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(7, 1), (12, 1), (13, 2), (14, 2)])
def test_a_sample_needs_one_token_more_than_its_length(
    tmp_path: Path, num_tokens: int, num_samples: int
) -> None:
    dataset = TokenDataset(write_counting_folder(tmp_path, num_tokens), "train", 6)
    assert dataset.num_samples == num_samples
    assert dataset.rows(np.array([num_samples - 1]))[0, -1] == num_samples * 6


def test_uint32_tokens_are_read_as_written(tmp_path: Path) -> None:
    documents = [[70_000, 65_536, 1, 0]]
    write_token_folder(tmp_path, {"train": documents}, vocab_size=100_000)
    rows = TokenDataset(tmp_path, "train", 3).rows(np.array([0]))
    assert rows.tolist() == documents


def test_a_sample_outside_the_split_is_refused(tmp_path: Path) -> None:
    dataset = TokenDataset(write_counting_folder(tmp_path, 50), "train", 6)
    for index in (-1, 8):
        with pytest.raises(IndexError, match=str(index)):
            dataset.rows(np.array([0, index]))


def test_a_split_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    folder = write_counting_folder(tmp_path, 6)
    with pytest.raises(
        DataError, match=r"'train' has 6 tokens.*sequence_length = 6 needs 7"
    ) as train:
        TokenDataset(folder, "train", 6)
    assert "validation_share" not in str(train.value), "does not make the training split longer"
    with pytest.raises(DataError, match="no split 'validation'. Splits here: train") as missing:
        TokenDataset(folder, "validation", 4)
    splits = {"train": [range(9)], "validation": [range(5)]}
    folder = write_token_folder(tmp_path / "both", splits)
    with pytest.raises(DataError, match=r"'validation' has 5 tokens.* needs 7") as short:
        TokenDataset(folder, "validation", 6)
    for error in (missing, short):
        assert "or raise shards.validation_share of its recipe" in str(error.value)


def test_a_shard_cut_short_after_the_start_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    folder = write_counting_folder(tmp_path, 50)
    dataset = TokenDataset(folder, "train", 6)
    (folder / "train-code-00000.bin").write_bytes(b"\0" * 20)
    with pytest.raises(DataError, match=r"train-code-00000\.bin: has 20 bytes"):
        dataset.rows(np.array([0]))


def test_bytes_per_token_are_those_of_the_split(tmp_path: Path) -> None:
    dataset = TokenDataset(write_counting_folder(tmp_path, 50), "train", 6)
    assert dataset.bytes_per_token == 3


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that this process may not read or enter, whoever runs it: root may read anything."""
    paths: set[Path] = set()
    opens, access = Path.open, os.access

    def refuse(path: Path, *arguments, **options):
        if paths & {path, *path.parents}:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opens(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path not in paths and access(path, mode))
    return paths


@pytest.mark.parametrize("mode", ["digest", "size"])
def test_a_shard_without_permission_is_not_to_be_deleted(
    tmp_path: Path, denied: set[Path], mode: str
) -> None:
    manifest = read_manifest(write_token_folder(tmp_path, {"train": DOCUMENTS}))
    file = tmp_path / f"{manifest.shards[0].stem}.bin"
    file.chmod(0o640)
    denied.add(file)
    for read in (
        lambda: verify_shards(tmp_path, manifest, mode=mode),
        lambda: TokenDataset(tmp_path, "train", 4).rows(np.array([0])),
    ):
        with pytest.raises(DataError) as caught:
            read()
        message = str(caught.value)
        assert f"{file}: cannot be read: Permission denied. {file} belongs to user" in message
        assert "mode 0640" in message and f"({os.geteuid()})" in message
        assert f"`chmod a+r {file}`" in message and "delete" not in message


def test_of_a_folder_that_is_closed_the_folder_is_named(tmp_path: Path, denied: set[Path]) -> None:
    denied.add(tmp_path)
    message = unreadable(tmp_path / "x.bin", PermissionError(errno.EACCES, "Permission denied"))
    assert f"`chmod a+x {tmp_path}`" in message
