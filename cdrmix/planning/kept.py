"""Bytes that autograd keeps on a rank: figures per token over blocks and micro-batches.

Blocks are kept, recomputed whole, or recomputed in spans of tokens, as models/recompute.py does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from cdrmix.config.model import LayerKind
from cdrmix.config.schema import Config
from cdrmix.planning import activations
from cdrmix.planning.activations import Halves, Numerics
from cdrmix.planning.layout import Degrees, Layout
from cdrmix.planning.sequence import SequenceForm, sequence_form


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
        self.model, self.training, self.numerics = config.model, config.training, numerics
        self._segments_documents = config.data.segment_documents
        kinds = self.model.layer_kinds()
        first_rwkv = kinds.index("rwkv") if "rwkv" in kinds else None
        self._has_rwkv = first_rwkv is not None
        self._block_kinds = [BlockKind(kind, i == first_rwkv) for i, kind in enumerate(kinds)]
        self._stages = stages
        self._before = activations.before_blocks(self.model, numerics)
        self._after = activations.after_blocks(self.model, numerics)
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
        degrees, tokens = layout.degrees, self.tokens(layout)
        in_flight = self.in_flight(layout, stage)
        border = activations.border(self.model, self.numerics)
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
        degrees, tokens = layout.degrees, self.tokens(layout)
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
        degrees, tokens = layout.degrees, self.tokens(layout)
        spans, span = self.spans(layout), self.span_tokens(layout)
        border = activations.border(self.model, self.numerics)
        # what is recomputed reads its border, unless its norm copies it
        twice = 0 if self.numerics.norm_copies_input else border
        carried = activations.carried_state(self.model, self.numerics).on(degrees.tensor)
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
            self._halves[kind, form] = activations.block(
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
            a_position = activations.rotary_angles(self.model, self.numerics)
            return a_position * self.training.sequence_length + self.segment_mask(layout)
        if self.sequence_form(degrees) != "state":
            return 0.0
        kept = activations.passed_states(self.model, self.numerics, degrees.sequence)
        return kept * layout.micro_batch_size / degrees.tensor
