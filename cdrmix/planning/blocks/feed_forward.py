"""Feed-forward of a block, dense or of experts, as planning sees it.

A block type does not choose its feed-forward: `model.moe.layers` tells which are of experts, and
`model.ffn_activation` the matrices, two with squared ReLU, three with SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import FLOAT32_BYTES, Moved, PerToken, Setting
from cdrmix.planning.layout import Degrees
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
    # router: input, which a compiler keeps in float32, as it is multiplied; float32 logits, and
    # indices (40 bytes for each of the top-k choices)
    of_input = FLOAT32_BYTES if setting.is_compiled else size
    router = of_input * width + 8 * moe.num_experts + 8 + 40 * moe.top_k
    # each tensor rank routes its share of the tokens
    return PerToken(0, router + moe.top_k * routed_row_bytes(setting))


def kept_by_feed_forward(setting: Setting, layer: int, degrees: Degrees) -> PerToken:
    """Bytes of these that selective recomputation keeps: what the matrices into the inner features
    give, rows that experts give, and rows that were exchanged."""
    model = setting.model
    size = setting.element_bytes
    width = model.hidden_size
    entering = len(linears(model)) - 1
    if not model.has_experts(layer):
        return PerToken(0, size * entering * model.ffn_hidden_size)
    moe = model.moe
    assert moe is not None, "the section lists the layer"
    router = 8 * moe.num_experts + 8 + 40 * moe.top_k
    if degrees.tensor > 1:  # a rank's share of the tokens is a copy
        router += size * width
    row = size * (width + entering * moe.expert_hidden_size)
    if degrees.expert > 1:  # what an expert reads came from other ranks
        row += size * width
    return PerToken(0, router + moe.top_k * row)


def rebuilt_by_feed_forward(
    setting: Setting, layer: int, degrees: Degrees, entering: PerToken
) -> PerToken:
    """Most bytes that it has made again at any moment of the backward pass: what leads out of the
    inner features, or what it reads, `entering`, with rows of that."""
    model = setting.model
    size = setting.element_bytes
    # squared ReLU in PyTorch saves relu(x), beside its output
    is_one = model.ffn_activation == "swiglu" or setting.runs_own
    inner = size * (1 if is_one else 2)
    if model.has_experts(layer):
        assert model.moe is not None, "the section lists the layer"
        leaving = PerToken(0, model.moe.top_k * inner * model.moe.expert_hidden_size)
        if degrees.expert == 1:
            entering += PerToken(0, model.moe.top_k * size * model.hidden_size)
    else:
        leaving = PerToken(0, inner * model.ffn_hidden_size)
    return max(leaving, entering, key=lambda each: each.on(degrees))


def routed_row_bytes(setting: Setting) -> int:
    """Bytes saved for one row sent to an expert: input, inner activations, output."""
    model = setting.model
    assert model.moe is not None, "a dense model has no router"
    inner = _inner_activations(model) * model.moe.expert_hidden_size
    return setting.element_bytes * (2 * model.hidden_size + inner)


def moved_by_feed_forward(setting: Setting, layer: int) -> Moved:
    """Memory traffic of a feed-forward, without norm, shift and residual sum.

    tests/parity/test_moved_bytes.py holds the figures to a count of operators, of Triton kernels
    and of what inductor has scheduled.
    """
    model = setting.model
    is_gated = model.ffn_activation == "swiglu"
    if setting.is_compiled or (setting.runs_triton and not is_gated):
        # the activation reads its inputs and writes its output; backward it also reads and writes
        # their gradients
        forward, backward = activation_moved_fused(is_gated=is_gated)
        kernels = (1, 1)
    else:
        forward, backward = 5, 20 if is_gated else 5
        kernels = (3, 10) if is_gated else (2, 3)
    products = len(linears(model))
    kernels = (kernels[0] + products, kernels[1] + 2 * products)
    size = setting.element_bytes
    if not model.has_experts(layer):
        inner = size * model.ffn_hidden_size
        # two products give their input a gradient, which are summed
        sum_streams = 2 if setting.is_compiled else 3
        summed = sum_streams * size * model.hidden_size if is_gated else 0
        return Moved(PerToken(0, forward * inner), PerToken(summed, backward * inner), *kernels)
    routing = _moved_by_routing(setting)
    moe = model.moe
    assert moe is not None, "the section lists the layer"
    inner = size * moe.top_k * moe.expert_hidden_size
    own = Moved(PerToken(0, forward * inner), PerToken(0, backward * inner), *kernels)
    return own + routing


def activation_moved_fused(*, is_gated: bool) -> tuple[int, int]:
    """Inner widths that an activation moves forward and backward as one kernel in each pass."""
    return (3, 5) if is_gated else (2, 3)


def routing_moved_compiled(width: int, top_k: int) -> tuple[float, float]:
    """Elements per token that routing moves forward and backward as torch 2.13's inductor schedules
    it, indices left out; counted with 1 to 8 choices (tools/benchmark/block_bytes.py).

    The router and the sums of rows join the kernels around; beyond two choices a part of a token's
    sum is written and read again. Backward, kernels are fused differently by the number of choices:
    the figure is within 2 % of a block's for each that was counted.
    """
    forward = 2 * top_k + (2 if top_k <= 2 else 4)
    return forward * width, (5.5 + 3 * top_k) * width


def _moved_by_routing(setting: Setting) -> Moved:
    """Memory traffic of router, gathering and weighted sum."""
    model, size = setting.model, setting.element_bytes
    moe = model.moe
    assert moe is not None, "such a model has experts"
    width, top_k, experts = model.hidden_size, moe.top_k, moe.num_experts
    if setting.is_compiled:
        forward, backward = routing_moved_compiled(width, top_k)
        indices = 9 * top_k * experts + 10 * experts + 170 * top_k
        summed = 2 * width if model.ffn_activation == "swiglu" else 0  # gradients of two products
        return Moved(
            PerToken(0, size * forward + indices), PerToken(0, size * (backward + summed)), 20, 8
        )
    # backward the router copies its input to float32, and its gradient from there
    copied = (size + FLOAT32_BYTES) * width if size < FLOAT32_BYTES else 0
    kept = 65 * top_k if moe.drop_tokens else 0  # bytes of indices and masks
    more = 3 if model.ffn_activation == "swiglu" else 0  # rows have a gradient of each product
    if setting.runs_triton:
        # forward rows are gathered (read, written), read again and summed; backward they are read
        # and written with the token's gradient, and read once more for the sum of a token's rows
        forward_bytes = size * (3 * top_k + 1) * width + (36 + 9 * top_k) * experts
        backward_bytes = size * ((3 + more) * top_k + 5) * width + 2 * copied + 84 * experts
        forward_bytes, backward_bytes = forward_bytes + 290 * top_k, backward_bytes + 155 * top_k
        return Moved(PerToken(0, forward_bytes), PerToken(0, backward_bytes), 42, 37)
    # rows of dropped choices are set to zero, once forward and once backward
    dropping = 2 if moe.drop_tokens else 0
    rows = size * (7 + dropping) * top_k * width
    forward_bytes = rows - size * width + 29 * experts + 7 * top_k * experts
    forward_bytes += 170 * top_k + kept
    rows = size * (13 + more + dropping) * top_k * width
    backward_bytes = rows + 2 * copied + 84 * experts + 155 * top_k + kept
    loops = 5 if moe.drop_tokens else 2  # kernels of each further choice
    return Moved(
        PerToken(0, forward_bytes),
        PerToken(0, backward_bytes),
        40 + loops * top_k,
        30 + loops * top_k,
    )


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
