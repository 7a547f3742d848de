"""What planning counts without torch is what gets built, name by name."""

from pathlib import Path

import pytest
import torch

from cdrmix.config.load import load_config, shipped
from cdrmix.config.model import ModelConfig
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.planning.counts import count, parameters, stage_b_params
from cdrmix.reasoning.hebbian import PlasticBackbone
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory
from tools.benchmark.segment_stream import NUM_FEATURES

VARIANTS = sorted(shipped("model_configs").glob("cdrmix-*.yaml"))


def counted_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in parameters(config)}


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Backbone(config)
    return {logical_name(name): tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_every_variant_is_built_as_counted_to_the_last_parameter(path: Path) -> None:
    config = load_config(path)
    built = built_shapes(config.model)
    assert built == counted_shapes(config.model)
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
    assert built_shapes(config) == counted_shapes(config)


@pytest.mark.parametrize("with_experts", [True, False], ids=["experts", "dense"])
def test_stage_b_is_counted_as_it_is_built(with_experts: bool) -> None:
    config = load_config(shipped("model_configs") / "cdrmix-reason-4b.yaml")
    stage_b = config.stage_b
    assert stage_b is not None
    dense = {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "vocab_size": 256}
    experts = {"num_experts": 2, "top_k": 1, "expert_hidden_size": 32}
    model = ModelConfig.model_validate({**dense, "moe": experts if with_experts else None})
    counts = stage_b_params(model, stage_b)
    plastic = PlasticBackbone(Backbone(model), stage_b.adapters)
    adapters = dict(plastic.adapters.named_parameters())
    assert counts.adapters == sum(p.numel() for p in adapters.values() if p.dim() == 2)
    assert counts.gates == sum(p.numel() for p in adapters.values() if p.dim() < 2)
    state = plastic.start(1).layers.values()
    assert counts.plastic_state == sum(layer.weights.numel() for layer in state)
    summary = stage_b.memory.summary_dim
    for counted, module in (
        (counts.heads, MemoryPolicy(64, NUM_FEATURES)),
        (counts.summariser, WorkingMemory(64, stage_b.memory)),
        (counts.retrieval, RetrievalEncoder(64, summary)),
    ):
        assert counted == sum(parameter.numel() for parameter in module.parameters())
