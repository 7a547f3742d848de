"""Bytes of Stage B as planned, against modules and graphs as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cdrmix.config.load import load_config, shipped
from cdrmix.models.backbone import Backbone
from cdrmix.parallel.frozen_stages import FrozenStages
from cdrmix.parallel.topology import Topology
from cdrmix.planning.cluster import processes
from cdrmix.planning.counts import stage_b_params
from cdrmix.planning.layout import Degrees
from cdrmix.planning.stage_b import stage_b_layers, stage_b_layout
from cdrmix.reasoning.hebbian import PlasticBackbone
from cdrmix.reasoning.memory_reader import NUM_FEATURES
from cdrmix.reasoning.policy import MemoryPolicy
from cdrmix.reasoning.working_memory import RetrievalEncoder, WorkingMemory
from cdrmix.stage_b.phases import phase_loss
from tests.unit.reasoning.small_reader import small_lessons, small_reader

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
    whole = sum(p.numel() for p in backbone.parameters())
    assert stage_b_params(config.model, stage_b).total_params == trained
    layout = stage_b_layout(config, processes(1), zero_stage=1)
    assert layout is not None
    found = layout.memory
    size = 4 if config.training.precision == "fp32" else 2
    assert found.weights == size * (whole + trained)
    if stage_b.training.backbone_lr_scale > 0:
        trained += whole
    assert found.gradients == (4 if size == 4 else 2 + 4) * trained
    assert found.optimizer == 12 * trained
    rows = stage_b.training.texts_per_lesson * stage_b.training.group_size
    state = plastic.start(rows).layers.values()
    assert found.buffers["plastic_state"] == sum(4 * layer.weights.numel() for layer in state)


@pytest.mark.parametrize(("rank", "backbone_lr_scale"), [(8, 0.0), (24, 0.0), (8, 0.1)])
def test_a_lesson_keeps_about_what_is_planned(rank: int, backbone_lr_scale: float) -> None:
    config = load_config(
        TINY,
        [
            "model.vocab_size=768",  # of the small tokenizer
            f"stage_b.adapters.rank={rank}",
            "stage_b.training.texts_per_lesson=8",
            f"stage_b.training.backbone_lr_scale={backbone_lr_scale}",
        ],
    )
    reader = small_reader(config)
    reader.backbone.requires_grad_(backbone_lr_scale > 0)
    lesson = small_lessons(config).lesson("joint", 0)
    own = {parameter.untyped_storage().data_ptr() for parameter in reader.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        phase_loss(reader, "joint", lesson, config)
    measured = sum(x.untyped_storage().nbytes() for x in kept.values())
    planned = stage_b_layout(config, processes(1), zero_stage=1)
    assert planned is not None
    assert 0.5 < measured / planned.memory.activations < 1.2


@pytest.mark.parametrize("pipeline", [2, 16])
def test_states_of_the_fullest_stage_are_those_of_the_built_modules(pipeline: int) -> None:
    config = load_config(TINY.with_name("cdrmix-reason-40b.yaml"), [f"stage_b.pipeline={pipeline}"])
    stage_b, width = config.stage_b, config.model.hidden_size
    assert stage_b is not None
    degrees = Degrees(data=2, tensor=1, pipeline=pipeline, sequence=1, expert=1)
    trained, held = [], []
    for stage, layers in enumerate(stage_b_layers(config, pipeline)):
        with torch.device("meta"):
            backbone = FrozenStages(config.model, Topology(degrees, rank=2 * stage), layers)
            parts = (
                PlasticBackbone(backbone, stage_b.adapters).adapters,
                WorkingMemory(width, stage_b.memory),
                RetrievalEncoder(width, stage_b.memory.summary_dim),
                MemoryPolicy(width, NUM_FEATURES),
            )
        trained.append(sum(p.numel() for part in parts for p in part.parameters()))
        held.append(trained[-1] + sum(p.numel() for p in backbone.parameters()))
    layout = stage_b_layout(config, processes(2 * pipeline), zero_stage=1)
    assert layout is not None and layout.degrees == degrees
    fullest = held.index(layout.memory.weights // 2)
    assert held[fullest] >= 0.99 * max(held)
    assert layout.memory.gradients == (2 + 4) * trained[fullest]
    assert layout.memory.optimizer == 12 * -(-trained[fullest] // 2)
