"""Folders of safetensors files as sources of weights: any span, and every kind of damage."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.stored_tensors import INDEX_FILE, SINGLE_FILE, stored_tensors
from cdrmix.checkpoint.weight_folder import Piece, WeightFolder
from cdrmix.checkpoint.weight_source import check_source
from cdrmix.errors import StateError

# E experts, F inner width, D hidden
EXPERTS, INNER, HIDDEN = 3, 4, 5
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of a layer of experts, each by itself, and of a norm."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"w{part}.{e}": (INNER, HIDDEN) for e in range(EXPERTS) for part in (1, 3)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return found | {"norm": torch.randn(HIDDEN, generator=generator).bfloat16()}


def packed() -> dict[str, list[Piece]]:
    """Pieces of `up` [E, 2F, D], of w1 and w3 of each expert, and of `norm` [D]."""
    up = [
        Piece(f"w{part}.{e}", Box((e, first, 0), (1, INNER, HIDDEN)))
        for e in range(EXPERTS)
        for part, first in ((1, 0), (3, INNER))
    ]
    return {"up": up, "norm": [Piece("norm", Box.whole((HIDDEN,)))]}


def write(folder: Path) -> Path:
    """Two shards with their index."""
    names = list(tensors())
    halves = (names[:3], names[3:])
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors()[name] for name in half}, folder / file)
    weight_map = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_any_span_of_a_tensor_packed_of_several_is_read(tmp_path: Path) -> None:
    each = tensors()
    rows = [torch.cat([each[f"w1.{e}"], each[f"w3.{e}"]]) for e in range(EXPERTS)]
    logical = torch.stack(rows)
    generator = random.Random(0)
    with WeightFolder(write(tmp_path), packed()) as folder:
        assert folder.names() == ["up", "norm"]
        assert folder.shape("up") == (EXPERTS, 2 * INNER, HIDDEN)
        norm = folder.read("norm", Span.whole(Box.whole((HIDDEN,))))
        assert norm.dtype == torch.bfloat16
        assert torch.equal(norm, each["norm"])
        for _ in range(50):
            low = [generator.randrange(size) for size in logical.shape]
            high = [generator.randrange(a, b) + 1 for a, b in zip(low, logical.shape, strict=True)]
            part = logical[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            block = Box(tuple(low), tuple(part.shape))
            start = generator.randrange(block.numel)
            numel = generator.randrange(block.numel - start) + 1
            found = folder.read("up", Span(block, start, numel))
            assert torch.equal(found, part.reshape(-1)[start : start + numel])
        with pytest.raises(StateError, match=r"5 of the 40 elements asked for lie outside it"):
            folder.read("up", Span(Box((2, 0, 0), (1, 8, 5)), 5, 40))


def test_a_folder_with_one_file_and_whole_tensors_needs_no_mapping(tmp_path: Path) -> None:
    values = {"model.a": torch.randn(2, 3), "model.b": torch.tensor(7.0)}
    save_file(values, tmp_path / SINGLE_FILE)
    with WeightFolder.of_whole(tmp_path, prefix="model.") as folder:
        assert {name: folder.shape(name) for name in folder.names()} == {"a": (2, 3), "b": ()}
        assert folder.read("b", Span.whole(Box.whole(()))).item() == 7.0


def cut_short(folder: Path) -> None:
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


def header(content: bytes, claimed: int | None = None) -> Callable[[Path], None]:
    """Replaces the first shard by one with this header."""

    def act(folder: Path) -> None:
        length = len(content) if claimed is None else claimed
        (folder / SHARDS[0]).write_bytes(struct.pack("<Q", length) + content)

    return act


def indexed(name: str, file: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = json.loads((folder / INDEX_FILE).read_text())
        content["weight_map"][name] = file
        (folder / INDEX_FILE).write_text(json.dumps(content))

    return act


def only_pickles(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def repeat(folder: Path) -> None:
    save_file({"w1.0": torch.zeros(INNER, HIDDEN)} | {"norm": torch.ones(5)}, folder / SHARDS[1])


FP8 = b'{"w1.0": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}'
NEGATIVE = b'{"w1.0": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}'
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated shard": (cut_short, rf"{SHARDS[1]}: \d+ bytes, \d+ were written"),
    "a missing shard": (lambda f: (f / SHARDS[0]).unlink(), f"{SHARDS[0]}: cannot be read: there"),
    "an empty shard": (lambda f: (f / SHARDS[0]).write_bytes(b""), f"{SHARDS[0]}: not a safet"),
    "a header that is no JSON": (header(b"{"), f"{SHARDS[0]}: not a safetensors file"),
    "a header of 2**62 bytes": (header(b"{}", 2**62), f"{SHARDS[0]}: not a safetensors file"),
    "a header that is a list": (header(b"[]"), f"{SHARDS[0]}: not a safetensors file"),
    "a negative size": (header(NEGATIVE), "w1.0: its numbers are not sizes"),
    "a quantised tensor": (header(FP8 + b""), "w1.0 is of type F8_E4M3, which is quantised"),
    "an index that leads out": (indexed("norm", "../x.safetensors"), "no safetensors file of this"),
    "an index of another shard": (indexed("norm", SHARDS[0]), "names norm in model-00001-of"),
    "an index of a missing tensor": (indexed("bias", SHARDS[0]), "names bias in model-00001-of"),
    "an index that is a list": (lambda f: (f / INDEX_FILE).write_text("[]"), "not an index of"),
    "pickles alone": (only_pickles, r"pickles \(pytorch_model.bin\).*\n?.*Convert them to safet"),
    "a tensor twice": (repeat, "w1.0 is in model-00001-of-00002.safetensors and in model-00002"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    act, message = DAMAGE[name]
    act(write(tmp_path))
    with pytest.raises(StateError, match=message):
        WeightFolder(tmp_path, packed())


def test_no_folder_and_a_folder_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no such folder"):
        stored_tensors(tmp_path / "nothing")
    with pytest.raises(StateError, match=r"holds neither model.safetensors nor model.safetensors."):
        stored_tensors(tmp_path)


def test_tensors_that_differ_from_the_pieces_are_named(tmp_path: Path) -> None:
    pieces = packed()
    missing, *pieces["up"] = pieces["up"]
    pieces["up"].append(Piece("w9", missing.box))
    pieces["norm"] = [Piece("norm", Box.whole((HIDDEN + 1,)))]
    with pytest.raises(StateError) as caught:
        WeightFolder(write(tmp_path), pieces)
    assert "(3 differences)" in str(caught.value)
    assert "w9: missing, up is made of it" in str(caught.value)
    assert "w1.0: unexpected" in str(caught.value)
    assert "norm: has shape (5,), and fills (6,) in norm" in str(caught.value)


def test_tensors_of_no_use_may_be_ignored(tmp_path: Path) -> None:
    pieces = {"norm": packed()["norm"]}
    names = [name for name in tensors() if name != "norm"]
    with WeightFolder(write(tmp_path), pieces, ignored=names) as folder:
        assert folder.names() == ["norm"]
    with pytest.raises(StateError, match="w1.0: unexpected"):
        WeightFolder(tmp_path, pieces, ignored=names[1:])


def test_pieces_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    pieces = packed()
    first, second, *rest = pieces["up"]
    pieces["up"] = [first, second._replace(box=Box((0, 1, 0), second.box.shape)), *rest]
    with pytest.raises(StateError, match=r"for up overlap in its shape \(3, 8, 5\)"):
        WeightFolder(tmp_path, pieces)
    pieces["up"] = [first, *rest]
    with pytest.raises(StateError, match=r"for up leave a gap in its shape \(3, 8, 5\)"):
        WeightFolder(tmp_path, pieces, ignored=[second.source])


def test_a_source_is_compared_with_a_model_by_name_and_shape(tmp_path: Path) -> None:
    with WeightFolder(write(tmp_path), packed()) as folder:
        shapes = {"up": (EXPERTS, 2 * INNER, HIDDEN), "norm": (HIDDEN,)}
        check_source(folder, shapes)
        check_source(folder, shapes | {"new": (1,)}, fresh={"new"})
        with pytest.raises(StateError, match=r"\(2 differences\):\n  new: missing\n  norm: \(5,\)"):
            check_source(folder, shapes | {"new": (1,), "norm": (6,)})
        with pytest.raises(StateError, match="up: not in the model"):
            check_source(folder, {"norm": (HIDDEN,)})
