"""Compiled kernels are taken from a folder that nobody else can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.models import cpu_library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cdrmix" / "kernels"


def test_the_folder_of_kernels_is_made_for_its_owner_alone(folder: Path) -> None:
    assert cpu_library.private_folder.__wrapped__() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["folder", "file", "link"])
def test_a_kernel_that_others_could_have_planted_is_left_aside(
    planted: str, folder: Path, tmp_path: Path
) -> None:
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(parents=True)
        (folder / "wkv7-0.so").touch(mode=0o600)
        which = folder if planted == "folder" else folder / "wkv7-0.so"
        which.chmod(0o775)
    private = cpu_library.private_folder.__wrapped__()
    assert private != folder
    assert (private.stat().st_mode & 0o777, list(private.iterdir())) == (0o700, [])
