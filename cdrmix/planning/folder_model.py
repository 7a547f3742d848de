"""Layers of a Hugging Face model by its config.json: their kinds, sizes and parameters; no torch.

The parameters of a known family are those that transformers 5.23 makes, name by name and in its
order, with the experts of a layer packed into matrices [experts, out, in]. Those of other families
are read off the headers of the safetensors files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from cdrmix.config.hugging_face import CONFIG_FILE, TESTED_FAMILIES, read_model_config
from cdrmix.config.model import ModelConfig
from cdrmix.config.safetensors_headers import (
    INDEX_FILE,
    RECORD_FILE,
    WEIGHTS_FILE,
    tensor_sizes,
)
from cdrmix.errors import PlanError
from cdrmix.planning.parameter import Parameter, Part

# Halves of a block; a block of Nemotron-H is one of them.
Half = Literal["attention", "mamba", "mlp", "moe"]

# Values that transformers takes for keys that a config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "conv_kernel": 4,
    "n_groups": 8,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "chunk_size": 128,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
_QWEN3_MOE_INNER = 768
# Nemotron-H names its blocks by a list of words or by a text of letters.
_NEMOTRON_BLOCKS: dict[str, Half] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "M": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
_NEMOTRON_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_WITH_EXPERTS = ("mixtral", "qwen3_moe", "nemotron_h")
_WITH_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")
_WITH_NORMED_HEADS = ("qwen3", "qwen3_moe")
# Buffers that some files hold beside the parameters, and layers that transformers passes over.
_NO_PARAMETERS = re.compile(r"(\.inv_freq|\.e_score_correction_bias)$|^mtp\.")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba-2 mixer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int  # features
    kernel: int  # tokens of the convolution
    chunk: int  # tokens of a chunk of the recurrence

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: all heads, and B and C of each group."""
        return self.inner + 2 * self.num_groups * self.state_size


@dataclass(frozen=True)
class FolderModel:
    """A Hugging Face model as its config.json tells it."""

    family: str  # model_type
    is_known: bool  # False: only the sizes in `model` are known, not the layers
    model: ModelConfig
    layers: tuple[tuple[Half, ...], ...]  # halves of each block
    is_tied: bool  # head and embedding are one matrix
    has_query_bias: bool  # also of key and value
    has_output_bias: bool
    has_normed_heads: bool  # queries and keys are normed by head
    is_gated: bool  # feed-forwards have a gate beside the up projection
    has_mlp_bias: bool
    expert_inner: int  # inner width of an expert (features); 0 without experts
    shared_inner: int  # of the shared expert; 0: none
    latent: int | None  # width in which experts work; None: that of the residual stream
    mamba: Mamba | None
    has_mamba_bias: bool
    has_conv_bias: bool

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.model.num_heads * self.model.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.model.num_kv_heads * self.model.head_dim


def folder_model(model: ModelConfig) -> FolderModel:
    """Reads the layers of a Hugging Face model off its folder.

    Raises:
        PlanError: if config.json cannot be read.
    """
    return _read(model, _signature(_folder(model) / CONFIG_FILE))


def folder_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Parameters of a Hugging Face model in the order of the built module, without adapters.

    Raises:
        PlanError: if config.json cannot be read; if the family is unknown and there are no weights;
            or if the weights are not those of config.json.
        DataError: if the safetensors files are damaged or incomplete.
    """
    folder = _folder(model)
    files = (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, RECORD_FILE)
    return _parameters(model, tuple(_signature(folder / name) for name in files))


def _folder(model: ModelConfig) -> Path:
    assert model.path is not None, "a Hugging Face model has a path"
    return Path(model.path)


def _signature(path: Path) -> tuple[int, int] | None:
    """Time of change and size of a file, None if it is missing: files may change between plans."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=16)  # a search asks for each of its layouts
def _read(model: ModelConfig, signature: object) -> FolderModel:
    try:
        given = read_model_config(_folder(model))
    except ValueError as error:
        raise PlanError(f"model.{error}") from None
    family = given["model_type"]
    values = {**_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    _check_counts(model, values)
    if family == "qwen3_moe" and "moe_intermediate_size" not in given:
        values["moe_intermediate_size"] = _QWEN3_MOE_INNER
    has_bias = bool(values["attention_bias"]) and family in _WITH_ATTENTION_BIAS
    is_nemotron = family == "nemotron_h"
    expert_inner = shared_inner = 0
    if family in _WITH_EXPERTS and model.moe is not None:
        key = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
        expert_inner = values[key]
        shared_inner = values["moe_shared_expert_intermediate_size"] if is_nemotron else 0
    return FolderModel(
        family=family,
        is_known=family in TESTED_FAMILIES,
        model=model,
        layers=tuple(_layers(model, family, values)),
        # transformers has no ties of Nemotron-H, whatever config.json says
        is_tied=bool(values["tie_word_embeddings"]) and not is_nemotron,
        has_query_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias,
        has_normed_heads=family in _WITH_NORMED_HEADS,
        is_gated=not is_nemotron,
        has_mlp_bias=bool(values["mlp_bias"]) and family in ("llama", "nemotron_h"),
        expert_inner=expert_inner,
        shared_inner=shared_inner,
        latent=values["moe_latent_size"] if is_nemotron else None,
        mamba=_mamba(values) if is_nemotron else None,
        has_mamba_bias=bool(values["use_bias"]),
        has_conv_bias=bool(values["use_conv_bias"]),
    )


def _check_counts(model: ModelConfig, values: Mapping[str, Any]) -> None:
    """Raises PlanError where a size is no positive whole number."""
    for key, default in _DEFAULTS.items():
        value = values[key]
        is_count = isinstance(default, int) and not isinstance(default, bool)
        if is_count and not (type(value) is int and value > 0):
            raise PlanError(
                f"{_folder(model) / CONFIG_FILE}: {key} = {value!r} is no count. Copy the file "
                "again"
            )


def _layers(
    model: ModelConfig, family: str, values: Mapping[str, Any]
) -> Iterator[tuple[Half, ...]]:
    """Halves of each block.

    Raises:
        PlanError: if a block of Nemotron-H has an unknown name.
    """
    if family == "nemotron_h":
        listed = next((values[key] for key in _NEMOTRON_LISTS if values.get(key)), ())
        for name in listed:
            if name not in _NEMOTRON_BLOCKS:
                raise PlanError(
                    f"{_folder(model) / CONFIG_FILE}: a block of kind {name!r} is not known here. "
                    f"Known are {', '.join(_NEMOTRON_BLOCKS)}"
                )
            yield (_NEMOTRON_BLOCKS[name],)
        return
    for layer in range(model.num_layers):
        has_experts = model.moe is not None
        if family == "qwen3_moe":
            is_chosen = (layer + 1) % values["decoder_sparse_step"] == 0
            has_experts = has_experts and is_chosen and layer not in values["mlp_only_layers"]
        yield ("attention", "moe" if has_experts else "mlp")


def _mamba(values: Mapping[str, Any]) -> Mamba:
    return Mamba(
        num_heads=values["mamba_num_heads"],
        head_dim=values["mamba_head_dim"],
        num_groups=values["n_groups"],
        state_size=values["ssm_state_size"],
        kernel=values["conv_kernel"],
        chunk=values["chunk_size"],
    )


@lru_cache(maxsize=16)
def _parameters(model: ModelConfig, signatures: tuple[object, ...]) -> tuple[Parameter, ...]:
    found = folder_model(model)
    folder = _folder(model)
    stored = _stored_shapes(folder)
    if not found.is_known:
        if stored is None:
            raise PlanError(
                f"model.path = {folder}: without its weights nothing tells the parameters of "
                f"model_type {found.family!r}. Copy the safetensors files there; of "
                f"{', '.join(TESTED_FAMILIES)}, {CONFIG_FILE} is enough"
            )
        return tuple(_stored_parameters(found, stored))
    listed = tuple(_known_parameters(found))
    if stored is not None:
        _check_stored(found, stored, listed)
    return listed


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the parameters in a folder's files, or of those that a run has kept of its base;
    None without either.

    Raises:
        DataError: if files are missing or damaged.
    """
    # An index alone says that the weights are elsewhere.
    if not (any(folder.glob("*.safetensors")) or (folder / RECORD_FILE).is_file()):
        return None
    sizes = tensor_sizes(folder).items()
    return {name: size.shape for name, size in sizes if not _NO_PARAMETERS.search(name)}


def _check_stored(
    found: FolderModel, stored: Mapping[str, tuple[int, ...]], listed: tuple[Parameter, ...]
) -> None:
    """Raises PlanError if files hold another number of elements than config.json tells."""
    in_files = sum(
        Parameter(name, shape, "head").num_elements
        for name, shape in stored.items()
        if not (found.is_tied and name == "lm_head.weight")
    )
    told = sum(parameter.num_elements for parameter in listed)
    if in_files != told:
        raise PlanError(
            f"model.path = {_folder(found.model)}: the safetensors files hold {in_files:,} "
            f"parameters, and {CONFIG_FILE} tells {told:,} of a {found.family} model. Copy the "
            "whole folder again"
        )


def _stored_parameters(
    found: FolderModel, stored: Mapping[str, tuple[int, ...]]
) -> Iterator[Parameter]:
    """Parameters of an unknown family by the names in its files."""
    for name, shape in stored.items():
        if found.is_tied and name == "lm_head.weight":
            continue
        match = _LAYER.search(name)
        part: Part = "feed_forward" if match else "norms"
        if match is None and len(shape) > 1:
            part = "embedding" if "emb" in name else "head"
        elif ".experts." in name:
            part = "experts"
        yield Parameter(name, shape, part, layer=int(match[1]) if match else None)


def _known_parameters(found: FolderModel) -> Iterator[Parameter]:
    is_nemotron = found.family == "nemotron_h"
    vocab, width = found.model.vocab_size, found.model.hidden_size
    embedding = "model.embeddings.weight" if is_nemotron else "model.embed_tokens.weight"
    yield Parameter(embedding, (vocab, width), "embedding")
    for layer, halves in enumerate(found.layers):
        block = list(_block(found, halves))
        norms = ("norm",) if is_nemotron else ("input_layernorm", "post_attention_layernorm")
        normed = [Parameter(f"{name}.weight", (width,), "norms") for name in norms]
        for each in normed + block if is_nemotron else block + normed:
            yield each._replace(name=f"model.layers.{layer}.{each.name}", layer=layer)
    last = "model.norm_f.weight" if is_nemotron else "model.norm.weight"
    yield Parameter(last, (width,), "norms")
    if not found.is_tied:
        yield Parameter("lm_head.weight", (vocab, width), "head")


def _block(found: FolderModel, halves: tuple[Half, ...]) -> Iterator[Parameter]:
    """Parameters of the halves of a block, without its norms."""
    is_nemotron = found.family == "nemotron_h"
    for half in halves:
        if half == "attention":
            parameters = _attention(found)
        elif half == "mamba":
            parameters = _mamba_mixer(found)
        elif half == "moe":
            parameters = _experts(found)
        else:
            parameters = _feed_forward(found, found.model.ffn_hidden_size)
        place = "mixer" if is_nemotron else "self_attn" if half == "attention" else "mlp"
        for each in parameters:
            yield each._replace(name=f"{place}.{each.name}")


def _linear(
    name: str, rows: int, columns: int, part: Part, *, has_bias: bool = False
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns), part)
    if has_bias:
        yield Parameter(f"{name}.bias", (rows,), part)


def _attention(found: FolderModel) -> Iterator[Parameter]:
    width, query, kv = found.model.hidden_size, found.query_width, found.kv_width
    for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(name, rows, width, "attention", has_bias=found.has_query_bias)
    yield from _linear("o_proj", width, query, "attention", has_bias=found.has_output_bias)
    if found.has_normed_heads:
        for name in ("q_norm", "k_norm"):
            yield Parameter(f"{name}.weight", (found.model.head_dim,), "norms")


def _feed_forward(found: FolderModel, inner: int) -> Iterator[Parameter]:
    width = found.model.hidden_size
    for name in ("gate_proj", "up_proj") if found.is_gated else ("up_proj",):
        yield from _linear(name, inner, width, "feed_forward", has_bias=found.has_mlp_bias)
    yield from _linear("down_proj", width, inner, "feed_forward", has_bias=found.has_mlp_bias)


def _experts(found: FolderModel) -> Iterator[Parameter]:
    moe = found.model.moe
    assert moe is not None, "a model without experts has no such layer"
    width, number, inner = found.model.hidden_size, moe.num_experts, found.expert_inner
    worked = found.latent or width
    name, rows = ("gate_up_proj", 2 * inner) if found.is_gated else ("up_proj", inner)
    router = Parameter("gate.weight", (number, width), "router")
    if found.family == "mixtral":
        yield router
    yield Parameter(f"experts.{name}", (number, rows, worked), "experts")
    yield Parameter("experts.down_proj", (number, worked, inner), "experts")
    if found.family != "mixtral":
        yield router
    if found.shared_inner:
        for each in _feed_forward(found, found.shared_inner):
            yield each._replace(name=f"shared_experts.{each.name}")
    if found.latent:
        bias = found.has_mlp_bias
        yield from _linear("fc1_latent_proj", worked, width, "feed_forward", has_bias=bias)
        yield from _linear("fc2_latent_proj", width, worked, "feed_forward", has_bias=bias)


def _mamba_mixer(found: FolderModel) -> Iterator[Parameter]:
    sizes = found.mamba
    assert sizes is not None, "only Nemotron-H has Mamba mixers"
    width = found.model.hidden_size
    for name in ("dt_bias", "A_log", "D"):
        yield Parameter(name, (sizes.num_heads,), "mamba")
    yield Parameter("conv1d.weight", (sizes.convolved, 1, sizes.kernel), "mamba")
    if found.has_conv_bias:
        yield Parameter("conv1d.bias", (sizes.convolved,), "mamba")
    projected = sizes.inner + sizes.convolved + sizes.num_heads
    yield from _linear("in_proj", projected, width, "mamba", has_bias=found.has_mamba_bias)
    yield Parameter("norm.weight", (sizes.inner,), "norms")
    yield from _linear("out_proj", width, sizes.inner, "mamba", has_bias=found.has_mamba_bias)
