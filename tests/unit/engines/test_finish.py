"""Adapters at the end of a run: those of an earlier end stay until the new ones are whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.engines.finish import _write_adapter
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.errors import StateError
from cdrmix.export import exported_run


def test_adapters_of_an_earlier_end_stay_until_the_new_ones_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = SimpleNamespace(directory=RunDirectory(tmp_path), step=4)
    weights = tmp_path / "adapter" / "weights"
    fails = False

    def export(found: Any, out: Path, *, format: str) -> Any:
        if fails:
            raise StateError("no room")
        out.mkdir()
        (out / "weights").write_text(f"step {found.step}")
        out.chmod(0o555)
        return SimpleNamespace(num_parameters=8)

    monkeypatch.setattr(exported_run, "export_checkpoint", export)
    _write_adapter(run)
    assert weights.read_text() == "step 4"
    run.step, fails = 8, True
    with pytest.raises(StateError, match="no room"):
        _write_adapter(run)
    assert weights.read_text() == "step 4"
    fails = False
    _write_adapter(run)
    assert weights.read_text() == "step 8"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
