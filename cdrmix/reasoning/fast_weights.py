"""Recurrence of the fast weights H of one plastic adapter, by one of three rules; their objective.

    hebb   H' = decay H + m q e^T
    delta  H' = decay H + m (q - H e) e^T
    oja    H' = decay H + m q (e - H^T q)^T

Each token looks up H p, and then stores its features q under e, the eligibility trace of the tokens
before it, with strength m. All three rules have the form H' = decay H + m a b^T. H is clamped after
every `CLAMP_EVERY_TOKENS` tokens of the episode, and chunks end there: in between, the rules are
linear in H, so that the reads of a chunk are a few matrix products. For delta, with its errors
u = q - H e,

    u_t = q_t - decay^t H_0 e_t - sum over s < t of decay^(t-1-s) m_s (e_s . e_t) u_s

is a triangular system of the chunk, whose matrix does not depend on H_0, the weights at its start.
Oja's rule is delta's with q and e exchanged and H transposed.
"""

# B sequences, T tokens, r rank, J lookups per token, n chunks of c tokens

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
# Largest norm of the matrix that one token adds. With |q| = 1 it keeps delta and oja contractive.
LARGEST_WRITE = 1.0
# Traces fade by at most 1/2 per token: 32 of them leave less than float32 resolves.
_TRACE_TOKENS = 32

Clamp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FastWeights:
    """State of one adapter."""

    weights: Tensor  # H, [B, r, r], float32
    trace: Tensor  # eligibility trace after the last token, [B, r], float32


class Writes(NamedTuple):
    """Features that the tokens of a call store."""

    post: Tensor  # q, [B, T, r]
    trace: Tensor  # e, [B, T, r]
    strength: Tensor  # m, already `limited`, [B, T]


def traces(pre: Tensor, trace: Tensor, decay: Tensor) -> Tensor:
    """Computes eligibility traces e_t = p_t + decay e_(t-1), with a decay of at most 1/2.

    From p [B, T, r] and the trace [B, r] before the first token: [B, T + 1, r], that trace, then
    the one after each token.
    """
    total = torch.cat([trace.unsqueeze(1), pre], dim=1)
    # with z the shift by a token, the product of (1 + decay^k z^k) over k = 1, 2, 4, ... is the
    # geometric series: five shifted sums in place of a loop over tokens
    shift = 1
    while shift < min(_TRACE_TOKENS, total.shape[1]):
        total = total + decay**shift * F.pad(total, (0, 0, shift, 0))[:, :-shift]
        shift *= 2
    return total


def limited(strength: Tensor, post: Tensor, trace: Tensor) -> Tensor:
    """Lowers strengths [B, T] so that no token adds more than `LARGEST_WRITE`."""
    # m |q| |e| is the norm of what a token adds, and m |e|^2 <= 1 keeps delta from overshooting
    size = torch.linalg.vector_norm(trace, dim=-1)
    size = size * torch.maximum(torch.linalg.vector_norm(post, dim=-1), size)
    return torch.minimum(strength, LARGEST_WRITE / size.clamp(min=1e-6))


def scan_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    *,
    rule: Rule,
    decay: float | Tensor,
    start: int,
    clamp: Clamp,
    passes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over the tokens of a call.

    Args:
        weights: H before the first token, [B, r, r].
        lookups: vectors that each token reads H with, before it stores, [B, T, J, r].
        writes: features that each token stores.
        rule, decay: of H, per token; a decay that is learned is a tensor of one number.
        start: tokens of the episode before these.
        clamp: applied to H after every `CLAMP_EVERY_TOKENS` tokens of the episode.
        passes: False for filling, over which H does not fade, [B, T]; it stores nothing either.
    Returns:
        H p for each lookup p, [B, T, J, r], and H after the last token.
    """
    length = lookups.shape[1]
    whole = CLAMP_EVERY_TOKENS
    # A call may begin within a chunk of the episode: first the rest of that chunk, then whole ones
    # in one batch, then the beginning of the next. So results do not depend on how a text is cut
    # into calls.
    first = min(length, -start % whole)
    middle = (length - first) // whole * whole
    read = []
    rest = length - first - middle
    pieces = ((0, first, 1), (first, whole, middle // whole), (first + middle, rest, 1))
    for begin, size, count in pieces:
        if size == 0 or count == 0:
            continue
        part = slice(begin, begin + size * count)
        chunked = [x[:, part].unflatten(1, (count, size)) for x in (lookups, *writes)]
        if passes is not None:
            decays = _decays_over(decay, passes[:, part].unflatten(1, (count, size)))
        elif isinstance(decay, Tensor):
            decays = _decays_over(decay, lookups.new_ones(1, 1, size))
        else:
            decays = _decays(decay, size, lookups.device)
        is_complete = (start + part.stop) % whole == 0
        values, weights = _scan_equal_chunks(
            weights, chunked[0], Writes(*chunked[1:]), rule, decays, clamp if is_complete else None
        )
        read.append(values)
    return torch.cat(read, dim=1), weights


class _Decays(NamedTuple):
    """Decays within chunks, of each chunk or the same for all, [B or 1, n or 1, ...]."""

    from_start: Tensor  # from the start of the chunk to each token, [..., c]
    within: Tensor  # from behind each earlier token s to token t, [..., t, s]; 0 for later ones
    to_end: Tensor  # from behind each token to the end of the chunk, [..., c]
    over_chunk: Tensor  # [..., 1, 1]

    def over(self, number: int) -> Tensor:
        """Decay over chunk `number`, [B or 1, 1, 1]."""
        return self.over_chunk[:, number if self.over_chunk.shape[1] > 1 else 0]


def _scan_equal_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    rule: Rule,
    decays: _Decays,
    clamp: Clamp | None,
) -> tuple[Tensor, Tensor]:
    """Scans chunks of equal size, [B, n, c, ...]; `clamp` is None for one incomplete chunk."""
    # H_t = decay^t H_0 + sum over s < t of decay^(t-1-s) left_s right_s^T
    left, right, _ = writes
    if rule == "hebb":
        faded = left * (writes.strength * decays.to_end).unsqueeze(-1)
        befores = []
        for number, added in enumerate((faded.transpose(2, 3) @ right).unbind(1)):
            befores.append(weights)
            weights = torch.addcmul(added, weights, decays.over(number))
            weights = weights if clamp is None else clamp(weights)
        starts = torch.stack(befores, dim=1)
    elif rule == "delta":
        starts, weights, left = _carry_delta(weights, writes, decays, clamp)
    else:
        # H^T follows delta's rule; the clamp works element by element, so it needs no transposing
        swapped = Writes(right, left, writes.strength)
        turned = weights.transpose(1, 2)
        starts, turned, right = _carry_delta(turned, swapped, decays, clamp)
        starts = starts.transpose(2, 3)
        weights = turned.transpose(1, 2)
    stored = left * writes.strength.unsqueeze(-1)  # m a, [B, n, c, r]
    carried = lookups * decays.from_start[..., None, None]
    flat = lookups.flatten(2, 3)  # [B, n, c J, r]
    # the sum over s as attention within the chunk: p . right_s, masked and faded, times left_s
    scores = flat @ right.transpose(2, 3)  # [B, n, c J, c]
    scores = scores * decays.within.repeat_interleave(lookups.shape[3], dim=-2)
    read = carried.flatten(2, 3) @ starts.transpose(2, 3) + scores @ stored
    return read.view(lookups.shape).flatten(1, 2), weights


def _carry_delta(
    weights: Tensor,
    writes: Writes,
    decays: _Decays,
    clamp: Clamp | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns H at the start of each chunk, H after the last, and the errors u, [B, n, c, r]."""
    value, key, strength = writes
    size, rank = key.shape[2:]
    overlap = (key @ key.transpose(2, 3)) * decays.within * strength.unsqueeze(2)  # strictly lower
    # The system is solved for both terms of its right side at once, for all chunks, before any H_0
    # is known; the loop over chunks is then two small products each.
    right = torch.cat([value, key * decays.from_start.unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(
        overlap + torch.eye(size, device=key.device), right, upper=False, unitriangular=True
    )
    stored = key * (strength * decays.to_end).unsqueeze(-1)
    starts = []
    errors = []
    pairs = zip(solved.unbind(1), stored.unbind(1), strict=True)
    for number, (chunk, added) in enumerate(pairs):
        starts.append(weights)
        error = chunk[..., :rank] - chunk[..., rank:] @ weights.transpose(1, 2)
        errors.append(error)
        weights = torch.addcmul(error.transpose(1, 2) @ added, weights, decays.over(number))
        if clamp is not None:
            weights = clamp(weights)
    return torch.stack(starts, dim=1), weights, torch.stack(errors, dim=1)


@functools.lru_cache(maxsize=64)
def _decays(decay: float, size: int, device: torch.device) -> _Decays:
    """Returns the decays of a fixed rate where every token takes time."""
    # cached tensors must not be inference tensors: a later call may need gradients through them
    with torch.inference_mode(False):
        return _decays_over(decay, torch.ones(1, 1, size, device=device))


def _decays_over(decay: float | Tensor, passes: Tensor) -> _Decays:
    """Returns the decays of chunks, [B, n, c], whose tokens take time where `passes`."""
    ticks = passes.float()
    after = ticks.cumsum(-1)  # tokens that took time, this one included
    before = after - ticks
    total = after[..., -1:]
    apart = before.unsqueeze(-1) - after.unsqueeze(-2)  # [B, n, t, s]
    earlier = torch.ones_like(apart, dtype=torch.bool).tril(-1)
    within = torch.where(earlier, decay ** apart.clamp(min=0), 0.0)
    return _Decays(decay**before, within, decay ** (total - after), (decay**total).unsqueeze(-1))


def correlation_loss(
    writes: Writes,
    recalled: Tensor,
    weights: Tensor,
    *,
    decay: float | Tensor,
    decorrelation_weight: float,
) -> Tensor:
    """Correlation objective of one adapter, summed over sequences; scalar, float32.

    Per sequence, with mu = 1 - decay:

        -(1/T) sum_t m_t <q_t, H_t e_t> + mu/2 ||H||^2 + nu ||offdiag(C_q)||^2 / r

    The first two terms are those whose gradient step in H, at rate 1, is the Hebb rule
    `H' = decay H + m q e^T`. The third keeps the features of q from becoming copies of each other;
    C_q is taken over the tokens of a sequence, so that the loss does not depend on how sequences
    are spread over ranks.

    Args:
        writes, decay: as of `scan_chunks`.
        recalled: H_t e_t, [B, T, r].
        weights: H after the last token, [B, r, r].
        decorrelation_weight: nu; 0.01 keeps the r features of a random projection apart, and is too
            small to affect the task.
    """
    post = writes.post
    agreement = (writes.strength * (post * recalled).sum(-1)).mean(1)  # [B]
    size = weights.square().sum((1, 2))  # [B]
    centred = post - post.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / post.shape[1]  # [B, r, r]
    diagonal = torch.diagonal(covariance, dim1=1, dim2=2)
    shared = covariance.square().sum((1, 2)) - diagonal.square().sum(1)
    per_sequence = (
        -agreement + (1 - decay) / 2 * size + decorrelation_weight / post.shape[2] * shared
    )
    return per_sequence.sum()
