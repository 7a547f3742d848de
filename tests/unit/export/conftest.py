"""Exported folders of small models of each kind, loaded as transformers loads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, dynamic_module_utils

from cdrmix.export.exported_run import export_run
from cdrmix.models.backbone import Backbone
from tests.made_run import made_run

KINDS = {
    "hybrid of experts": (),
    "dense": ("model.moe=null", "model.ffn_hidden_size=96", "model.init_std_scale=4"),
    "rwkv alone": ("model.transformer_fraction=0",),
    "attention alone": ("model.transformer_fraction=1", "model.num_kv_heads=1"),
}


@dataclass(frozen=True)
class Both:
    """A model of training, and the folder that it was exported to."""

    ours: Backbone
    folder: Path
    run_dir: Path

    def load(self, **settings: Any) -> Any:
        """The exported model, as a user's program loads it."""
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, trust_remote_code=True, local_files_only=True, **settings
        )
        assert not type(model).__module__.startswith("cdrmix"), "the code of the folder"
        return model.eval()


@pytest.fixture(scope="session", autouse=True)
def _own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keeps transformers' copies of the code out of the user's cache."""
    before = dynamic_module_utils.HF_MODULES_CACHE
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("hf_modules"))
    yield
    if dynamic_module_utils.HF_MODULES_CACHE in sys.path:
        sys.path.remove(dynamic_module_utils.HF_MODULES_CACHE)
    dynamic_module_utils.HF_MODULES_CACHE = before


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    """Makes the export of a kind of model, once."""
    made: dict[str, Both] = {}

    def of_kind(kind: str) -> Both:
        if kind not in made:
            root = tmp_path_factory.mktemp("exported")
            ours = made_run(root / "run", *KINDS[kind])
            export_run(root / "run", root / "folder")
            made[kind] = Both(ours, root / "folder", root / "run")
        return made[kind]

    return of_kind


@pytest.fixture(scope="session", params=KINDS)
def both(request: pytest.FixtureRequest, exported: Callable[[str], Both]) -> Both:
    """Each kind of model in turn."""
    return exported(request.param)


@pytest.fixture(scope="session")
def hybrid(exported: Callable[[str], Both]) -> Both:
    """RWKV and Transformer blocks with experts."""
    return exported("hybrid of experts")
