"""A model of RWKV blocks as one with LayerNorms, which computes the same at twice the width.

The RWKV-7 of other programs normalises with LayerNorm, which takes the mean off; ours has RMSNorm.
On a residual stream that holds x and -x the mean is 0 and the mean square is that of x, so that

    LayerNorm([x, -x]) = [x, -x] / sqrt(mean(x^2) + eps)

is RMSNorm(x) in its first half. A weight of [g, 0] lets that half alone into mixer, feed-forward
and head; their outputs are added as [y, -y]. The heads of the second half are zero throughout.

A reader's group norm may have another eps than ours: group_norm(c y; c^2 eps) = group_norm(y; eps),
so the receptance is multiplied by c, and the bonus weight r_k divided by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from cdrmix.export.configuration_cdrmix import CDRMixConfig
from cdrmix.export.weights import Part, Target

_HALF = (1, 0)  # there, and zero in the second half
_BOTH = (1, -1)
_LOW_RANK = {"decay": "w", "iclr": "a", "value": "v", "gate": "g"}
_PROJECTIONS = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj"}


def widened_targets(
    config: CDRMixConfig, dtype: torch.dtype, *, group_norm_eps: float
) -> dict[str, Target]:
    """Lays out the model of twice the width, in the names of flash-linear-attention.

    Args:
        dtype: type that the run computed in; what is multiplied by c is written in float32.
        group_norm_eps: eps of the reader's group norm.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    targets: dict[str, Target] = {}

    def add(name: str, shape: tuple[int, ...], part: Part) -> None:
        scaled = part.scale != 1.0
        targets[name] = Target(shape, (part,), dtype, torch.float32 if scaled else dtype)

    def add_norm(name: str, source: str, signs: tuple[int, ...]) -> None:
        add(f"{name}.weight", (2 * hidden,), Part(source, columns=signs))
        add(f"{name}.bias", (2 * hidden,), Part(source, columns=(0, 0)))

    matrix = (vocabulary, 2 * hidden)
    add("model.embeddings.weight", matrix, Part("embedding.weight", columns=_BOTH))
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        if layer == 0:
            add_norm(f"{theirs}.pre_norm", "embedding_norm.weight", (1, 1))
        add_norm(f"{theirs}.attn_norm", f"{ours}.mixer_norm.weight", _HALF)
        for name, shape, part in _time_mix(config, layer, group_norm_eps):
            add(f"{theirs}.attn.{name}", shape, part)
        add_norm(f"{theirs}.ffn_norm", f"{ours}.ffn_norm.weight", _HALF)
        add(f"{theirs}.ffn.x_k", (2 * hidden,), Part(f"{ours}.ffn_shift.mu", columns=_HALF))
        inner = config.intermediate_size
        up = Part(f"{ours}.ffn.up.weight", columns=_HALF)
        add(f"{theirs}.ffn.key.weight", (inner, 2 * hidden), up)
        down = Part(f"{ours}.ffn.down.weight", rows=_BOTH)
        add(f"{theirs}.ffn.value.weight", (2 * hidden, inner), down)
    add_norm("model.norm", "final_norm.weight", _HALF)
    add("lm_head.weight", matrix, Part("embedding.weight", columns=_HALF))
    return targets


def _time_mix(
    config: CDRMixConfig, layer: int, group_norm_eps: float
) -> Iterator[tuple[str, tuple[int, ...], Part]]:
    """Names, shapes and parts of one time mix."""
    mixer = f"blocks.{layer}.mixer"
    wide = 2 * config.hidden_size
    c = math.sqrt(group_norm_eps / (config.head_dim * config.group_norm_eps))
    for mix in "rwkvag":
        yield f"x_{mix}", (1, 1, wide), Part(f"{mixer}.mu_{mix}", columns=_HALF)
    yield "k_k", (wide,), Part(f"{mixer}.k_k", columns=_HALF)
    yield "k_a", (wide,), Part(f"{mixer}.k_a", columns=_HALF)
    heads = (wide // config.head_dim, config.head_dim)
    yield "r_k", heads, Part(f"{mixer}.r_k", columns=_HALF, scale=1 / c)
    for ours, theirs in _PROJECTIONS.items():
        scale = c if ours == "receptance" else 1.0
        part = Part(f"{mixer}.{ours}.weight", rows=_HALF, columns=_HALF, scale=scale)
        yield f"{theirs}.weight", (wide, wide), part
    part = Part(f"{mixer}.output.weight", rows=_BOTH, columns=_HALF)
    yield "o_proj.weight", (wide, wide), part
    for path, letter in _LOW_RANK.items():
        if path == "value" and layer == 0:
            continue
        rank = getattr(config, f"{path}_rank")
        lora = f"{letter}_lora.lora"
        down = Part(f"{mixer}.{path}_down", columns=_HALF, transposed=True)
        yield f"{lora}.0.weight", (rank, wide), down
        up = Part(f"{mixer}.{path}_up", rows=_HALF, transposed=True)
        yield f"{lora}.2.weight", (wide, rank), up
        if path != "gate":
            yield f"{lora}.2.bias", (wide,), Part(f"{mixer}.{path}_bias", columns=_HALF)
    for kind in ("weight", "bias"):
        yield f"g_norm.{kind}", (wide,), Part(f"{mixer}.group_norm.{kind}", columns=_HALF)
