"""The base of a run, compared with what an export of it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.checkpoint.base_model import base_records
from cdrmix.engines.base_model import verified_digest
from cdrmix.errors import DataError
from cdrmix.export.manifest import write_export_manifest
from tests.hf_models import make_folder


def test_an_export_that_was_changed_is_no_base(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "export", "llama")
    digest = verified_digest(folder)
    write_export_manifest(folder, base_records(folder))
    assert verified_digest(folder) == digest
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="model.safetensors changed since the export"):
        verified_digest(folder)
    (folder / "MANIFEST.json").unlink()
    assert verified_digest(folder) != digest
