"""A block of the backbone: mixer, then feed-forward, each behind a norm and with a residual.

Every block takes (x, v_first) and gives (x, v_first, statistics), so that a block can stand on any
pipeline stage and be recomputed alone. No process group is seen here but the expert group that
DeepSpeed hands to its MoE layers.
"""

# B batch, T time, D hidden, E experts, R routers, S statistics in a row

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.config.plugin import is_plugin
from cdrmix.errors import ConfigError
from cdrmix.models.block_cpu import RMSNorm
from cdrmix.models.feed_forward import FeedForward
from cdrmix.models.mixer import Gathered, Mixer, placed, taken
from cdrmix.models.moe import MoEFeedForward, widened
from cdrmix.models.rwkv7 import ChannelShift
from cdrmix.planning.blocks.block_type import layer_type
from cdrmix.planning.blocks.routers import num_statistics, router_places

NORM_EPS = 1e-6


class BlockState(NamedTuple):
    """State of one block between calls."""

    mixer: Any  # of the block type
    channel_last: Tensor | None  # last normalised input of a shifted feed-forward, [B, D]


def make_mixer(config: ModelConfig, layer: int) -> Mixer:
    """Makes the mixer of a layer, without initial values.

    Raises ConfigError if that of a user's block type is not as its planning half says.
    """
    name = config.layer_kinds()[layer]
    kind = layer_type(config, layer)
    if not is_plugin(name):
        mixer: Mixer = kind.module_class().of_layer(config, layer)
        return mixer
    where = f"model.mixers: {name}: {kind.module}"
    try:
        mixer = kind.module_class().of_layer(config, layer)
    except Exception as error:  # any that code of a user's may raise
        raise ConfigError(f"{where} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(mixer, Mixer):
        raise ConfigError(f"{where} makes no cdrmix.models.mixer.Mixer")
    if not mixer.carries_state == kind.carries_state == (mixer.state_type is not None):
        raise ConfigError(
            f"{where}: its carries_state, that of the block type and state_type do not agree"
        )
    built = {f"mixer.{name}": tuple(each.shape) for name, each in mixer.named_parameters()}
    listed = {each.name: each.shape for each in kind.parameters(config, layer)}
    if list(built.items()) != list(listed.items()):
        raise ConfigError(
            f"{where} has the parameters {built}, and its block type lists {listed}: names, order "
            "and shapes must agree"
        )
    return mixer


def rms_norm(config: ModelConfig) -> RMSNorm:
    """Makes a norm, [..., D] -> [..., D] of the same type, in float32 inside."""
    return RMSNorm(config.hidden_size, eps=NORM_EPS)


class Block(nn.Module):
    """Pre-norm block at `layer` of the schedule, from 0 at the input, without initial values."""

    def __init__(self, config: ModelConfig, layer: int, *, expert_parallel_size: int = 1) -> None:
        super().__init__()
        kind = layer_type(config, layer)
        self.config = config
        self.layer = layer
        self.num_statistics = num_statistics(config)  # of a row, S
        self.mixer_norm = rms_norm(config)
        self.mixer: Mixer = make_mixer(config, layer)
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
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, BlockState]:
        """Runs the block on the residual stream, [B, T, D]; arguments as of `TimeMix.forward`.

        `gathered` is None where x is of whole rows. Gives residual stream, v_first, router
        statistics as `rows` or None, state after token T.
        """
        x, v_first, mixer_state, of_mixer = self.mix(x, v_first, state, segment_ids, gathered)
        last = state.channel_last if state else None
        x, of_ffn, channel_last = self.feed(x, last, segment_ids, gathered)
        after = BlockState(mixer_state, channel_last)
        return x, v_first, self.rows(of_mixer, of_ffn), after

    def rows(self, of_mixer: Tensor | None, of_ffn: Tensor | None) -> Tensor | None:
        """Stacks statistics of the block's routers, [2E + 3] each, to rows [R, S]; None: no router.

        They are in the order of `planning.blocks.routers`.
        """
        found = [each for each in (of_mixer, of_ffn) if each is not None]
        if not found:
            return None
        return torch.stack([widened(each, self.num_statistics) for each in found])

    def no_rows(self, like: Tensor) -> Tensor | None:
        """Returns the rows of `rows` where no token has been here, on the device of `like`."""
        number = len(router_places(self.config, [self.layer]))
        if number == 0:
            return None
        return like.new_zeros(number, self.num_statistics, dtype=torch.float32)

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: BlockState | None,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, Any, Tensor | None]:
        """Runs the first half.

        Gives residual stream, v_first, the mixer's state after token T, router statistics [2E + 3]
        or None.
        """
        normed = self.mixer_norm(x)
        past = state.mixer if state else None
        mixed, v_first, after, statistics = self.mixer.mix(
            normed, v_first, past, segment_ids, gathered
        )
        return x + mixed, v_first, after, statistics

    def feed(
        self,
        x: Tensor,
        last: Tensor | None,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Runs the second half: feed-forward, behind its shift if the block type has one.

        `last` is the normalised token before the first, [B, D], None at the start of a sequence.
        Gives residual stream, router statistics [2E + 3] or None, last normalised token if shifted.
        """
        normed = self.ffn_norm(x)
        channel_last = None
        if self.ffn_shift is not None:
            channel_last = normed[:, -1]
            normed = self.ffn_shift(normed, last, segment_ids)
        if isinstance(self.ffn, MoEFeedForward):
            if gathered is None or gathered.tokens is None:
                out, statistics = self.ffn(normed)
            else:  # what fills up rows meets no expert, and is counted nowhere
                rows, statistics = self.ffn(taken(normed, gathered.tokens).unsqueeze(0))
                out = placed(rows[0], x, gathered.tokens)
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
