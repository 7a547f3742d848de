"""Bytes of activations that autograd saves for the backward pass, per token and per rank.

The figures follow the code of `models` and `objectives`, operation by operation; a tensor that two
operations save is counted once. Those of a mixer are told by its block type (`blocks`).
tests/parity/test_memory.py compares them with torch's saved-tensor hooks. Blocks are stored,
recomputed whole, or recomputed in spans of tokens (models/recompute.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from cdrmix.config.model import ModelConfig
from cdrmix.config.schema import Config
from cdrmix.planning.blocks.attention import segment_mask_bytes
from cdrmix.planning.blocks.block_type import (
    BlockType,
    PerToken,
    SequenceForm,
    Setting,
    WKVForm,
    block_types,
    rebuilt_norm,
)
from cdrmix.planning.blocks.feed_forward import (
    kept_by_feed_forward,
    rebuilt_by_feed_forward,
    routed_row_bytes,
    saved_by_feed_forward,
)
from cdrmix.planning.counts import block_parameters
from cdrmix.planning.depth import saved_by_routing, setting_inside, share_of_tokens
from cdrmix.planning.layout import ELEMENT_BYTES, Degrees, Layout
from cdrmix.planning.stages import stage_layers


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
        self.setting = Setting(
            model=config.model,
            sequence_length=config.training.sequence_length,
            element_bytes=self.element_bytes,
            device=device,
            wkv=wkv,
            segments_documents=config.data.segment_documents,
            kernels="compiled",
        )
        if config.training.compile == "off":
            self.setting = self.setting.uncompiled()
        self.types = block_types(self.model)
        self._has_v_first = any(kind.passes_v_first for kind in self.types)
        self._like = _first_alike(config.model)
        self._stream = self.element_bytes * self.model.hidden_size  # of one token
        # RMSNorm saves its input and one float32 a row, that of models/block_cpu.cpp and a compiled
        # one its input; on CPU torch composes it of operations that save input and normalised
        # input, both in float32
        self._norm = PerToken(self._stream + 4)
        if self.setting.runs_cpp or self.setting.is_compiled:
            self._norm = PerToken(self._stream)
        elif device == "cpu":
            self._norm = PerToken(2 * 4 * self.model.hidden_size + 4)
        # The norm of a recomputed block reads its input, which is counted already, unless torch's
        # CPU norm saves a float32 copy of it.
        copies_input = device == "cpu" and self.element_bytes < 4
        self._twice = 0 if copies_input else self._stream
        # blocks of each pipeline stage by their number, as `parallel/pipeline.py` builds them
        length = self.training.sequence_length
        self.stages = cache(partial(stage_layers, self.model, length))
        self._halves_of = cache(self._halves)
        self._kept_of, self._rebuilt_of = cache(self._kept), cache(self._rebuilt)
        self._form_of = cache(self._form)
        self._bytes_on = cache(self._on_stage)

    def largest_exchange(self, layout: Layout) -> int:
        """Bytes of the largest message that sequence ranks exchange for a mixer."""
        largest = 0
        for kind, layer in {kind: n for n, kind in enumerate(self.types)}.items():
            if self.sequence_form(layer, layout.degrees) == "state":
                sequence = layout.degrees.sequence
                message = kind.states_bytes(self.model, layout.micro_batch_size, sequence)
            else:
                message = kind.heads_bytes(self.model, self.tokens(layout), self.element_bytes)
            largest = max(largest, message or 0)
        return largest

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        return layout.micro_batch_size * self.training.sequence_length // layout.degrees.sequence

    def sequence_form(self, layer: int, degrees: Degrees) -> SequenceForm:
        """Exchange of a block's mixer between sequence ranks."""
        return self._form_of(self.types[layer], degrees.sequence)

    def _form(self, kind: BlockType, sequence: int) -> SequenceForm:
        return kind.sequence_form(
            self.model,
            sequence_length=self.training.sequence_length,
            sequence=sequence,
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
        return self._bytes_on(layout.passes, stage)

    def _on_stage(self, layout: Layout, stage: int) -> int:
        degrees = layout.degrees
        tokens = self.tokens(layout)
        in_flight = self.in_flight(layout, stage)
        v_first = self._stream // degrees.tensor * tokens if self._has_v_first else 0
        is_last = stage == degrees.pipeline - 1
        further, unit_of_further = self._of_further_tokens(layout) if is_last else (0.0, 0.0)
        if layout.recomputes_blocks:
            inputs, unit = self._recomputed(layout, stage)
            unit = max(unit, unit_of_further)
            total = in_flight * (inputs + v_first) + unit
        else:
            # v_first counts with the block that creates it, or is received from the stage before
            total = in_flight * (self.of_blocks(layout, stage) + (v_first if stage else 0))
            total += self._shared(stage, degrees)
            if layout.activation_checkpointing == "selective":
                total += max(self._most_rebuilt(layout, stage), unit_of_further)
        if stage == 0:
            token_ids = PerToken(8)
            total += in_flight * (self._norm + token_ids).on(degrees) * tokens
        if is_last:
            # the loss forms the gradients of the embedding (float32) and of the hidden states
            # already in its forward pass
            total += 4 * self.model.vocab_size * self.model.hidden_size / degrees.tensor
            total += (self._norm + PerToken(self._stream)).on(degrees) * tokens
            total += further
        return int(total)

    def of_forward(self, layout: Layout, stage: int) -> int:
        """Most bytes of one micro-batch in a forward pass without gradients: of the largest block,
        no more than autograd would save of it, and what enters and leaves a block."""
        whole = replace(layout, sequence_checkpoint_tokens=None)
        _, unit = self._recomputed(whole, stage)
        around = 3 * self._stream * self.tokens(layout)  # input, v_first and output
        return int(unit) + around

    def _of_further_tokens(self, layout: Layout) -> tuple[float, float]:
        """Bytes of what predicts further tokens (`models/mtp.py`), with the gradients of what the
        head scores for them; and of one of its blocks while that is recomputed.

        It is computed with the loss, of one micro-batch at a time.
        """
        mtp = self.model.mtp
        if mtp is None:
            return 0.0, 0.0
        degrees = layout.degrees
        tokens = self.tokens(layout)
        further = mtp.num_tokens - 1
        gradients = PerToken(self._stream).on(degrees) * tokens * further
        if mtp.kind == "independent" and mtp.head == "linear":
            return gradients + self._stream * tokens, 0.0  # all maps have one input
        setting = replace(self.setting.uncompiled(), model=self.model.further_blocks())
        kind = block_types(setting.model)[-1]
        form = kind.sequence_form(
            setting.model,
            sequence_length=setting.sequence_length,
            sequence=degrees.sequence,
            element_bytes=self.element_bytes,
        )
        last = setting.model.num_layers - 1
        is_selective = layout.activation_checkpointing == "selective"
        if is_selective:
            block = self._kept_in(setting, kind, last, form, degrees)
        else:
            block = kind.saved(setting, last, form) + saved_by_feed_forward(setting, last)
            block += self._norm + self._norm
        of_block = block.on(degrees) * tokens
        of_block += kind.saved_per_sample(setting, layout, form)
        outside = self._norm
        if mtp.kind == "deepseek":
            # two norms more, the pair that is projected, and the ids of its tokens
            outside += self._norm + self._norm + PerToken(2 * self._stream + 8)
        total = gradients + further * outside.on(degrees) * tokens
        if mtp.kind == "deepseek":  # two norms read the output of a depth that has a next one
            total -= (further - 1) * self._twice * tokens
        if not layout.recomputes_blocks:
            again = self._rebuilt_in(setting, kind, last, form, degrees).on(degrees) * tokens
            return total + further * of_block, again if is_selective else 0.0
        of_block += kind.saved_once(setting) - self._twice * tokens
        return total + further * self._stream * tokens, of_block

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
        for layer, number in Counter(self._like[layer] for layer in layers).items():
            form = self.sequence_form(layer, degrees)
            if layout.activation_checkpointing == "selective":
                block = self._kept_of(layer, form, degrees)
            else:
                mixer, feed_forward = self._halves_of(layer, form)
                block = mixer + feed_forward
            taken = share_of_tokens(self.model, layer) * tokens
            inside = setting_inside(self.setting, layer)
            per_sample = self.types[layer].saved_per_sample(inside, layout, form)
            of_router = self._by_routing(layer, tokens, degrees)
            total += number * (block.on(degrees) * taken + per_sample + of_router)
        return total

    def _most_rebuilt(self, layout: Layout, stage: int) -> float:
        """Most bytes of one block of a stage that are made again at a time."""
        degrees = layout.degrees
        most = 0.0
        for layer in {self._like[layer] for layer in self.stages(degrees.pipeline)[stage]}:
            form = self.sequence_form(layer, degrees)
            share = share_of_tokens(self.model, layer)
            most = max(most, share * self._rebuilt_of(layer, form, degrees).on(degrees))
        return most * self.tokens(layout)

    def _kept(self, layer: int, form: SequenceForm, degrees: Degrees) -> PerToken:
        """Bytes of a block that selective recomputation keeps."""
        return self._kept_in(self.setting, self.types[layer], layer, form, degrees)

    def _rebuilt(self, layer: int, form: SequenceForm, degrees: Degrees) -> PerToken:
        """Most bytes of a block that it has made again at a time."""
        return self._rebuilt_in(self.setting, self.types[layer], layer, form, degrees)

    def _kept_in(
        self, setting: Setting, kind: BlockType, layer: int, form: SequenceForm, degrees: Degrees
    ) -> PerToken:
        inputs = PerToken(2 * self._stream)  # of both norms
        feed_forward = kept_by_feed_forward(setting, layer, degrees)
        return inputs + kind.kept(setting, layer, form) + feed_forward

    def _rebuilt_in(
        self, setting: Setting, kind: BlockType, layer: int, form: SequenceForm, degrees: Degrees
    ) -> PerToken:
        entering = rebuilt_norm(setting)
        if kind.shifts_channels:
            entering += PerToken(self._stream)
        feed_forward = rebuilt_by_feed_forward(setting, layer, degrees, entering)
        moments = (*kind.rebuilt(setting, layer, form), feed_forward)
        return max(moments, key=lambda each: each.on(degrees))

    def _shared(self, stage: int, degrees: Degrees) -> int:
        """Bytes that the layers of a stage share with others of their type."""
        routed = self.model.routed_layers()
        kinds = {self.types[n] for n in self.stages(degrees.pipeline)[stage] if n not in routed}
        mtp = self.model.mtp
        if stage == degrees.pipeline - 1 and mtp is not None and mtp.has_blocks:
            kinds.add(block_types(self.model.further_blocks())[-1])
        return sum(kind.saved_once(self.setting) for kind in kinds)

    def _by_routing(self, layer: int, tokens: int, degrees: Degrees) -> float:
        """Bytes that Mixture of Depths saves around a block of a micro-batch of `tokens`."""
        if layer not in self.model.routed_layers():
            return 0.0
        copies, row, taken = saved_by_routing(self.setting, layer)
        return copies + (row + share_of_tokens(self.model, layer) * taken.on(degrees)) * tokens

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that separates the documents of a sample in one attention layer."""
        return segment_mask_bytes(self.setting, layout)

    def routed_row(self) -> int:
        """Bytes saved for one row sent to an expert: input, inner activations, output."""
        return routed_row_bytes(self.setting)

    def _recomputed(self, layout: Layout, stage: int) -> tuple[float, float]:
        """Bytes with activation checkpointing: block inputs of one micro-batch, and the largest
        unit while it is recomputed (a block, a span of it, or its mixer and a span of the rest)."""
        degrees = layout.degrees
        tokens = self.tokens(layout)
        spans, span = self.spans(layout)
        stream, twice = self._stream, self._twice
        borders = (spans - 1) * layout.micro_batch_size
        inputs = unit = 0.0
        layers = self.stages(degrees.pipeline)[stage]
        for layer, number in Counter(self._like[layer] for layer in layers).items():
            kind = self.types[layer]
            form = self.sequence_form(layer, degrees)
            mixer, feed_forward = (half.on(degrees) for half in self._halves_of(layer, form))
            inside_setting = setting_inside(self.setting, layer)
            per_sample = kind.saved_per_sample(inside_setting, layout, form)
            per_sample += kind.saved_once(inside_setting)
            inputs += number * stream * tokens
            if layer in self.model.routed_layers():
                # tokens are gathered from the block's input, which is counted already
                again = stream * tokens
                inside = (mixer + feed_forward) * share_of_tokens(self.model, layer) * tokens
                routing = self._by_routing(layer, tokens, degrees) - again
                unit = max(unit, inside + per_sample + routing)
            elif spans == 1:
                unit = max(unit, (mixer + feed_forward - twice) * tokens + per_sample)
            elif kind.carries_state and form == "whole":
                inputs += number * kind.span_state(self.setting).on(degrees) * borders
                unit = max(unit, (mixer + feed_forward - twice) * span)
            else:  # the mixer reads all tokens at once; its output is the feed-forward's input
                mixed = (mixer - twice + stream) * tokens + per_sample
                unit = max(unit, mixed + (feed_forward - twice) * span)
        return inputs, unit

    def _halves(self, layer: int, form: SequenceForm) -> tuple[PerToken, PerToken]:
        """Mixer and feed-forward of a block, each with its norm and residual input."""
        kind = self.types[layer]
        mixer = kind.saved(self.setting, layer, form)
        feed_forward = saved_by_feed_forward(self.setting, layer)
        if kind.shifts_channels:  # what is shifted, and its shift; compiled, the shift alone
            tensors = 1 if self.setting.runs_own or self.setting.is_compiled else 2
            feed_forward = PerToken(tensors * self._stream) + feed_forward
        return self._norm + mixer, self._norm + feed_forward


def _first_alike(model: ModelConfig) -> list[int]:
    """First layer with the same block type and the same parameters, for each layer."""
    seen: dict[object, int] = {}
    first = []
    for layer, kind in enumerate(model.layer_kinds()):
        sizes = [(each.name, each.shape) for each in block_parameters(model, layer)]
        first.append(seen.setdefault((kind, *sizes), layer))
    return first
