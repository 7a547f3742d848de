"""The RWKX-V backbone: layer schedule, blocks, embedding and tied head."""

# B batch, T time, D hidden, V vocabulary, R routers, S statistics in a row

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Recomputation
from cdrmix.models.block import Block, rms_norm
from cdrmix.models.initialize import normal_
from cdrmix.models.mixture_of_depths import make_block
from cdrmix.models.mtp import FurtherTokens
from cdrmix.models.recompute import Context, run_blocks
from cdrmix.planning.blocks.routers import router_places


class Output(NamedTuple):
    """Output of a forward pass."""

    hidden: Tensor  # normalised output of the last block, [B, T, D]; `Backbone.logits` maps it
    router_statistics: Tensor | None  # [R, S] as in `planning.blocks.routers`; None: no routers
    # for going on after token T; None unless asked for
    state: Any  # of each block, `list[BlockState]`; the cache of a Hugging Face model
    # of routed blocks, [L, S] as in `planning.depth.DEPTH_STATISTICS`; None without any
    depth_statistics: Tensor | None = None


class Scorer(Protocol):
    """The head of a model."""

    def logits(self, hidden: Tensor) -> Tensor: ...


class LanguageModel(Protocol):
    """Interface for evaluation and decoding: a `Backbone`, one over pipeline stages, or a
    Hugging Face model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def embedding(self) -> Scorer: ...
    @property
    def num_routers(self) -> int: ...
    @property
    def training(self) -> bool: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def __call__(self, input_ids: Tensor, **context: Unpack[Context]) -> Output: ...


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
    """RWKX-V language model: embedding, blocks by the layer schedule, tied head, and what predicts
    further tokens.

    Args:
        activation_checkpointing, sequence_checkpoint_tokens, is_compiled: of the blocks; see
            `run_blocks`.
        block: makes the block of a layer; by default a whole one, without initial values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        activation_checkpointing: Recomputation = "none",
        sequence_checkpoint_tokens: int | None = None,
        is_compiled: bool = False,
        block: Callable[[ModelConfig, int], Block] = make_block,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.sequence_checkpoint_tokens = sequence_checkpoint_tokens
        self.is_compiled = is_compiled
        self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = rms_norm(config)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.num_layers))
        self.final_norm = rms_norm(config)
        # Not a part of `forward`: the loss and speculative decoding ask for further tokens.
        self.mtp: FurtherTokens | None = None
        if config.mtp is not None:
            self.mtp = FurtherTokens(
                config,
                block,
                activation_checkpointing=activation_checkpointing,
                sequence_checkpoint_tokens=sequence_checkpoint_tokens,
            )

    def forward(self, input_ids: Tensor, **context: Unpack[Context]) -> Output:
        """Computes the hidden states of every position of `input_ids`, [B, T], int64."""
        x = self.embedding_norm(self.embedding(input_ids))  # [B, T, D]
        x, _, statistics, after = run_blocks(
            self.blocks,
            x,
            None,
            recompute=self.activation_checkpointing,
            sequence_checkpoint_tokens=self.sequence_checkpoint_tokens,
            is_compiled=self.is_compiled,
            **context,
        )
        return Output(self.final_norm(x), statistics.experts, after, statistics.depth)

    @property
    def device(self) -> torch.device:
        """Device that inputs must be on."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.embedding.weight.dtype

    @property
    def num_routers(self) -> int:
        """Routers of mixers and of feed-forwards."""
        return len(router_places(self.config))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V]."""
        return self.embedding.logits(hidden)

    def initialize(self, *, seed: int) -> None:
        """Sets the initial values of a whole backbone from the seed."""
        further = [] if self.mtp is None else [*self.mtp.blocks, self.mtp]
        for part in (self.embedding, *self.blocks, *further):
            assert isinstance(part, TokenEmbedding | Block | FurtherTokens), "blocks hold no other"
            part.initialize(seed=seed, std=self.config.init_std)


def logical_name(name: str) -> str:
    """Returns the name of a parameter in checkpoints and exports, without DeepSpeed's modules.

    DeepSpeed's pipeline module numbers layers, a whole stage being one: `1.blocks.2.mixer_norm`.
    """
    name = re.sub(r"^\d+\.", "", name)
    return name.replace(".deepspeed_moe.gate.", ".router.").replace(".deepspeed_moe.", ".")
