"""Bytes that autograd keeps of a forward pass, per token, from what each operation saves.

Read off the code of `models` and `objectives`, operation by operation; held against torch's
saved-tensor hooks in tests/parity/test_memory.py. What two operations save is counted once.

Letters: D hidden, H heads, K head dim, F inner width, E experts, k experts per token.

Bytes that autograd keeps on a rank: figures per token over blocks and micro-batches.

Blocks are kept, recomputed whole, or recomputed in spans of tokens, as models/recompute.py does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cdrmix.config.model import LayerKind, ModelConfig
from cdrmix.config.schema import Config
from cdrmix.planning.layout import Degrees, Layout, SequenceForm, sequence_form

WKVForm = Literal["fla", "chunked", "cpp"]
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Tokens between the states that the C++ recurrence keeps: TILE in models/wkv7_cpu.cpp.
CPP_TILE_TOKENS = 32


@dataclass(frozen=True)
class PerToken:
    """Bytes kept per token.

    Attributes:
        whole: on every tensor rank alike.
        split: of heads, inner features or routed rows, which tensor ranks share out.
    """

    whole: float
    split: float = 0.0

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(self.whole + other.whole, self.split + other.split)

    def on(self, tensor: int) -> float:
        """Bytes per token on one of `tensor` ranks."""
        return self.whole + self.split / tensor


@dataclass(frozen=True)
class Numerics:
    """Settings that decide how an operation is computed, and so what is saved for backward.

    Attributes:
        element_bytes: of weights and activations.
        device: on CPU, torch composes RMSNorm of float32 operations that keep two copies.
        wkv: form of the WKV-7 op.
    """

    element_bytes: int
    device: Literal["cuda", "cpu"]
    wkv: WKVForm

    @classmethod
    def of(
        cls, precision: str, device: Literal["cuda", "cpu"], wkv: WKVForm | None = None
    ) -> Numerics:
        """Numerics of a run; the WKV-7 form as `models/wkv7.py` chooses it where all are there."""
        half = precision != "fp32"
        if wkv is None:
            wkv = "cpp" if device == "cpu" else "fla" if half else "chunked"
        return cls(ELEMENT_BYTES[precision], device, wkv)

    @property
    def norm_copies_input(self) -> bool:
        """True if RMSNorm saves a float32 copy of its input rather than the input."""
        return self.device == "cpu" and self.element_bytes < 4


def rms_norm(model: ModelConfig, numerics: Numerics) -> PerToken:
    """RMSNorm: its input and one float32 a row; on CPU also the normalised input, in float32."""
    if numerics.device == "cpu":
        return PerToken(2 * 4 * model.hidden_size + 4)
    return PerToken(numerics.element_bytes * model.hidden_size + 4)


@dataclass(frozen=True)
class Halves:
    """A block's two halves, each with its norm and the residual stream that this reads."""

    mixer: PerToken
    feed_forward: PerToken


def block(
    model: ModelConfig,
    kind: LayerKind,
    *,
    creates_v_first: bool,
    numerics: Numerics,
    form: SequenceForm,
) -> Halves:
    """One block. v_first is kept by the layer that creates it, and counted there."""
    norm = rms_norm(model, numerics)
    mixer = (
        _attention(model, numerics, form)
        if kind == "transformer"
        else _time_mix(model, creates_v_first, numerics, form)
    )
    return Halves(norm + mixer, norm + _feed_forward(model, kind, numerics))


def rotary_angle_elements(model: ModelConfig, numerics: Numerics) -> int:
    """Cosine and sine of a position, whatever the number of samples."""
    return 2 * numerics.element_bytes * model.head_dim


def passed_states(model: ModelConfig, numerics: Numerics, sequence: int) -> float:
    """Bytes saved of a sample to pass the state between `sequence` ranks.

    They are the states that enter each rank, as they were combined and as they were stacked, and
    what was gathered, if it is read.
    """
    state = 4 * model.head_dim * model.hidden_size
    gathered = 2 * sequence * state if sequence > 2 else 0  # of two ranks, the first adds to zero
    stacked = sequence * state
    if numerics.element_bytes < 4:  # read in that type
        stacked = numerics.element_bytes * model.head_dim * model.hidden_size
    return (sequence - 1) * state + stacked + gathered


def carried_state(model: ModelConfig, numerics: Numerics) -> PerToken:
    """Bytes saved of an RWKV block where a recomputed span begins, for each sample: the
    recurrent state and the last inputs of both halves. Not per token but per border."""
    last = numerics.element_bytes * model.hidden_size
    return PerToken(2 * last, 4 * model.head_dim * model.hidden_size)


def before_blocks(model: ModelConfig, numerics: Numerics) -> PerToken:
    """Token ids and embedding norm."""
    return rms_norm(model, numerics) + PerToken(8)


def after_blocks(model: ModelConfig, numerics: Numerics) -> PerToken:
    """Final norm, and the gradient of the hidden states that the loss forms in its forward pass."""
    return rms_norm(model, numerics) + PerToken(numerics.element_bytes * model.hidden_size)


def block_input_bytes(model: ModelConfig, numerics: Numerics) -> int:
    """Bytes per token that activation checkpointing saves of a block: its input."""
    return numerics.element_bytes * model.hidden_size


def _time_mix(
    model: ModelConfig, creates_v_first: bool, numerics: Numerics, form: SequenceForm
) -> PerToken:
    size = numerics.element_bytes
    width = model.hidden_size
    heads = model.num_heads
    ranks = model.low_rank_sizes()
    hidden_ranks = ranks.decay + ranks.iclr + ranks.gate + (0 if creates_v_first else ranks.value)
    # x, its shift, and the six mixes that the projections read
    whole = size * (8 * width + hidden_ranks)
    # k, kk, k * k_a, iclr - 1, iclr; y, r * k, y + bonus, gate, their product
    per_head = size * 10 * width
    if not creates_v_first:
        per_head += size * 2 * width  # v before the mix, and its share of v_first
    per_head += 4 * 2 * width  # sigmoid of the decay and k * k_k, float32
    per_head += 4 * 2 * heads + size * 3 * heads  # two norms of k; mean, deviation of y, bonus
    return PerToken(whole, per_head + _wkv(model, numerics, form))


def _wkv(model: ModelConfig, numerics: Numerics, form: SequenceForm) -> float:
    """The WKV-7 op's inputs, and what its form keeps besides."""
    size = numerics.element_bytes
    width = model.hidden_size
    values = 2 if form == "state" else 1  # V + K of them in place of V
    # of r, k and v, which the bonus keeps as they are: those that the op reads as another tensor
    apart = {"whole": 0, "heads": 3, "state": 1}[form]
    passing = size * width if form == "state" else 0  # what the entering state meets
    if numerics.wkv == "cpp":  # all in float32: six inputs, S a, a state for each tile
        apart = 3 if size < 4 else apart
        states = 4 * values * width * model.head_dim / CPP_TILE_TOKENS
        return (5 + 2 * values) * 4 * width + states + apart * size * width + passing
    inputs = (4 + values + apart) * size * width + 4 * width + passing
    if numerics.wkv == "fla":  # recomputes the rest
        return inputs
    return inputs + 2 * 4 * values * width  # states around blocks: at most 2 V floats a token


def _attention(model: ModelConfig, numerics: Numerics, form: SequenceForm) -> PerToken:
    """Flash attention keeps query, key, value, output and one float32 a head."""
    size = numerics.element_bytes
    width = model.hidden_size
    kv_width = model.num_kv_heads * model.head_dim
    outputs = 1 if form == "whole" else 2  # before it goes back to its tokens, and after
    per_head = size * ((1 + outputs) * width + 2 * kv_width) + 4 * model.num_heads
    return PerToken(size * width, per_head)


def _feed_forward(model: ModelConfig, kind: LayerKind, numerics: Numerics) -> PerToken:
    size = numerics.element_bytes
    width = model.hidden_size
    moe = model.moe
    shift = PerToken(size * 2 * width if kind == "rwkv" else 0)  # x and its shift
    if moe is None:
        return shift + PerToken(size * width, size * 2 * model.ffn_hidden_size)
    # float32 input and logits of the router, and indices: 40 bytes for each choice
    router = 4 * width + 8 * moe.num_experts + 8 + 40 * moe.top_k
    # tensor ranks share out the tokens that they route
    return shift + PerToken(0, router + moe.top_k * routed_row(model, numerics))


def routed_row(model: ModelConfig, numerics: Numerics) -> int:
    """Bytes kept for one row that reaches an expert: input, both inner activations, output."""
    assert model.moe is not None, "a dense model routes nothing"
    return numerics.element_bytes * 2 * (model.hidden_size + model.moe.expert_hidden_size)


class BlockKind(NamedTuple):
    """Properties of a block that its activations follow from."""

    kind: LayerKind
    creates_v_first: bool


class KeptActivations:
    """Activations of one configuration; what does not depend on the layout is computed once.

    Args:
        config: of the run.
        numerics: how operations are computed.
        stages: gives the blocks of each stage of a pipeline of so many.
    """

    def __init__(
        self, config: Config, numerics: Numerics, stages: Callable[[int], list[range]]
    ) -> None:
        self.model = config.model
        self.training = config.training
        self.numerics = numerics
        self._segments_documents = config.data.segment_documents
        kinds = self.model.layer_kinds()
        first_rwkv = kinds.index("rwkv") if "rwkv" in kinds else None
        self._has_rwkv = first_rwkv is not None
        self._block_kinds = [BlockKind(kind, i == first_rwkv) for i, kind in enumerate(kinds)]
        self._stages = stages
        self._before = before_blocks(self.model, numerics)
        self._after = after_blocks(self.model, numerics)
        self._kinds_on: dict[tuple[int, int], Counter[BlockKind]] = {}
        self._halves: dict[tuple[BlockKind, SequenceForm], Halves] = {}

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        tokens = layout.micro_batch_size * self.training.sequence_length
        return tokens // layout.degrees.sequence

    def sequence_form(self, degrees: Degrees) -> SequenceForm:
        """Form in which a recurrence meets the tokens of other ranks."""
        return sequence_form(
            self.model,
            sequence_length=self.training.sequence_length,
            sequence=degrees.sequence,
            element_bytes=self.numerics.element_bytes,
        )

    def spans(self, layout: Layout) -> int:
        """Spans in which a rank's part of a sample is recomputed."""
        part = self.training.sequence_length // layout.degrees.sequence
        return -(-part // (layout.sequence_checkpoint_tokens or part))

    def span_tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch in the longest of its spans."""
        part = self.tokens(layout) // layout.micro_batch_size
        span = min(layout.sequence_checkpoint_tokens or part, part)
        return span * layout.micro_batch_size

    def on_stage(self, layout: Layout, stage: int) -> int:
        """Bytes of the micro-batches that are in flight at a stage."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        in_flight = self.in_flight(layout, stage)
        border = block_input_bytes(self.model, self.numerics)
        v_first = border // degrees.tensor * tokens if self._has_rwkv else 0
        if layout.activation_checkpointing:
            borders, unit = self._recomputed(layout, stage)
            total = in_flight * (borders + v_first) + unit
        else:
            # v_first counts with the block that makes it, or is received
            total = in_flight * (self.of_blocks(layout, stage) + (v_first if stage else 0))
        if stage == 0:
            total += in_flight * self._before.on(degrees.tensor) * tokens
        if stage == degrees.pipeline - 1:
            # the loss forms the embedding's gradient, float32, in its forward pass
            total += 4 * self.model.vocab_size * self.model.hidden_size / degrees.tensor
            total += self._after.on(degrees.tensor) * tokens
        return int(total)

    def in_flight(self, layout: Layout, stage: int) -> int:
        """Micro-batches of which a stage keeps activations: one forward, one backward in turn, as
        many are started as stages follow, this one included."""
        started = layout.degrees.pipeline - stage
        return min(started, layout.gradient_accumulation_steps)

    def of_blocks(self, layout: Layout, stage: int) -> float:
        """Bytes that the blocks of a stage keep of a micro-batch, none of them recomputed."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        total = 0.0
        for kind, number in self.kinds_on(degrees.pipeline, stage).items():
            halves = self._block(kind, degrees)
            kept = (halves.mixer + halves.feed_forward).on(degrees.tensor) * tokens
            total += number * (kept + self._besides(kind, layout))
        return total

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that keeps documents apart in one attention.

        It is [B, 1, T, T] in the type of the activations, of all tokens of a sample, whatever ranks
        share its heads or tokens.
        """
        if not self._segments_documents:
            return 0
        pairs = layout.micro_batch_size * self.training.sequence_length**2
        return self.numerics.element_bytes * pairs

    def _recomputed(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Bytes that recomputed blocks of a stage keep of a micro-batch, and those of the largest
        unit while it is recomputed: a block, a span of it, or its mixer with a span of the rest."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        spans = self.spans(layout)
        span = self.span_tokens(layout)
        border = block_input_bytes(self.model, self.numerics)
        # what is recomputed reads its border, unless its norm copies it
        twice = 0 if self.numerics.norm_copies_input else border
        carried = carried_state(self.model, self.numerics).on(degrees.tensor)
        carried *= (spans - 1) * layout.micro_batch_size
        borders = unit = 0.0
        for kind, number in self.kinds_on(degrees.pipeline, stage).items():
            halves = self._block(kind, degrees)
            mixer, feed_forward = (
                half.on(degrees.tensor) for half in (halves.mixer, halves.feed_forward)
            )
            besides = self._besides(kind, layout)
            borders += number * border * tokens
            if spans == 1:
                unit = max(unit, (mixer + feed_forward - twice) * tokens + besides)
            elif kind.kind == "rwkv" and self.sequence_form(degrees) == "whole":
                borders += number * carried
                unit = max(unit, (mixer + feed_forward - twice) * span)
            else:  # the mixer sees all tokens at once, and leaves a border for the feed-forward
                mixed = (mixer - twice + border) * tokens + besides
                unit = max(unit, mixed + (feed_forward - twice) * span)
        return borders, unit

    def kinds_on(self, pipeline: int, stage: int) -> Counter[BlockKind]:
        """Number of blocks of each kind on a stage."""
        key = (pipeline, stage)
        if key not in self._kinds_on:
            here = self._stages(pipeline)[stage]
            self._kinds_on[key] = Counter(self._block_kinds[layer] for layer in here)
        return self._kinds_on[key]

    def _block(self, kind: BlockKind, degrees: Degrees) -> Halves:
        form = self.sequence_form(degrees)
        if (kind, form) not in self._halves:
            self._halves[kind, form] = block(
                self.model,
                kind.kind,
                creates_v_first=kind.creates_v_first,
                numerics=self.numerics,
                form=form,
            )
        return self._halves[kind, form]

    def _besides(self, kind: BlockKind, layout: Layout) -> float:
        """Bytes kept of a mixer that are not per token here: rotary angles of all positions and the
        mask of documents, or the states that sequence ranks gather."""
        degrees = layout.degrees
        if kind.kind == "transformer":
            a_position = rotary_angle_elements(self.model, self.numerics)
            return a_position * self.training.sequence_length + self.segment_mask(layout)
        if self.sequence_form(degrees) != "state":
            return 0.0
        kept = passed_states(self.model, self.numerics, degrees.sequence)
        return kept * layout.micro_batch_size / degrees.tensor
