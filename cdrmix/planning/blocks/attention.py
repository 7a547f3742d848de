"""Causal grouped-query attention as a block type, under the name `transformer`."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.model import ModelConfig
from cdrmix.planning.blocks.block_type import (
    FLOAT32_BYTES,
    BlockType,
    Moved,
    PerToken,
    SequenceForm,
    Setting,
)
from cdrmix.planning.layout import Layout
from cdrmix.planning.parameter import Parameter


class AttentionBlock(BlockType):
    """Attention to all tokens before; heads are cut over tensor and exchanged between sequence
    ranks."""

    module = "cdrmix.models.attention:Attention"
    adapted = ("query", "key", "value", "output")

    def parameters(self, model: ModelConfig, layer: int) -> Iterator[Parameter]:
        """Three matrices into the heads, and one out of them."""
        width = model.hidden_size
        kv_width = model.num_kv_heads * model.head_dim
        for name, rows in {"query": width, "key": kv_width, "value": kv_width}.items():
            yield Parameter(f"mixer.{name}.weight", (rows, width), "attention", cut=0)
        yield Parameter("mixer.output.weight", (width, width), "attention", cut=1)

    def mixing_flops(self, model: ModelConfig, sequence_length: int) -> int:
        """2 T D: the causal half of scores and of mixing."""
        return 2 * sequence_length * model.hidden_size

    def saved(self, setting: Setting, layer: int, form: SequenceForm) -> PerToken:
        """Query, key, value, output and one float32 a head, as flash attention saves them."""
        model = setting.model
        size = setting.element_bytes
        width = model.hidden_size
        kv_width = model.num_kv_heads * model.head_dim
        outputs = 1 if form == "whole" else 2  # also before heads are exchanged for tokens
        per_head = size * ((1 + outputs) * width + 2 * kv_width) + 4 * model.num_heads
        return PerToken(size * width, per_head)

    def saved_per_sample(self, setting: Setting, layout: Layout, form: SequenceForm) -> float:
        """The mask of documents, if there is one, and the angles of tokens gathered from rows, each
        of which has positions of its own."""
        angles = layout.micro_batch_size * _angle_bytes(setting) if setting.is_gathered else 0
        return angles + segment_mask_bytes(setting, layout)

    def saved_once(self, setting: Setting) -> int:
        """Cosine and sine of all positions."""
        return 0 if setting.is_gathered else _angle_bytes(setting)

    def moved(self, setting: Setting, layer: int, form: SequenceForm) -> Moved:
        """Rotation of query and key, the attention kernel, and the sum of three inputs' gradients.

        The kernel reads a sample's keys and values once: what it reads again is in its caches.
        """
        model = setting.model
        size, width = setting.element_bytes, model.hidden_size
        kv_width = model.num_kv_heads * model.head_dim
        forward, backward = attention_moved(width, kv_width, compiled=setting.is_compiled)
        # each tensor rank has the gradients of the three inputs, and their sum, in full
        whole = 0 if setting.is_compiled else 6 * width
        kernels = (12, 19) if setting.is_compiled else (20, 22)
        return Moved(
            PerToken(0, size * forward), PerToken(size * whole, size * (backward - whole)), *kernels
        )

    def heads_bytes(self, model: ModelConfig, tokens: int, element_bytes: int) -> int:
        """Query, key, value there, mixed values back."""
        kv_width = model.num_kv_heads * model.head_dim
        return tokens * 2 * (model.hidden_size + kv_width) * element_bytes


def _angle_bytes(setting: Setting) -> int:
    return 2 * setting.element_bytes * setting.model.head_dim * setting.sequence_length


def attention_moved(query_width: int, kv_width: int, *, compiled: bool) -> tuple[int, int]:
    """Elements per token that attention moves forward and backward.

    Rotation, kernel and the sum of three inputs' gradients, as counted operator by operator, or as
    torch 2.13's inductor schedules them (tools/benchmark/count_bytes.py and block_bytes.py).
    """
    if compiled:
        return 8 * query_width + 7 * kv_width, 20 * query_width + 11 * kv_width
    return 12 * query_width + 12 * kv_width, 19 * query_width + 14 * kv_width


def segment_mask_bytes(setting: Setting, layout: Layout) -> int:
    """Bytes of the mask that separates the documents of a sample in one attention layer.

    There is one in float32 on GPUs alone, elsewhere documents are attended one by one
    (models/packed_attention.py). Its shape is [B, 1, T, T] in the type of the activations, over all
    tokens of a sample on every rank: neither tensor nor sequence ranks split it.
    """
    is_masked = setting.device == "cuda" and setting.element_bytes == FLOAT32_BYTES
    pairs = layout.micro_batch_size * setting.sequence_length**2
    return setting.element_bytes * pairs if setting.segments_documents and is_masked else 0
