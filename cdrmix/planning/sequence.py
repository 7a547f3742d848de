"""Exchange of sequence ranks for a recurrence, in one of two forms.

heads   tokens of a rank and all heads become all tokens and heads of a rank: r, lw, k, v, a, b
        there and y back, in their own types (lw is float32)
state   every rank runs its own tokens and says what they add to the state and how they map the one
        that enters: [V + K, K] a head, float32, gathered by all

Attention exchanges heads in both. Bytes are of what a rank receives, its own part included, in a
forward pass; a backward pass takes as many. The state's form also runs the recurrence over V + K
values a head instead of V.
"""

from __future__ import annotations

from typing import Literal

from cdrmix.config.model import ModelConfig

SequenceForm = Literal["whole", "heads", "state"]  # whole: one rank has the sequence
FLOAT32_BYTES = 4


def recurrence_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of the exchange of heads for `tokens` tokens of a rank, one RWKV layer."""
    return tokens * model.hidden_size * (6 * element_bytes + FLOAT32_BYTES)


def attention_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of the exchange of heads for `tokens` tokens of a rank, one Transformer layer."""
    kv_width = model.num_kv_heads * model.head_dim
    return tokens * 2 * (model.hidden_size + kv_width) * element_bytes


def state_bytes(model: ModelConfig, samples: int, sequence: int) -> int:
    """Bytes of the states of `samples` samples, gathered from `sequence` ranks, one RWKV layer."""
    return sequence * samples * 2 * model.head_dim * model.hidden_size * FLOAT32_BYTES


def sequence_form(
    model: ModelConfig, *, sequence_length: int, sequence: int, element_bytes: int
) -> SequenceForm:
    """The form that exchanges fewer bytes where a sequence is spread over `sequence` ranks."""
    if sequence == 1:
        return "whole"
    by_heads = recurrence_bytes(model, sequence_length // sequence, element_bytes)
    return "state" if state_bytes(model, 1, sequence) < by_heads else "heads"
