"""Small files of a Hugging Face model that a run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdrmix.checkpoint.base_model import (
    base_records,
    digest_of_base,
    recorded_digest,
    refuse_other_base,
    write_base_files,
)
from cdrmix.errors import StateError
from tests.hf_models import make_folder


@pytest.mark.parametrize("seed", [0, 1])  # the same weights, and others
def test_files_of_a_replaced_base_are_replaced(tmp_path: Path, seed: int) -> None:
    """The folder of the model has changed between two starts, and its config.json has not."""
    run_dir = tmp_path / "run"
    bases = [make_folder(tmp_path / f"{n}", "llama", seed=n * seed) for n in range(2)]
    digests = [digest_of_base(base_records(base)) for base in bases]
    assert (digests[0] == digests[1]) == (seed == 0)
    (bases[0] / "LICENSE").write_text("of the first")
    settings = bases[1] / "generation_config.json"
    settings.write_text(json.dumps({"temperature": 0.25}))
    for base, digest in zip(bases, digests, strict=True):
        write_base_files(run_dir, base, digest)
    kept = run_dir / "base"
    assert recorded_digest(kept) == digests[1]
    assert (kept / settings.name).read_bytes() == settings.read_bytes()
    assert not (kept / "LICENSE").exists()
    assert [path.name for path in run_dir.iterdir()] == ["base"]
    # nothing is written again for the same base, nor for what a run keeps of it
    inode = kept.stat().st_ino
    write_base_files(run_dir, bases[1], digests[1])
    write_base_files(run_dir, kept, digests[1])
    assert kept.stat().st_ino == inode


def test_a_base_that_was_changed_in_its_place_is_told_as_such(tmp_path: Path) -> None:
    recorded = {"digest": "a" * 64, "folder": str(tmp_path / "base")}
    refuse_other_base(recorded, "a" * 64, tmp_path / "base")
    with pytest.raises(StateError, match="changed since they were trained"):
        refuse_other_base(recorded, "b" * 64, tmp_path / "base")
    with pytest.raises(StateError, match=f"of {tmp_path}/base. Give the folder"):
        refuse_other_base(recorded, "b" * 64, tmp_path / "other")
