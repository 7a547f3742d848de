"""The sample corpus, built from a few packages of this Python's standard library."""

from __future__ import annotations

import logging
import pprint
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

from cdrmix.data.sample import SampleDocument, build_sample, ensure_sample, read_standard_library
from cdrmix.data.shards import check_vocab, read_manifest, verify_shards
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.data.tokenizer import load_tokenizer
from cdrmix.errors import DataError
from tests.full_disk import file_size_limit

VOCAB_SIZE = 400
STDLIB = Path(sysconfig.get_path("stdlib"))
PARAGRAPHS = [f"Paragraph {number} " + "goes on and on " * 10 for number in range(20)]
NESTED = '''
if True:
    class Outer:
        """A docstring long enough to be kept: one that has more than eighty characters in it."""

        def inner(self):
            """Short."""
'''


def held_out_name() -> str:
    """Some file name that the hash puts into the validation split."""
    names = (f"held_out_{number}.py" for number in range(1000))
    return next(name for name in names if SampleDocument(name, "code", "").split == "validation")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library: real modules, odd ones, and some that must stay out."""
    folder = tmp_path_factory.mktemp("stdlib")
    for name in ("collections", "json", "logging"):
        shutil.copytree(STDLIB / name, folder / name)
    for name, target in [
        ("bisect.py", "bisect.py"),
        ("copy.py", "copy.py"),
        ("copy.py", "copy_again.py"),
        ("heapq.py", held_out_name()),
    ]:
        shutil.copy(STDLIB / name, folder / target)
    for name in ("site-packages", "test", "json/tests", "config-3", "encodings", "pydoc_data"):
        (folder / name).mkdir()
        (folder / name / "unwanted.py").write_text("unwanted = True\n")
    for name in ("sitecustomize.py", "_sysconfigdata_x.py"):
        (folder / name).write_text("unwanted = True\n")
    (folder / "encodings/unwanted.py").write_text('"""Python Character Mapping Codec x."""\n')
    (folder / "empty.py").write_text("\n")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\r\nname = 'b\xfcro'\r\n")
    (folder / "undecodable.py").write_bytes(b"name = '\xff'\n")
    (folder / "template.py").write_text("class $name: pass\n")
    (folder / "nested.py").write_text(NESTED)
    topics = {"excerpt": "\n\n".join(PARAGRAPHS[3:6]), "whole": "\n\n".join(PARAGRAPHS)}
    (folder / "pydoc_data/topics.py").write_text(f"# made\ntopics = {pprint.pformat(topics)}\n")
    return folder


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / f"sample-{VOCAB_SIZE}"
    build_sample(out, VOCAB_SIZE, stdlib=sources)
    return out


def test_code_is_the_sources_as_they_stand(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents = list(read_standard_library(sources))
    code = {document.path: document.text for document in documents if document.domain == "code"}
    assert code["json/decoder.py"] == (STDLIB / "json/decoder.py").read_text()
    assert code["latin.py"] == "# -*- coding: latin-1 -*-\nname = 'büro'\n"
    assert code["template.py"] == "class $name: pass\n"
    assert not [document for document in documents if "unwanted" in document.text]
    assert not [path for path in code if "unwanted" in path]
    assert "undecodable.py left out" in caplog.text
    assert list(code) == sorted(code)


def test_prose_is_docstrings_under_their_names_and_whole_topics(sources: Path) -> None:
    prose = {d.path: d.text for d in read_standard_library(sources) if d.domain == "prose"}
    decoder = prose["json/decoder.py"]
    assert "json.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document from" in decoder
    assert prose["nested.py"].startswith("nested.Outer\n\nA docstring long enough")
    assert "Short" not in prose["nested.py"]
    topics = {path: text for path, text in prose.items() if "#" in path}
    assert topics == {"pydoc_data/topics.py#whole": "\n\n".join(PARAGRAPHS)}


def test_a_python_without_topics_gives_a_log_line_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "a.py").write_text("a = 1\n")
    assert [document.path for document in read_standard_library(tmp_path)] == ["a.py", "a.py"]
    assert "goes on without" in caplog.text


def test_a_twentieth_of_the_files_is_held_out_code_and_docstrings_together() -> None:
    paths = [f"package/module_{number}.py" for number in range(4000)]
    splits = [SampleDocument(path, "code", "").split for path in paths]
    assert splits == [SampleDocument(path, "prose", "x").split for path in paths]
    # 200 expected, standard deviation 14.
    assert 140 < splits.count("validation") < 260


def test_two_builds_are_equal_byte_by_byte_and_name_no_place(
    sources: Path, built: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(sources, moved)
    out = tmp_path / "data" / "another-name"
    build_sample(out, VOCAB_SIZE, stdlib=moved)
    names = sorted(path.name for path in built.iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (built / name).read_bytes(), name
    assert str(sources.parent) not in (built / "manifest.json").read_text()


def test_the_shards_hold_the_text_once_each_document_ended_by_eos(
    sources: Path, built: Path
) -> None:
    manifest, tokenizer = read_manifest(built), load_tokenizer(built)
    verify_shards(built, manifest)
    check_vocab(manifest, VOCAB_SIZE)
    stored: dict[tuple[str, str], list[str]] = {}
    for shard in manifest.shards:
        ids = np.fromfile(built / f"{shard.stem}.bin", "<u2")
        assert ids[-1] == tokenizer.eos_id
        texts = [tokenizer.decode(piece) for piece in np.split(ids, np.flatnonzero(ids == 0) + 1)]
        stored[shard.split, shard.domain] = [text.removesuffix("<|eos|>") for text in texts[:-1]]
        assert shard.documents == len(texts) - 1
        text = "".join(stored[shard.split, shard.domain])
        assert shard.text_bytes == len(text.encode())
    assert sorted(stored) == [
        (split, domain) for split in ("train", "validation") for domain in ("code", "prose")
    ]
    expected: dict[tuple[str, str], list[str]] = {}
    for document in read_standard_library(sources):
        known = expected.setdefault((document.split, document.domain), [])
        if document.text.strip() and document.text not in known:
            known.append(document.text)
    assert stored == expected
    copied = (STDLIB / "copy.py").read_text()
    assert stored["train", "code"].count(copied) == 1


def test_the_held_out_text_is_not_in_the_tokens_trained_on(built: Path) -> None:
    tokenizer = load_tokenizer(built)
    train = TokenDataset(built, "train", 64)
    trained_on = tokenizer.decode(train.rows(np.arange(train.num_samples))[:, :-1].ravel())
    assert "def raw_decode" in trained_on
    assert "def heappushpop" in (STDLIB / "heapq.py").read_text()
    assert "def heappushpop" not in trained_on
    assert "heappushpop\n\nFast version of a heappush" not in trained_on


def test_a_built_sample_is_used_at_once(built: Path) -> None:
    before = (built / "manifest.json").stat()
    assert ensure_sample(VOCAB_SIZE, root=built.parent) == built
    assert (built / "manifest.json").stat() == before


def test_of_two_at_once_one_builds_and_the_other_waits(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    out = tmp_path / "sample"
    threads = [
        threading.Thread(target=build_sample, args=(out, VOCAB_SIZE), kwargs={"stdlib": sources})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verify_shards(out, read_manifest(out))
    assert caplog.text.count("training a tokenizer") == 1
    assert caplog.text.count("waiting for it") == 1


def test_a_killed_build_leaves_no_half_folder_and_the_next_one_clears_up(
    sources: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sample"
    # The manifest is the last file written: here the process dies instead.
    script = (
        "import os, signal; from pathlib import Path; from cdrmix.data import sample\n"
        "sample.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sample.build_sample(Path({str(out)!r}), {VOCAB_SIZE}, stdlib=Path({str(sources)!r}))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob(".sample.building-*"))) == 1
    build_sample(out, VOCAB_SIZE, stdlib=sources)
    verify_shards(out, read_manifest(out))
    assert not list(tmp_path.glob(".sample.building-*"))


def test_a_full_disk_is_named_and_leaves_nothing_behind(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "sample"
    with file_size_limit(60_000), pytest.raises(DataError, match=r"sample.*File too large.*room"):
        build_sample(out, VOCAB_SIZE, stdlib=sources)
    assert [path.name for path in tmp_path.iterdir()] == [".sample.lock"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(DataError, match=r"root: File exists.*--out DIR"):
        ensure_sample(VOCAB_SIZE, root=tmp_path / "root")


def test_a_folder_of_something_else_is_left_alone(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and holds no manifest"):
        build_sample(tmp_path, VOCAB_SIZE, stdlib=sources)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    (tmp_path / "stdlib").mkdir()
    with pytest.raises(DataError, match=r"stdlib: holds no Python sources.*Use another Python"):
        build_sample(tmp_path / "sample", VOCAB_SIZE, stdlib=tmp_path / "stdlib")
