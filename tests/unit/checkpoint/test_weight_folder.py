"""Folders of safetensors files as sources of weights: any span, and what is refused."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cdrmix.checkpoint import files
from cdrmix.checkpoint.fragments import Box, Span
from cdrmix.checkpoint.weight_folder import Piece, WeightFolder
from cdrmix.checkpoint.weight_source import check_source
from cdrmix.config.safetensors_headers import INDEX_FILE, WEIGHTS_FILE
from cdrmix.errors import DataError, InfrastructureError, StateError

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
        with pytest.raises(DataError, match=r"5 of the 40 elements asked for lie outside it"):
            folder.read("up", Span(Box((2, 0, 0), (1, 8, 5)), 5, 40))


def test_a_folder_with_one_file_and_whole_tensors_needs_no_mapping(tmp_path: Path) -> None:
    values = {"model.a": torch.randn(2, 3), "model.b": torch.tensor(7.0)}
    save_file(values, tmp_path / WEIGHTS_FILE)
    with WeightFolder.of_whole(tmp_path, prefix="model.") as folder:
        assert {name: folder.shape(name) for name in folder.names()} == {"a": (2, 3), "b": ()}
        assert folder.read("b", Span.whole(Box.whole(()))).item() == 7.0


def test_a_folder_of_links_is_read_as_a_cache_of_downloads_has_it(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for path in write(tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..", "blobs", path.name))
    with WeightFolder(tmp_path / "snapshot", packed()) as folder:
        norm = folder.read("norm", Span.whole(Box.whole((HIDDEN,))))
    assert torch.equal(norm, tensors()["norm"])


def test_damage_of_the_files_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path) / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{SHARDS[1]}: cut off"):
        WeightFolder(tmp_path, packed())


def test_quantised_tensors_are_refused_where_they_are_taken(tmp_path: Path) -> None:
    values = {"norm": torch.ones(HIDDEN), "scaled": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(values, tmp_path / WEIGHTS_FILE)
    pieces = {"norm": packed()["norm"]}
    with WeightFolder(tmp_path, pieces, ignored={"scaled"}) as folder:
        assert folder.names() == ["norm"]
    pieces["scaled"] = [Piece("scaled", Box.whole((2,)))]
    with pytest.raises(DataError, match=f"{WEIGHTS_FILE}: scaled is of type F8_E4M3, which is"):
        WeightFolder(tmp_path, pieces)


def test_a_file_system_that_fails_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    whole = Path.open
    failures = [errno.ESTALE, errno.EIO]

    def failing(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == SHARDS[1] and failures:
            raise OSError(failures.pop(), "not for now", str(self))
        return whole(self, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    monkeypatch.setattr(files, "READ_RETRY_SECONDS", (0.0, 0.0))
    with WeightFolder(tmp_path, packed()) as folder:
        assert folder.names() == ["up", "norm"]
    failures += [errno.ESTALE] * 3
    with pytest.raises(InfrastructureError, match=f"{SHARDS[1]}: cannot be read for now"):
        WeightFolder(tmp_path, packed())
    failures += [errno.EISDIR]
    with pytest.raises(DataError, match=f"{SHARDS[1]}: cannot be read: not for now"):
        WeightFolder(tmp_path, packed())


def test_tensors_that_differ_from_the_pieces_are_named(tmp_path: Path) -> None:
    pieces = packed()
    missing, *pieces["up"] = pieces["up"]
    pieces["up"].append(Piece("w9", missing.box))
    pieces["norm"] = [Piece("norm", Box.whole((HIDDEN + 1,)))]
    with pytest.raises(DataError) as caught:
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
    with pytest.raises(DataError, match="w1.0: unexpected"):
        WeightFolder(tmp_path, pieces, ignored=names[1:])


def test_pieces_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    pieces = packed()
    first, second, *rest = pieces["up"]
    pieces["up"] = [first, second._replace(box=Box((0, 1, 0), second.box.shape)), *rest]
    with pytest.raises(DataError, match=r"for up overlap in its shape \(3, 8, 5\)"):
        WeightFolder(tmp_path, pieces)
    pieces["up"] = [first, *rest]
    with pytest.raises(DataError, match=r"for up leave a gap in its shape \(3, 8, 5\)"):
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
