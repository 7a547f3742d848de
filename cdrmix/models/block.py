"""A block of the backbone: mixer, then feed-forward, each behind a norm and with a residual.

B batch, T time, D hidden, S router statistics.

Every block takes (x, v_first) and gives (x, v_first, statistics), so that a block can stand on any
pipeline stage and be recomputed alone. No process group is seen here but the expert group that
DeepSpeed hands to its MoE layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdrmix.config.model import LayerKind, ModelConfig
from cdrmix.models.attention import Attention, AttentionState
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.moe import MoEFeedForward
from cdrmix.models.rwkv7 import ChannelShift, TimeMix, TimeMixState

NORM_EPS = 1e-6


class BlockState(NamedTuple):
    """State of one block between calls.

    Attributes:
        mixer: state of the time mix or of the attention.
        channel_last: last normalised input of an RWKV block's feed-forward, [B, D]; else None.
    """

    mixer: TimeMixState | AttentionState
    channel_last: Tensor | None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises, [..., D] -> [..., D], same type."""
        return F.rms_norm(x, x.shape[-1:], self.weight, NORM_EPS)


class Block(nn.Module):
    """Pre-norm block: mixer, then feed-forward, each with a residual.

    Args:
        config: dimensions.
        kind: rwkv or transformer.
        layer: index of the block, from 0 at the input.
        creates_v_first: True for the first RWKV layer.
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
        """Runs the block.

        Args:
            x: residual stream, [B, T, D].
            v_first: value of the first RWKV layer, [B, T, D]; None before it.
            state: this block's state, or None at the start of a sequence.
            segment_ids: document of each token, [B, T].
        Returns:
            residual stream, v_first, router statistics [S] or None, state after token T.
        """
        x, v_first, mixer_state = self.mix(x, v_first, state, segment_ids)
        last = state.channel_last if state else None
        x, statistics, channel_last = self.feed(x, last, segment_ids)
        return x, v_first, statistics, BlockState(mixer_state, channel_last)

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: BlockState | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, TimeMixState | AttentionState]:
        """Runs the first half, time mix or attention; arguments as of `forward`.

        Returns:
            residual stream, v_first, the mixer's state after token T.
        """
        normed = self.mixer_norm(x)
        past = state.mixer if state else None
        if isinstance(self.mixer, TimeMix):
            assert past is None or isinstance(past, TimeMixState), "state of another block kind"
            mixed, v_first, after = self.mixer(normed, v_first, past, segment_ids)
            return x + mixed, v_first, after
        mixed, cache = self.mixer(normed, past, segment_ids)
        return x + mixed, v_first, cache

    def feed(
        self, x: Tensor, last: Tensor | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Runs the second half: feed-forward, behind its shift in an RWKV block.

        Args:
            x: residual stream after the mixer, [B, T, D].
            last: normalised token before the first, [B, D]; None at the start of a sequence.
            segment_ids: document of each token, [B, T].
        Returns:
            residual stream, router statistics [S] or None, last normalised token of an RWKV block.
        """
        normed = self.ffn_norm(x)
        channel_last = None
        if self.ffn_shift is not None:
            channel_last = normed[:, -1]
            normed = self.ffn_shift(normed, last, segment_ids)
        if isinstance(self.ffn, MoEFeedForward):
            out, statistics = self.ffn(normed)
            return x + out, statistics, channel_last
        return x + self.ffn(normed), None, channel_last

    def initialize(self, *, seed: int, std: float, expert_parallel_rank: int = 0) -> None:
        """Sets the initial values; see the parts."""
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
    """Makes the block at `layer` of the schedule, without initial values."""
    kinds = config.layer_kinds()
    return Block(
        config,
        kind=kinds[layer],
        layer=layer,
        creates_v_first=kinds[layer] == "rwkv" and "rwkv" not in kinds[:layer],
        expert_parallel_size=expert_parallel_size,
    )
