"""Data sets that the ranks open: what only they can check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.engines.training_data import open_corpus
from cdrmix.errors import DataError
from tests.conftest import TINY
from tests.hf_models import make_folder


def test_data_at_a_url_are_of_the_tokenizer_of_a_hugging_face_model(
    small_corpus: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", "llama", vocab_size=4096)
    data = {"path": small_corpus.absolute().as_uri(), "cache_folder": str(tmp_path / "cache")}
    model = {"kind": "hf", "path": str(folder)}
    values = load_config(TINY).model_dump() | {"model": model, "data": data}
    config = Config.model_validate(values)
    with pytest.raises(DataError, match="its tokens are of another tokenizer than the model's"):
        open_corpus(config)
    shutil.copyfile(small_corpus / "tokenizer.json", folder / "tokenizer.json")
    open_corpus(config)
