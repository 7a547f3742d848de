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

A backbone has some adapters a layer and each works on few numbers, so that what an adapter costs is
the number of its operations: hebb's does not depend on the number of tokens.
"""

# B sequences, T tokens, r rank, F features, J lookups per token, n chunks of c tokens

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cdrmix.models.clamped_recurrence import clamped, clamped_recurrence

Rule = Literal["hebb", "delta", "oja"]
RULES: tuple[Rule, ...] = ("hebb", "delta", "oja")

CLAMP_EVERY_TOKENS = 16
# Largest norm of the matrix that one token adds. With |q| = 1 it keeps delta and oja contractive.
LARGEST_WRITE = 1.0
# Traces fade by at most 1/2 per token: 32 of them leave less than float32 resolves.
_TRACE_TOKENS = 32
# Traces are computed in blocks of so many tokens, each from itself and the 32 tokens before.
_TRACE_BLOCK = 16


@dataclass(frozen=True)
class FastWeights:
    """State of one adapter."""

    weights: Tensor  # H, [B, r, r], float32
    trace: Tensor  # eligibility trace after the last token, [B, r], float32
    mean: Tensor  # of A x and B^T y0 over the tokens stored so far, [B, 2 r], float32
    count: Tensor  # of these tokens, [B, 1], float32

    @classmethod
    def blank(
        cls, batch_size: int, rank: int, *, device: torch.device | None = None
    ) -> FastWeights:
        """Returns those at the start of episodes."""
        sizes = ((rank, rank), (rank,), (2 * rank,), (1,))
        return cls(*(torch.zeros(batch_size, *size, device=device) for size in sizes))


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
    length = total.shape[1]
    padded = F.pad(total, (0, 0, _TRACE_TOKENS, -length % _TRACE_BLOCK))
    seen = padded.unfold(1, _TRACE_TOKENS + _TRACE_BLOCK, _TRACE_BLOCK)  # [B, blocks, r, seen]
    device = pre.device
    lag = torch.arange(_TRACE_TOKENS, _TRACE_TOKENS + _TRACE_BLOCK, device=device) - torch.arange(
        seen.shape[3], device=device
    ).unsqueeze(1)
    fades = torch.where(lag >= 0, decay ** lag.clamp(min=0), 0.0)
    return (seen @ fades).transpose(2, 3).flatten(1, 2)[:, :length]


def centred(
    features: Tensor, mean: Tensor, count: Tensor, *, stores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Subtracts from the features of each token their mean over the tokens stored before it.

    What is the same for all tokens would otherwise add up in H, until it is the same for all texts.

    Args:
        features: [B, T, F]; finite.
        mean, count: of `FastWeights`, before the first token.
        stores: True for tokens that count, [B, T].
    Returns:
        Centred features, and mean and count after the last token.
    """
    stored = F.pad(features, (0, 1), value=1.0) * stores.unsqueeze(-1)
    before = torch.cat([mean * count, count], dim=-1).unsqueeze(1)
    total = torch.cat([before, stored], dim=1).cumsum(1)  # [B, T + 1, F + 1]
    means = total[..., :-1] / total[..., -1:].clamp(min=1)
    return features - means[:, :-1], means[:, -1], total[:, -1, -1:]


def limited(strength: Tensor, post: Tensor, trace: Tensor) -> Tensor:
    """Lowers strengths [B, T] so that no token adds more than `LARGEST_WRITE`."""
    # m |q| |e| is the norm of what a token adds, and m |e|^2 <= 1 keeps delta from overshooting
    size = torch.linalg.vector_norm(trace, dim=-1)
    size = size * torch.maximum(torch.linalg.vector_norm(post, dim=-1), size)
    return torch.minimum(strength, LARGEST_WRITE / size.clamp(min=1e-6))


class Chunks(NamedTuple):
    """Chunks of equal size that follow each other in a call, the same for all adapters."""

    begin: int  # first token
    size: int  # c
    number: int  # n
    ends_whole: bool  # the last token is the last of a chunk of the episode
    # tokens that take time, [B or 1, n or 1, ...]: from the start of the chunk to each token, [c];
    # from behind each earlier token s to token t, [c c]; from behind each token to the end, [c]; in
    # all, [1]
    ticks: Tensor
    is_earlier: Tensor  # True where s is before t, [c, c]


def chunks_of(
    length: int, *, start: int, passes: Tensor | None = None, device: torch.device
) -> tuple[Chunks, ...]:
    """Cuts the tokens of a call into chunks.

    Args:
        length: tokens of the call.
        start: tokens of the episode before these.
        passes: False for filling, over which H does not fade, [B, T]; it stores nothing either.
    """
    whole = CLAMP_EVERY_TOKENS
    # A call may begin within a chunk of the episode: first the rest of that chunk, then whole ones
    # in one batch, then the beginning of the next. So results do not depend on how a text is cut
    # into calls.
    first = min(length, -start % whole)
    middle = (length - first) // whole * whole
    rest = length - first - middle
    pieces = ((0, first, 1), (first, whole, middle // whole), (first + middle, rest, 1))
    chunks = []
    for begin, size, count in pieces:
        if size == 0 or count == 0:
            continue
        part = slice(begin, begin + size * count)
        if passes is None:
            taken = torch.ones(1, 1, size, device=device)
        else:
            taken = passes[:, part].unflatten(1, (count, size)).float()
        after = taken.cumsum(-1)  # tokens that took time, this one included
        before = after - taken
        total = after[..., -1:]
        apart = (before.unsqueeze(-1) - after.unsqueeze(-2)).clamp(min=0)  # [B, n, t, s]
        ticks = torch.cat([before, apart.flatten(-2), total - after, total], dim=-1)
        is_earlier = torch.ones(size, size, dtype=torch.bool, device=device).tril(-1)
        ends_whole = (start + part.stop) % whole == 0
        chunks.append(Chunks(begin, size, count, ends_whole, ticks, is_earlier))
    return tuple(chunks)


def scan_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    chunks: Sequence[Chunks],
    *,
    rule: Rule,
    decay: float | Tensor,
    largest: float,
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over the tokens of a call.

    Args:
        weights: H before the first token, [B, r, r].
        lookups: vectors that each token reads H with, before it stores, [B, T, J, r].
        writes: features that each token stores.
        chunks: from `chunks_of`.
        rule, decay: of H, per token; a decay that is learned is a tensor of one number.
        largest: bound of the clamp, applied to H after every `CLAMP_EVERY_TOKENS` tokens of the
            episode.
    Returns:
        H p for each lookup p, [B, T, J, r], and H after the last token.
    """
    read = []
    for each in chunks:
        part = slice(each.begin, each.begin + each.size * each.number)
        chunked = [x[:, part].unflatten(1, (each.number, each.size)) for x in (lookups, *writes)]
        decays = _decays_over(decay, each)
        bound = largest if each.ends_whole else None
        values, weights = _scan_equal_chunks(
            weights, chunked[0], Writes(*chunked[1:]), rule, decays, bound
        )
        read.append(values)
    return torch.cat(read, dim=1) if len(read) > 1 else read[0], weights


class _Decays(NamedTuple):
    """Decays within chunks, of each chunk or the same for all, [B or 1, n or 1, ...]."""

    from_start: Tensor  # from the start of the chunk to each token, [..., c]
    within: Tensor  # from behind each earlier token s to token t, [..., t, s]; 0 for later ones
    to_end: Tensor  # from behind each token to the end of the chunk, [..., c]
    over_chunk: Tensor  # [...]

    def over(self, number: int) -> Tensor:
        """Decay over chunk `number`, [B or 1, 1, 1]."""
        return self.over_chunk[:, number if self.over_chunk.shape[1] > 1 else 0, None, None]


def _decays_over(decay: float | Tensor, chunks: Chunks) -> _Decays:
    """Returns the decays of chunks: all of them by one power."""
    size = chunks.size
    parts = (decay**chunks.ticks).split((size, size * size, size, 1), dim=-1)
    within = torch.where(chunks.is_earlier, parts[1].unflatten(-1, (size, size)), 0.0)
    return _Decays(parts[0], within, parts[2], parts[3].squeeze(-1))


def _scan_equal_chunks(
    weights: Tensor,
    lookups: Tensor,
    writes: Writes,
    rule: Rule,
    decays: _Decays,
    largest: float | None,
) -> tuple[Tensor, Tensor]:
    """Scans chunks of equal size, [B, n, c, ...]; `largest` is None for one incomplete chunk."""
    # H_t = decay^t H_0 + sum over s < t of decay^(t-1-s) left_s right_s^T
    left, right, _ = writes
    if rule == "hebb":
        faded = left * (writes.strength * decays.to_end).unsqueeze(-1)
        added = faded.transpose(2, 3) @ right
        if largest is None:
            starts = weights.unsqueeze(1)
            weights = torch.addcmul(added.squeeze(1), weights, decays.over(0))
        else:
            starts, weights = clamped_recurrence(weights, added, decays.over_chunk, largest=largest)
    elif rule == "delta":
        starts, weights, left = _carry_delta(weights, writes, decays, largest)
    else:
        # H^T follows delta's rule; the clamp works element by element, so it needs no transposing
        swapped = Writes(right, left, writes.strength)
        turned = weights.transpose(1, 2)
        starts, turned, right = _carry_delta(turned, swapped, decays, largest)
        starts = starts.transpose(2, 3)
        weights = turned.transpose(1, 2)
    stored = left * writes.strength.unsqueeze(-1)  # m a, [B, n, c, r]
    carried = lookups * decays.from_start[..., None, None]
    flat = lookups.flatten(2, 3)  # [B, n, c J, r]
    # the sum over s as attention within the chunk: p . right_s, masked and faded, times left_s
    scores = (flat @ right.transpose(2, 3)).unflatten(2, lookups.shape[2:4])  # [B, n, c, J, c]
    scores = (scores * decays.within.unsqueeze(-2)).flatten(2, 3)
    read = carried.flatten(2, 3) @ starts.transpose(2, 3) + scores @ stored
    return read.view(lookups.shape).flatten(1, 2), weights


def _carry_delta(
    weights: Tensor,
    writes: Writes,
    decays: _Decays,
    largest: float | None,
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
        if largest is not None:
            weights = clamped(weights, largest=largest)
    return torch.stack(starts, dim=1), weights, torch.stack(errors, dim=1)


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
