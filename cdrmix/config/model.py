"""The `model` section with its layer schedule and low-rank sizes."""

from __future__ import annotations

import difflib
import math
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from cdrmix.config.hugging_face import sizes_of_folder
from cdrmix.config.lora_targets import dropout_refused
from cdrmix.config.model_parts import (
    LoraConfig,
    MambaConfig,
    ModConfig,
    MoEConfig,
    MtpConfig,
    RoutingMambaConfig,
)
from cdrmix.config.plugin import HashableDict, NamesPlugins, is_plugin
from cdrmix.config.section import Section

# Block types by the name that a schedule gives them, MODULE:CLASS: the one registration of a type.
# docs/architecture.md tells how to add one.
BLOCK_TYPES = {
    "rwkv": "cdrmix.planning.blocks.rwkv:RWKVBlock",
    "transformer": "cdrmix.planning.blocks.attention:AttentionBlock",
    "mamba": "cdrmix.planning.blocks.mamba:MambaBlock",
    "routing_mamba": "cdrmix.planning.blocks.mamba:RoutingMambaBlock",
}
# Sections that only some block types read, each with these.
_USERS_OF_SECTIONS = {
    "mamba": ("mamba", "routing_mamba"),
    "routing_mamba": ("routing_mamba",),
}
HEAD_DIMS = (32, 64, 128)
# Fields that are derived from others when left out: pydantic requires them, not the JSON schema.
DERIVED_MODEL_FIELDS = ("num_kv_heads", "head_dim", "ffn_hidden_size")
# Sizes that the folder of a Hugging Face model tells.
_FOLDER_SIZES = ("hidden_size", "num_layers", "num_heads", "vocab_size", *DERIVED_MODEL_FIELDS)
# Keys of RWKX-V alone.
_EXPERT_SIZES = ("num_experts", "top_k", "expert_hidden_size")
_SCHEDULE_KEYS = ("schedule", "transformer_fraction")
_RWKX_KEYS = (
    *_SCHEDULE_KEYS,
    "mixers",
    "mixer_options",
    "mamba",
    "routing_mamba",
    "ffn_activation",
    "init_std_scale",
    "rope_theta",
    "mod",
    "mtp",
)
# An entry of `mixers`: NAME, or NAME*N for N layers.
_MIXER_ENTRY = re.compile(r"([\w.:]+)(?:\*([1-9]\d{0,3}))?")


class LowRankSizes(NamedTuple):
    """Ranks of the four low-rank paths of an RWKV-7 time mix (features)."""

    decay: int
    iclr: int
    value: int
    gate: int


def _is_count(value: Any) -> TypeGuard[int]:
    # true is an int to Python
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class ModelConfig(Section):
    """Dimensions of the RWKX-V backbone, whose embedding and head are tied; or a causal language
    model of Hugging Face transformers, whose folder tells its dimensions."""

    kind: Literal["rwkx", "hf"] = "rwkx"
    """rwkx: RWKX-V, by the dimensions here. hf: the model in the folder `path`."""
    path: str | None = None
    """Local folder of a Hugging Face model, with config.json and safetensors files; its weights are
    where training starts."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of a Hugging Face model; null: the whole model."""
    remote_code: tuple[str, ...] = Field((), strict=False)
    """sha256 of each Python file of `path` that may run (hex); without them none does."""
    # The smallest head has 32 features.
    hidden_size: int = Field(ge=32, description="Width of the residual stream (features).")
    num_layers: int = Field(
        ge=1, le=9_999, description="Blocks, RWKV and Transformer together (count)."
    )
    num_heads: int = Field(ge=1, description="Heads of attention and of RWKV (count).")
    num_kv_heads: int = Field(ge=1)
    """Key/value heads of attention (count); num_heads when left out."""
    head_dim: int = Field(ge=1)
    """Width of one head, 32, 64 or 128 (features); hidden_size / num_heads when left out."""
    # A tokenizer has a token for each of the 256 bytes, so that no text is without tokens.
    vocab_size: int = Field(ge=256)
    """Rows of the embedding (tokens); a tokenizer may use fewer."""
    schedule: Literal["top-of-x", "interleave-x"] = "interleave-x"
    """Positions of the Transformer blocks: top-of-x, the last ones; interleave-x, every (1 /
    transformer_fraction)-th."""
    transformer_fraction: float = Field(0.25, ge=0, le=1)
    """Share of blocks that are Transformer blocks (ratio)."""
    mixers: Annotated[tuple[str, ...] | None, NamesPlugins()] = Field(
        None, min_length=1, strict=False
    )
    """Block type of each layer from the input, in place of schedule and transformer_fraction: rwkv,
    transformer, mamba, routing_mamba, or package.module:Name of yours; NAME*N stands for N layers.
    null: by the schedule."""
    mixer_options: Annotated[dict[str, dict[str, Any]], AfterValidator(HashableDict)] = Field(
        {}, validate_default=True
    )
    """Options of block types of yours, by the name that mixers gives each; they check them."""
    ffn_hidden_size: int = Field(ge=1)
    """Inner width of a dense feed-forward, of layers without experts (features); top_k *
    expert_hidden_size, or 4 * hidden_size without experts, when left out."""
    ffn_activation: Literal["squared_relu", "swiglu"] = "squared_relu"
    """Feed-forwards and experts. squared_relu: two matrices, down(relu(up x)^2). swiglu: three,
    down(silu(gate x) * up x)."""
    moe: MoEConfig | None = None
    """Mixture-of-experts feed-forward; null is a dense model."""
    mtp: MtpConfig | None = None
    """Multi-token prediction; null: the next token alone."""
    mamba: MambaConfig | None = None
    """Sizes of Mamba mixers, of Routing Mamba too; filled in where there are such layers."""
    routing_mamba: RoutingMambaConfig | None = None
    """Experts of Routing Mamba mixers; filled in where there are such layers."""
    mod: ModConfig | None = None
    """Mixture of Depths; null: every block takes every token."""
    init_std_scale: float = Field(1.0, gt=0)
    """Factor on the initial standard deviation of 0.02 (ratio)."""
    # At 1 all pairs of features would turn by the same angle.
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the rotary angles (ratio).")

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("kind") == "hf":
            return _filled_from_folder(values)
        filled = dict(values)
        hidden, heads, moe = (filled.get(key) for key in ("hidden_size", "num_heads", "moe"))
        # Only from values of the right type: what is wrong with others is said of them alone.
        if filled.get("num_kv_heads") is None and _is_count(heads):
            filled["num_kv_heads"] = heads
        if filled.get("head_dim") is None and _is_count(hidden) and _is_count(heads):
            # A fraction stays one, for the message of `_head_dim_is_known`.
            filled["head_dim"] = hidden // heads if hidden % heads == 0 else hidden / heads
        if filled.get("ffn_hidden_size") is None and _is_count(hidden):
            experts = moe.model_dump() if isinstance(moe, MoEConfig) else moe
            width = 4 * hidden
            if isinstance(experts, dict):
                top_k = experts.get("top_k", 2)
                inner = experts.get("expert_hidden_size")
                if _is_count(inner) and _is_count(top_k):
                    width = inner * top_k
            filled["ffn_hidden_size"] = width
        _fill_sections(filled)
        return filled

    @field_validator("head_dim", mode="before")
    @classmethod
    def _head_dim_is_known(cls, value: Any, info: ValidationInfo) -> Any:
        if value in HEAD_DIMS or info.data.get("kind") == "hf":
            return value
        hidden = info.data.get("hidden_size")
        heads = info.data.get("num_heads")
        if not hidden or not heads or value != hidden / heads:
            raise ValueError(f"given {value!r}, allowed is one of {', '.join(map(str, HEAD_DIMS))}")
        fitting = " or ".join(str(hidden // dim) for dim in HEAD_DIMS if hidden % dim == 0)
        advice = f"num_heads = {fitting}" if fitting else "a hidden_size that 32 divides"
        raise ValueError(
            f"hidden_size / num_heads = {hidden} / {heads} = {value:g}; a head has 32, 64 or 128 "
            f"features. Try {advice}"
        )

    @field_validator("mixers", mode="before")
    @classmethod
    def _mixers_are_known(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            return value
        expanded: list[str] = []
        for entry in value:
            match = _MIXER_ENTRY.fullmatch(entry)
            name = match[1] if match else entry
            if match is None or not (name in BLOCK_TYPES or is_plugin(name)):
                (near,) = difflib.get_close_matches(name, BLOCK_TYPES, n=1, cutoff=0)
                raise ValueError(
                    f"{entry!r}: give a block type, or a type and a number of layers as in "
                    f"'{near}*3'. Known: {', '.join(BLOCK_TYPES)}, or package.module:Name"
                )
            expanded += [name] * int(match[2] or 1)
        return expanded

    @model_validator(mode="after")
    def _parts_fit(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}"
            )
        if self.kind == "hf":
            lora = self.lora
            if lora is not None and lora.dropout and lora.experts and self.moe is not None:
                raise ValueError(dropout_refused(lora.dropout))
            return self
        for key, value in (("path", self.path), ("lora", self.lora)):
            if value is not None:
                raise ValueError(
                    f"{key} is for Hugging Face models. Try kind = hf, or {key} = null"
                )
        if self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"num_heads * head_dim = {self.num_heads} * {self.head_dim} = "
                f"{self.num_heads * self.head_dim} is not hidden_size = {self.hidden_size}"
            )
        # For their errors: a fraction that cannot be interleaved is refused with the file, and so
        # are blocks that cannot be routed.
        self.layer_kinds()
        self._check_layers()
        self.routed_layers()
        return self

    def _check_layers(self) -> None:
        """Raises ValueError where keys of single layers do not fit the others."""
        if self.mixers is not None:
            if len(self.mixers) != self.num_layers:
                raise ValueError(
                    f"mixers names {len(self.mixers)} layers, and num_layers = {self.num_layers}"
                )
            for key in _SCHEDULE_KEYS:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"{key} has no meaning with mixers, which names the type of each layer. "
                        "Leave one of them out"
                    )
        kinds = set(self.layer_kinds())
        for name in self.mixer_options:
            if name not in kinds or not is_plugin(name):
                yours = ", ".join(filter(is_plugin, sorted(kinds))) or "none"
                raise ValueError(
                    f"mixer_options has {name!r}, which is no block type of yours in mixers. There "
                    f"are: {yours}"
                )
        for key, users in _USERS_OF_SECTIONS.items():
            if getattr(self, key) is not None and kinds.isdisjoint(users):
                raise ValueError(
                    f"{key} has no meaning without a layer of the type {' or '.join(users)} in "
                    "mixers. Leave it out"
                )
        last = self.moe_layers()[-1:]
        if last and last[0] >= self.num_layers:
            raise ValueError(
                f"moe.layers names layer {last[0]}, and num_layers = {self.num_layers}: the last "
                f"one is {self.num_layers - 1}"
            )

    @property
    def has_deepspeed_experts(self) -> bool:
        """True for experts in DeepSpeed's MoE layers, which lie over expert groups.

        A Hugging Face model has its experts as ordinary parameters.
        """
        return self.kind == "rwkx" and self.moe is not None

    def further_blocks(self) -> ModelConfig:
        """Sizes of the blocks that predict further tokens: Transformer blocks with a dense
        feed-forward, above the layers, with numbers, and so initial values, of their own."""
        assert self.mtp is not None, "a model with multi-token prediction"
        return self.model_copy(
            update={
                "num_layers": self.num_layers + self.mtp.num_tokens - 1,
                "schedule": "interleave-x",
                "transformer_fraction": 1.0,
                "mixers": None,
                "mixer_options": HashableDict(),
                **dict.fromkeys(("mamba", "routing_mamba", "moe", "mod", "mtp")),
            }
        )

    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose feed-forward is of experts, from 0 at the input."""
        assert self.kind == "rwkx", "layers of a Hugging Face model are in its config.json"
        if self.moe is None:
            return ()
        return tuple(range(self.num_layers)) if self.moe.layers is None else self.moe.layers

    @property
    def has_dense_layers(self) -> bool:
        """True if the feed-forward of a layer is dense."""
        return len(self.moe_layers()) < self.num_layers

    @property
    def has_dense_feed_forwards(self) -> bool:
        """True if a feed-forward is dense: of a layer, or of a block that predicts further
        tokens."""
        return self.has_dense_layers or (self.mtp is not None and self.mtp.has_blocks)

    def has_experts(self, layer: int) -> bool:
        """True if the feed-forward of a layer is of experts."""
        return layer in self.moe_layers()

    def layer_kinds(self) -> tuple[str, ...]:
        """Block type of each layer from the input, by name: of `mixers`, or else of `schedule` and
        `transformer_fraction`. Raises ValueError if an interleaved fraction is not one over a whole
        number."""
        assert self.kind == "rwkx", "layers of a Hugging Face model are in its config.json"
        if self.mixers is not None:
            return self.mixers
        return _scheduled_kinds(self.schedule, self.num_layers, self.transformer_fraction)

    def routed_layers(self) -> tuple[int, ...]:
        """Blocks that take a share of the tokens alone, from the input; none without `mod`. Raises
        ValueError if one of `mod.layers` cannot be one of them, or no block can."""
        if self.mod is None or self.kind != "rwkx":
            return ()
        kinds = self.layer_kinds()
        whole = kinds.index("rwkv") if "rwkv" in kinds else None
        possible = [layer for layer in range(self.num_layers) if layer != whole]
        if not possible:
            raise ValueError(
                "mod has no block to route: the only one is the first RWKV block, whose values all "
                "later ones would mix in. Leave it out"
            )
        if self.mod.layers is None:
            return tuple(possible)
        for layer in self.mod.layers:
            if layer == whole:
                raise ValueError(
                    f"mod.layers holds {layer}, the first RWKV block, whose values all later RWKV "
                    "blocks mix in, for every token. Leave it out"
                )
            if layer not in possible:
                raise ValueError(
                    f"mod.layers holds {layer}, and the blocks are 0 to {self.num_layers - 1}"
                )
        return self.mod.layers

    @property
    def init_std(self) -> float:
        """Standard deviation of the normal initialisation."""
        return 0.02 * self.init_std_scale

    def low_rank_sizes(self) -> LowRankSizes:
        """Computes the ranks by RWKV-LM's rule: multiples of 32 near c * sqrt(hidden_size)."""
        decay, value, gate = (
            max(32, round(factor * math.sqrt(self.hidden_size) / 32) * 32)
            for factor in (2.5, 1.7, 5)
        )
        return LowRankSizes(decay=decay, iclr=decay, value=value, gate=gate)


def _fill_sections(filled: dict[str, Any]) -> None:
    """Fills in the sections that block types of the model need, in place."""
    entries = filled.get("mixers")
    if isinstance(entries, list | tuple):
        kinds = {str(entry).partition("*")[0] for entry in entries}
        for key, users in _USERS_OF_SECTIONS.items():
            if not kinds.isdisjoint(users) and filled.get(key) is None:
                filled[key] = {}


def _filled_from_folder(values: dict[str, Any]) -> dict[str, Any]:
    """Completes the values of a Hugging Face model with the sizes of its folder.

    Raises:
        ValueError: if the folder cannot be used, or other sizes are given than it has.
    """
    path = values.get("path")
    if not isinstance(path, str):
        raise ValueError("kind = hf needs path, the folder of a Hugging Face model")
    for key in _RWKX_KEYS:
        default = ModelConfig.model_fields[key].default
        if values.get(key, default) != default:
            raise ValueError(f"{key} has no meaning with kind = hf. Leave it out")
    # A checkpoint's configuration tells all of them, wherever the folder has gone.
    if not Path(path).is_dir() and all(_is_count(values.get(key)) for key in _FOLDER_SIZES):
        return values
    sizes = sizes_of_folder(Path(path))
    filled = dict(values)
    for key, size in sizes.items():
        given = filled.get(key)
        if isinstance(given, MoEConfig):
            given = given.model_dump()
        if isinstance(size, dict):
            given = given if isinstance(given, dict) else {}
            if given.get("layers") is not None:
                raise ValueError("moe.layers has no meaning with kind = hf. Leave it out")
            changed = {name: given[name] for name in _EXPERT_SIZES if name in given}
            if given.get("drop_tokens"):
                raise ValueError(
                    "moe.drop_tokens = true has no meaning with kind = hf, whose experts take all "
                    "tokens. Leave it out"
                )
            filled[key] = {**size, **given}
            is_other = any(size[name] != value for name, value in changed.items())
        else:
            filled[key] = size
            is_other = given is not None and given != size
        if is_other:
            raise ValueError(
                f"{key} is not that of {path}, whose config.json tells it. Leave it out"
            )
    return filled


@cache  # a search asks for it tens of thousands of times
def _scheduled_kinds(
    schedule: str, num_layers: int, transformer_fraction: float
) -> tuple[str, ...]:
    kinds = ["rwkv"] * num_layers
    if schedule == "top-of-x":
        # The margin absorbs rounding: 0.29 * 100 is below 29 in binary floats.
        top = math.floor(num_layers * transformer_fraction + 1e-9)
        kinds[num_layers - top :] = ["transformer"] * top
    elif transformer_fraction > 0:
        period = round(1 / transformer_fraction)
        # The tolerance takes 0.3333333 for a third.
        if abs(period * transformer_fraction - 1) > 1e-6:
            raise ValueError(
                f"transformer_fraction = {transformer_fraction} cannot be interleaved: "
                "give one over a whole number (1, 0.5, 0.25, ...) or schedule = top-of-x"
            )
        # The Transformer block ends its period: RWKV blocks come first.
        for layer in range(period - 1, num_layers, period):
            kinds[layer] = "transformer"
    return tuple(kinds)
