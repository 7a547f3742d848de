"""Run directories, checkpoints and task files made by somebody else: every verb that reads them
ends with one message, and writes nowhere but where the command line says.

Tried: names with `..`, absolute ones, with a newline; links and pipes in place of files; headers of
safetensors of 2**62 bytes; JSON nested 100,000 deep; URLs and paths in the saved configuration;
sizes that do not fit the tensors; another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cdrmix.cli import main
from cdrmix.config.load import load_config
from cdrmix.engines.run_directory import open_run_directory
from cdrmix.errors import DataError, StateError
from cdrmix.monitoring.sinks import MetricsFile
from cdrmix.reasoning.task_files import read_examples
from tests.conftest import TINY
from tests.harness import ROOT

EARLIER = ROOT / "tests" / "data" / "earlier_run"
STEP = "run/checkpoints/4"
# json.dumps would not get so deep
DEEP = "[" * 100_000 + "]" * 100_000


def sealed(step: Path) -> None:
    """Have the manifest agree with the files, as somebody who made them would."""
    manifest = step / "manifest.json"
    content = json.loads(manifest.read_text())
    for name in content["files"]:
        path = step / name
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            content["files"][name] = {"bytes": len(data), "sha256": digest}
    manifest.write_text(json.dumps(content))


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A hostile act: change a JSON file of the checkpoint."""

    def act(step: Path) -> None:
        content = json.loads((step / name).read_text())
        change(content)
        (step / name).write_text(json.dumps(content))
        if name != "manifest.json":
            sealed(step)

    return act


def text(name: str, content: str) -> Callable[[Path], None]:
    def act(step: Path) -> None:
        (step / name).write_text(content)
        if name != "manifest.json":
            sealed(step)

    return act


def listed_as(name: str) -> Callable[[Path], None]:
    record = {"bytes": 3, "sha256": "0" * 64}
    return changed("manifest.json", lambda content: content["files"].update({name: record}))


def indexed(key: str, value: Any) -> Callable[[Path], None]:
    def change(content: dict[str, Any]) -> None:
        entry = content["tensors"]["embedding.weight"]["param"]
        (entry if key in entry else entry["fragments"][0])[key] = value

    return changed("index.json", change)


def configured(section: str, key: str, value: Any) -> Callable[[Path], None]:
    return changed("state.json", lambda content: content["config"][section].update({key: value}))


def oversized_header(step: Path) -> None:
    path = step / "rank-00000.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    sealed(step)


def link(step: Path) -> None:
    path = step / "rank-00000.safetensors"
    path.rename(step.parent.parent.parent / "elsewhere")
    path.symlink_to(step.parent.parent.parent / "elsewhere")


def pipe(step: Path) -> None:
    (step / "state.json").unlink()
    os.mkfifo(step / "state.json")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "manifest lists an absolute name": listed_as("/etc/passwd"),
    "manifest lists a name outside": listed_as("../../../data/tokenizer.json"),
    "manifest lists a newline": listed_as("rank-00000.json\n"),
    "manifest nested deeply": text("manifest.json", DEEP),
    "manifest of another shape": text("manifest.json", '{"format": 1, "files": [1]}'),
    "index names an absolute file": indexed("file", "/etc/passwd"),
    "index names a file outside": indexed("file", "../4/rank-00000.safetensors"),
    "index names a newline": indexed("file", "rank-00000.safetensors\n"),
    "index names a function as dtype": indexed("dtype", "load"),
    "index with a negative offset": indexed("start", -1),
    "index nested deeply": text("index.json", DEEP),
    "index that is a list": text("index.json", "[]"),
    "state nested deeply": text("state.json", DEEP),
    "state that is a list": text("state.json", "[]"),
    "state without a configuration": changed("state.json", lambda s: s.pop("config")),
    "configuration of another kind": configured("model", "hidden_size", "x; rm -rf /"),
    "configuration of a huge model": configured("model", "vocab_size", 2**31),
    "header of 2**62 bytes": oversized_header,
    "file that is a link": link,
    "file that is a pipe": pipe,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and nothing that could be reached by the network; the place to be."""

    def refused(*address: object) -> NoReturn:
        raise AssertionError(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    shutil.copytree(EARLIER, tmp_path / "place")
    shutil.copy(EARLIER / "data" / "tokenizer.json", tmp_path / "place" / "run")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Message of a verb that must end with 2 or 3."""
    assert main(list(words)) in (2, 3)
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    return error


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_hostile_checkpoint_is_refused_and_nothing_is_written(
    what: str, verb: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HOSTILE[what](place / STEP)
    before = files_of(place.parent)
    data = ["--data", "data"] if verb == "evaluate" else []
    message = refused(capsys, verb, "run", *data)
    assert message.startswith(("error: run", f"error: rank 0: {STEP}"))
    assert files_of(place.parent) == before


@pytest.mark.parametrize(
    "path", ["http://127.0.0.1:1/x", "s3://bucket/x", "../outside", "/nowhere/at/all", "sample"]
)
def test_what_a_checkpoint_says_of_its_data_is_neither_opened_nor_written(
    path: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.parent / "outside").mkdir()
    configured("data", "path", path)(place / STEP)
    configured("data", "cache_folder", str(place.parent / "cache"))(place / STEP)
    before = files_of(place.parent)
    assert main(["generate", "run", "--prompt", "def", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    assert "--data" in refused(capsys, "evaluate", "run") or path == "../outside"
    assert main(["evaluate", "run", "--data", "data", "--max-tokens", "200", "--json"]) == 0
    shutil.rmtree(place / "run" / "evaluations")  # the result, in the run that was named
    assert files_of(place.parent) == before


def test_the_tokenizer_must_be_the_one_that_was_trained_with(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = place / "run" / "tokenizer.json"
    shutil.copytree(place / STEP, place / "alone")
    assert "its tokenizer is in none of" not in refused(capsys, "generate", "nowhere")
    configured("data", "path", "http://127.0.0.1:1/x")(place / "alone")
    assert "its tokenizer is in none of alone" in refused(capsys, "generate", "alone")
    shutil.copy(tokenizer, place / "alone")
    assert main(["generate", "alone", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    content = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(content, indent=3))
    assert "is not the tokenizer of" in refused(capsys, "generate", "run")


def test_a_run_writes_through_no_link(place: Path) -> None:
    config = load_config(TINY, [])
    outside = place.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine\n")
    for name in ("train.log", "metrics.jsonl", "checkpoints", ".lock", "launch"):
        run = place / f"run-{name}"
        run.mkdir()
        (run / name).symlink_to(outside if name in ("checkpoints", "launch") else outside / "file")
        with pytest.raises(StateError, match=f"{name}: is a link"):
            open_run_directory(config, requested=run, resume="auto")
        if name == "metrics.jsonl":
            with pytest.raises(StateError, match="cannot be written"):
                MetricsFile(run / name)
    assert files_of(outside) == {"file": b"mine\n"}


@pytest.mark.parametrize(
    "row", [DEEP, '{"text": 1}', '{"text": "a", "question": "b", "answer": ["..", 1]}', "\0"]
)
def test_a_hostile_task_file_is_refused(row: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(row + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"tasks.jsonl"):
        read_examples(file, check=lambda _: None)
