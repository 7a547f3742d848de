"""Construction of this rank's part of the model from a plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.hf import names
from cdrmix.hf.model import HuggingFaceModel
from cdrmix.models.backbone import Backbone, logical_name
from cdrmix.models.block import Block
from cdrmix.models.mixture_of_depths import RoutedBlock, make_block
from cdrmix.models.moe import ExpertLayer
from cdrmix.parallel.pipeline import Pipeline, PipelineStage, StagedBackbone
from cdrmix.parallel.sequence import spread_tokens
from cdrmix.parallel.tensor import mark_copies, split_block, split_embedding
from cdrmix.parallel.topology import Topology
from cdrmix.parallel.zero3 import PartitionedEmbedding, partition
from cdrmix.planning.plan import Plan


def build_model(config: Config, plan: Plan, topology: Topology) -> nn.Module:
    """Builds this rank's part of the backbone on its device, with initial values of the run's seed.

    Each block is built whole but for its experts, initialised as in any other layout, and then cut,
    so that no rank holds more than one whole block beside its own part. A Hugging Face model has no
    values yet: they are read into its engine.
    """
    if config.model.kind == "hf":
        # transformers takes seconds to import
        from cdrmix.hf import build

        return build.build_model(config, plan)

    expert = topology.degrees.expert

    def block(model: ModelConfig, layer: int) -> Block:
        whole = make_block(model, layer, expert_parallel_size=expert)
        if isinstance(whole, RoutedBlock):
            whole.is_collective = expert > 1 or plan.zero_stage == 3
        whole.initialize(
            seed=config.training.seed,
            std=model.init_std,
            expert_parallel_rank=topology.expert_rank,
        )
        split_block(whole, topology)
        spread_tokens(whole, topology, config)
        # last, as a partitioned parameter has no values left to initialise or cut; block by block,
        # so that a rank never holds the whole model
        if plan.zero_stage == 3:
            partition(whole, plan.deepspeed)
        return whole

    with torch.device(runtime.device()):
        model: Backbone | PipelineStage
        if topology.degrees.pipeline > 1:
            model = PipelineStage(config, plan, topology, block)
        else:
            model = Backbone(
                config.model,
                activation_checkpointing=plan.activation_checkpointing,
                sequence_checkpoint_tokens=plan.sequence_checkpoint_tokens,
                is_compiled=config.training.compile == "blocks",
                block=block,
            )
        if topology.is_first_stage or topology.is_last_stage:
            model.embedding.initialize(seed=config.training.seed, std=config.model.init_std)
            model.embedding = split_embedding(model.embedding, topology)
        if model.mtp is not None:  # whose blocks are made as others are
            model.mtp.initialize(seed=config.training.seed, std=config.model.init_std)
        mark_copies(model, topology)
        if isinstance(model, PipelineStage):
            return Pipeline(model)
    if plan.zero_stage == 3:
        # What is outside the blocks. Then the embedding lends its weight to a head that is a
        # module, as DeepSpeed gathers weights around modules alone.
        partition(model, plan.deepspeed)
        model.embedding = PartitionedEmbedding(model.embedding)
    return model


def join_experts(module: nn.Module, topology: Topology) -> None:
    """Makes the groups over which experts are spread, for a model without an engine, which would
    make them; collective over the world."""
    size = topology.degrees.expert
    if size == 1:
        return
    for first in range(0, topology.degrees.world_size, size):
        ranks = range(first, first + size)
        # in one order on every rank, as each group is made by a collective over the world
        group = runtime.new_group(list(ranks))
        if topology.rank in ranks:
            mine = group
    for part in module.modules():
        if isinstance(part, ExpertLayer):
            part.join(mine)


def for_inference(module: nn.Module) -> Backbone | StagedBackbone | HuggingFaceModel:
    """Returns an engine's module in the form that evaluation and decoding call."""
    if isinstance(module, Pipeline):
        return StagedBackbone(module.stage)
    assert isinstance(module, Backbone | HuggingFaceModel), "build_model makes one of these"
    return module


def logical_name_in(model: ModelConfig) -> Callable[[str], str]:
    """Returns the function that gives a parameter of a model its name in checkpoints."""
    return names.logical_name if model.kind == "hf" else logical_name


def frozen_in(model: ModelConfig) -> Callable[[str], bool]:
    """Returns whether a logical name is of a base that no checkpoint holds: all but adapters."""
    return lambda name: model.lora is not None and not names.is_adapter(name)
