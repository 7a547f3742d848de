"""From a plan to this rank's part of the model."""

from __future__ import annotations

import torch
from torch import nn

from cdrmix import runtime
from cdrmix.config.schema import Config, ModelConfig
from cdrmix.models.backbone import Backbone
from cdrmix.models.block import Block, make_block
from cdrmix.parallel.partitioned import PartitionedEmbedding, partition
from cdrmix.parallel.sequence import spread_tokens
from cdrmix.parallel.tensor import mark_copies, split_block
from cdrmix.parallel.topology import Topology
from cdrmix.parallel.vocabulary import split_embedding
from cdrmix.planning.activations import ELEMENT_BYTES
from cdrmix.planning.profile import Choice
from cdrmix.planning.sequence import passes_state


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
        split_block(made, topology)
        spread_tokens(made, topology, passes_state=by_state)
        if choice.zero_stage == 3:
            partition(made, choice.deepspeed)
        return made

    by_state = passes_state(
        config.model,
        sequence_length=config.training.sequence_length,
        sequence=topology.degrees.sequence,
        element_bytes=ELEMENT_BYTES[config.training.precision],
    )

    with torch.device(runtime.device()):
        model = Backbone(
            config.model,
            activation_checkpointing=choice.activation_checkpointing,
            sequence_checkpoint_tokens=config.training.sequence_checkpoint_tokens,
            block=block,
        )
        model.embedding.initialize(seed=config.training.seed, std=config.model.init_std)
        model.embedding = split_embedding(model.embedding, topology)
        mark_copies(model, topology)
    if choice.zero_stage == 3:
        partition(model, choice.deepspeed)
        model.embedding = PartitionedEmbedding(model.embedding)
    return model
