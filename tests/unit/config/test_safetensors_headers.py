"""Headers of safetensors files without torch, against safetensors itself."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cdrmix.config.safetensors_headers import INDEX_FILE, WEIGHTS_FILE, TensorSize, tensor_sizes
from cdrmix.errors import DataError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder: Path) -> Path:
    """Makes a folder of two shards and an index."""
    folder.mkdir()
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder / FIRST)
    save_file({"c": torch.zeros((), dtype=torch.int64)}, folder / SECOND)
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_sizes_of_shards_and_of_one_file(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    expected = {
        "a": TensorSize((3, 5), "F32", FIRST, 60),
        "b": TensorSize((2,), "BF16", FIRST, 4),
        "c": TensorSize((), "I64", SECOND, 8),
    }
    assert tensor_sizes(folder) == expected
    # transformers takes a whole file before an index
    save_file({"d": torch.zeros(7, dtype=torch.uint8)}, folder / "model.safetensors")
    assert tensor_sizes(folder) == {"d": TensorSize((7,), "U8", "model.safetensors", 7)}


def cut_off(folder: Path) -> None:
    """Removes the last byte of the second shard."""
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1])


def cut_in_header(folder: Path) -> None:
    """Leaves a part of a header."""
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:20])


def pickles_alone(folder: Path) -> None:
    """Replaces all safetensors by a pickle."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def shard_of_another(folder: Path) -> None:
    """Puts a tensor into both shards."""
    save_file({"a": torch.zeros(3, 5)}, folder / SECOND)


def index_of_another(folder: Path) -> None:
    """Names a tensor that no shard holds."""
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def index_that_leads_out(folder: Path) -> None:
    """Names a file of another folder."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../secret"}}))


def damaged_shape(folder: Path) -> None:
    """Tells another shape than the bytes have."""
    content = (folder / FIRST).read_bytes().replace(b'"shape":[3,5]', b'"shape":[3,6]')
    (folder / FIRST).write_bytes(content)


def with_header(content: bytes, claimed: int | None = None) -> Callable[[Path], None]:
    """Replaces the second shard by a header, of a length that it has or claims."""
    length = struct.pack("<Q", len(content) if claimed is None else claimed)
    return lambda folder: (folder / SECOND).write_bytes(length + content) and None


def pipe_as_index(folder: Path) -> None:
    """Puts a pipe in the place of the index; whoever opens it waits for ever."""
    (folder / INDEX_FILE).unlink()
    os.mkfifo(folder / INDEX_FILE)


NEGATIVE = b'{"c": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / SECOND).write_bytes(b""), f"{SECOND}: cut off"),
        (with_header(b"{"), f"{SECOND}: cut off, or no safetensors file"),
        (with_header(b"[]"), f"{SECOND}: cut off, or no safetensors file"),
        (with_header(b"[" * 100_000), f"{SECOND}: cut off, or no safetensors file"),
        (with_header(b"{}", 2**62), "a header of 4,611,686,018,427,387,904 bytes does not fit"),
        (with_header(NEGATIVE), "the numbers of 'c' are not sizes"),
        (lambda folder: (folder / INDEX_FILE).write_text("[]"), "not the index of a model"),
        (pipe_as_index, f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"),
        (cut_off, f"{SECOND}: cut off"),
        (cut_in_header, f"{SECOND}: cut off"),
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND} of {INDEX_FILE} is not there"),
        (pickles_alone, "pickles (pytorch_model.bin)"),
        (shard_of_another, f"holds a, which {FIRST} holds too"),
        (index_of_another, f"no file holds d, and {INDEX_FILE} names {SECOND} for it"),
        (index_that_leads_out, "the file of 'a' is '../secret'"),
        (damaged_shape, "the bytes of 'a' are not those of its shape"),
    ],
)  # fmt: skip
def test_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = sharded(tmp_path / "model")
    damage(folder)
    with pytest.raises(DataError) as caught:
        tensor_sizes(folder)
    assert message in str(caught.value)


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"):
        tensor_sizes(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        tensor_sizes(tmp_path / "none")
