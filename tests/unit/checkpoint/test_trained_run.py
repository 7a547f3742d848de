"""What `cdrmix evaluate`, `generate` and `export` take for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix import cli
from tests.unit.data.token_folder import write_counting_folder


@pytest.mark.parametrize("verb", ["evaluate", "generate", "export --out {out}"])
def test_a_data_set_in_place_of_a_run_is_told_as_such(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_counting_folder(tmp_path / "shards", 64)
    words = verb.format(out=tmp_path / "out").split()
    assert cli.main([*words, str(folder)]) == 2
    told = capsys.readouterr().err
    assert f"{folder}: is a data set, not a run" in told
    assert "damaged" not in told
    assert not (tmp_path / "out").exists()
