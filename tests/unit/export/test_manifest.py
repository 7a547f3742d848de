"""The comparison of an exported folder with its manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cdrmix.errors import StateError
from cdrmix.export.manifest import verify_export
from tests.unit.export.conftest import Both

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(hybrid: Both, tmp_path: Path) -> Path:
    """A copy that can be written to."""
    copy = tmp_path / "copy"
    shutil.copytree(hybrid.folder, copy)
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)
    return copy


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1
    (folder / SHARD).write_bytes(content)


def link_it(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere")


def add_below(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "more.py").write_text("")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed byte": (flip_a_byte, f"{SHARD}: changed, its sha256 differs"),
    "a missing file": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "an extra file": (lambda f: (f / "x.py").touch(), "x.py: extra, not in MANIFEST.json"),
    "an extra file below": (add_below, "sub/more.py: extra"),
    "a shorter file": (lambda f: os.truncate(f / SHARD, 9), f"{SHARD}: changed, 9 bytes instead"),
    "a link to the same": (link_it, "config.json: changed, not a regular file"),
}


def test_a_whole_folder_is_as_exported(folder: Path) -> None:
    num_files, num_bytes = verify_export(folder)
    paths = [path for path in folder.iterdir() if path.name != "MANIFEST.json"]
    assert num_files == len(paths)
    assert num_bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_differs_is_named(folder: Path, damage: str) -> None:
    act, message = DAMAGES[damage]
    act(folder)
    with pytest.raises(StateError) as refused:
        verify_export(folder)
    assert message in str(refused.value)
    assert "differs from what was exported in 1 of" in str(refused.value)


@pytest.mark.parametrize("text", ["{", "{}", '{"files": [{"path": "a"}]}', "[]", "null"])
def test_what_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "MANIFEST.json").write_text(text)
    with pytest.raises(StateError, match="not the manifest of an export"):
        verify_export(folder)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"holds no MANIFEST\.json"):
        verify_export(tmp_path)
