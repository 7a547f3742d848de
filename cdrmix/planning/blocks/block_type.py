"""Interface of a block type, and how the one of a name is found.

A block type is what a block mixes tokens with. It has two halves: a `BlockType`, which tells
planning its parameters, FLOPs, activations, cut and state without torch, and the module that it
names, a `models.mixer.Mixer`. Everything else, in planning and in the modules, asks these two and
knows no type by its name.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from cdrmix.config.model import BLOCK_TYPES, ModelConfig
from cdrmix.config.model_parts import RoutingMambaConfig
from cdrmix.config.plugin import PluginConfig
from cdrmix.hooks.plugin import make_plugin
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.parameter import Parameter

FLOAT32_BYTES = 4
WKVForm = Literal["fla", "chunked", "cpp"]
# What computes between a block's matrix products. operators: PyTorch's, one by one; own: the
# kernels of `models`, in Triton on GPUs and in C++ on CPUs; compiled: those of torch.compile.
BlockKernels = Literal["operators", "own", "compiled"]
# Exchange of a mixer between sequence ranks. whole: none; heads: tokens for heads, all-to-all;
# state: each rank runs its own tokens, and their effect on the state is gathered.
SequenceForm = Literal["whole", "heads", "state"]


@dataclass(frozen=True)
class PerToken:
    """Bytes saved per token."""

    whole: float  # of tensors that every tensor rank has in full
    split: float = 0.0  # of heads, inner features or routed rows, which are split over tensor ranks

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(self.whole + other.whole, self.split + other.split)

    def on(self, degrees: Degrees) -> float:
        """Bytes per token on one rank."""
        return self.whole + self.split / degrees.tensor


@dataclass(frozen=True)
class Moved:
    """Memory traffic of a part of a model on a GPU: bytes per token that its kernels read and
    write, matrix products left out, and the number of all its kernels."""

    forward: PerToken
    backward: PerToken
    forward_kernels: int
    backward_kernels: int

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )


@dataclass(frozen=True)
class Setting:
    """Properties of a run, the same in every layout, that bytes of a block depend on."""

    model: ModelConfig
    sequence_length: int  # tokens of a sample
    element_bytes: int  # of an activation
    device: Literal["cuda", "cpu"]
    wkv: WKVForm  # implementation of the WKV-7 op
    segments_documents: bool  # True if documents in a sample are kept apart
    # True of tokens that are some of their sample, each row others; `sequence_length` counts them
    is_gathered: bool = False
    kernels: BlockKernels = "operators"

    def uncompiled(self) -> Setting:
        """Setting of what training.compile leaves out: with our own kernels, where they run.

        Those in C++ take float32, and are there where that of the recurrence is; Triton comes with
        torch's builds for GPUs.
        """
        is_cpp = self.wkv == "cpp" and self.element_bytes == FLOAT32_BYTES
        return replace(self, kernels="own" if self.device == "cuda" or is_cpp else "operators")

    @property
    def is_compiled(self) -> bool:
        """True where torch.compile makes the kernels of a block."""
        return self.kernels == "compiled"

    @property
    def runs_cpp(self) -> bool:
        """True where kernels of models/rwkv7_cpu.cpp and block_cpu.cpp run."""
        return self.kernels == "own" and self.device == "cpu"

    @property
    def runs_triton(self) -> bool:
        """True where kernels of models/expert_rows_triton.py run."""
        return self.kernels == "own" and self.device == "cuda"

    @property
    def runs_own(self) -> bool:
        """True where kernels of `models` run, which save their inputs and nothing between."""
        return self.kernels == "own"


# Bytes moved for each byte that is saved, where nothing else is known, and kernels. Of blocks that
# tell, with dense feed-forwards: attention 3.4 and 4.1, RWKV-7 2.8 and 7.2.
_FORWARD_OF_SAVED, _BACKWARD_OF_SAVED = 3.0, 5.0
_KERNELS_OF_UNKNOWN = (50, 100)


def moved_by_saved(saved: PerToken) -> Moved:
    """Memory traffic estimated from the bytes that a part saves for its backward pass."""

    def times(factor: float) -> PerToken:
        return PerToken(factor * saved.whole, factor * saved.split)

    return Moved(times(_FORWARD_OF_SAVED), times(_BACKWARD_OF_SAVED), *_KERNELS_OF_UNKNOWN)


class BlockType(ABC):
    """Planning half of a block type.

    Byte counts of exchanges are those that a rank receives in a forward pass, its own part
    included; a backward pass receives as many.
    """

    # path of the module's class, MODULE:CLASS
    module: ClassVar[str]
    # True if the feed-forward is behind a token shift (RWKV's channel mixing)
    shifts_channels: ClassVar[bool] = False
    # True if the first block of the type makes v_first, which all later blocks are handed
    passes_v_first: ClassVar[bool] = False
    # True if tokens can be run span by span from a state of a fixed size
    carries_state: ClassVar[bool] = False
    # linear layers of the mixer that plastic adapters are attached to, by name
    adapted: ClassVar[tuple[str, ...]] = ()
    # axes of parallelism that the type cannot run on yet, each with the reason
    refused_axes: ClassVar[Mapping[str, str]] = {}
    # of a user's type: what model.mixer_options may give it
    Options: ClassVar[type[BaseModel] | None] = None

    def __init__(self, options: Any = None) -> None:
        self.options = options  # instance of `Options`, checked

    @abstractmethod
    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        """Parameters of the mixer in the order of the module, named from the block on
        (`mixer.key.weight`), each with its cut over tensor ranks."""

    @abstractmethod
    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        """Forward FLOPs per token, without those of the matrices among the parameters."""

    @abstractmethod
    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Bytes saved for the backward pass by the mixer, its input (the norm's output) included,
        the norm and the residual stream left out."""

    def saved_per_sample(self, setting: Setting, layout: Layout, form: SequenceForm) -> float:
        """Bytes of a micro-batch saved by the mixer independently of its rank's tokens."""
        return 0.0

    def saved_once(self, setting: Setting) -> int:
        """Bytes saved by a mixer that all layers of the type, and all micro-batches, share."""
        return 0

    def kept(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Bytes of `saved` that selective recomputation keeps (models/rebuild.py): by default all
        but the input, which the norm gives again."""
        saved = self.saved(setting, layer, form)
        return PerToken(
            saved.whole - setting.element_bytes * setting.model.hidden_size, saved.split
        )

    def rebuilt(self, setting: Setting, layer: int, form: SequenceForm) -> tuple[PerToken, ...]:
        """Bytes that it has made again at each moment of the backward pass that may have most."""
        return (rebuilt_norm(setting),)

    def span_state(self, setting: Setting) -> PerToken:
        """Bytes of a sample saved at the border of two recomputed spans, if a state is carried."""
        assert not self.carries_state, "a type that carries a state tells its size"
        return PerToken(0)

    def moved(self, setting: Setting, layer: int, form: SequenceForm) -> Moved:
        """Memory traffic of the mixer, without the norm before it and the residual sum behind.

        A type that does not tell moves what attention and RWKV-7 move for each byte that they save:
        three forward, five backward.
        """
        saved = self.saved(setting, layer, form)
        return moved_by_saved(saved)

    def moved_by_shift(self, setting: Setting) -> Moved:
        """Memory traffic of the shift before the feed-forward, of a type that has one."""
        size = 2 * setting.element_bytes * setting.model.hidden_size
        return moved_by_saved(PerToken(size))

    def workspace(self, setting: Setting) -> int:
        """Bytes per token of temporary gradients in the mixer's backward pass."""
        return 12 * setting.model.hidden_size * setting.element_bytes

    def router_sizes(self, model: ModelConfig) -> RoutingMambaConfig | None:
        """Sizes of the mixer's router; None: it has none."""
        return None

    def heads_bytes(self, model: ModelConfig, tokens: int, element_bytes: int) -> int | None:
        """Bytes of a layer's exchange of heads for `tokens` tokens; None: heads cannot be split."""
        return None

    def states_bytes(self, model: ModelConfig, samples: int, sequence: int) -> int | None:
        """Bytes of a layer's states gathered from `sequence` ranks; None: none can be passed."""
        return None

    def is_exchanged(self, model: ModelConfig) -> bool:
        """True if sequence ranks exchange what the mixer reads of other tokens, in either form."""
        forms = (self.heads_bytes(model, 1, 1), self.states_bytes(model, 1, 2))
        return any(form is not None for form in forms)

    def state_form_flops(self, model: ModelConfig) -> int:
        """Further forward FLOPs per token where states are passed between sequence ranks."""
        return 0

    def halo_values(self, model: ModelConfig) -> int:
        """Values of a sample that a block takes from the sequence rank before, in each pass."""
        return 0

    def sequence_form(
        self, model: ModelConfig, *, sequence_length: int, sequence: int, element_bytes: int
    ) -> SequenceForm:
        """Form that exchanges fewer bytes when `sequence` ranks share a sample."""
        # one sample decides, as both forms grow with the number of samples
        if sequence == 1:
            return "whole"
        by_heads = self.heads_bytes(model, sequence_length // sequence, element_bytes)
        by_state = self.states_bytes(model, 1, sequence)
        if by_state is None:
            return "heads"
        return "state" if by_heads is None or by_state < by_heads else "heads"

    def module_class(self) -> Any:
        """Class of the module; imports torch."""
        return _found(self.module)


def rebuilt_norm(setting: Setting) -> PerToken:
    """Bytes of a norm that is computed again: its output, and what it saves for its own gradient.

    On CPUs torch composes it: of the normalised input, in 16 bits of that and the input in float32.
    """
    width = setting.model.hidden_size
    inside = 4.0
    if setting.runs_cpp:
        inside = 0
    elif setting.device == "cpu":
        wide = 1 if setting.element_bytes == FLOAT32_BYTES else 2
        inside += FLOAT32_BYTES * wide * width
    return PerToken(setting.element_bytes * width + inside)


def block_type(name: str, model: ModelConfig | None = None) -> BlockType:
    """Block type of a name: a registered one, or a user's with its options of `model`.

    Raises ConfigError if a user's class cannot be imported, lacks a part or refuses its options.
    """
    options = {} if model is None else model.mixer_options.get(name, {})
    return _made(name, json.dumps(options, sort_keys=True) if options else "{}")


@cache
def _made(name: str, options: str) -> BlockType:
    if name not in BLOCK_TYPES:
        plugin = PluginConfig(use=name, options=json.loads(options))
        keys = ("mixers", f"mixer_options.{name}")
        return make_plugin(plugin, BlockType, where="model", keys=keys)
    found = _found(BLOCK_TYPES[name])
    assert issubclass(found, BlockType), f"{BLOCK_TYPES[name]} is no block type"
    made: BlockType = found()
    return made


def block_types(model: ModelConfig) -> list[BlockType]:
    """Block type of each layer from the input."""
    return [block_type(kind, model) for kind in model.layer_kinds()]


def layer_type(model: ModelConfig, layer: int) -> BlockType:
    """Block type of a layer, from 0 at the input."""
    return block_type(model.layer_kinds()[layer], model)


def is_v_first_made(model: ModelConfig, layer: int) -> bool:
    """True if a block before `layer` makes v_first."""
    return any(block_type(kind, model).passes_v_first for kind in model.layer_kinds()[:layer])


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
