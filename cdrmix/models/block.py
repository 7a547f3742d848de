"""A block of the backbone: mixer, then feed-forward, each behind a norm and with a residual.

Every block takes (x, v_first) and gives (x, v_first, statistics), so that a block can stand on any
pipeline stage and be recomputed alone. No process group is seen here but the expert group that
DeepSpeed hands to its MoE layers.
"""

# B batch, T time, D hidden, S router statistics

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.mixer import Mixer
from cdrmix.models.moe import MoEFeedForward
from cdrmix.models.rwkv7 import ChannelShift
from cdrmix.planning.blocks.block_type import block_type

NORM_EPS = 1e-6


class BlockState(NamedTuple):
    """State of one block between calls."""

    mixer: Any  # of the block type
    channel_last: Tensor | None  # last normalised input of a shifted feed-forward, [B, D]


def rms_norm(config: ModelConfig) -> nn.RMSNorm:
    """Makes a norm, [..., D] -> [..., D] of the same type, in float32 inside."""
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


class Block(nn.Module):
    """Pre-norm block at `layer` of the schedule, from 0 at the input, without initial values."""

    def __init__(self, config: ModelConfig, layer: int, *, expert_parallel_size: int = 1) -> None:
        super().__init__()
        kind = block_type(config.layer_kinds()[layer])
        self.config = config
        self.layer = layer
        self.mixer_norm = rms_norm(config)
        self.mixer: Mixer = kind.module_class().of_layer(config, layer)
        self.ffn_norm = rms_norm(config)
        self.ffn_shift = ChannelShift(config, layer=layer) if kind.shifts_channels else None
        self.ffn: FeedForward | MoEFeedForward
        if config.has_experts(layer):
            self.ffn = MoEFeedForward(config, expert_parallel_size=expert_parallel_size)
        else:
            self.ffn = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: BlockState | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, BlockState]:
        """Runs the block on the residual stream, [B, T, D]; arguments as of `TimeMix.forward`.

        Gives residual stream, v_first, router statistics [S] or None, state after token T.
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
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Runs the first half; gives residual stream, v_first, the mixer's state after token T."""
        normed = self.mixer_norm(x)
        past = state.mixer if state else None
        mixed, v_first, after = self.mixer.mix(normed, v_first, past, segment_ids)
        return x + mixed, v_first, after

    def feed(
        self, x: Tensor, last: Tensor | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Runs the second half: feed-forward, behind its shift if the block type has one.

        `last` is the normalised token before the first, [B, D], None at the start of a sequence.
        Gives residual stream, router statistics [S] or None, last normalised token if shifted.
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
        mixer = f"blocks.{self.layer}.mixer"
        ffn = f"blocks.{self.layer}.ffn"
        self.mixer.initialize(seed=seed, name=mixer, std=std)
        if self.ffn_shift is not None:
            self.ffn_shift.initialize()
        if isinstance(self.ffn, FeedForward):
            self.ffn.initialize(seed=seed, name=ffn, std=std)
        else:
            rank = expert_parallel_rank
            self.ffn.initialize(seed=seed, name=ffn, std=std, expert_parallel_rank=rank)
