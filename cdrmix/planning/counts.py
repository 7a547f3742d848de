"""Parameters and training FLOPs of a model, from its configuration alone.

`parameters` lists every tensor of the backbone as it is built (logical, unsharded shapes); all
counts are sums over that list, so there is one place to change when the model changes.

Letters: V vocabulary, D hidden, F inner width, E experts, L layers, T sequence length (tokens).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cdrmix.config.model import LayerKind, ModelConfig
from cdrmix.config.reasoning import StageBConfig

Part = Literal[
    "embedding", "time_mix", "low_rank", "attention", "feed_forward", "router", "experts", "norms"
]


@dataclass(frozen=True)
class Parameter:
    """One tensor of the backbone.

    Attributes:
        name: as in checkpoints; the experts of a layer are stacked in one tensor.
        shape: logical, unsharded.
        part: what it belongs to.
        layer: its block, counted from the input; None outside the blocks.
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
        total_params: all parameters; the embedding, which is also the head, once.
        active_params: those that one token is multiplied with: of the experts top_k per layer. The
            tied embedding counts whole, since the head multiplies with all of it.
        train_flops_per_token: forward and backward of one token, no recomputation.
    """

    total_params: int
    active_params: int
    train_flops_per_token: int


def count(model: ModelConfig, sequence_length: int) -> Counts:
    """Total and active parameters, and training FLOPs per token at a sequence length (tokens).

    Of a reasoning variant this is the backbone that Stage A builds; what Stage B adds is
    `stage_b_params`.
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
        train_flops_per_token=3 * sum(forward_flops_by_layer(model, sequence_length))
        + 3 * head_flops(model),
    )


def params_by_part(model: ModelConfig) -> Counter[Part]:
    """Number of parameters of each part of the whole backbone."""
    parts: Counter[Part] = Counter()
    for parameter in parameters(model):
        parts[parameter.part] += parameter.num_elements
    return parts


def params_by_layer(model: ModelConfig) -> list[Counter[Part]]:
    """Number of parameters of each part, block by block from the input."""
    layers: list[Counter[Part]] = [Counter() for _ in range(model.num_layers)]
    for parameter in parameters(model):
        if parameter.layer is not None:
            layers[parameter.layer][parameter.part] += parameter.num_elements
    return layers


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Logical shape of every parameter of the backbone by its name."""
    return {parameter.name: parameter.shape for parameter in parameters(model)}


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the backbone in the order of the built module, from the input upwards.

    There is no head: it is tied.
    """
    width = model.hidden_size
    yield Parameter("embedding.weight", (model.vocab_size, width), "embedding")
    yield Parameter("embedding_norm.weight", (width,), "norms")
    kinds = model.layer_kinds()
    # The first RWKV layer makes v_first and so has no path that mixes it in.
    first_rwkv = kinds.index("rwkv") if "rwkv" in kinds else None
    for layer, kind in enumerate(kinds):
        for name, shape, part in _block(model, kind, makes_v_first=layer == first_rwkv):
            yield Parameter(f"blocks.{layer}.{name}", shape, part, layer)
    yield Parameter("final_norm.weight", (width,), "norms")


_Row = tuple[str, tuple[int, ...], Part]


def _block(model: ModelConfig, kind: LayerKind, *, makes_v_first: bool) -> list[_Row]:
    width = (model.hidden_size,)
    mixer = _attention(model) if kind == "transformer" else _time_mix(model, makes_v_first)
    shift: list[_Row] = [("ffn_shift.mu", width, "feed_forward")] if kind == "rwkv" else []
    return [
        ("mixer_norm.weight", width, "norms"),
        *((f"mixer.{name}", shape, part) for name, shape, part in mixer),
        ("ffn_norm.weight", width, "norms"),
        *shift,
        *((f"ffn.{name}", shape, part) for name, shape, part in _feed_forward(model)),
    ]


def _time_mix(model: ModelConfig, makes_v_first: bool) -> list[_Row]:
    width = model.hidden_size
    ranks = model.low_rank_sizes()
    mixes = ("mu_r", "mu_w", "mu_k", "mu_v", "mu_a", "mu_g")
    rows: list[_Row] = [(name, (width,), "time_mix") for name in mixes]
    for name, rank in (("decay", ranks.decay), ("iclr", ranks.iclr), ("value", ranks.value)):
        if name != "value" or not makes_v_first:
            rows.append((f"{name}_bias", (width,), "low_rank"))
            rows += _low_rank_pair(name, width, rank)
    rows += _low_rank_pair("gate", width, ranks.gate)
    rows += [(name, (width,), "time_mix") for name in ("k_k", "k_a", "r_k")]
    for name in ("receptance", "key", "value", "output"):
        rows.append((f"{name}.weight", (width, width), "time_mix"))
    rows += [(f"group_norm.{name}", (width,), "norms") for name in ("weight", "bias")]
    return rows


def _low_rank_pair(name: str, width: int, rank: int) -> list[_Row]:
    return [
        (f"{name}_down", (width, rank), "low_rank"),
        (f"{name}_up", (rank, width), "low_rank"),
    ]


def _attention(model: ModelConfig) -> list[_Row]:
    width = model.hidden_size
    kv_width = model.num_kv_heads * model.head_dim
    rows = {"query": width, "key": kv_width, "value": kv_width, "output": width}
    return [(f"{name}.weight", (size, width), "attention") for name, size in rows.items()]


def _feed_forward(model: ModelConfig) -> list[_Row]:
    width = model.hidden_size
    moe = model.moe
    if moe is None:
        inner = model.ffn_hidden_size
        return [
            ("up.weight", (inner, width), "feed_forward"),
            ("down.weight", (width, inner), "feed_forward"),
        ]
    experts = moe.num_experts
    inner = moe.expert_hidden_size
    return [
        ("router.weight", (experts, width), "router"),
        ("experts.up", (experts, inner, width), "experts"),
        ("experts.down", (experts, width, inner), "experts"),
    ]


def forward_flops_by_layer(model: ModelConfig, sequence_length: int) -> list[int]:
    """Forward FLOPs per token of each block: 2 per multiply-accumulate of its matrices, 8 D N for
    the recurrence of an RWKV block with heads of N (whatever a kernel really does), 2 T D for the
    causal half of attention. The backward pass takes twice as much.
    """
    per_layer = []
    for kind, parts in zip(model.layer_kinds(), _matrices_by_layer(model), strict=True):
        if model.moe is not None:
            parts["experts"] = parts["experts"] * model.moe.top_k // model.moe.num_experts
        width = model.hidden_size
        mixing = (
            2 * sequence_length * width if kind == "transformer" else 8 * width * model.head_dim
        )
        per_layer.append(2 * sum(parts.values()) + mixing)
    return per_layer


def head_flops(model: ModelConfig) -> int:
    """Forward FLOPs per token of the head, a product with the tied embedding."""
    return 2 * model.hidden_size * model.vocab_size


def _matrices_by_layer(model: ModelConfig) -> list[Counter[Part]]:
    layers: list[Counter[Part]] = [Counter() for _ in range(model.num_layers)]
    for parameter in parameters(model):
        if parameter.layer is not None and len(parameter.shape) > 1:
            layers[parameter.layer][parameter.part] += parameter.num_elements
    return layers


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
        """Parameters that Stage B trains beside the backbone."""
        return self.adapters + self.gates + self.heads + self.summariser + self.retrieval


# As cdrmix/reasoning builds them; tests/unit/test_model_size.py holds both to each other.
_SUMMARY_SLOTS = 8
_POLICY_ACTIONS = 4
_POLICY_FEATURES = 9
_VALUE_WIDTH = 64
_SCALARS_PER_ADAPTER = 3


def stage_b_params(
    model: ModelConfig, stage_b: StageBConfig, layers: range | None = None
) -> StageBCounts:
    """Parameters of Stage B, exactly as built.

    Args:
        model: of the backbone.
        stage_b: dimensions of the parts.
        layers: blocks whose adapters count; None: all.
    """
    width = model.hidden_size
    rank = stage_b.adapters.rank
    adapted = _adapted_matrices(model, layers or range(model.num_layers))
    summary = stage_b.memory.summary_dim
    slot = summary // _SUMMARY_SLOTS
    features = _POLICY_FEATURES
    return StageBCounts(
        adapters=sum(rank * (inner + outer) for inner, outer in adapted),
        gates=sum(inner + _SCALARS_PER_ADAPTER for inner, _ in adapted),
        heads=width * (_POLICY_ACTIONS + 1)
        + (features + 1) * (_POLICY_ACTIONS + _VALUE_WIDTH)
        + _VALUE_WIDTH
        + 1,
        summariser=4 * width * slot + (2 * slot + 1) * slot + _SUMMARY_SLOTS * slot,
        retrieval=2 * width * summary,
        plastic_state=len(adapted) * rank**2,
    )


def _adapted_matrices(model: ModelConfig, layers: range) -> list[tuple[int, int]]:
    """Inputs and outputs of every layer of some blocks that has an adapter: receptance, key and
    value of RWKV blocks, query, key, value and output of Transformer blocks, dense feed-forwards;
    experts have none.
    """
    width = model.hidden_size
    inner = model.ffn_hidden_size
    kv_width = model.num_kv_heads * model.head_dim
    time_mix = [(width, width)] * 3
    attention = [(width, width), (width, kv_width), (width, kv_width), (width, width)]
    dense = [(width, inner), (inner, width)] if model.moe is None else []
    return [
        matrix
        for kind in model.layer_kinds()[layers.start : layers.stop]
        for matrix in (time_mix if kind == "rwkv" else attention) + dense
    ]
