"""Multi-token prediction: parts that predict tokens beyond the next one, under the model's head.

Two kinds. An independent head maps the last hidden state of a position, alone (`linear`) or through
a block of attention over those before it (`block`); Gloeckle et al., 2404.19737. A deepseek depth
reads the hidden state of the depth before it and the embedding of the token that this one predicts,
and runs them through a block; DeepSeek-V3, 2412.19437.

The blocks are Transformer blocks with a dense feed-forward, also in a model of experts: routers and
their losses stay those of the layers. Where documents are apart, attention keeps to the document of
a position. Then the pair of a hidden state and a token of the next document is seen by no position
whose target counts: later positions of that document are such pairs too, and their targets lie in
another document. So it is with pairs at the end of a sample, whose token is unknown.
"""

# B batch, T time, D hidden, n tokens predicted at each position, the next one included

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Recomputation
from cdrmix.models.attention import AttentionState
from cdrmix.models.block import Block, BlockState, rms_norm
from cdrmix.models.initialize import normal_
from cdrmix.models.recompute import run_blocks

# (sizes of the model, number of the layer) -> block
MakeBlock = Callable[[ModelConfig, int], Block]


class LinearHead(nn.Module):
    """Linear map of the hidden state.

    It starts at zero: nothing reaches the trunk from it before it has learned a direction.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.map = nn.Linear(model.hidden_size, model.hidden_size, bias=False)

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets zeros."""
        self.map.weight.zero_()


class BlockHead(nn.Module):
    """Transformer block over the hidden states, and a norm."""

    def __init__(self, model: ModelConfig, block: Block) -> None:
        super().__init__()
        self.block = block
        self.final_norm = rms_norm(model)

    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Leaves the norm at one; whoever makes the block initialises it."""


class Depth(nn.Module):
    """Transformer block over pairs of a hidden state and the embedding of a token after it."""

    def __init__(self, model: ModelConfig, block: Block) -> None:
        super().__init__()
        self.hidden_norm = rms_norm(model)
        self.token_norm = rms_norm(model)
        self.projection = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.block = block
        self.final_norm = rms_norm(model)

    def pair(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Projects hidden states and embedded tokens, both [B, T, D], to the block's input."""
        pairs = torch.cat([self.hidden_norm(hidden), self.token_norm(embedded)], dim=-1)
        return cast(Tensor, self.projection(pairs))

    @torch.no_grad()
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets a normal projection."""
        normal_(self.projection.weight, std, seed=seed, name=f"{name}.projection")


class FurtherTokens(nn.ModuleDict):
    """Heads or depths of a model by the place of the token that they predict: `2` to `n`.

    Args:
        model: sizes, with the section mtp.
        block: makes a block from sizes and the number of its layer.
        activation_checkpointing, sequence_checkpoint_tokens: of the blocks; see `run_blocks`.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: MakeBlock,
        *,
        activation_checkpointing: Recomputation = "none",
        sequence_checkpoint_tokens: int | None = None,
    ) -> None:
        assert model.mtp is not None, "a model with multi-token prediction"
        sizes = model.further_blocks()
        parts: dict[str, nn.Module] = {}
        for place in range(2, model.mtp.num_tokens + 1):
            layer = model.num_layers + place - 2
            if model.mtp.kind == "deepseek":
                parts[str(place)] = Depth(model, block(sizes, layer))
            elif model.mtp.head == "block":
                parts[str(place)] = BlockHead(model, block(sizes, layer))
            else:
                parts[str(place)] = LinearHead(model)
        super().__init__(parts)
        self.activation_checkpointing = activation_checkpointing
        self.sequence_checkpoint_tokens = sequence_checkpoint_tokens

    def forward(
        self,
        hidden: Tensor,
        following: Tensor,
        embed: Callable[[Tensor], Tensor],
        segment_ids: Tensor | None,
    ) -> list[Tensor]:
        """Computes what the head is to score for each further token, n - 1 times [B, T, D].

        Args:
            hidden: normalised output of the last layer, [B, T, D].
            following: tokens at 1 to n - 1 after each position, [B, T, n - 1], int64, whatever
                document they are of; below 0 where they are beyond the sample.
            embed: looks up tokens, [B, T] -> [B, T, D].
            segment_ids: document of each token, as `run_blocks` takes them.
        """
        outs = []
        for place, part in self._placed():
            if isinstance(part, LinearHead):
                outs.append(part.map(hidden))
                continue
            x = hidden
            if isinstance(part, Depth):
                x = part.pair(hidden, embed(following[..., place - 2].clamp(min=0)))
            x, *_ = run_blocks(
                [part.block],
                x,
                None,
                segment_ids=segment_ids,
                recompute=self.activation_checkpointing,
                sequence_checkpoint_tokens=self.sequence_checkpoint_tokens,
            )
            if isinstance(part, Depth):
                hidden = x
            outs.append(part.final_norm(x))
        return outs

    def _placed(self) -> list[tuple[int, LinearHead | BlockHead | Depth]]:
        """The parts with their places, from 2 on."""
        return [(int(place), cast(Any, part)) for place, part in self.items()]

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the parts that have one."""
        return [part.block for _, part in self._placed() if not isinstance(part, LinearHead)]

    def initialize(self, *, seed: int, std: float) -> None:
        """Sets the initial values of what is outside the blocks."""
        for place, part in self._placed():
            part.initialize(seed=seed, name=f"mtp.{place}", std=std)

    def start_drafting(self) -> list[DraftState]:
        """Returns the states of all parts before the first token; see `draft`."""
        return [DraftState(None, None) for _ in self]

    def draft(
        self,
        hidden: Tensor,
        tokens: Tensor,
        states: list[DraftState],
        choose: Callable[[Tensor], Tensor],
        embed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, list[DraftState]]:
        """Guesses the n - 1 tokens after those known, without gradients.

        Args:
            hidden: normalised output of the last layer at m new positions, [B, m, D].
            tokens: the token after each of these positions, known to be right, [B, m].
            states: after the positions before.
            choose: takes what the head is to score, [B, D], to tokens, [B].
            embed: looks up tokens, [B, m] -> [B, m, D].
        Returns:
            Guessed tokens, [B, n - 1], and states after the new positions.
        """
        guesses: list[Tensor] = []
        after = []
        for (place, part), state in zip(self._placed(), states, strict=True):
            x = hidden
            if isinstance(part, LinearHead):
                after.append(state)
                scored = part.map(x[:, -1])
            elif isinstance(part, BlockHead):
                x, cache = _decode(part.block, x, state.cache)
                after.append(DraftState(cache, None))
                scored = part.final_norm(x[:, -1])
            else:
                if state.left is not None:
                    x = torch.cat([state.left, x], dim=1)
                # Of the last positions the token after the one guessed last.
                embedded = embed(tokens[:, -x.shape[1] :])
                hidden, cache = _decode(part.block, part.pair(x, embedded), state.cache)
                after.append(_kept(x, cache, place))
                scored = part.final_norm(hidden[:, -1])
            guesses.append(choose(scored))
            tokens = torch.cat([tokens, guesses[-1].unsqueeze(1)], dim=1)
        return torch.stack(guesses, dim=1), after


class DraftState(NamedTuple):
    """State of one head or depth between calls of `FurtherTokens.draft`."""

    cache: AttentionState | None  # of its block
    # Of a depth: outputs of the depth before that are right, and whose pair is a guess, [B, m, D].
    left: Tensor | None


def _decode(block: Block, x: Tensor, cache: AttentionState | None) -> tuple[Tensor, AttentionState]:
    """Runs a block of attention on the positions after those in its cache."""
    past = None if cache is None else BlockState(cache, None)
    x, _, _, after = block(x, None, past)
    assert isinstance(after.mixer, AttentionState), "a Transformer block"
    return x, after.mixer


def _kept(x: Tensor, cache: AttentionState, place: int) -> DraftState:
    """State of the depth at a place without what was computed from guesses.

    Its input x ends where its cache does, at position E. The pair of position t has the token of
    t + place - 1, of which those up to E + 1 are known.
    """
    end = cache.keys.shape[2]
    sure = max(0, end - (place - 2))
    # The depth before has read a token less: one position more of its outputs is right.
    right = min(end, max(0, end - (place - 3)))
    first = end - x.shape[1]
    left = x[:, sure - first : right - first]
    return DraftState(AttentionState(cache.keys[:, :, :sure], cache.values[:, :, :sure]), left)
