"""WebDataset tars: what is written reads back, here and by the webdataset package."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cdrmix import cli
from cdrmix.corpus.encode import export_tars
from cdrmix.data.shards import TokenizerInfo, new_manifest, write_file, write_manifest, write_shards
from cdrmix.data.tokenizer import load_tokenizer, train_tokenizer
from cdrmix.errors import DataError
from tests.unit.corpus.test_read import read, texts

TEXTS = ["The first text.\n", "zweiter, mit Umlaut: ä\n", "third " * 40, "<|eos|> is a name here"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """TEXTS as token shards of at most 20 tokens, so that documents are cut."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    trained = train_tokenizer(TEXTS, 300).to_str().encode()
    file = write_file(folder / "tokenizer.json", trained)
    tokenizer = load_tokenizer(folder)
    encoded = [np.array([*tokenizer.encode(text), tokenizer.eos_id]) for text in TEXTS]
    shards = [
        shard
        for split, documents in (("train", encoded[:3]), ("validation", encoded[3:]))
        for shard in write_shards(
            folder,
            ((ids, 1) for ids in documents),
            split=split,
            domain="prose",
            dtype="uint16",
            max_tokens=20,
        )
    ]
    info = TokenizerInfo(file="tokenizer.json", sha256=file.sha256, num_tokens=300)
    manifest = new_manifest(
        shards, vocab_size=300, tokenizer=info, eos_id=tokenizer.eos_id, source={}
    )
    write_manifest(folder, manifest)
    return folder


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_texts_come_back_whole_though_their_tokens_were_cut(folder: Path, tmp_path: Path) -> None:
    assert len(list(folder.glob("train-*.bin"))) > 3
    assert export_tars(folder, tmp_path / "tars") == len(TEXTS)
    assert sorted(texts(tmp_path / "tars")) == sorted(TEXTS)
    documents, _ = read(tmp_path / "tars", metadata_fields=("split", "domain"))
    assert {(d.metadata["split"], d.metadata["domain"]) for d in documents} == {
        ("train", "prose"),
        ("validation", "prose"),
    }


def test_equal_folders_export_equal_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_tars(folder, tmp_path / name)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


# webdataset itself leaves each tar that it has read for the collector to close
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning:webdataset")
def test_webdataset_reads_what_is_exported(folder: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="the webdataset package reads the tars")
    export_tars(folder, tmp_path / "tars")
    urls = sorted(map(str, (tmp_path / "tars").glob("*.tar")))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [sample["txt"] for sample in samples] == TEXTS
    assert samples[0]["json"] == {"split": "train", "domain": "prose"}


def test_a_folder_that_is_there_is_not_written_into(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "export", str(folder), "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    shard = next(folder.glob("*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match="altered"):
        export_tars(folder, tmp_path / "tars")
    assert not (tmp_path / "tars").exists()


def test_samples_of_others_are_read_by_their_endings(tmp_path: Path) -> None:
    members = {
        "part/0001.txt": b"first",
        "part/0001.json": b'{"url": "https://a.example", "text": "another"}',
        "part/0001.jpg": b"\xff\xd8",
        "part/0002.json": json.dumps({"text": "second"}).encode(),
        "part/0003.cls": b"7",
        "part/0004.json": b"[1]",
        "part/0005.txt": b"\xff",
        "part/0006.json": b"{broken",
        "part/0007.txt": b"x" * 200,
        "part/0008.txt": b"last",
    }
    write_tar(tmp_path / "given.tar", members)
    documents, aside = read(tmp_path, max_document_bytes=150)
    assert [(d.text, d.id) for d in documents] == [
        ("first", "s/given.tar#0"),
        ("second", "s/given.tar#1"),
        ("last", "s/given.tar#7"),
    ]
    assert documents[0].metadata["url"] == "https://a.example"
    assert [(row, reason) for _, row, reason in aside] == [
        (2, "no .txt or .json in the sample"),
        (3, "not an object"),
        (4, "invalid utf-8"),
        (5, "invalid JSON"),
        (6, "member larger than max_document_bytes"),
    ]


def test_what_precedes_the_damage_of_a_tar_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "cut.tar", {f"{n}.txt": b"text %d" % n for n in range(5)})
    content = (tmp_path / "cut.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: 3 * 1024 + 512 + 3])
    (tmp_path / "none.tar").write_bytes(b"this is no tar file" * 100)
    documents, aside = read(tmp_path)
    # The third may have lost members of its own.
    assert [d.text for d in documents] == ["text 0", "text 1"]
    assert [(name, reason) for name, _, reason in aside] == [
        ("cut.tar", "damaged tar"),
        ("none.tar", "damaged tar"),
    ]
