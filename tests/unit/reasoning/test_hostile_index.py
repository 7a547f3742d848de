"""Episodic indices made by somebody else: refused with one message, and nothing else is touched.

Tried: links and a pipe in place of saves and files, JSON nested 100,000 deep, fields that there are
not, token ids without an embedding, segments cut backwards, keys that are no unit vectors, counts
that do not fit, a source that moves a terminal's cursor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cdrmix.errors import StateError
from cdrmix.stage_b.answering import Answered, ReadingEvent
from tests.unit.reasoning.test_earlier import ONE, QUESTION, loaded, told

SAVE = "00000001"


def sealed(save: Path, **values: Any) -> None:
    """Have the manifest agree with the files, as somebody who made them would."""
    manifest = json.loads((save / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((save / name).read_bytes()).hexdigest()
    (save / "manifest.json").write_text(json.dumps(manifest | values))


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def act(save: Path) -> None:
        values = load_file(save / name)
        change(values)
        save_file(values, save / name)
        sealed(save)

    return act


def entry(**values: Any) -> Callable[[Path], None]:
    def act(save: Path) -> None:
        first, *others = (save / "entries.jsonl").read_text().splitlines()
        first = json.dumps(json.loads(first) | values)
        (save / "entries.jsonl").write_text("\n".join([first, *others]))
        sealed(save)

    return act


def deep(name: str) -> Callable[[Path], None]:
    def act(save: Path) -> None:
        (save / name).write_text("[" * 100_000 + "]" * 100_000)
        if name != "manifest.json":
            sealed(save)

    return act


def link_to_save(save: Path) -> None:
    save.rename(save.parent.parent / "elsewhere")
    save.symlink_to(save.parent.parent / "elsewhere")


def link_to_file(save: Path) -> None:
    (save / "entries.jsonl").rename(save.parent.parent / "elsewhere")
    (save / "entries.jsonl").symlink_to(save.parent.parent / "elsewhere")


def pipe(save: Path) -> None:
    (save / "manifest.json").unlink()
    os.mkfifo(save / "manifest.json")


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "save that is a link": (link_to_save, "is a link"),
    "file that is a link": (link_to_file, "is a link"),
    "manifest that is a pipe": (pipe, "not a regular file"),
    "manifest nested deeply": (deep("manifest.json"), "not a manifest"),
    "entries nested deeply": (deep("entries.jsonl"), "not what this version writes"),
    "manifest of a count": (lambda save: sealed(save, count=10**9), "its manifest says"),
    "manifest of an id": (lambda save: sealed(save, next_id=0), "next_id is 0"),
    "id without an embedding": (
        tensors("values.safetensors", lambda values: values["tokens"].fill_(10**6)),
        "ids outside of",
    ),
    "negative id": (
        tensors("values.safetensors", lambda values: values["tokens"].fill_(-1)),
        "ids outside of",
    ),
    "segments cut backwards": (
        tensors("values.safetensors", lambda values: values.update(ends=values["ends"].flip(0))),
        "ends do not cut",
    ),
    "ids that are no numbers": (
        tensors("values.safetensors", lambda v: v.update(tokens=v["tokens"].double())),
        "lists of integers",
    ),
    "keys that are not finite": (
        tensors("keys.safetensors", lambda values: values["keys"].fill_(torch.nan)),
        "unit vectors",
    ),
    "keys of another size": (
        tensors("keys.safetensors", lambda v: v.update(keys=torch.ones(len(v["keys"]), 1))),
        "keys of shape",
    ),
    "entry with a field that is none": (entry(run="rm -rf /"), "unexpected keyword"),
    "entry with an id of text": (entry(id="0"), "are .*'0'"),
    "entry with a score of text": (entry(score="high"), "not what this version writes"),
    "entry with a source that is none": (entry(source=["a"]), "has no source"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_of_somebody_else_is_refused(name: str, tmp_path: Path) -> None:
    told(loaded(tmp_path), tmp_path, ONE)
    act, message = HOSTILE[name]
    act(tmp_path / "index" / SAVE)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StateError, match=message) as error:
        told(loaded(tmp_path), tmp_path, question=QUESTION)
    assert str(tmp_path / "index" / SAVE) in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_of_somebody_else_moves_no_cursor() -> None:
    event = ReadingEvent("recalled", "a text", "a\x1b[2Jfile\n")
    line = Answered("", (event,)).memory_lines()
    assert line.endswith("from a?[2Jfile?")
