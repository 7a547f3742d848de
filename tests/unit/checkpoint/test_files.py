"""Durable files: what the record says is what lies on the disk."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdrmix.checkpoint import files


@pytest.mark.parametrize("chunk_bytes", [5, 64, 2**20])
def test_size_and_digest_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.safetensors"
    tensors = {"x": torch.arange(40.0).view(5, 8)[:, ::2], "y": torch.tensor([True])}
    record = files.write_tensors(path, list(tensors.items()), list(tensors.values()))
    content = path.read_bytes()
    assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert files.digest(path) == record["sha256"]
    loaded = load_file(path)
    assert all(torch.equal(loaded[key].view(-1), t.reshape(-1)) for key, t in tensors.items())


def test_json_keeps_every_bit_of_a_float(tmp_path: Path) -> None:
    value = {"x": [0.1, 1e-45, 2.0**60 + 1], "y": None}
    files.write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == value


def test_an_error_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        files.write_json(tmp_path / "missing" / "a.json", {})
    assert caught.value.filename == str(tmp_path / "missing" / "a.json")
