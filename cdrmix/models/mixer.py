"""Interface of a mixer, the part of a block that mixes tokens: the torch half of a block type.

Its planning half is a `planning.blocks.block_type.BlockType`, which names the mixer's class.
"""

# B batch, T time, D hidden

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from cdrmix.config.model import ModelConfig


class Gathered(NamedTuple):
    """Tokens of a row that a block runs on where they are some of it, in order."""

    positions: Tensor  # in the whole row, [B, T]
    # indices of tokens in all rows end to end, [n], rising, without the filling of shorter rows at
    # their ends; None: all are tokens. A mask in its place would have the host wait for its count
    tokens: Tensor | None


def taken(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Takes tokens, as `Gathered.tokens` has them, out of rows: [B, T, F] -> [n, F]."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if tokens is None else flat[tokens]


def placed(rows: Tensor, like: Tensor, tokens: Tensor | None) -> Tensor:
    """Puts tokens back into rows as those of `like`, [n, F] -> [B, T, F]; zero beside them."""
    shape = (*like.shape[:2], rows.shape[-1])
    if tokens is None:
        return rows.view(shape)
    flat = rows.new_zeros(like.shape[:2].numel(), rows.shape[-1])
    return flat.index_put((tokens,), rows).view(shape)


class Mixer(nn.Module):
    """Mixer of one layer.

    Its own `forward` takes normalised input [B, T, D], a state or None, and segment ids [B, T] or
    None; it returns the output [B, T, D] and the state after token T. One that hands on v_first,
    or has a router, overrides `mix`, which calls the module itself, `self(...)`: tensor ranks and
    ZeRO-3 exchange and gather in hooks of that call.

    Where a sequence is spread over ranks, what meets other tokens is replaced: `across_tokens`
    names such attributes, each with the operation that it holds (parallel/sequence.py knows them).
    """

    # False once the mixer looks at all tokens at once, as over sequence ranks
    carries_state: bool = False
    # dataclass of tensors; None if no state of a fixed size is carried
    state_type: ClassVar[type | None] = None
    across_tokens: ClassVar[Mapping[str, str]] = {}
    # parts whose parameters the mixer reads without calling them, so that ZeRO-3 gathers them
    read_inside: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> Self:
        """Makes the mixer of a layer, from 0 at the input, without initial values."""

    def mix(
        self,
        x: Tensor,
        v_first: Tensor | None,
        state: Any,
        segment_ids: Tensor | None,
        gathered: Gathered | None = None,
    ) -> tuple[Tensor, Tensor | None, Any, Tensor | None]:
        """Mixes normalised input.

        `gathered` is None where x is of whole rows: a type that looks at positions, or counts its
        tokens, reads there what they are. Returns the output, v_first, the state after token T, and
        statistics of the mixer's router as `MoEFeedForward.forward` gives them, [2E + 3], or None.
        """
        out, after = self(x, state, segment_ids)
        return out, v_first, after, None

    @abstractmethod
    def initialize(self, *, seed: int, name: str, std: float) -> None:
        """Sets the initial values, random ones by the module's path `name`; `std` is the run's
        standard deviation, which a type may leave for values of its own."""
