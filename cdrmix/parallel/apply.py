"""From a plan to this rank's part of the model."""

from __future__ import annotations

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.schema import Config, ModelConfig
from cdrmix.models.backbone import Backbone, Block, make_block
from cdrmix.parallel.partitioned import PartitionedEmbedding, partition
from cdrmix.parallel.topology import Topology
from cdrmix.planning.profile import Choice


def build_model(config: Config, choice: Choice, topology: Topology) -> nn.Module:
    """This rank's part of the backbone on its device, with the initial values of the run's seed.

    Each block is made whole but for its experts, initialised as in any other layout, and then cut,
    so that no rank holds more than one whole block beside its own part.
    """

    def block(model: ModelConfig, layer: int) -> Block:
        made = make_block(model, layer, expert_parallel_size=topology.degrees.expert)
        made.initialize(
            seed=config.training.seed,
            std=model.init_std,
            expert_parallel_rank=topology.rank_in_stage % topology.degrees.expert,
        )
        if choice.zero_stage == 3:
            partition(made, choice.deepspeed)
        return made

    with torch.device(runtime.device()):
        model = Backbone(
            config.model,
            activation_checkpointing=choice.activation_checkpointing,
            block=block,
        )
        model.embedding.initialize(seed=config.training.seed, std=config.model.init_std)
    if choice.zero_stage == 3:
        partition(model, choice.deepspeed)
        model.embedding = PartitionedEmbedding(model.embedding)
    return model
