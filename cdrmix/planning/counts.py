"""Counts parameters and training FLOPs of a model from its configuration.

`parameters` lists every tensor of the backbone (logical, unsharded shapes); all counts are sums
over that list, so a change of the model is made in one place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from cdrmix.config.model import ModelConfig
from cdrmix.config.reasoning import StageBConfig
from cdrmix.config.schema import Config
from cdrmix.planning.adapters import trained_parameters
from cdrmix.planning.blocks.block_type import block_types, layer_type
from cdrmix.planning.blocks.feed_forward import feed_forward_parameters, linears
from cdrmix.planning.depth import depth_flops, depth_parameters
from cdrmix.planning.folder_model import folder_model
from cdrmix.planning.parameter import Parameter, Part


class Counts(NamedTuple):
    """Sizes of a backbone."""

    # all parameters, also adapters; a tied embedding and head are counted once
    total_params: int
    # parameters used by one token: of the experts top_k per layer, and the whole embedding, which
    # the head multiplies with; without those that predict further tokens, which decoding can do
    # without
    active_params: int
    train_flops_per_token: int  # forward and backward of one token without recomputation


# Tokens of a document, on average over tokens, where documents of a sample are kept apart: assumed.
# Web text has some hundreds to a thousand a document, and a token is more often in a long one. With
# more, a step has more FLOPs than are counted: what is said of its utilisation is too little.
DOCUMENT_TOKENS = 1_024


def attended_tokens(config: Config) -> int:
    """Tokens of a sequence as attention sees it: of a sample, or of a document where these are kept
    apart, at most `DOCUMENT_TOKENS`."""
    length = config.training.sequence_length
    return min(length, DOCUMENT_TOKENS) if config.data.segment_documents else length


def count(model: ModelConfig, sequence_length: int) -> Counts:
    """Counts parameters, and training FLOPs per token at a sequence length (tokens).

    Of a reasoning variant this is the backbone of Stage A; `stage_b_params` counts the rest.
    """
    total = params_by_part(model).total()
    forward = sum(forward_flops_by_layer(model, sequence_length))
    forward += flops_above_layers(model, sequence_length)
    # the backward pass has twice the FLOPs of the forward pass, but for the gradients of frozen
    # matrices, which are not formed
    trained = 3 * forward - _frozen_flops(model)
    used = (parameter for parameter in parameters(model) if parameter.part != "mtp")
    active = sum(_used_elements(model, parameter) for parameter in used)
    return Counts(total, active, train_flops_per_token=trained)


def trained_params(model: ModelConfig) -> int:
    """Parameters that training changes: all, or those of the adapters alone."""
    return sum(parameter.num_elements for parameter in parameters(model) if parameter.is_trained)


def params_by_part(model: ModelConfig) -> Counter[Part]:
    """Parameters of each part of the model, a tied embedding and head counted once."""
    return _by_part(model) if model.kind == "rwkx" else _sum_by_part(model)


def _sum_by_part(model: ModelConfig) -> Counter[Part]:
    parts: Counter[Part] = Counter()
    for parameter in parameters(model):
        parts[parameter.part] += parameter.num_elements
    return parts


# A search asks for each of its layouts, which share the result. Of a folder, whose files may
# change, the parameters are cached where they are read.
_by_part = lru_cache(maxsize=16)(_sum_by_part)


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of a model in the order of the built module; of RWKX-V the head is tied.

    Raises:
        PlanError: if the folder of a Hugging Face model does not tell them.
    """
    return _backbone(model) if model.kind == "rwkx" else trained_parameters(model)


def _backbone(model: ModelConfig) -> Iterator[Parameter]:
    width = model.hidden_size
    yield Parameter("embedding.weight", (model.vocab_size, width), "embedding", cut=0)
    yield Parameter("embedding_norm.weight", (width,), "norms")
    for layer in range(model.num_layers):
        for each in block_parameters(model, layer):
            yield each._replace(name=f"blocks.{layer}.{each.name}", layer=layer)
    yield Parameter("final_norm.weight", (width,), "norms")
    yield from further_parameters(model)


def is_further(name: str) -> bool:
    """Tells if a logical name is of a part that predicts further tokens."""
    return name.startswith("mtp.")


def further_parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Parameters that predict further tokens (`models/mtp.py`), in the order of the module."""
    if model.mtp is None:
        return
    width = model.hidden_size
    sizes = model.further_blocks()
    block = [
        each._replace(name=f"block.{each.name}", part="mtp")
        for each in block_parameters(sizes, model.num_layers)
    ]
    final = Parameter("final_norm.weight", (width,), "mtp")
    if model.mtp.kind == "deepseek":
        norms = [Parameter(f"{name}_norm.weight", (width,), "mtp") for name in ("hidden", "token")]
        own = [*norms, Parameter("projection.weight", (width, 2 * width), "mtp"), *block, final]
    elif model.mtp.head == "block":
        own = [*block, final]
    else:
        own = [Parameter("map.weight", (width, width), "mtp")]
    for place in range(2, model.mtp.num_tokens + 1):
        for each in own:
            yield each._replace(name=f"mtp.{place}.{each.name}")


def block_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Every parameter of a block of RWKX-V in the order of the module, named from the block on."""
    width = model.hidden_size
    kind = layer_type(model, layer)
    yield Parameter("mixer_norm.weight", (width,), "norms")
    yield from kind.parameters(model, layer)
    yield Parameter("ffn_norm.weight", (width,), "norms")
    if kind.shifts_channels:
        yield Parameter("ffn_shift.mu", (width,), "feed_forward")
    yield from feed_forward_parameters(model, layer)
    yield from depth_parameters(model, layer)


def forward_flops_by_layer(
    model: ModelConfig, sequence_length: int, fractions: Mapping[int, float] | None = None
) -> list[int]:
    """Forward FLOPs per token of each block; the backward pass takes twice as many.

    They are 2 per multiply-accumulate of the matrices, and those of a block type's mixing beside
    them. In layers of a Hugging Face model mixing takes 2 T D for the causal half of attention,
    where D is the width of all heads and T the sequence length, and 5 D N for a Mamba-2 mixer with
    D inner features and states of N.

    A routed block's are those of its share of the tokens, among which its attention is: `fractions`
    by layer, by default the capacity; its router sees every token.
    """
    flops = _mixing_flops(model, sequence_length)
    if fractions is None and model.mod is not None:
        fractions = dict.fromkeys(model.routed_layers(), model.mod.capacity)
    fractions = fractions or {}
    for layer, fraction in fractions.items():
        flops[layer] = _mixing_flops(model, round(fraction * sequence_length))[layer]
    for parameter in parameters(model):
        if parameter.layer is not None and parameter.part != "depth_router":
            flops[parameter.layer] += _used_flops(model, parameter)
    for layer, fraction in fractions.items():
        flops[layer] = round(fraction * flops[layer]) + depth_flops(model)
    return flops


def compute_share(
    model: ModelConfig, sequence_length: int, fractions: Mapping[int, float]
) -> float:
    """FLOPs of a model whose routed blocks take these fractions of the tokens, by layer, over those
    of the same model in which every block takes all."""
    whole = model.model_copy(update={"mod": None})
    above = flops_above_layers(model, sequence_length)
    routed = sum(forward_flops_by_layer(model, sequence_length, fractions)) + above
    return routed / (sum(forward_flops_by_layer(whole, sequence_length)) + above)


def _mixing_flops(model: ModelConfig, sequence_length: int) -> list[int]:
    """Forward FLOPs per token of each block's mixer, without those of its matrices."""
    if model.kind == "rwkx":
        return [kind.mixing_flops(model, sequence_length) for kind in block_types(model)]
    found = folder_model(model)
    attention = 2 * sequence_length * found.query_width
    recurrence = 5 * found.mamba.inner * found.mamba.state_size if found.mamba else 0
    of_half = {"attention": attention, "mamba": recurrence, "mlp": 0, "moe": 0}
    return [sum(of_half[half] for half in halves) for halves in found.layers]


def _used_elements(model: ModelConfig, parameter: Parameter) -> int:
    """Elements of a parameter that one token uses: of experts, and of their adapters, a share."""
    elements = parameter.num_elements
    if parameter.part == "mamba_experts":
        sizes = model.routing_mamba
        assert sizes is not None, "filled in where there are such layers"
        return elements * sizes.top_k // sizes.num_experts
    of_experts = parameter.part == "experts" or ".experts." in parameter.name
    if of_experts and model.moe is not None:
        return elements * model.moe.top_k // model.moe.num_experts
    return elements


def _used_flops(model: ModelConfig, parameter: Parameter) -> int:
    """Forward FLOPs per token of a parameter of a block: 2 for each element of a matrix in use."""
    return 2 * _used_elements(model, parameter) if len(parameter.shape) > 1 else 0


def _frozen_flops(model: ModelConfig) -> int:
    """FLOPs per token of the gradients that frozen matrices do not need."""
    if model.lora is None:
        return 0
    frozen = (each for each in parameters(model) if not each.is_trained and each.layer is not None)
    return sum(_used_flops(model, each) for each in frozen) + head_flops(model)


def flops_above_layers(model: ModelConfig, sequence_length: int) -> int:
    """Forward FLOPs per token of what the last pipeline stage computes behind its layers: the head,
    and each further token's part with the head once more."""
    if model.mtp is None:
        return head_flops(model)
    further = model.mtp.num_tokens - 1
    matrices = sum(_used_flops(model, parameter) for parameter in further_parameters(model))
    mixing = 0
    if model.mtp.has_blocks:
        sizes = model.further_blocks()
        mixing = _mixing_flops(sizes, sequence_length)[-1]
    return (1 + further) * head_flops(model) + matrices + further * mixing


def head_flops(model: ModelConfig) -> int:
    """Forward FLOPs per token of the head, whether it is tied to the embedding or not."""
    return 2 * model.hidden_size * model.vocab_size


class StageBCounts(NamedTuple):
    """Parameters that reasoning enablement adds to a backbone."""

    adapters: int  # low-rank factors of the plastic adapters (parameters)
    gates: int  # gain, modulator and trace of every adapter (parameters)
    heads: int  # policy head over four memory actions, and value head (parameters)
    summariser: int  # projections into and out of the summary slots, and their gate (parameters)
    retrieval: int  # projections to keys and queries of episodic memory (parameters)
    plastic_state: int  # fast weights of one sequence (float32 values, not parameters)

    @property
    def total_params(self) -> int:
        """Parameters of Stage B, the backbone left out."""
        return sum(self) - self.plastic_state


# As cdrmix/reasoning builds them; tests/unit/planning/test_model_size.py compares the two.
_SUMMARY_SLOTS = 8
_POLICY_ACTIONS = 4
_POLICY_FEATURES = 9
_SCALARS_PER_ADAPTER = 3


def stage_b_params(
    model: ModelConfig, stage_b: StageBConfig, layers: range | None = None
) -> StageBCounts:
    """Counts the parameters of Stage B as built, with the adapters of some blocks (None: of all).

    Adapters are on the layers that block types name, and on dense feed-forwards; experts have none.
    """
    width = model.hidden_size
    rank = stage_b.adapters.rank
    adapted = [
        matrix
        for layer in (range(model.num_layers) if layers is None else layers)
        for matrix in _adapted_matrices(model, layer)
    ]
    scalars = _SCALARS_PER_ADAPTER + (stage_b.adapters.half_life_tokens is not None)
    summary = stage_b.memory.summary_dim
    slot = summary // _SUMMARY_SLOTS
    policy = width * _POLICY_ACTIONS + (_POLICY_FEATURES + 1) * _POLICY_ACTIONS
    inner = stage_b.policy.value_width
    value = width + (_POLICY_FEATURES + 1) * inner + inner + 1
    return StageBCounts(
        adapters=sum(rank * (entering + leaving) for entering, leaving in adapted),
        gates=sum(entering + scalars for entering, _ in adapted),
        heads=policy + value,
        summariser=4 * width * slot + (2 * slot + 1) * slot + _SUMMARY_SLOTS * slot,
        retrieval=2 * width * summary,
        plastic_state=len(adapted) * rank**2,
    )


def _adapted_matrices(model: ModelConfig, layer: int) -> Iterator[tuple[int, int]]:
    """(input, output) features of the linear layers of a block that have plastic adapters."""
    names = [f"mixer.{name}.weight" for name in layer_type(model, layer).adapted]
    if not model.has_experts(layer):
        names += [f"ffn.{name}.weight" for name in linears(model)]
    for parameter in block_parameters(model, layer):
        if parameter.name in names:
            leaving, entering = parameter.shape
            yield entering, leaving
