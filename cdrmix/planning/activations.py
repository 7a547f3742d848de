"""Bytes of activations that autograd saves for the backward pass, per token and per rank.

The figures follow the code of `models` and `objectives`, operation by operation; a tensor that two
operations save is counted once. tests/parity/test_memory.py compares them with torch's saved-tensor
hooks. Blocks are stored, recomputed whole, or recomputed in spans of tokens (models/recompute.py).

Letters: D hidden, H heads, K head dim, V value dim, F inner width, B samples, T tokens of a sample.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from cdrmix.config.schema import Config
from cdrmix.planning.layout import (
    ELEMENT_BYTES,
    Degrees,
    Layout,
    SequenceForm,
    sequence_form,
    stage_layers,
)

WKVForm = Literal["fla", "chunked", "cpp"]
BlockKind = Literal["rwkv", "first_rwkv", "transformer"]  # the first RWKV block creates v_first
# Tokens between the states that the C++ recurrence stores: TILE in models/wkv7_cpu.cpp.
CPP_TILE_TOKENS = 32


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


class SavedActivations:
    """Activation memory of one configuration; results that no layout changes are cached.

    Without `wkv` the form of the WKV-7 op is the one that models/wkv7.py would choose.
    """

    def __init__(
        self, config: Config, device: Literal["cuda", "cpu"], wkv: WKVForm | None = None
    ) -> None:
        self.model = config.model
        self.training = config.training
        self.device = device
        self.element_bytes = ELEMENT_BYTES[config.training.precision]
        if wkv is None:
            on_gpu: WKVForm = "chunked" if config.training.precision == "fp32" else "fla"
            wkv = "cpp" if device == "cpu" else on_gpu
        self.wkv = wkv
        self._segments_documents = config.data.segment_documents
        self._block_kinds: list[BlockKind] = list(self.model.layer_kinds())
        self._has_rwkv = "rwkv" in self._block_kinds
        if self._has_rwkv:
            self._block_kinds[self._block_kinds.index("rwkv")] = "first_rwkv"
        self._stream = self.element_bytes * self.model.hidden_size  # of one token
        # RMSNorm saves its input and one float32 a row; on CPU torch composes it of operations that
        # save input and normalised input, both in float32
        kept = 2 * 4 * self.model.hidden_size if device == "cpu" else self._stream
        self._norm = PerToken(kept + 4)
        # blocks of each pipeline stage by their number, as `parallel/pipeline.py` builds them
        length = self.training.sequence_length
        self.stages = cache(partial(stage_layers, self.model, length))
        self._halves_of = cache(self._halves)

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        return layout.micro_batch_size * self.training.sequence_length // layout.degrees.sequence

    def sequence_form(self, degrees: Degrees) -> SequenceForm:
        """Exchange by which a recurrence crosses sequence ranks."""
        return sequence_form(
            self.model,
            sequence_length=self.training.sequence_length,
            sequence=degrees.sequence,
            element_bytes=self.element_bytes,
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
        if stage == 0:
            token_ids = PerToken(8)
            total += in_flight * (self._norm + token_ids).on(degrees) * tokens
        if stage == degrees.pipeline - 1:
            # the loss forms the gradients of the embedding (float32) and of the hidden states
            # already in its forward pass
            total += 4 * self.model.vocab_size * self.model.hidden_size / degrees.tensor
            total += (self._norm + PerToken(self._stream)).on(degrees) * tokens
        return int(total)

    def in_flight(self, layout: Layout, stage: int) -> int:
        """Micro-batches whose activations a stage holds at a time.

        Under the 1F1B schedule a stage starts as many as there are stages from it to the end.
        """
        return min(layout.degrees.pipeline - stage, layout.gradient_accumulation_steps)

    def of_blocks(self, layout: Layout, stage: int) -> float:
        """Bytes of one micro-batch in the blocks of a stage, without recomputation."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        total = 0.0
        layers = self.stages(degrees.pipeline)[stage]
        for kind, number in Counter(self._block_kinds[layer] for layer in layers).items():
            mixer, feed_forward = self._halves_of(kind, self.sequence_form(degrees))
            per_token = (mixer + feed_forward).on(degrees) * tokens
            total += number * (per_token + self._per_sample(kind, layout))
        return total

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that separates the documents of a sample in one attention layer.

        Its shape is [B, 1, T, T] in the type of the activations, over all tokens of a sample on
        every rank: neither tensor nor sequence ranks split it.
        """
        pairs = layout.micro_batch_size * self.training.sequence_length**2
        return self.element_bytes * pairs if self._segments_documents else 0

    def routed_row(self) -> int:
        """Bytes saved for one row sent to an expert: input, both inner activations, output."""
        assert self.model.moe is not None, "a dense model has no router"
        return self.element_bytes * 2 * (self.model.hidden_size + self.model.moe.expert_hidden_size)

    def _recomputed(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Bytes with activation checkpointing: block inputs of one micro-batch, and the largest
        unit while it is recomputed (a block, a span of it, or its mixer and a span of the rest)."""
        degrees = layout.degrees
        form = self.sequence_form(degrees)
        tokens = self.tokens(layout)
        spans, span = self.spans(layout)
        stream = self._stream
        # The norm reads the block's input, which is counted already, unless torch's CPU norm
        # saves a float32 copy of it.
        copies_input = self.device == "cpu" and self.element_bytes < 4
        twice = 0 if copies_input else stream
        # An RWKV block saves at each span but the first: the recurrent state in float32 and the
        # last input of both halves.
        state = PerToken(2 * stream, 4 * self.model.head_dim * self.model.hidden_size)
        states = state.on(degrees) * ((spans - 1) * layout.micro_batch_size)
        inputs = unit = 0.0
        layers = self.stages(degrees.pipeline)[stage]
        for kind, number in Counter(self._block_kinds[layer] for layer in layers).items():
            mixer, feed_forward = (half.on(degrees) for half in self._halves_of(kind, form))
            per_sample = self._per_sample(kind, layout)
            inputs += number * stream * tokens
            if spans == 1:
                unit = max(unit, (mixer + feed_forward - twice) * tokens + per_sample)
            elif kind != "transformer" and form == "whole":
                inputs += number * states
                unit = max(unit, (mixer + feed_forward - twice) * span)
            else:  # the mixer reads all tokens at once; its output is the feed-forward's input
                mixed = (mixer - twice + stream) * tokens + per_sample
                unit = max(unit, mixed + (feed_forward - twice) * span)
        return inputs, unit

    def _halves(self, kind: BlockKind, form: SequenceForm) -> tuple[PerToken, PerToken]:
        """Mixer and feed-forward of a block, each with its norm and residual input."""
        model = self.model
        size = self.element_bytes
        width = model.hidden_size
        shift = PerToken(0)
        if kind == "transformer":
            # query, key, value, output and one float32 a head, as flash attention saves them
            kv_width = model.num_kv_heads * model.head_dim
            outputs = 1 if form == "whole" else 2  # also before heads are exchanged for tokens
            per_head = size * ((1 + outputs) * width + 2 * kv_width) + 4 * model.num_heads
            mixer = PerToken(size * width, per_head)
        else:
            mixer = self._time_mix(form, creates_v_first=kind == "first_rwkv")
            shift = PerToken(size * 2 * width)  # input of the feed-forward and its shift
        moe = model.moe
        if moe is None:
            feed_forward = shift + PerToken(size * width, size * 2 * model.ffn_hidden_size)
        else:
            # router: float32 input and logits, and indices (40 bytes for each of the top-k choices)
            router = 4 * width + 8 * moe.num_experts + 8 + 40 * moe.top_k
            # each tensor rank routes its share of the tokens
            feed_forward = shift + PerToken(0, router + moe.top_k * self.routed_row())
        return self._norm + mixer, self._norm + feed_forward

    def _time_mix(self, form: SequenceForm, *, creates_v_first: bool) -> PerToken:
        size = self.element_bytes
        width = self.model.hidden_size
        heads = self.model.num_heads
        ranks = self.model.low_rank_sizes()
        hidden_ranks = (
            ranks.decay + ranks.iclr + ranks.gate + (0 if creates_v_first else ranks.value)
        )
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
        if self.wkv == "cpp":  # all in float32: six inputs, S a, one state for each tile
            apart = 3 if size < 4 else apart
            states = 4 * values * width * self.model.head_dim / CPP_TILE_TOKENS
            wkv = (5 + 2 * values) * 4 * width + states + apart * size * width + passing
        elif self.wkv != "fla":  # which recomputes the rest
            wkv += 2 * 4 * values * width  # states around blocks: at most 2 V floats a token
        return PerToken(whole, per_head + wkv)

    def _per_sample(self, kind: BlockKind, layout: Layout) -> float:
        """Bytes that a mixer saves independently of its rank's tokens.

        Attention saves cosine and sine of all positions and the mask of documents; a recurrence
        over sequence ranks saves the states that it combines: those entering each rank, the stacked
        ones, and the gathered ones where they are read.
        """
        degrees = layout.degrees
        model = self.model
        size = self.element_bytes
        if kind == "transformer":
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
