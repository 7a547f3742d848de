"""Folders that `cdrmix data` is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix import cli


@pytest.mark.parametrize("verb", ["inspect", "verify", "export --out {out}"])
def test_a_folder_without_shards_is_named_as_it_was_given(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = verb.format(out=tmp_path / "out").split()
    assert cli.main(["data", *words, str(tmp_path / "txt")]) == 2
    told = capsys.readouterr().err
    assert "not found. DIR must be a folder of token shards" in told
    assert "data.path" not in told
