"""Mixture of Depths as planning sees it: router and predictor of a routed block.

A routed block does what it does on `capacity` of the tokens (models/mixture_of_depths.py). In the
mode topk those are exact; in the mode threshold they are the mean that the threshold is moved to,
and rows are filled up to the longest of a micro-batch, which is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import FLOAT32_BYTES, PerToken, Setting, layer_type
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


def num_chosen(capacity: float, length: int) -> int:
    """Number of tokens of a row of `length` that a routed block takes: ceil(capacity * T)."""
    # in exact arithmetic: 0.07 * 100 is above 7 in binary floats
    return math.ceil(Fraction(str(capacity)) * length)


def share_of_tokens(model: ModelConfig, layer: int) -> float:
    """Share of the tokens that a block takes: the capacity of a routed one, else 1."""
    return model.mod.capacity if model.mod and layer in model.routed_layers() else 1.0


def setting_inside(setting: Setting, layer: int) -> Setting:
    """Setting of the block inside a routed one, on the tokens that it takes; else as it is."""
    mod = setting.model.mod
    if mod is None or layer not in setting.model.routed_layers():
        return setting
    length = num_chosen(mod.capacity, setting.sequence_length)
    return replace(setting, sequence_length=length, is_gathered=True)


def saved_by_routing(setting: Setting, layer: int) -> tuple[int, float, PerToken]:
    """Bytes that a routed block saves beside the block inside: of a micro-batch, per token of whole
    rows, and per token that it takes."""
    model = setting.model
    assert model.mod is not None, "only a routed block has a router"
    stream = setting.element_bytes * model.hidden_size
    # float32 input of router and predictor, order of the tokens, weight
    row = FLOAT32_BYTES * model.hidden_size + 8 + FLOAT32_BYTES
    if setting.element_bytes < FLOAT32_BYTES:  # and the input that tokens are gathered from
        row += stream
    if model.mod.mode == "topk":  # both inner tensors of the predictor; logit, and membership
        row += FLOAT32_BYTES * (2 * model.mod.predictor_hidden + 2)
    # output of the block inside, and its weight in the type of the activations
    taken = stream + setting.element_bytes
    if setting.device == "cpu" and setting.element_bytes < FLOAT32_BYTES:
        taken += stream  # its input, of which torch's CPU norm saves copies in float32
    mixes = layer_type(model, layer).passes_v_first  # v_first of these tokens
    copies = 0  # in float32, of what scores and logits are products with
    if setting.element_bytes < FLOAT32_BYTES:
        last = model.mod.predictor_hidden if model.mod.mode == "topk" else 0
        copies = FLOAT32_BYTES * (model.hidden_size + last)
    return copies, row, PerToken(taken, stream if mixes else 0)
