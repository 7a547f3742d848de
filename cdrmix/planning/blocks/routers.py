"""Routers of a model, in the rows of its statistics: those of mixers and of feed-forwards.

Statistics of a router are a row of 2 E + 3 sums over tokens: assignments of each expert, its
probability, and three of the router as a whole (`MoEFeedForward.forward`). Where the routers of a
model differ in E, the narrower ones have zeros behind the values of their experts, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from cdrmix.config.model import ModelConfig
from cdrmix.config.model_parts import MoEConfig, RoutingMambaConfig
from cdrmix.planning.blocks.block_type import layer_type

RouterPart = Literal["mixer", "ffn"]
NUM_TOTALS = 3  # sums that are of no expert


class RouterPlace(NamedTuple):
    """One router: its layer, from 0 at the input, the half of the block, its sizes."""

    layer: int
    part: RouterPart
    sizes: MoEConfig | RoutingMambaConfig


def router_places(model: ModelConfig, layers: Sequence[int] | None = None) -> list[RouterPlace]:
    """Routers of some layers of RWKX-V, of all by default, in the order of their rows."""
    places = []
    for layer in range(model.num_layers) if layers is None else layers:
        of_mixer = layer_type(model, layer).router_sizes(model)
        if of_mixer is not None:
            places.append(RouterPlace(layer, "mixer", of_mixer))
        if model.has_experts(layer):
            assert model.moe is not None, "the section lists the layer"
            places.append(RouterPlace(layer, "ffn", model.moe))
    return places


def routers_in(model: ModelConfig, part: RouterPart) -> MoEConfig | RoutingMambaConfig | None:
    """Sizes and loss weights of the routers in one half of the blocks; None: there are none."""
    if model.kind == "hf":
        return model.moe if part == "ffn" else None
    return next((each.sizes for each in router_places(model) if each.part == part), None)


def most_experts(model: ModelConfig) -> int:
    """Experts of the widest router; 0 in a model without any."""
    if model.kind == "hf":
        return model.moe.num_experts if model.moe else 0
    return max((place.sizes.num_experts for place in router_places(model)), default=0)


def num_statistics(model: ModelConfig) -> int:
    """Statistics of a router of the model, in a row that is as wide as the widest one needs."""
    return 2 * most_experts(model) + NUM_TOTALS
