"""A run with multi-token prediction as others take its weights: exports, Stage B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cdrmix.checkpoint.checkpoint_file import CheckpointFile
from cdrmix.checkpoint.store import find_newest
from cdrmix.config.load import load_config
from cdrmix.engines import start_point
from cdrmix.errors import ConfigError
from cdrmix.export.exported_run import export_run
from cdrmix.models.backbone import Backbone
from cdrmix.parallel.topology import ALONE
from cdrmix.stage_b.backbone_source import load_backbone
from tests.made_run import SETTINGS, made_run
from tests.unit.reasoning.small_reader import small_config

MTP = "model.mtp={kind: deepseek, num_tokens: 3}"
DENSE_RWKV = ("model.transformer_fraction=0", "model.moe=null", "model.ffn_hidden_size=96")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Backbone]:
    run_dir = tmp_path_factory.mktemp("further") / "run"
    return run_dir, made_run(run_dir, *DENSE_RWKV, MTP)


@torch.no_grad()
def test_transformers_loads_the_model_and_passes_over_the_parts(
    run: tuple[Path, Backbone], tmp_path: Path
) -> None:
    exported = export_run(run[0], tmp_path / "folder")
    ours = run[1]
    assert exported.num_parameters == sum(p.numel() for p in ours.parameters())
    assert exported.left_out == ()
    loaded: Any
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", trust_remote_code=True, local_files_only=True, output_loading_info=True
    )
    # What would be warned of.
    assert not any(told[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys"))
    assert loaded.config.mtp == {"kind": "deepseek", "num_tokens": 3, "head": "linear"}
    tokens = torch.arange(10, 40).unsqueeze(0)
    torch.testing.assert_close(
        loaded.eval()(tokens).logits, ours.logits(ours(tokens).hidden), atol=1e-5, rtol=0
    )
    of_run = start_point.of_checkpoint(run[0] / "checkpoints" / "7")
    assert start_point.of_export(tmp_path / "folder").shapes == of_run.shapes
    assert "`model.mtp.`" in (tmp_path / "folder" / "README.md").read_text()


def test_formats_without_a_place_leave_the_parts_out(
    run: tuple[Path, Backbone], tmp_path: Path
) -> None:
    made_run(tmp_path / "plain", *DENSE_RWKV)
    for format in ("fla", "gguf"):
        exported = export_run(run[0], tmp_path / format, format=format)
        plain = export_run(tmp_path / "plain", tmp_path / f"plain-{format}", format=format)
        assert exported.left_out == ("mtp",) and plain.left_out == ()
        assert exported.num_parameters == plain.num_parameters
        metadata = json.loads((tmp_path / format / "training_metadata.json").read_text())
        assert metadata["left_out"] == ["mtp"]
        assert "are not here" in (tmp_path / format / "README.md").read_text()


def test_start_from_takes_parts_that_are_the_same_and_no_others(
    run: tuple[Path, Backbone],
) -> None:
    point = start_point.of_checkpoint(run[0] / "checkpoints" / "7")

    def apart(*settings: str) -> frozenset[str]:
        config = load_config(
            "model_configs/cdrmix-core-tiny.yaml", [*SETTINGS, *DENSE_RWKV, *settings]
        )
        start_point.check_fits(point, config.model, data=None)
        return start_point.fresh_and_left(point, config.model)

    there = {name for name in point.shapes if name.startswith("mtp.")}
    assert apart(MTP) == frozenset()
    assert apart() == there
    assert apart("model.mtp.num_tokens=2") == there | {"mtp.2.map.weight"}


def test_stage_b_reads_a_backbone_without_its_parts(
    run: tuple[Path, Backbone], tmp_path: Path
) -> None:
    sizes = ["model.num_layers=4", "model.moe.expert_hidden_size=64"]
    model = made_run(tmp_path / "run", *sizes, "model.mtp.num_tokens=2")
    found = find_newest(tmp_path / "run")
    assert found is not None
    plain = model.config.model_copy(update={"mtp": None})
    config = small_config().model_copy(update={"model": plain})
    with CheckpointFile(found.path) as checkpoint:
        backbone = load_backbone(config, checkpoint, ALONE)
    values = dict(model.named_parameters())
    assert backbone.mtp is None
    assert all(torch.equal(p, values[name]) for name, p in backbone.named_parameters())
    with pytest.raises(ConfigError, match="Train Stage A in a run of its own"):
        load_config("model_configs/cdrmix-reason-tiny.yaml", ["model.mtp.num_tokens=2"])
