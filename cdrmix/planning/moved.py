"""Memory traffic of a model: bytes per token that all kernels beside matrix products move.

Blocks tell theirs (`planning/blocks/`); norms, residual sums, the loss and what is around the
blocks are here. tests/parity/test_moved_bytes.py holds all of it to a count of the operators.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from cdrmix.config.model import ModelConfig
from cdrmix.planning.activations import SavedActivations
from cdrmix.planning.blocks.block_type import (
    FLOAT32_BYTES,
    BlockType,
    Moved,
    PerToken,
    SequenceForm,
    Setting,
    block_types,
    is_v_first_made,
    moved_by_saved,
)
from cdrmix.planning.blocks.feed_forward import moved_by_feed_forward
from cdrmix.planning.depth import share_of_tokens
from cdrmix.planning.folder_activations import FolderActivations
from cdrmix.planning.layout import Degrees
from cdrmix.planning.memory import LOGIT_BYTES, LOGITS_BYTES

# Kernels of a chunk of the loss, both passes.
_LOSS_KERNELS = 37
# Streams that lookup and two norms move, forward and backward.
_AROUND_BLOCKS = 15


class Kernels(NamedTuple):
    """Kernels of some blocks: bytes per token that they move beside products, and their number."""

    forward_bytes: float
    backward_bytes: float
    forward: float
    backward: float


class MovedBytes:
    """Memory traffic of one configuration; results that no layout changes are cached."""

    def __init__(self, activations: SavedActivations | FolderActivations) -> None:
        self._activations = activations
        self._model = activations.model
        self._size = activations.element_bytes
        self._of_kind: dict[object, Moved] = {}
        self._of_stage = cache(self._sum)
        self._of_each = cache(self._each)

    def of_layers(self, layers: range, degrees: Degrees) -> Kernels:
        """Kernels of a rank in some blocks."""
        spread = degrees.tensor, degrees.sequence, degrees.expert
        return self._of_stage(layers.start, layers.stop, *spread)

    def _sum(self, start: int, stop: int, tensor: int, sequence: int, expert: int) -> Kernels:
        layers = self._of_each(tensor, sequence, expert)[start:stop]
        return Kernels(*map(sum, zip(*layers, strict=True)))

    def _each(self, tensor: int, sequence: int, expert: int) -> list[Kernels]:
        """Kernels of each block of the model."""
        degrees = Degrees(tensor=tensor, sequence=sequence, expert=expert)
        kernels = []
        for layer in range(self._model.num_layers):
            moved = self._block(layer, degrees)
            share = share_of_tokens(self._model, layer)
            forward, backward = moved.forward.on(degrees), moved.backward.on(degrees)
            numbers = (moved.forward_kernels, moved.backward_kernels)
            kernels.append(Kernels(share * forward, share * backward, *numbers))
        return kernels

    def _block(self, layer: int, degrees: Degrees) -> Moved:
        activations = self._activations
        if isinstance(activations, FolderActivations):
            return moved_by_saved(PerToken(activations.saved_per_token(layer)))
        kind, form = activations.types[layer], activations.sequence_form(layer, degrees)
        makes_v_first = not is_v_first_made(self._model, layer)
        has_experts = self._model.has_experts(layer)
        is_sent = has_experts and degrees.expert > 1
        alike = (kind, form, has_experts, is_sent, makes_v_first)
        if alike not in self._of_kind:
            self._of_kind[alike] = block_moved(
                activations.setting, layer, form, kind, is_sent=is_sent
            )
        return self._of_kind[alike]

    def outside(self, degrees: Degrees, tokens: int) -> tuple[float, float]:
        """Bytes and kernels of a micro-step of `tokens` tokens on a rank of the last stage: the
        loss, lookup and norms around the blocks; further tokens are scored once more each."""
        mtp = self._model.mtp
        heads = 1 if mtp is None else mtp.num_tokens
        loss = loss_bytes(self._model, tokens, self._size) / degrees.tensor
        of_position = LOGIT_BYTES * self._model.vocab_size // degrees.tensor
        positions = max(1, LOGITS_BYTES[self._activations.device] // of_position)
        kernels: float = heads * _LOSS_KERNELS * -(-tokens // positions)
        around = _AROUND_BLOCKS * self._size * self._model.hidden_size * tokens
        total = heads * loss + around
        if mtp is not None and mtp.has_blocks:
            moved = self._further_block()
            of_token = moved.forward.on(degrees) + moved.backward.on(degrees)
            total += (heads - 1) * of_token * tokens
            kernels += (heads - 1) * (moved.forward_kernels + moved.backward_kernels)
        return total, kernels

    def _further_block(self) -> Moved:
        assert isinstance(self._activations, SavedActivations), "rules refuse it of other models"
        sizes = self._model.further_blocks()
        setting = replace(self._activations.setting.uncompiled(), model=sizes)
        return block_moved(setting, sizes.num_layers - 1, "whole", block_types(sizes)[-1])


def block_moved(
    setting: Setting,
    layer: int,
    form: SequenceForm,
    kind: BlockType,
    *,
    is_sent: bool = False,
) -> Moved:
    """Memory traffic of a block of RWKX-V: both halves, each with its norm and residual sum.

    The second half is not compiled where its rows are sent to experts on other ranks (`is_sent`).
    """
    second = setting.uncompiled() if is_sent and setting.is_compiled else setting
    moved = kind.moved(setting, layer, form) + moved_by_feed_forward(second, layer)
    if kind.shifts_channels:
        moved = moved + kind.moved_by_shift(second)
    return moved + _around_half(setting) + _around_half(second)


def _around_half(setting: Setting) -> Moved:
    """Norm before a half of a block, and residual sum behind it.

    Apart: the norm reads and writes (backward reads two, writes one), the sum reads two and writes
    one, and so does that of the gradients. Together: one kernel reads the stream and what is added,
    and writes both; backward it reads three and writes one.
    """
    stream = setting.element_bytes * setting.model.hidden_size
    if setting.is_compiled:
        return Moved(PerToken(4 * stream), PerToken(4 * stream), 1, 1)
    return Moved(PerToken(5 * stream), PerToken(6 * stream), 2, 2)


def loss_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> float:
    """Bytes that the loss of a micro-batch moves beside its products, on one rank.

    Softmax, largest logit and gradient pass over the logits in float32; the head's gradient is
    summed inside its product, and scaled once at the end.
    """
    vocab, width = model.vocab_size, model.hidden_size
    of_score, of_weight = (18, 10) if element_bytes < FLOAT32_BYTES else (20, 12)
    scores = of_score * vocab * tokens
    return scores + of_weight * vocab * width + 2 * element_bytes * width * tokens
