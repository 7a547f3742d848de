"""Feed-forward of a block, dense or of experts, as planning sees it.

A block type does not choose its feed-forward: `model.moe.layers` tells which are of experts, and
`model.ffn_activation` the matrices, two with squared ReLU, three with SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import PerToken, Setting
from cdrmix.planning.parameter import Parameter


def linears(model: ModelConfig) -> tuple[str, ...]:
    """Names of the matrices of a feed-forward, in the order of the module; the last leads out."""
    return ("gate", "up", "down") if model.ffn_activation == "swiglu" else ("up", "down")


def feed_forward_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Parameters of a block's feed-forward in the order of the module, named from the block on."""
    width = model.hidden_size
    *entering, leaving = linears(model)
    if not model.has_experts(layer):
        inner = model.ffn_hidden_size
        for name in entering:
            yield Parameter(f"ffn.{name}.weight", (inner, width), "feed_forward", cut=0)
        yield Parameter(f"ffn.{leaving}.weight", (width, inner), "feed_forward", cut=1)
        return
    assert model.moe is not None, "the section lists the layer"
    experts, inner = model.moe.num_experts, model.moe.expert_hidden_size
    # each tensor rank routes its share of the tokens
    yield Parameter("ffn.router.weight", (experts, width), "router", is_partial=True)
    for name in entering:
        yield Parameter(f"ffn.experts.{name}", (experts, inner, width), "experts", cut=0)
    yield Parameter(f"ffn.experts.{leaving}", (experts, width, inner), "experts", cut=0)


def saved_by_feed_forward(setting: Setting, layer: int) -> PerToken:
    """Bytes saved for the backward pass, without norm, shift and residual stream."""
    model = setting.model
    size = setting.element_bytes
    width = model.hidden_size
    if not model.has_experts(layer):
        inner = size * _inner_activations(model) * model.ffn_hidden_size
        return PerToken(size * width, inner)
    moe = model.moe
    assert moe is not None, "the section lists the layer"
    # router: input, float32 logits, and indices (40 bytes for each of the top-k choices)
    router = size * width + 8 * moe.num_experts + 8 + 40 * moe.top_k
    # each tensor rank routes its share of the tokens
    return PerToken(0, router + moe.top_k * routed_row_bytes(setting))


def routed_row_bytes(setting: Setting) -> int:
    """Bytes saved for one row sent to an expert: input, inner activations, output."""
    model = setting.model
    assert model.moe is not None, "a dense model has no router"
    inner = _inner_activations(model) * model.moe.expert_hidden_size
    return setting.element_bytes * (2 * model.hidden_size + inner)


def feed_forward_workspace(setting: Setting) -> int:
    """Bytes per token of temporary gradients in the backward pass of the largest feed-forward."""
    model = setting.model
    inner = []
    if model.has_dense_feed_forwards:
        inner.append(model.ffn_hidden_size)
    if model.moe is not None:
        inner.append(model.moe.top_k * model.moe.expert_hidden_size)
    return len(linears(model)) * max(inner) * setting.element_bytes


def _inner_activations(model: ModelConfig) -> int:
    """Inner tensors that are saved: inputs and output of the activation."""
    return len(linears(model))
