"""The RWKX-V backbone: layer schedule, blocks, embedding and tied head.

B batch, T time, D hidden, V vocabulary, L layers, S router statistics per layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.models.block import Block, BlockState, RMSNorm, make_block
from cdrmix.models.initialize import normal_
from cdrmix.models.recompute import run_blocks


class Output(NamedTuple):
    """Output of a forward pass.

    Attributes:
        hidden: normalised output of the last block, [B, T, D]; `Backbone.logits` maps it.
        router_statistics: [L, S] as in `MoEFeedForward.forward`, or None in a dense model.
        state: one entry per block, for going on after token T; None unless asked for.
    """

    hidden: Tensor
    router_statistics: Tensor | None
    state: list[BlockState] | None


class LanguageModel(Protocol):
    """Interface for evaluation and decoding: a `Backbone`, or one over pipeline stages."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def embedding(self) -> TokenEmbedding: ...

    @property
    def training(self) -> bool: ...

    def train(self, mode: bool = True) -> object: ...

    def eval(self) -> object: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def __call__(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        state: list[BlockState] | None = None,
        return_state: bool = False,
    ) -> Output: ...


class TokenEmbedding(nn.Embedding):
    """Embedding of the vocabulary, [V, D], which is the head too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the next token, [..., D] -> [..., V]."""
        return F.linear(hidden, self.weight)

    @torch.no_grad()
    def initialize(self, *, seed: int, std: float) -> None:
        """Sets normal values of deviation `std`."""
        normal_(self.weight, std, seed=seed, name="embedding")


class Backbone(nn.Module):
    """RWKX-V language model: embedding, blocks by the layer schedule, tied head.

    Args:
        config: dimensions.
        activation_checkpointing: recompute each block in the backward pass.
        sequence_checkpoint_tokens: recompute it in spans of so many tokens; None: in one.
        block: makes the block of a layer; by default a whole one, without initial values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        activation_checkpointing: bool = False,
        sequence_checkpoint_tokens: int | None = None,
        block: Callable[[ModelConfig, int], Block] = make_block,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.sequence_checkpoint_tokens = sequence_checkpoint_tokens
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = RMSNorm(config.hidden_size)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        state: list[BlockState] | None = None,
        return_state: bool = False,
    ) -> Output:
        """Computes the hidden states of every position.

        Args:
            input_ids: [B, T], int64.
            segment_ids: document of each token, [B, T], non-decreasing; nothing crosses documents.
            state: where an earlier call stopped; None at the start of a sequence.
            return_state: also give the state after token T.
        Returns:
            See `Output`.
        """
        x = self.embedding_norm(self.embedding(input_ids))  # [B, T, D]
        x, _, statistics, after = run_blocks(
            self.blocks,
            x,
            None,
            state=state,
            segment_ids=segment_ids,
            return_state=return_state,
            recompute=self.activation_checkpointing,
            sequence_checkpoint_tokens=self.sequence_checkpoint_tokens,
        )
        return Output(self.final_norm(x), statistics, after)

    @property
    def device(self) -> torch.device:
        """Device that inputs must be on."""
        return self.embedding.weight.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V]."""
        return self.embedding.logits(hidden)

    def initialize(self, *, seed: int) -> None:
        """Sets the initial values of a whole backbone from the seed."""
        std = self.config.init_std
        self.embedding.initialize(seed=seed, std=std)
        for block in self.blocks:
            assert isinstance(block, Block), "the list holds blocks only"
            block.initialize(seed=seed, std=std)


def logical_name(name: str) -> str:
    """Returns the name of a parameter in checkpoints and exports, without DeepSpeed's modules.

    DeepSpeed's pipeline module numbers layers, a whole stage being one: `1.blocks.2.mixer_norm`.
    """
    name = re.sub(r"^\d+\.", "", name)
    return name.replace(".deepspeed_moe.gate.", ".router.").replace(".deepspeed_moe.", ".")
