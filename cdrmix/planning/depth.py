"""Mixture of Depths as planning sees it: router and predictor of a routed block.

A routed block does what it does on `capacity` of the tokens (models/mixture_of_depths.py). In the
mode topk those are exact; in the mode threshold they are the mean that the threshold is moved to,
and rows are filled up to the longest of a micro-batch, which is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.planning.parameter import Parameter

# Sums over the tokens of a micro-batch that `DepthRouter.forward` gives, in this order.
DEPTH_STATISTICS = (
    "tokens",
    "chosen",
    "score",  # above the threshold, which is 0 in the mode topk
    "score_square",
    "predictor_nats",  # cross-entropy of membership; with a gradient
    "predicted",  # tokens whose membership the predictor tells
    "chosen_position",  # of chosen tokens, from -1 to 1, so that those of a row add up to 0
    "position_square",
    "threshold",
)


def depth_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Parameters of a block's router in the order of the module, named from the block on; none
    unless it is routed."""
    if model.mod is None or layer not in model.routed_layers():
        return
    width = model.hidden_size
    inner = model.mod.predictor_hidden
    shapes: dict[str, tuple[int, ...]] = {"weight": (width,)}
    if model.mod.mode == "topk":
        shapes |= {
            "predictor_in": (inner, width),
            "predictor_in_bias": (inner,),
            "predictor_out": (inner,),
            "predictor_out_bias": (1,),
        }
    for name, shape in shapes.items():
        yield Parameter(f"depth_router.{name}", shape, "depth_router")


def depth_flops(model: ModelConfig) -> int:
    """Forward FLOPs of the router of one block for a token, chosen or not."""
    assert model.mod is not None, "only a routed block has a router"
    width = model.hidden_size
    scores = 2 * width
    if model.mod.mode == "threshold":
        return scores
    return scores + 2 * model.mod.predictor_hidden * (width + 1)
