"""Bytes of activations that autograd saves for the backward pass, per token and per rank.

The figures follow the code of `models` and `objectives`, operation by operation; a tensor that two
operations save is counted once. tests/parity/test_memory.py compares them with torch's saved-tensor
hooks. Blocks are stored, recomputed whole, or recomputed in spans of tokens (models/recompute.py).

Letters: D hidden, H heads, K head dim, V value dim, F inner width, B samples, T tokens of a sample.
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
# Tokens between the states that the C++ recurrence stores: TILE in models/wkv7_cpu.cpp.
CPP_TILE_TOKENS = 32


@dataclass(frozen=True)
class PerToken:
    """Bytes saved per token.

    Attributes:
        whole: of tensors that every tensor rank has in full.
        split: of heads, inner features or routed rows, which are split over tensor ranks.
    """

    whole: float
    split: float = 0.0

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(self.whole + other.whole, self.split + other.split)

    def on(self, degrees: Degrees) -> float:
        """Bytes per token on one rank."""
        return self.whole + self.split / degrees.tensor


@dataclass(frozen=True)
class Numerics:
    """Settings that select the kernels, and with them the tensors saved for backward.

    Attributes:
        element_bytes: size of one weight or activation.
        device: on CPU, torch composes RMSNorm of float32 operations that save two copies.
        wkv: implementation of the WKV-7 op.
    """

    element_bytes: int
    device: Literal["cuda", "cpu"]
    wkv: WKVForm

    @classmethod
    def of(
        cls, precision: str, device: Literal["cuda", "cpu"], wkv: WKVForm | None = None
    ) -> Numerics:
        """Numerics of a run; without `wkv`, the form that models/wkv7.py would choose."""
        half = precision != "fp32"
        if wkv is None:
            wkv = "cpp" if device == "cpu" else "fla" if half else "chunked"
        return cls(ELEMENT_BYTES[precision], device, wkv)


def rms_norm(model: ModelConfig, numerics: Numerics) -> PerToken:
    """RMSNorm: input and one float32 a row; on CPU input and normalised input, both in float32."""
    if numerics.device == "cpu":
        return PerToken(2 * 4 * model.hidden_size + 4)
    return PerToken(numerics.element_bytes * model.hidden_size + 4)


@dataclass(frozen=True)
class Halves:
    """The two halves of a block, each with its norm and residual input."""

    mixer: PerToken
    feed_forward: PerToken


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
    # The WKV-7 op: its inputs, and the states that its implementation saves.
    values = 2 if form == "state" else 1  # V + K values a head in place of V
    # r, k and v are saved for the bonus as well: number of them that the op reads in a copy
    apart = {"whole": 0, "heads": 3, "state": 1}[form]
    passing = size * width if form == "state" else 0  # receptance, to apply the entering state
    wkv: float = (4 + values + apart) * size * width + 4 * width + passing
    if numerics.wkv == "cpp":  # all in float32: six inputs, S a, one state for each tile
        apart = 3 if size < 4 else apart
        states = 4 * values * width * model.head_dim / CPP_TILE_TOKENS
        wkv = (5 + 2 * values) * 4 * width + states + apart * size * width + passing
    elif numerics.wkv != "fla":  # which recomputes the rest
        wkv += 2 * 4 * values * width  # states around blocks: at most 2 V floats a token
    return PerToken(whole, per_head + wkv)


def routed_row(model: ModelConfig, numerics: Numerics) -> int:
    """Bytes saved for one row sent to an expert: input, both inner activations, output."""
    assert model.moe is not None, "a dense model has no router"
    return numerics.element_bytes * 2 * (model.hidden_size + model.moe.expert_hidden_size)


class BlockKind(NamedTuple):
    """Properties of a block that determine its activations."""

    kind: LayerKind
    creates_v_first: bool


class SavedActivations:
    """Activation memory of one configuration; results that no layout changes are cached.

    Args:
        config: of the run.
        numerics: kernels and element type.
        stages: function from a number of pipeline stages to the blocks of each.
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
        self._stream = numerics.element_bytes * self.model.hidden_size  # of one token
        self._kinds_on: dict[tuple[int, int], Counter[BlockKind]] = {}
        self._halves: dict[tuple[BlockKind, SequenceForm], Halves] = {}

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        tokens = layout.micro_batch_size * self.training.sequence_length
        return tokens // layout.degrees.sequence

    def sequence_form(self, degrees: Degrees) -> SequenceForm:
        """Exchange by which a recurrence crosses sequence ranks."""
        return sequence_form(
            self.model,
            sequence_length=self.training.sequence_length,
            sequence=degrees.sequence,
            element_bytes=self.numerics.element_bytes,
        )

    def spans(self, layout: Layout) -> tuple[int, int]:
        """Number of spans in which a rank recomputes its part of a sample, and the tokens of a
        micro-batch in the longest one."""
        part = self.training.sequence_length // layout.degrees.sequence
        span = min(layout.sequence_checkpoint_tokens or part, part)
        return -(-part // span), span * layout.micro_batch_size

    def on_stage(self, layout: Layout, stage: int) -> int:
        """Bytes of all micro-batches in flight at a stage."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        in_flight = self.in_flight(layout, stage)
        v_first = self._stream // degrees.tensor * tokens if self._has_rwkv else 0
        if layout.activation_checkpointing:
            inputs, unit = self._recomputed(layout, stage)
            total = in_flight * (inputs + v_first) + unit
        else:
            # v_first counts with the block that creates it, or is received from the stage before
            total = in_flight * (self.of_blocks(layout, stage) + (v_first if stage else 0))
        norm = rms_norm(self.model, self.numerics)
        if stage == 0:
            token_ids = PerToken(8)
            total += in_flight * (norm + token_ids).on(degrees) * tokens
        if stage == degrees.pipeline - 1:
            # the loss forms the gradients of the embedding (float32) and of the hidden states
            # already in its forward pass
            total += 4 * self.model.vocab_size * self.model.hidden_size / degrees.tensor
            total += (norm + PerToken(self._stream)).on(degrees) * tokens
        return int(total)

    def in_flight(self, layout: Layout, stage: int) -> int:
        """Micro-batches whose activations a stage holds at a time.

        Under the 1F1B schedule a stage starts as many as there are stages from it to the end.
        """
        started = layout.degrees.pipeline - stage
        return min(started, layout.gradient_accumulation_steps)

    def of_blocks(self, layout: Layout, stage: int) -> float:
        """Bytes of one micro-batch in the blocks of a stage, without recomputation."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        total = 0.0
        for kind, number in self.kinds_on(degrees.pipeline, stage).items():
            halves = self._halves_of(kind, degrees)
            per_token = (halves.mixer + halves.feed_forward).on(degrees) * tokens
            total += number * (per_token + self._per_sample(kind, layout))
        return total

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that separates the documents of a sample in one attention layer.

        Its shape is [B, 1, T, T] in the type of the activations, over all tokens of a sample on
        every rank: neither tensor nor sequence ranks split it.
        """
        if not self._segments_documents:
            return 0
        pairs = layout.micro_batch_size * self.training.sequence_length**2
        return self.numerics.element_bytes * pairs

    def kinds_on(self, pipeline: int, stage: int) -> Counter[BlockKind]:
        """Number of blocks of each kind on a stage."""
        key = (pipeline, stage)
        if key not in self._kinds_on:
            layers = self._stages(pipeline)[stage]
            self._kinds_on[key] = Counter(self._block_kinds[layer] for layer in layers)
        return self._kinds_on[key]

    def _recomputed(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Bytes with activation checkpointing: block inputs of one micro-batch, and the largest
        unit while it is recomputed (a block, a span of it, or its mixer and a span of the rest)."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        spans, span = self.spans(layout)
        stream = self._stream
        # The norm reads the block's input, which is counted already, unless torch's CPU norm
        # saves a float32 copy of it.
        copies_input = self.numerics.device == "cpu" and self.numerics.element_bytes < 4
        twice = 0 if copies_input else stream
        # An RWKV block saves at each span but the first: the recurrent state in float32 and the
        # last input of both halves.
        state = PerToken(2 * stream, 4 * self.model.head_dim * self.model.hidden_size)
        states = state.on(degrees) * ((spans - 1) * layout.micro_batch_size)
        inputs = unit = 0.0
        for kind, number in self.kinds_on(degrees.pipeline, stage).items():
            halves = self._halves_of(kind, degrees)
            mixer = halves.mixer.on(degrees)
            feed_forward = halves.feed_forward.on(degrees)
            per_sample = self._per_sample(kind, layout)
            inputs += number * stream * tokens
            if spans == 1:
                unit = max(unit, (mixer + feed_forward - twice) * tokens + per_sample)
            elif kind.kind == "rwkv" and self.sequence_form(degrees) == "whole":
                inputs += number * states
                unit = max(unit, (mixer + feed_forward - twice) * span)
            else:  # the mixer reads all tokens at once; its output is the feed-forward's input
                mixed = (mixer - twice + stream) * tokens + per_sample
                unit = max(unit, mixed + (feed_forward - twice) * span)
        return inputs, unit

    def _halves_of(self, kind: BlockKind, degrees: Degrees) -> Halves:
        form = self.sequence_form(degrees)
        if (kind, form) in self._halves:
            return self._halves[kind, form]
        model = self.model
        size = self.numerics.element_bytes
        width = model.hidden_size
        if kind.kind == "rwkv":
            mixer = _time_mix(model, kind.creates_v_first, self.numerics, form)
            shift = PerToken(size * 2 * width)  # input of the feed-forward and its shift
        else:
            # query, key, value, output and one float32 a head, as flash attention saves them
            kv_width = model.num_kv_heads * model.head_dim
            outputs = 1 if form == "whole" else 2  # also before heads are exchanged for tokens
            per_head = size * ((1 + outputs) * width + 2 * kv_width) + 4 * model.num_heads
            mixer = PerToken(size * width, per_head)
            shift = PerToken(0)
        moe = model.moe
        if moe is None:
            feed_forward = shift + PerToken(size * width, size * 2 * model.ffn_hidden_size)
        else:
            # router: float32 input and logits, and indices (40 bytes for each of the top-k choices)
            router = 4 * width + 8 * moe.num_experts + 8 + 40 * moe.top_k
            # each tensor rank routes its share of the tokens
            rows = moe.top_k * routed_row(model, self.numerics)
            feed_forward = shift + PerToken(0, router + rows)
        norm = rms_norm(model, self.numerics)
        self._halves[kind, form] = Halves(norm + mixer, norm + feed_forward)
        return self._halves[kind, form]

    def _per_sample(self, kind: BlockKind, layout: Layout) -> float:
        """Bytes that a mixer saves independently of its rank's tokens.

        Attention saves cosine and sine of all positions and the mask of documents; a recurrence
        over sequence ranks saves the states that it combines: those entering each rank, the stacked
        ones, and the gathered ones where they are read.
        """
        degrees = layout.degrees
        model = self.model
        size = self.numerics.element_bytes
        if kind.kind == "transformer":
            angles = 2 * size * model.head_dim * self.training.sequence_length
            return angles + self.segment_mask(layout)
        if self.sequence_form(degrees) != "state":
            return 0.0
        sequence = degrees.sequence
        state = 4 * model.head_dim * model.hidden_size
        gathered = 2 * sequence * state if sequence > 2 else 0  # of two ranks, the first adds to 0
        stacked = sequence * state
        if size < 4:  # the op reads the state in the type of the activations
            stacked = size * model.head_dim * model.hidden_size
        states = (sequence - 1) * state + stacked + gathered
        return states * layout.micro_batch_size / degrees.tensor
