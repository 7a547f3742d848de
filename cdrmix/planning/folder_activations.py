"""Bytes of activations that autograd saves in a Hugging Face model, per token and per rank."""

from __future__ import annotations

from functools import cache, partial
from typing import Literal

from cdrmix.config.schema import Config
from cdrmix.planning.folder_model import FolderModel, Half, folder_model
from cdrmix.planning.layout import ELEMENT_BYTES, Degrees, Layout, SequenceForm, stage_layers


class FolderActivations:
    """Activation memory of one configuration of a Hugging Face model."""

    def __init__(self, config: Config, device: Literal["cuda", "cpu"]) -> None:
        self.model = config.model
        self.training = config.training
        self.device = device
        self.element_bytes = ELEMENT_BYTES[config.training.precision]
        self.found: FolderModel = folder_model(config.model)
        self._segments_documents = config.data.segment_documents
        length = self.training.sequence_length
        self.stages = cache(partial(stage_layers, self.model, length))

    def tokens(self, layout: Layout) -> int:
        """Tokens of a rank's micro-batch."""
        return layout.micro_batch_size * self.training.sequence_length

    def sequence_form(self, degrees: Degrees) -> SequenceForm:
        """Exchange of sequence ranks: none, as there are none."""
        return "whole"

    def spans(self, layout: Layout) -> tuple[int, int]:
        """Number of spans in which a sample is recomputed, and their tokens: one of all."""
        return 1, self.tokens(layout)

    def in_flight(self, layout: Layout, stage: int) -> int:
        """Micro-batches whose activations are held at a time."""
        return 1

    def on_stage(self, layout: Layout, stage: int) -> int:
        """Bytes of a micro-batch."""
        tokens = self.tokens(layout)
        blocks = [sum(map(self._half, halves)) for halves in self.found.layers]
        stream = self.element_bytes * self.model.hidden_size
        if layout.activation_checkpointing:
            total = (len(blocks) * stream + max(blocks)) * tokens
        else:
            total = sum(blocks) * tokens
        total += (2 * stream + 8 * self.model.hidden_size + 8) * tokens
        if self.model.lora is None:
            total += 4 * self.model.vocab_size * self.model.hidden_size
        return int(total)

    def segment_mask(self, layout: Layout) -> int:
        """Bytes of the mask that separates the documents of a sample."""
        pairs = layout.micro_batch_size * self.training.sequence_length**2
        return self.element_bytes * pairs if self._segments_documents else 0

    def workspace(self, layout: Layout) -> int:
        """Bytes of the gradients of one block's activations while they pass."""
        return int(max(sum(map(self._half, halves)) for halves in self.found.layers)) * self.tokens(
            layout
        )

    def _half(self, half: Half) -> float:
        """Bytes per token of one half of a block, with its norm."""
        found, size, width = self.found, self.element_bytes, self.model.hidden_size
        norm = 8 * width + size * width + 4
        if half == "attention":
            return norm + size * (3 * found.query_width + 2 * found.kv_width)
        if half == "mamba":
            assert found.mamba is not None, "only Nemotron-H has Mamba mixers"
            return norm + 4 * 8 * found.mamba.inner
        if half == "mlp":
            return norm + size * 4 * self.model.ffn_hidden_size
        assert self.model.moe is not None, "a model without experts has no such layer"
        return norm + self.model.moe.top_k * size * (2 * width + 4 * found.expert_inner)
