"""Counts parameters and training FLOPs of a model from its configuration.

`parameters` lists every tensor of the backbone (logical, unsharded shapes); all counts are sums
over that list, so a change of the model is made in one place.

Letters: V vocabulary, D hidden, F inner width, E experts, L layers, T sequence length (tokens).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import StageBConfig

Part = Literal[
    "embedding", "time_mix", "low_rank", "attention", "feed_forward", "router", "experts", "norms"
]


@dataclass(frozen=True)
class Parameter:
    """One tensor of the backbone.

    Attributes:
        name: name in checkpoints; the experts of a layer are stacked in one tensor.
        shape: logical, unsharded.
        part: part of the model.
        layer: index of the block from the input; None outside the blocks.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Counts:
    """Sizes of a backbone.

    Attributes:
        total_params: all parameters, the tied embedding and head counted once.
        active_params: parameters used by one token: of the experts top_k per layer, and the whole
            embedding, which the head multiplies with.
        train_flops_per_token: forward and backward of one token without recomputation.
    """

    total_params: int
    active_params: int
    train_flops_per_token: int


def count(model: ModelConfig, sequence_length: int) -> Counts:
    """Counts parameters, and training FLOPs per token at a sequence length (tokens).

    Of a reasoning variant this is the backbone of Stage A; `stage_b_params` counts the rest.
    """
    parts = params_by_part(model)
    idle_experts = 0
    if model.moe is not None:
        num_experts = model.moe.num_experts
        top_k = model.moe.top_k
        idle_experts = parts["experts"] * (num_experts - top_k) // num_experts
    total = sum(parts.values())
    return Counts(
        total_params=total,
        active_params=total - idle_experts,
        # the backward pass has twice the FLOPs of the forward pass
        train_flops_per_token=3 * sum(forward_flops_by_layer(model, sequence_length))
        + 3 * head_flops(model),
    )


def params_by_part(model: ModelConfig) -> Counter[Part]:
    """Parameters of each part of the backbone (count)."""
    parts: Counter[Part] = Counter()
    for parameter in parameters(model):
        parts[parameter.part] += parameter.num_elements
    return parts


def params_by_layer(model: ModelConfig) -> list[Counter[Part]]:
    """Parameters of each part, block by block from the input (count)."""
    layers: list[Counter[Part]] = [Counter() for _ in range(model.num_layers)]
    for parameter in parameters(model):
        if parameter.layer is not None:
            layers[parameter.layer][parameter.part] += parameter.num_elements
    return layers


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Logical shape of every parameter of the backbone by name."""
    return {parameter.name: parameter.shape for parameter in parameters(model)}


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the backbone in the order of the built module; the head is tied."""
    width = model.hidden_size
    yield Parameter("embedding.weight", (model.vocab_size, width), "embedding")
    yield Parameter("embedding_norm.weight", (width,), "norms")
    kinds = model.layer_kinds()
    kv_width = model.num_kv_heads * model.head_dim
    # The first RWKV layer creates v_first, so it has no low-rank path that mixes v_first in.
    first_rwkv = kinds.index("rwkv") if "rwkv" in kinds else None
    inner = model.ffn_hidden_size
    feed_forward: list[_Row] = [
        ("up.weight", (inner, width), "feed_forward"),
        ("down.weight", (width, inner), "feed_forward"),
    ]
    if model.moe is not None:
        experts = model.moe.num_experts
        inner = model.moe.expert_hidden_size
        feed_forward = [
            ("router.weight", (experts, width), "router"),
            ("experts.up", (experts, inner, width), "experts"),
            ("experts.down", (experts, width, inner), "experts"),
        ]
    for layer, kind in enumerate(kinds):
        if kind == "transformer":
            sizes = {"query": width, "key": kv_width, "value": kv_width, "output": width}
            mixer: list[_Row] = [(f"{k}.weight", (n, width), "attention") for k, n in sizes.items()]
        else:
            mixer = _time_mix(model, creates_v_first=layer == first_rwkv)
        shift: list[_Row] = [("ffn_shift.mu", (width,), "feed_forward")] if kind == "rwkv" else []
        rows: list[_Row] = [
            ("mixer_norm.weight", (width,), "norms"),
            *((f"mixer.{name}", shape, part) for name, shape, part in mixer),
            ("ffn_norm.weight", (width,), "norms"),
            *shift,
            *((f"ffn.{name}", shape, part) for name, shape, part in feed_forward),
        ]
        for name, shape, part in rows:
            yield Parameter(f"blocks.{layer}.{name}", shape, part, layer)
    yield Parameter("final_norm.weight", (width,), "norms")


_Row = tuple[str, tuple[int, ...], Part]


def _time_mix(model: ModelConfig, *, creates_v_first: bool) -> list[_Row]:
    width = model.hidden_size
    ranks = model.low_rank_sizes()
    mixes = ("mu_r", "mu_w", "mu_k", "mu_v", "mu_a", "mu_g")
    rows: list[_Row] = [(name, (width,), "time_mix") for name in mixes]
    low_rank = {"decay": ranks.decay, "iclr": ranks.iclr, "value": ranks.value, "gate": ranks.gate}
    if creates_v_first:
        del low_rank["value"]
    for name, rank in low_rank.items():
        if name != "gate":
            rows.append((f"{name}_bias", (width,), "low_rank"))
        rows.append((f"{name}_down", (width, rank), "low_rank"))
        rows.append((f"{name}_up", (rank, width), "low_rank"))
    rows += [(name, (width,), "time_mix") for name in ("k_k", "k_a", "r_k")]
    for name in ("receptance", "key", "value", "output"):
        rows.append((f"{name}.weight", (width, width), "time_mix"))
    rows += [(f"group_norm.{name}", (width,), "norms") for name in ("weight", "bias")]
    return rows


def forward_flops_by_layer(model: ModelConfig, sequence_length: int) -> list[int]:
    """Forward FLOPs per token of each block; the backward pass takes twice as many.

    They are 2 per multiply-accumulate of the matrices, 8 D N for the recurrence of an RWKV block
    with heads of N (independent of the kernel), 2 T D for the causal half of attention.
    """
    matrices: list[Counter[Part]] = [Counter() for _ in range(model.num_layers)]
    for parameter in parameters(model):
        if parameter.layer is not None and len(parameter.shape) > 1:
            matrices[parameter.layer][parameter.part] += parameter.num_elements
    per_layer = []
    for kind, parts in zip(model.layer_kinds(), matrices, strict=True):
        if model.moe is not None:
            parts["experts"] = parts["experts"] * model.moe.top_k // model.moe.num_experts
        width = model.hidden_size
        mixing = (
            2 * sequence_length * width if kind == "transformer" else 8 * width * model.head_dim
        )
        per_layer.append(2 * sum(parts.values()) + mixing)
    return per_layer


def head_flops(model: ModelConfig) -> int:
    """Forward FLOPs per token of the head, which multiplies with the tied embedding."""
    return 2 * model.hidden_size * model.vocab_size


@dataclass(frozen=True)
class StageBCounts:
    """Parameters that reasoning enablement adds to a backbone.

    Attributes:
        adapters: low-rank factors of the plastic adapters (parameters).
        gates: gain, modulator and trace of every adapter (parameters).
        heads: policy head over four memory actions, and value head (parameters).
        summariser: projections into and out of the summary slots, and their gate (parameters).
        retrieval: projections to keys and queries of episodic memory (parameters).
        plastic_state: fast weights of one sequence (float32 values, not parameters).
    """

    adapters: int
    gates: int
    heads: int
    summariser: int
    retrieval: int
    plastic_state: int

    @property
    def total_params(self) -> int:
        """Parameters of Stage B, the backbone left out."""
        return self.adapters + self.gates + self.heads + self.summariser + self.retrieval


# As cdrmix/reasoning builds them; tests/unit/planning/test_model_size.py compares the two.
_SUMMARY_SLOTS = 8
_POLICY_ACTIONS = 4
_POLICY_FEATURES = 9
_VALUE_WIDTH = 64
_SCALARS_PER_ADAPTER = 3


def stage_b_params(
    model: ModelConfig, stage_b: StageBConfig, layers: range | None = None
) -> StageBCounts:
    """Counts the parameters of Stage B as built.

    Adapters are on receptance, key and value of RWKV blocks, on query, key, value and output of
    Transformer blocks, and on dense feed-forwards; experts have none.

    Args:
        model: of the backbone.
        stage_b: dimensions of the parts.
        layers: blocks whose adapters count; None: all.
    """
    width = model.hidden_size
    rank = stage_b.adapters.rank
    inner = model.ffn_hidden_size
    kv_width = model.num_kv_heads * model.head_dim
    # (input, output) features
    matrices = {
        "rwkv": [(width, width)] * 3,
        "transformer": [(width, width), (width, kv_width), (width, kv_width), (width, width)],
    }
    dense = [(width, inner), (inner, width)] if model.moe is None else []
    layers = layers or range(model.num_layers)
    adapted = [
        matrix
        for kind in model.layer_kinds()[layers.start : layers.stop]
        for matrix in matrices[kind] + dense
    ]
    summary = stage_b.memory.summary_dim
    slot = summary // _SUMMARY_SLOTS
    return StageBCounts(
        adapters=sum(rank * (entering + leaving) for entering, leaving in adapted),
        gates=sum(entering + _SCALARS_PER_ADAPTER for entering, _ in adapted),
        heads=width * (_POLICY_ACTIONS + 1)
        + (_POLICY_FEATURES + 1) * (_POLICY_ACTIONS + _VALUE_WIDTH)
        + _VALUE_WIDTH
        + 1,
        summariser=4 * width * slot + (2 * slot + 1) * slot + _SUMMARY_SLOTS * slot,
        retrieval=2 * width * summary,
        plastic_state=len(adapted) * rank**2,
    )
