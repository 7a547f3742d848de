"""Fast weights of one plastic adapter: three rules, token by token and in chunks.

    hebb   H' = decay H + m q e^T
    delta  H' = decay H + m (q - H e) e^T
    oja    H' = decay H + m q (e - H^T q)^T

p is what a token looks up, q what it stores, e the eligibility trace of the tokens before it, m how
much it stores. All three are H' = decay H + m a b^T with H read before it is written. Every
`CLAMP_EVERY_TOKENS` tokens of the episode H passes a border, where it is bounded; between borders
the rules are linear in H, which is what the chunked form needs. In a chunk that starts from H, with
delta's errors u = q - H e (oja's the same with q and e exchanged and H transposed),

    u_t = q_t - decay^t H e_t - sum over s < t of decay^(t-1-s) m_s (e_s . e_t) u_s

is one triangular system, whose inverse does not depend on H.
"""

# B sequences, T time, r rank, J lookups per token, n chunks of c tokens

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Rule = Literal["hebb", "delta", "oja"]
RULES: tuple[Rule, ...] = ("hebb", "delta", "oja")

CLAMP_EVERY_TOKENS = 16
# Largest norm of what one token adds. Together with |q| = 1 it keeps delta and oja contractive.
LARGEST_WRITE = 1.0
# Traces fade by at most 1/2 per token: 32 of them leave less than float32 resolves.
_TRACE_TOKENS = 32

Border = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FastWeights:
    """What one adapter carries from token to token.

    Attributes:
        weights: H, [B, r, r], float32.
        trace: eligibility trace after the last token, [B, r], float32.
    """

    weights: Tensor
    trace: Tensor


class Writes(NamedTuple):
    """What the tokens of a call store, guarded.

    Attributes:
        post: q, [B, T, r].
        trace: e, trace of the tokens before each, [B, T, r].
        strength: m, [B, T].
    """

    post: Tensor
    trace: Tensor
    strength: Tensor


def blank(batch_size: int, rank: int, *, device: torch.device | None = None) -> FastWeights:
    """Fast weights at the start of an episode: zero."""
    return FastWeights(
        torch.zeros(batch_size, rank, rank, device=device),
        torch.zeros(batch_size, rank, device=device),
    )


def traces(pre: Tensor, trace: Tensor, decay: Tensor) -> Tensor:
    """Eligibility traces e_t = p_t + decay e_(t-1).

    Args:
        pre: p, [B, T, r].
        trace: of the token before the first, [B, r].
        decay: scalar, at most 1/2.
    Returns:
        [B, T + 1, r]: the given trace, then that after each token.
    """
    total = torch.cat([trace.unsqueeze(1), pre], dim=1)
    # the product of (1 + decay^k z^k) over k = 1, 2, 4, ... is the whole geometric series
    shift = 1
    while shift < min(_TRACE_TOKENS, total.shape[1]):
        total = total + decay**shift * F.pad(total, (0, 0, shift, 0))[:, :-shift]
        shift *= 2
    return total


def limited(strength: Tensor, post: Tensor, trace: Tensor) -> Tensor:
    """Modulators [B, T] lowered to where no token adds more than `LARGEST_WRITE`."""
    size = torch.linalg.vector_norm(trace, dim=-1)
    size = size * torch.maximum(torch.linalg.vector_norm(post, dim=-1), size)
    return torch.minimum(strength, LARGEST_WRITE / size.clamp(min=1e-6))


def scan_tokens(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    *,
    rule: Rule,
    decay: float,
    start: int,
    border: Border,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: the yardstick.

    Args:
        weights: H before the first token, [B, r, r].
        lookups: what each token reads H with, [B, T, J, r].
        writes: what each token stores after it has read.
        rule: hebb, delta or oja.
        decay: of H per token.
        start: tokens of the episode before these.
        border: what H passes through after every `CLAMP_EVERY_TOKENS` tokens.
    Returns:
        What was read, H p for each lookup p, [B, T, J, r], and H after the last token.
    """
    read = []
    for t in range(lookups.shape[1]):
        read.append(lookups[:, t] @ weights.transpose(1, 2))  # [B, J, r]
        q = writes.post[:, t].unsqueeze(2)
        e = writes.trace[:, t].unsqueeze(2)  # [B, r, 1]
        if rule == "delta":
            q = q - weights @ e
        elif rule == "oja":
            e = e - weights.transpose(1, 2) @ q
        m = writes.strength[:, t, None, None]
        weights = decay * weights + m * q @ e.transpose(1, 2)
        if (start + t + 1) % CLAMP_EVERY_TOKENS == 0:
            weights = border(weights)
    return torch.stack(read, dim=1), weights


def scan_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    *,
    rule: Rule,
    decay: float,
    start: int,
    border: Border,
) -> tuple[Tensor, Tensor]:
    """`scan_tokens` in chunks that end at the borders: the same values within rounding."""
    length = lookups.shape[1]
    whole = CLAMP_EVERY_TOKENS
    first = min(length, -start % whole)
    middle = (length - first) // whole * whole
    read = []
    for begin, size, count in (
        (0, first, 1),
        (first, whole, middle // whole),
        (first + middle, length - first - middle, 1),
    ):
        if size == 0 or count == 0:
            continue
        part = slice(begin, begin + size * count)
        chunked = [x[:, part].unflatten(1, (count, size)) for x in (lookups, *writes)]
        at_border = (start + part.stop) % whole == 0
        out, weights = _scan_equal_chunks(
            weights, chunked[0], Writes(*chunked[1:]), rule, decay, border if at_border else None
        )
        read.append(out)
    return torch.cat(read, dim=1), weights


def _scan_equal_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    rule: Rule,
    decay: float,
    border: Border | None,
) -> tuple[Tensor, Tensor]:
    """Chunks of equal size, everything [B, n, c, ...]; each ends at a border, or one does not."""
    size = lookups.shape[2]
    within, to_end = _decays(decay, size, lookups.device)
    if rule == "hebb":
        starts, weights = _carry_hebb(weights, writes, to_end, decay**size, border)
        left = writes.post
        right = writes.trace
    else:
        value = writes.post
        key = writes.trace
        if rule == "oja":  # delta of the transposed weights, with what is stored as the key
            value, key, weights = key, value, weights.transpose(1, 2)
            border = _transposed(border)
        starts, weights, errors = _carry_delta(
            weights, value, key, writes.strength, decay, within, to_end, border
        )
        left = errors
        right = key
        if rule == "oja":
            starts = starts.transpose(2, 3)
            weights = weights.transpose(1, 2)
            left = key
            right = errors
    stored = left * writes.strength.unsqueeze(-1)  # m a, [B, n, c, r]
    powers = decay ** torch.arange(size, device=lookups.device, dtype=torch.float32)
    carried = lookups * powers[:, None, None]
    flat = lookups.flatten(2, 3)  # [B, n, c J, r]
    scores = flat @ right.transpose(2, 3)  # [B, n, c J, c]
    scores = scores * within.repeat_interleave(lookups.shape[3], dim=0)
    read = carried.flatten(2, 3) @ starts.transpose(2, 3) + scores @ stored
    return read.view(lookups.shape).flatten(1, 2), weights


def _carry_hebb(
    weights: Tensor, writes: Writes, to_end: Tensor, over_chunk: float, border: Border | None
) -> tuple[Tensor, Tensor]:
    """H at the start of each chunk, [B, n, r, r], and after the last."""
    stored = writes.post * (writes.strength * to_end).unsqueeze(-1)
    starts = []
    for added in (stored.transpose(2, 3) @ writes.trace).unbind(1):
        starts.append(weights)
        weights = torch.add(added, weights, alpha=over_chunk)
        if border is not None:
            weights = border(weights)
    return torch.stack(starts, dim=1), weights


def _carry_delta(
    weights: Tensor,
    value: Tensor,
    key: Tensor,
    strength: Tensor,
    decay: float,
    within: Tensor,
    to_end: Tensor,
    border: Border | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """H at the start of each chunk, H after the last, and the errors u, [B, n, c, r]."""
    size, rank = key.shape[2:]
    overlap = (key @ key.transpose(2, 3)) * within * strength.unsqueeze(2)  # strictly lower
    powers = decay ** torch.arange(size, device=key.device, dtype=torch.float32)
    right = torch.cat([value, key * powers.unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(
        overlap + torch.eye(size, device=key.device), right, upper=False, unitriangular=True
    )
    stored = key * (strength * to_end).unsqueeze(-1)
    starts = []
    errors = []
    for chunk, added in zip(solved.unbind(1), stored.unbind(1), strict=True):
        starts.append(weights)
        error = chunk[..., :rank] - chunk[..., rank:] @ weights.transpose(1, 2)
        errors.append(error)
        weights = torch.add(error.transpose(1, 2) @ added, weights, alpha=decay**size)
        if border is not None:
            weights = border(weights)
    return torch.stack(starts, dim=1), weights, torch.stack(errors, dim=1)


def _transposed(border: Border | None) -> Border | None:
    if border is None:
        return None
    return lambda weights: border(weights.transpose(1, 2)).transpose(1, 2)


@functools.lru_cache(maxsize=64)
def _decays(decay: float, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """decay^(t-1-s) where s < t and zero elsewhere, [c, c]; decay^(c-1-s), [c]."""
    with torch.inference_mode(False):  # kept for later calls, which may need gradients
        place = torch.arange(size, device=device, dtype=torch.float32)
        apart = place.unsqueeze(1) - place - 1
        within = torch.where(apart >= 0, decay ** apart.clamp(min=0), 0.0)
        return within, decay ** (size - 1 - place)
