"""Bytes of Stage B as planned, against modules and graphs as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdrmix.config.load import load_config, shipped
from cdrmix.models.backbone import Backbone
from cdrmix.planning.cluster import processes
from cdrmix.planning.counts import stage_b_params
from cdrmix.planning.stage_b_memory import stage_b_memory
from cdrmix.reasoning.hebbian import PlasticBackbone
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.reasoning.retrieval import RetrievalEncoder
from cdrmix.reasoning.stream import NUM_FEATURES
from cdrmix.reasoning.working_memory import WorkingMemory

VARIANTS = sorted(shipped("model_configs").glob("cdrmix-reason-*.yaml"))
TINY = shipped("model_configs") / "cdrmix-reason-tiny.yaml"


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_states_are_those_of_the_built_modules_to_the_last_parameter(path: Any) -> None:
    config = load_config(path)
    stage_b, width = config.stage_b, config.model.hidden_size
    assert stage_b is not None
    with torch.device("meta"):
        backbone = Backbone(config.model)
        plastic = PlasticBackbone(backbone, stage_b.adapters)
        parts = (
            plastic.adapters,
            WorkingMemory(width, stage_b.memory),
            RetrievalEncoder(width, stage_b.memory.summary_dim),
            MemoryPolicy(width, NUM_FEATURES),
        )
    trained = sum(p.numel() for part in parts for p in part.parameters())
    frozen = sum(p.numel() for p in backbone.parameters())
    assert stage_b_params(config.model, stage_b).total_params == trained
    found = stage_b_memory(config, processes(1), zero_stage=1)
    assert found is not None
    size = 4 if config.training.precision == "fp32" else 2
    assert found.weights == size * (frozen + trained)
    assert found.gradients == (4 if size == 4 else 2 + 4) * trained
    assert found.optimizer == 12 * trained
    rows = stage_b.training.texts_per_lesson * stage_b.training.group_size
    state = plastic.start(rows).plastic.layers.values()
    assert found.buffers["plastic_state"] == sum(4 * layer.weights.numel() for layer in state)


@pytest.mark.parametrize("rank", [8, 24])
def test_a_lesson_keeps_about_what_is_planned(rank: int) -> None:
    lesson = [f"stage_b.adapters.rank={rank}", "stage_b.training.texts_per_lesson=2"]
    config = load_config(TINY, [*lesson, "stage_b.training.window_tokens=64"])
    assert config.stage_b is not None
    assert max(config.stage_b.training.length_ratios) == 8, "the longest text has 512 tokens"
    backbone = Backbone(config.model).requires_grad_(False)
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = PlasticBackbone(backbone, config.stage_b.adapters)
    model.initialize(seed=1)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        output = model(torch.randint(0, 300, (2, 512)), state=model.start(2), with_correlation=True)
    assert output.correlation is not None
    measured = sum(x.untyped_storage().nbytes() for x in kept.values())
    planned = stage_b_memory(config, processes(1), zero_stage=1)
    assert planned is not None
    assert 0.7 < measured / planned.activations < 1.2
