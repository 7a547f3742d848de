"""What planning counts without torch is what gets built, name by name."""

from pathlib import Path

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.schema import ModelConfig
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.planning.counts import count, parameter_shapes

VARIANTS = sorted(shipped("model_configs").glob("cdrmix-*.yaml"))


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Backbone(config)
    return {logical_name(name): tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_every_variant_is_built_as_counted_to_the_last_parameter(path: Path) -> None:
    config = load_config(path)
    built = built_shapes(config.model)
    assert built == parameter_shapes(config.model)
    total = sum(torch.Size(shape).numel() for shape in built.values())
    assert count(config.model, config.training.sequence_length).total_params == total


@pytest.mark.parametrize(
    "changes",
    [
        {"moe": None},
        {"num_kv_heads": 2},
        {"schedule": "top-of-x", "transformer_fraction": 0.5},
        {"transformer_fraction": 0.0},
        {"transformer_fraction": 1.0},
    ],
    ids=str,
)
def test_other_shapes_are_built_as_counted(changes: dict) -> None:
    tiny = load_config(shipped("model_configs") / "cdrmix-core-tiny.yaml").model
    config = ModelConfig.model_validate({**tiny.model_dump(), **changes})
    assert built_shapes(config) == parameter_shapes(config)
