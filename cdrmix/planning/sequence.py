"""What sequence ranks exchange for a recurrence, and by which of two forms.

heads   tokens of a rank and all heads become all tokens and heads of a rank: r, lw, k, v, a, b
        there and y back, in their own types (lw is float32)
state   every rank runs its own tokens and says what they add to the state and how they map the one
        that enters: [V + K, K] a head, float32, gathered by all

Bytes are of what a rank receives, its own part included, in a forward pass; a backward pass takes
as many. The state's form also runs the recurrence over V + K values a head instead of V.
"""

from __future__ import annotations

from cdrmix.config.schema import ModelConfig

FLOAT32_BYTES = 4


def head_scatter_bytes(model: ModelConfig, tokens: int, element_bytes: int) -> int:
    """Bytes of the exchange of heads for `tokens` tokens of a rank, one layer."""
    return tokens * model.hidden_size * (6 * element_bytes + FLOAT32_BYTES)


def state_bytes(model: ModelConfig, samples: int, sequence: int) -> int:
    """Bytes of the states of `samples` samples, gathered from `sequence` ranks, one layer."""
    return sequence * samples * 2 * model.head_dim * model.hidden_size * FLOAT32_BYTES


def passes_state(
    model: ModelConfig, *, sequence_length: int, sequence: int, element_bytes: int
) -> bool:
    """Whether the recurrence of a sequence spread over `sequence` ranks is cheaper by its state."""
    tokens = sequence_length // sequence
    by_heads = head_scatter_bytes(model, tokens, element_bytes)
    return sequence > 1 and state_bytes(model, 1, sequence) < by_heads
