"""The RWKX-V backbone: layer schedule, blocks, embedding and tied head.

B batch, T time, D hidden, V vocabulary, L layers, S router statistics per layer.

Every block takes (x, v_first) and gives (x, v_first, statistics), so that a block can stand on any
pipeline stage and be recomputed alone. No process group is seen here but the expert group that
DeepSpeed hands to its MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cdrmix.config.schema import LayerKind, ModelConfig
from cdrmix.models.attention import Attention, AttentionState
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.initialize import normal_
from cdrmix.models.moe import MoEFeedForward
from cdrmix.models.rwkv7 import ChannelShift, TimeMix, TimeMixState

NORM_EPS = 1e-6


class BlockState(NamedTuple):
    """What one block carries from call to call.

    Attributes:
        mixer: state of the time mix or of the attention.
        channel_last: last normalised input of an RWKV block's feed-forward, [B, D]; else None.
    """

    mixer: TimeMixState | AttentionState
    channel_last: Tensor | None


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: normalised output of the last block, [B, T, D]; `Backbone.logits` maps it.
        router_statistics: [L, S] as in `MoEFeedForward.forward`, or None in a dense model.
        state: one entry per block, for going on after token T; None unless asked for.
    """

    hidden: Tensor
    router_statistics: Tensor | None
    state: list[BlockState] | None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], same type."""
        return F.rms_norm(x, x.shape[-1:], self.weight, NORM_EPS)


class Block(nn.Module):
    """Pre-norm block: mixer, then feed-forward, each with a residual.

    Args:
        config: dimensions.
        kind: rwkv or transformer.
        layer: index of the block, from 0 at the input.
        creates_v_first: whether this is the first RWKV layer.
        expert_parallel_size: ranks over which the experts are spread.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kind: LayerKind,
        layer: int,
        creates_v_first: bool,
        expert_parallel_size: int,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = RMSNorm(config.hidden_size)
        self.mixer: TimeMix | Attention
        if kind == "rwkv":
            self.mixer = TimeMix(config, layer=layer, creates_v_first=creates_v_first)
        else:
            self.mixer = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size)
        self.ffn_shift = ChannelShift(config, layer=layer) if kind == "rwkv" else None
        self.ffn: nn.Module
        if config.moe is None:
            self.ffn = FeedForward(config)
        else:
            self.ffn = MoEFeedForward(config, expert_parallel_size=expert_parallel_size)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: BlockState | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, BlockState]:
        """One block.

        Args:
            x: residual stream, [B, T, D].
            v_first: value of the first RWKV layer, [B, T, D]; None before it.
            state: this block's state, or None at the start of a sequence.
            segment_ids: document of each token, [B, T].
        Returns:
            residual stream, v_first, router statistics [S] or None, state after token T.
        """
        mixer_input = self.mixer_norm(x)
        mixer_state: TimeMixState | AttentionState
        if isinstance(self.mixer, TimeMix):
            past = state.mixer if state else None
            assert past is None or isinstance(past, TimeMixState), "state of another block kind"
            mixed, v_first, mixer_state = self.mixer(mixer_input, v_first, past, segment_ids)
        else:
            mixed, mixer_state = self.mixer(
                mixer_input, state.mixer if state else None, segment_ids
            )
        x = x + mixed
        ffn_input = self.ffn_norm(x)
        channel_last = None
        if self.ffn_shift is not None:
            channel_last = ffn_input[:, -1]
            ffn_input = self.ffn_shift(
                ffn_input, state.channel_last if state else None, segment_ids
            )
        statistics = None
        if isinstance(self.ffn, MoEFeedForward):
            out, statistics = self.ffn(ffn_input)
        else:
            out = self.ffn(ffn_input)
        return x + out, v_first, statistics, BlockState(mixer_state, channel_last)

    def initialize(self, *, seed: int, std: float, expert_parallel_rank: int = 0) -> None:
        """Set the initial values; see the parts."""
        name = f"blocks.{self.layer}"
        if isinstance(self.mixer, TimeMix):
            self.mixer.initialize(seed=seed, name=f"{name}.mixer")
        else:
            self.mixer.initialize(seed=seed, name=f"{name}.mixer", std=std)
        if self.ffn_shift is not None:
            self.ffn_shift.initialize()
        place = f"{name}.ffn"
        if isinstance(self.ffn, MoEFeedForward):
            rank = expert_parallel_rank
            self.ffn.initialize(seed=seed, name=place, std=std, expert_parallel_rank=rank)
            return
        assert isinstance(self.ffn, FeedForward), "a block has one or the other"
        self.ffn.initialize(seed=seed, name=place, std=std)


def make_block(config: ModelConfig, layer: int, *, expert_parallel_size: int = 1) -> Block:
    """The block at `layer` of the schedule, without initial values."""
    kinds = config.layer_kinds()
    return Block(
        config,
        kind=kinds[layer],
        layer=layer,
        creates_v_first=kinds[layer] == "rwkv" and "rwkv" not in kinds[:layer],
        expert_parallel_size=expert_parallel_size,
    )


class TokenEmbedding(nn.Embedding):
    """Embedding of the vocabulary, [V, D], which is the head too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V]."""
        return F.linear(hidden, self.weight)

    @torch.no_grad()
    def initialize(self, *, seed: int, std: float) -> None:
        """Normal with deviation `std`."""
        normal_(self.weight, std, seed=seed, name="embedding")


class Backbone(nn.Module):
    """RWKX-V language model: embedding, blocks by the layer schedule, tied head.

    Args:
        config: dimensions.
        activation_checkpointing: recompute each block in the backward pass.
        block: makes the block of a layer; by default a whole one, without initial values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        activation_checkpointing: bool = False,
        block: Callable[[ModelConfig, int], Block] = make_block,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
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
        """Hidden states of every position.

        Args:
            input_ids: [B, T], int64.
            segment_ids: document of each token, [B, T], non-decreasing; nothing crosses documents.
            state: where an earlier call stopped; None at the start of a sequence.
            return_state: also give the state after token T.
        Returns:
            See `Output`.
        """
        x = self.embedding_norm(self.embedding(input_ids))  # [B, T, D]
        v_first, statistics, states = None, [], []
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            past = state[i] if state else None
            if recompute:
                x, v_first, layer_statistics, after = checkpoint(
                    block, x, v_first, past, segment_ids, use_reentrant=False
                )
            else:
                x, v_first, layer_statistics, after = block(x, v_first, past, segment_ids)
            if layer_statistics is not None:
                statistics.append(layer_statistics)
            if return_state:
                states.append(after)
        return Output(
            hidden=self.final_norm(x),
            router_statistics=torch.stack(statistics) if statistics else None,
            state=states if return_state else None,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., D] -> [..., V]."""
        return self.embedding.logits(hidden)

    def initialize(self, *, seed: int) -> None:
        """Set the initial values of a whole backbone from the seed."""
        std = self.config.init_std
        self.embedding.initialize(seed=seed, std=std)
        for block in self.blocks:
            assert isinstance(block, Block), "the list holds blocks only"
            block.initialize(seed=seed, std=std)


def logical_name(name: str) -> str:
    """Name of a parameter in checkpoints and exports, free of DeepSpeed's module names."""
    return name.replace(".deepspeed_moe.gate.", ".router.").replace(".deepspeed_moe.", ".")
