"""Text that the starting model has written: where it is kept, and which one a run goes on with."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdrmix.checkpoint.store import FoundCheckpoint
from cdrmix.config.load import load_config
from cdrmix.data.shards import read_manifest, write_manifest
from cdrmix.data.token_dataset import TokenDataset
from cdrmix.engines.run_directory import RunDirectory
from cdrmix.engines.self_replay import own_replay
from cdrmix.engines.training_data import Corpus
from cdrmix.errors import StateError
from cdrmix.parallel.topology import ALONE
from tests.small_run import CONFIG, SMALL
from tests.unit.data.token_folder import write_token_folder

SELF = (
    "cpt.replay.source=self",
    "cpt.replay.self_tokens=200",
    "cpt.replay.self_document_tokens=70",
)
MORE = ("cpt.forgetting.data=[old]", "training.start_from=base", "training.max_steps=9")
ORIGIN = {
    "text": "written by the starting model",
    "model": "a" * 64,
    "seed": load_config(CONFIG).training.seed,
    "tokens": 200,
    "document_tokens": 70,
}


def write_text(folder: Path, **origin: Any) -> bytes:
    """Text of a starting model; gives its manifest."""
    write_token_folder(folder, {"train/self": [range(200)]})
    manifest = read_manifest(folder).model_copy(update={"source": ORIGIN | origin})
    write_manifest(folder, manifest)
    return (folder / "manifest.json").read_bytes()


def opened(run_dir: Path, *copies: Path, checkpoint: Path | None) -> None:
    """Opens the text of a run with a new data set; its model writes none."""
    data = write_token_folder(run_dir.parent / "data", {"train": [range(200)]})
    train = TokenDataset(data, "train", 64)
    corpus = Corpus(train.manifest, train, train, None, data)  # type: ignore[arg-type]
    settings = [*SMALL, *SELF, *MORE]
    base = {"digest": "a" * 64}
    start: Any = SimpleNamespace(
        base=base,
        start_from=None,
        heartbeat=None,
        config=load_config(CONFIG, settings),
        directory=RunDirectory(run_dir, copies),
    )
    found = None if checkpoint is None else FoundCheckpoint(checkpoint, int(checkpoint.name), ())
    own_replay(start, corpus, ALONE, None, found)


def test_a_replica_is_enough_to_go_on_with_the_text(tmp_path: Path) -> None:
    copies = tmp_path / "replica" / "run-1234"
    text = write_text(tmp_path / "run" / "replay")
    opened(tmp_path / "run", copies, checkpoint=tmp_path / "run" / "checkpoints" / "4")
    assert (copies / "replay" / "manifest.json").read_bytes() == text
    shutil.rmtree(tmp_path / "run")
    opened(tmp_path / "run", copies, checkpoint=copies / "4")
    assert (tmp_path / "run" / "replay" / "manifest.json").read_bytes() == text
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(copies / "replay")
    with pytest.raises(StateError, match="the text that the starting model wrote before the first"):
        opened(tmp_path / "run", copies, checkpoint=copies / "4")


def test_text_of_another_model_is_written_anew_or_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_text(run_dir / "replay")
    opened(run_dir, checkpoint=None)  # as it is
    shutil.rmtree(run_dir)
    write_text(run_dir / "replay", model="b" * 64)
    with pytest.raises(StateError, match="was written by another model, of digest bbbbbbbbbbbb"):
        opened(run_dir, checkpoint=run_dir / "checkpoints" / "4")
    # a run that begins would have its model write, which is none here
    with pytest.raises(AttributeError, match="document_prefix|prefix_ids|device"):
        opened(run_dir, checkpoint=None)
