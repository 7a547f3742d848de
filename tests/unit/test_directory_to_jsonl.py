"""The tool that writes a directory as JSON lines."""

import gzip
import json
from pathlib import Path

import pytest

from cdrmix.corpus.source import SourceConfig, find_files
from cdrmix.corpus.steps.read import read_file
from tools.directory_to_jsonl import main


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number} é")
    (folder / "bad.txt").write_bytes(b"\0")
    return folder


@pytest.mark.parametrize("flags", [[], ["--gzip"]])
def test_what_is_written_reads_back_as_the_same_texts(
    directory: Path, tmp_path: Path, flags: list[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(directory), "--out", str(out), "--shard-mb", "0.00015", *flags]) == 0
    shards = sorted(out.glob("documents-*"))
    assert len(shards) == 3, "two lines of about 70 bytes fit into 150"
    source = SourceConfig(name="s", type="local", path=str(out), domain="prose")
    documents = [
        document
        for file in find_files(source).files
        if file.name.startswith("documents-")
        for document in read_file(file, source, pytest.fail)
    ]
    assert [document.text for document in documents] == [f"text {n} é" for n in range(5)]
    (aside,) = map(json.loads, (out / "set_aside.jsonl").read_text().splitlines())
    assert (aside["file"], aside["reason"]) == ("bad.txt", "NUL characters")


def test_equal_directories_give_equal_shards(directory: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert main([str(directory), "--out", str(tmp_path / out), "--gzip"]) == 0
    first, second = (tmp_path / out / "documents-00000.jsonl.gz" for out in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(gzip.decompress(first.read_bytes()).splitlines()[0])["id"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--out", "{in}"], "exists"),
        (["--out", "{out}", "--name", "A b"], "--name A b: allowed are names"),
    ],
)
def test_what_is_wrong_is_told_with_code_2(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    places = {"in": str(directory), "out": str(tmp_path / "out")}
    assert main([str(directory), *(flag.format(**places) for flag in flags)]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_directory_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
